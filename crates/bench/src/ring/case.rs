//! What is measured: the cases and their paths.
use paravane_spec::feature;
use std::fmt;

/// Descriptors in every queue.
pub(crate) const QUEUE_SIZE: u16 = 256;
/// Bytes of the buffer of each chain.
pub(crate) const BUFFER: usize = 64;
/// Bytes of one segment of a chain of four.
pub(crate) const QUARTER: usize = BUFFER / 4;

/// Features of a queue with this layout and order.
pub(crate) fn ring_features(packed: bool, in_order: bool) -> u64 {
    feature::VERSION_1
        | if packed { feature::RING_PACKED } else { 0 }
        | if in_order { feature::IN_ORDER } else { 0 }
}

/// The side of the queue that the subject plays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// Takes chains and completes them.
    Device,
    /// Adds buffers and takes them back.
    Driver,
}

/// Length and direction of a segment of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SegmentShape {
    /// Bytes.
    pub(crate) len: u32,
    /// Whether the device writes it.
    pub(crate) writable: bool,
}

/// One case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Case {
    /// The ring's layout.
    pub(crate) packed: bool,
    /// Whether IN_ORDER is negotiated.
    pub(crate) in_order: bool,
    /// The side that the subject plays.
    pub(crate) side: Side,
    /// Descriptors per chain, 1 or 4.
    pub(crate) descriptors: u16,
    /// Whether the descriptors are in an indirect table.
    pub(crate) indirect: bool,
    /// Chains between two publications.
    pub(crate) batch: u16,
}

impl Case {
    /// Every case.
    ///
    /// A driver puts a single segment into the ring even if indirect tables are negotiated, so its
    /// side lacks that case. The shape of a chain does not affect order, so IN_ORDER has one
    /// descriptor.
    pub(crate) fn all() -> Vec<Self> {
        let mut cases = Vec::new();
        for packed in [false, true] {
            for side in [Side::Device, Side::Driver] {
                for (descriptors, indirect, in_order) in [
                    (1, false, false),
                    (1, false, true),
                    (1, true, false),
                    (4, false, false),
                    (4, true, false),
                ] {
                    if side == Side::Driver && descriptors == 1 && indirect {
                        continue;
                    }
                    for batch in [1, 32] {
                        cases.push(Self { packed, in_order, side, descriptors, indirect, batch });
                    }
                }
            }
        }
        cases
    }

    /// The negotiated features of the ring.
    pub(crate) fn features(self) -> u64 {
        ring_features(self.packed, self.in_order) | if self.indirect { feature::INDIRECT_DESC } else { 0 }
    }

    /// The case with this path.
    pub(crate) fn parse(path: &str) -> Option<Self> {
        Self::all().into_iter().find(|case| case.to_string() == path)
    }

    /// The segments of a chain: one writable, or one readable and three writable.
    pub(crate) fn segments(self) -> &'static [SegmentShape] {
        const ONE: [SegmentShape; 1] = [SegmentShape { len: BUFFER as u32, writable: true }];
        const READ: SegmentShape = SegmentShape { len: QUARTER as u32, writable: false };
        const WRITE: SegmentShape = SegmentShape { len: QUARTER as u32, writable: true };
        const FOUR: [SegmentShape; 4] = [READ, WRITE, WRITE, WRITE];
        if self.descriptors == 1 { &ONE } else { &FOUR }
    }

    /// Writable bytes of a chain.
    pub(crate) fn written(self) -> u32 {
        self.segments().iter().filter(|segment| segment.writable).map(|segment| segment.len).sum()
    }

    /// Descriptors of a chain in the ring.
    pub(crate) fn ring_descriptors(self) -> u16 {
        if self.indirect { 1 } else { self.descriptors }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = match self.side {
            Side::Device => "device",
            Side::Driver => "driver",
        };
        let layout = if self.packed { "packed" } else { "split" };
        let indirect = if self.indirect { "/indirect" } else { "" };
        let in_order = if self.in_order { "/in-order" } else { "" };
        write!(f, "{layout}/{side}/{}desc{indirect}{in_order}/batch{}", self.descriptors, self.batch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_distinct_and_parse_back() {
        let cases = Case::all();
        for (index, case) in cases.iter().enumerate() {
            assert_eq!(Case::parse(&case.to_string()), Some(*case));
            assert!(!cases[..index].contains(case));
        }
        assert_eq!(Case::parse("split/device/2desc/batch32"), None);
    }

    #[test]
    fn the_paths_that_others_rely_on_exist() {
        for path in [
            "split/device/1desc/batch32",
            "split/device/4desc/indirect/batch32",
            "split/device/1desc/indirect/batch1",
            "split/driver/4desc/batch1",
            "split/driver/4desc/indirect/batch32",
            "split/device/1desc/in-order/batch32",
            "packed/device/1desc/batch32",
            "packed/driver/4desc/indirect/batch1",
        ] {
            assert!(Case::parse(path).is_some(), "{path}");
        }
    }

    #[test]
    fn a_chain_describes_one_buffer() {
        for case in Case::all() {
            assert_eq!(case.segments().iter().map(|segment| segment.len as usize).sum::<usize>(), BUFFER);
            assert_eq!(case.segments().len(), usize::from(case.descriptors));
        }
    }
}
