//! What is measured: the cases with two threads and their paths.
use crate::ring::case::{QUEUE_SIZE, ring_features};
use paravane_spec::feature;
use std::fmt;

/// One case with two threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Case {
    /// The ring's layout.
    pub(crate) packed: bool,
    /// Whether IN_ORDER is negotiated.
    pub(crate) in_order: bool,
    /// How the buffers flow.
    pub(crate) flow: Flow,
}

/// How the buffers flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flow {
    /// A full ring of buffers outstanding, published in batches of this size.
    Stream(u16),
    /// One buffer outstanding.
    RoundTrip,
}

impl Case {
    /// Every case.
    pub(crate) fn all() -> Vec<Self> {
        let mut cases = Vec::new();
        for packed in [false, true] {
            for flow in [Flow::Stream(1), Flow::Stream(32), Flow::RoundTrip] {
                for in_order in [false, true] {
                    if !(in_order && flow == Flow::RoundTrip) {
                        cases.push(Self { packed, in_order, flow });
                    }
                }
            }
        }
        cases
    }

    /// The negotiated features.
    ///
    /// EVENT_IDX is one of them, as in ringtest: deciding whether to notify then reads a field that
    /// the other side does not write, not the cache line of its index.
    pub(crate) fn features(self) -> u64 {
        ring_features(self.packed, self.in_order) | feature::EVENT_IDX
    }

    /// Buffers between two publications.
    pub(crate) fn batch(self) -> u16 {
        match self.flow {
            Flow::Stream(batch) => batch,
            Flow::RoundTrip => 1,
        }
    }

    /// Most buffers outstanding.
    pub(crate) fn outstanding(self) -> u16 {
        match self.flow {
            Flow::Stream(_) => QUEUE_SIZE,
            Flow::RoundTrip => 1,
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let layout = if self.packed { "packed" } else { "split" };
        let in_order = if self.in_order { "/in-order" } else { "" };
        match self.flow {
            Flow::Stream(batch) => write!(f, "{layout}/stream{in_order}/batch{batch}"),
            Flow::RoundTrip => write!(f, "{layout}/roundtrip{in_order}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_distinct() {
        let mut paths: Vec<String> = Case::all().iter().map(Case::to_string).collect();
        assert!(
            ["split/stream/batch1", "split/stream/batch32", "split/roundtrip"]
                .iter()
                .all(|path| paths.iter().any(|other| other == path))
        );
        let before = paths.len();
        paths.sort();
        paths.dedup();
        assert_eq!(paths.len(), before);
    }
}
