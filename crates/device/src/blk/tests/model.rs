//! Random requests against a plain array.
use super::*;
use proptest::prelude::*;

pub(super) const SECTORS: u64 = 128;
pub(super) const DISK: usize = SECTORS as usize * 512;

#[derive(Clone, Debug)]
pub(super) enum Op {
    Read { sector: u64, sectors: u64, cuts: Vec<usize> },
    Write { sector: u64, sectors: u64, seed: u64, cuts: Vec<usize> },
    Discard { ranges: Vec<(u64, u32)> },
    WriteZeroes { ranges: Vec<(u64, u32)>, unmap: bool },
    Flush,
}

pub(super) fn op() -> impl Strategy<Value = Op> {
    let cuts = || prop::collection::vec(1..5000usize, 0..6);
    // Somewhat beyond the end, too.
    let sector = 0..SECTORS + 3;
    let ranges = || prop::collection::vec((0..SECTORS + 3, 0..40u32), 1..5);
    prop_oneof![
        4 => (sector.clone(), 0..40u64, cuts())
            .prop_map(|(sector, sectors, cuts)| Op::Read { sector, sectors, cuts }),
        4 => (sector, 0..40u64, any::<u64>(), cuts())
            .prop_map(|(sector, sectors, seed, cuts)| Op::Write { sector, sectors, seed, cuts }),
        1 => ranges().prop_map(|ranges| Op::Discard { ranges }),
        1 => (ranges(), any::<bool>()).prop_map(|(ranges, unmap)| Op::WriteZeroes { ranges, unmap }),
        1 => Just(Op::Flush),
    ]
}

/// Cuts `len` bytes at `addr` into pieces.
fn cut(addr: u64, len: usize, cuts: &[usize]) -> Vec<Segment> {
    let mut pieces = Vec::new();
    let mut at = 0;
    for &piece in cuts {
        let piece = piece.min(len - at);
        if piece > 0 {
            pieces.push(segment(addr + at as u64, piece));
            at += piece;
        }
    }
    if at < len {
        pieces.push(segment(addr + at as u64, len - at));
    }
    pieces
}

pub(super) struct Model {
    pub(super) bytes: Vec<u8>,
    /// Discarded and not written since: may read as anything.
    pub(super) unknown: Vec<bool>,
}

impl Model {
    pub(super) fn apply(&mut self, op: &Op, rig: &mut Rig<Blk>) {
        let inside = |sector: u64, sectors: u64| sector + sectors <= SECTORS;
        match op {
            Op::Read { sector, sectors, cuts } => {
                let len = *sectors as usize * 512;
                rig.poke(HEADER, &header(blk::T_IN, *sector));
                rig.poke(ROOM, &vec![UNTOUCHED; len + 1]);
                // The status follows the data, in the same piece if there is no cut.
                let used = rig.one(&cut(HEADER, 16, cuts), &cut(ROOM, len + 1, cuts)).unwrap();
                let status = rig.peek(ROOM + len as u64, 1)[0];
                if !inside(*sector, *sectors) {
                    assert_eq!((status, used.len), (blk::S_IOERR, 1));
                    return;
                }
                assert_eq!((status, used.len as usize), (blk::S_OK, len + 1));
                let from = *sector as usize * 512;
                for (at, byte) in rig.peek(ROOM, len).into_iter().enumerate() {
                    assert!(self.unknown[from + at] || self.bytes[from + at] == byte, "byte {}", from + at);
                }
            }
            Op::Write { sector, sectors, seed, cuts } => {
                let data = pattern(*sectors as usize * 512, *seed);
                rig.poke(PAYLOAD, &[&header(blk::T_OUT, *sector)[..], &data].concat());
                let used = rig.one(&cut(PAYLOAD, 16 + data.len(), cuts), &[segment(STATUS, 1)]).unwrap();
                let ok = inside(*sector, *sectors);
                assert_eq!((rig.peek(STATUS, 1)[0] == blk::S_OK, used.len), (ok, 1));
                if ok {
                    let from = *sector as usize * 512;
                    self.bytes[from..from + data.len()].copy_from_slice(&data);
                    self.unknown[from..from + data.len()].fill(false);
                }
            }
            Op::Discard { ranges } => self.ranges(blk::T_DISCARD, ranges, 0, rig),
            Op::WriteZeroes { ranges, unmap } => {
                self.ranges(blk::T_WRITE_ZEROES, ranges, u32::from(*unmap), rig);
            }
            Op::Flush => assert_eq!(rig.status(blk::T_FLUSH, 0, &[]), blk::S_OK),
        }
    }

    fn ranges(&mut self, kind: u32, ranges: &[(u64, u32)], flags: u32, rig: &mut Rig<Blk>) {
        let bytes: Vec<u8> =
            ranges.iter().flat_map(|&(sector, sectors)| range(sector, sectors, flags)).collect();
        let ok = ranges.iter().all(|&(sector, sectors)| sector + u64::from(sectors) <= SECTORS);
        let status = rig.status(kind, 0, &bytes);
        assert_eq!(status, if ok { blk::S_OK } else { blk::S_IOERR });
        if ok {
            for &(sector, sectors) in ranges {
                let span = sector as usize * 512..(sector as usize + sectors as usize) * 512;
                self.bytes[span.clone()].fill(0);
                self.unknown[span].fill(kind == blk::T_DISCARD);
            }
        }
    }
}

fn agrees(ops: &[Op], way: Way, features: impl Fn(u64) -> u64) {
    use crate::Device;
    let file = image(&pattern(DISK, 1));
    let disk = Blk::open(config(&file, way)).unwrap();
    let features = features(disk.features());
    let mut rig = Rig::with_features(disk, features);
    let mut model = Model { bytes: pattern(DISK, 1), unknown: vec![false; DISK] };
    for op in ops {
        model.apply(op, &mut rig);
    }
    drop(rig);
    let end = content(&file);
    assert_eq!(end.len(), DISK);
    for (at, byte) in end.into_iter().enumerate() {
        assert!(model.unknown[at] || model.bytes[at] == byte, "byte {at} of the file");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn a_disk_is_an_array_of_bytes(ops in prop::collection::vec(op(), 1..40)) {
        for way in ways("a_disk_is_an_array_of_bytes") {
            agrees(&ops, way, |offered| offered);
        }
    }

    #[test]
    fn a_write_through_disk_is_an_array_of_bytes(ops in prop::collection::vec(op(), 1..10)) {
        for way in ways("a_write_through_disk_is_an_array_of_bytes") {
            agrees(&ops, way, |offered| offered & !blk::F_FLUSH);
        }
    }
}
