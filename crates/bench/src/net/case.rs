//! The cases: layout, receive buffers, direction, packet size.
use crate::BenchError;
use crate::meter::SampleLength;
use std::fmt;
use std::time::Duration;

/// The direction of packets, as the driver sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    /// The driver sends, the device discards.
    Transmit,
    /// The device sends, the driver discards.
    Receive,
    /// Both send what they receive.
    Forward,
}

/// A case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Case {
    pub(super) packed: bool,
    pub(super) mergeable: bool,
    pub(super) direction: Direction,
    /// Bytes of a packet, without the virtio header.
    pub(super) bytes: u16,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let layout = if self.packed { "packed" } else { "split" };
        let buffers = if self.mergeable { "mergeable" } else { "single" };
        let direction = match self.direction {
            Direction::Transmit => "transmit",
            Direction::Receive => "receive",
            Direction::Forward => "forward",
        };
        write!(f, "{layout}/{buffers}/{direction}/{}", self.bytes)
    }
}

impl Case {
    /// Every case; with `quick`, small packets only.
    pub(super) fn all(quick: bool) -> Vec<Self> {
        let sizes: &[u16] = if quick { &[64] } else { &[64, 1500] };
        let mut all = Vec::new();
        for packed in [false, true] {
            for mergeable in [false, true] {
                for direction in [Direction::Transmit, Direction::Receive, Direction::Forward] {
                    all.extend(sizes.iter().map(|&bytes| Self { packed, mergeable, direction, bytes }));
                }
            }
        }
        all
    }

    /// Selects the cases whose path contains `filter`.
    ///
    /// # Errors
    /// No case matches.
    pub(super) fn select(filter: &str, quick: bool) -> Result<Vec<Self>, BenchError> {
        crate::options::select(Self::all(quick), filter)
    }
}

/// Windows of a full sample.
pub(super) const FULL: SampleLength = SampleLength {
    warm_up: Duration::from_millis(30),
    timed: Duration::from_millis(100),
    counted: Duration::from_millis(20),
};
/// Windows of a sample with `--quick`.
pub(super) const QUICK: SampleLength = SampleLength {
    warm_up: Duration::from_millis(20),
    timed: Duration::from_millis(30),
    counted: Duration::from_millis(10),
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_stable() {
        let names: Vec<String> = Case::all(false).iter().map(Case::to_string).collect();
        assert_eq!(names.len(), 24);
        for name in ["split/single/transmit/64", "packed/mergeable/forward/1500", "packed/single/receive/64"]
        {
            assert!(names.iter().any(|known| known == name), "{name}");
        }
    }

    #[test]
    fn a_filter_selects() {
        let selected = Case::select("packed/single/receive", false).unwrap();
        assert_eq!(selected.iter().map(|case| case.bytes).collect::<Vec<_>>(), [64, 1500]);
        assert!(matches!(Case::select("/1500", true), Err(BenchError::NoCase(_))));
    }
}
