//! The cases: what the devices of a daemon do, and how many they are.
use crate::BenchError;
use std::fmt;
use std::time::Duration;

/// Numbers of devices.
const COUNTS: [usize; 4] = [1, 10, 100, 1000];
/// The same with `--quick`.
const QUICK_COUNTS: [usize; 2] = [1, 100];

/// What a device does beside the quiet one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hog {
    /// Nothing.
    Idle,
    /// Reads of this many bytes, [`Hog::DEPTH`] in flight, without a pause.
    Reads(u64),
}

impl Hog {
    /// Requests in flight.
    pub(super) const DEPTH: usize = 32;

    /// Bytes of its requests; `None` if it has none.
    pub(super) fn bytes(self) -> Option<u64> {
        match self {
            Self::Idle => None,
            Self::Reads(bytes) => Some(bytes),
        }
    }
}

/// A case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Case {
    /// So many devices, no client.
    Idle(usize),
    /// So many devices, each with a client that never asks for anything.
    Connected(usize),
    /// So many devices that share one rate.
    Load(usize),
    /// A quiet device beside another one.
    Beside(Hog),
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Idle(count) => write!(f, "idle/{count}"),
            Self::Connected(count) => write!(f, "connected/{count}"),
            Self::Load(count) => write!(f, "load/{count}"),
            Self::Beside(Hog::Idle) => write!(f, "beside/idle"),
            Self::Beside(Hog::Reads(bytes)) => write!(f, "beside/read{}k", bytes >> 10),
        }
    }
}

/// The selected cases.
#[derive(Clone, Debug)]
pub(super) struct Cases(Vec<Case>);

impl Cases {
    /// Selects the cases whose path contains `filter`.
    ///
    /// # Errors
    /// No case matches.
    pub(super) fn select(filter: &str, quick: bool) -> Result<Self, BenchError> {
        let counts = if quick { &QUICK_COUNTS[..] } else { &COUNTS[..] };
        let mut all = Vec::new();
        for state in [Case::Idle, Case::Connected, Case::Load] {
            all.extend(counts.iter().map(|&count| state(count)));
        }
        all.extend([Hog::Idle, Hog::Reads(128 << 10), Hog::Reads(1 << 20)].map(Case::Beside));
        crate::options::select(all, filter).map(Self)
    }

    pub(super) fn contains(&self, case: Case) -> bool {
        self.0.contains(&case)
    }

    /// The numbers of devices, ascending.
    pub(super) fn counts(&self) -> Vec<usize> {
        let count = |case: &Case| match *case {
            Case::Idle(count) | Case::Connected(count) | Case::Load(count) => Some(count),
            Case::Beside(_) => None,
        };
        let mut counts: Vec<usize> = self.0.iter().filter_map(count).collect();
        counts.sort_unstable();
        counts.dedup();
        counts
    }

    /// What runs beside a quiet device, in order.
    pub(super) fn hogs(&self) -> impl Iterator<Item = Hog> {
        self.0.iter().filter_map(|case| if let Case::Beside(hog) = case { Some(*hog) } else { None })
    }
}

/// The windows of a sample.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lengths {
    /// Nothing happens, for the idle CPU time.
    pub(super) idle: Duration,
    /// Load before anything is measured.
    pub(super) warm_up: Duration,
    /// Load.
    pub(super) load: Duration,
}

/// Windows of a full sample.
pub(super) const FULL: Lengths = Lengths {
    idle: Duration::from_millis(500),
    warm_up: Duration::from_millis(200),
    load: Duration::from_millis(500),
};
/// Windows of a sample with `--quick`.
pub(super) const QUICK: Lengths = Lengths {
    idle: Duration::from_millis(100),
    warm_up: Duration::from_millis(50),
    load: Duration::from_millis(200),
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_stable() {
        let all = Cases::select("", false).unwrap();
        let names: Vec<String> = all.0.iter().map(Case::to_string).collect();
        let expected = "idle/1 idle/10 idle/100 idle/1000 connected/1 connected/10 connected/100 \
                        connected/1000 load/1 load/10 load/100 load/1000 beside/idle beside/read128k \
                        beside/read1024k";
        assert_eq!(names.join(" "), expected);
        assert_eq!(all.counts(), COUNTS);
        assert_eq!(all.hogs().count(), 3);
    }

    #[test]
    fn a_filter_selects() {
        let some = Cases::select("load/10", true).unwrap();
        assert_eq!(some.counts(), [100]);
        assert!(some.contains(Case::Load(100)) && !some.contains(Case::Idle(100)));
        assert!(matches!(Cases::select("load/7", false), Err(BenchError::NoCase(_))));
    }
}
