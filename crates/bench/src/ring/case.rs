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

/// The buffer of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// One segment of 64 bytes.
    One,
    /// 64 bytes in four segments.
    Four,
    /// A read of 4 KiB from a disk, as Linux and Windows send it: header, data, status.
    Blk,
    /// A frame of 1514 bytes to send, with its header apart: Linux without ANY_LAYOUT, Windows.
    Net,
    /// 64 KiB to send in one go (TSO), as Linux does: a header, and 17 fragments.
    Tso,
}

impl Shape {
    /// Its segments, readable ones first.
    fn segments(self) -> &'static [SegmentShape] {
        const fn read(len: usize) -> SegmentShape {
            SegmentShape { len: len as u32, writable: false }
        }
        const fn write(len: usize) -> SegmentShape {
            SegmentShape { len: len as u32, writable: true }
        }
        const TSO: [SegmentShape; 18] = {
            // 64 KiB less the headers do not begin at the start of a page.
            let mut segments = [read(4096); 18];
            (segments[0], segments[1], segments[17]) = (read(12 + 66), read(1448), read(2581));
            segments
        };
        match self {
            Self::One => const { &[write(BUFFER)] },
            Self::Four => const { &[read(QUARTER), write(QUARTER), write(QUARTER), write(QUARTER)] },
            Self::Blk => const { &[read(16), write(4096), write(1)] },
            Self::Net => const { &[read(12), read(1514)] },
            Self::Tso => &TSO,
        }
    }

    /// Its name in paths; those of 64 bytes have none but their number of descriptors.
    fn name(self) -> &'static str {
        match self {
            Self::One | Self::Four => "",
            Self::Blk => "/blk",
            Self::Net => "/net",
            Self::Tso => "/tso",
        }
    }
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
    /// The buffer of a chain.
    pub(crate) shape: Shape,
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
                for (shape, indirect, in_order) in [
                    (Shape::One, false, false),
                    (Shape::One, false, true),
                    (Shape::One, true, false),
                    (Shape::Four, false, false),
                    (Shape::Four, true, false),
                    (Shape::Blk, true, false),
                    (Shape::Net, false, false),
                    (Shape::Net, true, false),
                    (Shape::Tso, true, false),
                ] {
                    if side == Side::Driver && shape == Shape::One && indirect {
                        continue;
                    }
                    for batch in [1, 32] {
                        cases.push(Self { packed, in_order, side, shape, indirect, batch });
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

    /// The segments of a chain.
    pub(crate) fn segments(self) -> &'static [SegmentShape] {
        self.shape.segments()
    }

    /// Descriptors of a chain, wherever they are.
    pub(crate) fn descriptors(self) -> u16 {
        self.segments().len() as u16
    }

    /// Writable bytes of a chain.
    pub(crate) fn written(self) -> u32 {
        self.segments().iter().filter(|segment| segment.writable).map(|segment| segment.len).sum()
    }

    /// Descriptors of a chain in the ring.
    pub(crate) fn ring_descriptors(self) -> u16 {
        if self.indirect { 1 } else { self.descriptors() }
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
        let (descriptors, shape) = (self.descriptors(), self.shape.name());
        write!(f, "{layout}/{side}/{descriptors}desc{shape}{indirect}{in_order}/batch{}", self.batch)
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
            "split/device/3desc/blk/indirect/batch32",
            "packed/driver/2desc/net/batch1",
            "split/device/18desc/tso/indirect/batch32",
            "packed/device/1desc/batch32",
            "packed/driver/4desc/indirect/batch1",
        ] {
            assert!(Case::parse(path).is_some(), "{path}");
        }
    }

    #[test]
    fn a_chain_describes_one_buffer() {
        for case in Case::all() {
            let bytes = case.segments().iter().map(|segment| segment.len as usize).sum::<usize>();
            let expected = match case.shape {
                Shape::One | Shape::Four => BUFFER,
                Shape::Blk => 16 + 4096 + 1,
                Shape::Net => 12 + 1514,
                Shape::Tso => 12 + 66 + (64 << 10) - 66 - 1,
            };
            assert_eq!(bytes, expected, "{case}");
            let written = case.segments().iter().skip_while(|segment| !segment.writable);
            assert!(written.clone().all(|segment| segment.writable), "{case}");
            // The ring holds a whole number of chains.
            assert!(QUEUE_SIZE.is_multiple_of(case.ring_descriptors()), "{case}");
        }
    }
}
