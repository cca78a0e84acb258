//! Access guard against a plain model: a vector of bytes and a kind per page.
use paravane_dma::{
    Access, AccessGuard, Backing, DmaError, DmaFault, Handle, Memory, Region, RegionConfig, Segment,
};
use proptest::prelude::*;

const PAGE: u64 = 4096;
const PAGES: usize = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Hole,
    ReadOnly,
    Ram,
}

/// Simple model of guest memory: no pointers, no regions, one byte at a time.
struct Model {
    base: u64,
    pages: Vec<Kind>,
    /// Number of the region that each page belongs to.
    region: Vec<usize>,
    bytes: Vec<u8>,
}

impl Model {
    fn index(&self, at: u64) -> Option<usize> {
        let offset = usize::try_from(at.checked_sub(self.base)?).ok()?;
        (offset < self.bytes.len() && self.kind(offset) != Kind::Hole).then_some(offset)
    }

    fn kind(&self, offset: usize) -> Kind {
        self.pages[offset / PAGE as usize]
    }

    /// Indices of `pieces` up to the first fault, and the fault.
    fn walk(
        &self,
        pieces: &[(u128, usize)],
        whole: usize,
        write: bool,
    ) -> (Vec<usize>, Result<(), DmaError>) {
        let mut found = Vec::new();
        for &(start, n) in pieces {
            if n == 0 {
                continue;
            }
            let wraps = |addr| DmaError { addr, len: whole, done: found.len(), fault: DmaFault::Wraps };
            let Ok(first) = u64::try_from(start) else { panic!("skip never leaves a segment in this test") };
            if start + n as u128 - 1 > u128::from(u64::MAX) {
                let error = wraps(first);
                return (found, Err(error));
            }
            for i in 0..n as u64 {
                let addr = first + i;
                let done = found.len();
                match self.index(addr) {
                    None => {
                        return (found, Err(DmaError { addr, len: whole, done, fault: DmaFault::Unmapped }));
                    }
                    Some(at) if write && self.kind(at) != Kind::Ram => {
                        return (
                            found,
                            Err(DmaError { addr, len: whole, done, fault: DmaFault::Denied(Access::WRITE) }),
                        );
                    }
                    Some(at) => found.push(at),
                }
            }
        }
        (found, Ok(()))
    }
}

#[derive(Clone, Debug)]
enum Op {
    Read { at: u64, len: usize },
    Write { at: u64, len: usize, seed: u8 },
    Fill { at: u64, len: usize, byte: u8 },
    Object { at: u64, value: u64, width: usize },
    ReadSegments { list: Vec<(u64, u32)>, skip: u64, len: usize },
    WriteSegments { list: Vec<(u64, u32)>, skip: u64, len: usize, seed: u8 },
    Map { at: u64, len: usize, write: bool },
    MapSegments { list: Vec<(u64, u32)>, skip: u64, len: usize, write: bool },
}

/// Offsets from the base, mostly near the edges of pages.
///
/// Some are outside: one page before, one page after.
fn offset() -> impl Strategy<Value = u64> {
    let pages = PAGES as u64;
    prop_oneof![
        3 => (0..=pages + 1, 0..32_u64).prop_map(|(page, near)| (page * PAGE + near).wrapping_sub(16 + PAGE)),
        1 => 0..pages * PAGE,
    ]
}

fn length() -> impl Strategy<Value = usize> {
    let long = if cfg!(miri) { 1000 } else { 3 * PAGE as usize };
    prop_oneof![4 => 0..40_usize, 2 => 200..600_usize, 1 => 0..long]
}

fn list() -> impl Strategy<Value = Vec<(u64, u32)>> {
    prop::collection::vec((offset(), prop_oneof![3 => 0..40_u32, 1 => 0..6000_u32]), 0..5)
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        (offset(), length()).prop_map(|(at, len)| Op::Read { at, len }),
        (offset(), length(), any::<u8>()).prop_map(|(at, len, seed)| Op::Write { at, len, seed }),
        (offset(), length(), any::<u8>()).prop_map(|(at, len, byte)| Op::Fill { at, len, byte }),
        (offset(), any::<u64>(), 0..4_usize).prop_map(|(at, value, width)| Op::Object { at, value, width }),
        (list(), 0..100_u64, length()).prop_map(|(list, skip, len)| Op::ReadSegments { list, skip, len }),
        (list(), 0..100_u64, length(), any::<u8>()).prop_map(|(list, skip, len, seed)| Op::WriteSegments {
            list,
            skip,
            len,
            seed
        }),
        (offset(), length(), any::<bool>()).prop_map(|(at, len, write)| Op::Map { at, len, write }),
        (list(), 0..100_u64, length(), any::<bool>()).prop_map(|(list, skip, len, write)| Op::MapSegments {
            list,
            skip,
            len,
            write
        }),
    ]
}

/// Kind of each page, and whether it starts a new region.
fn layout() -> impl Strategy<Value = Vec<(Kind, bool)>> {
    let kind = prop_oneof![1 => Just(Kind::Hole), 1 => Just(Kind::ReadOnly), 4 => Just(Kind::Ram)];
    prop::collection::vec((kind, prop::bool::weighted(0.3)), PAGES)
}

/// Low, somewhere, across 4 GiB, and up to the last byte of the address space.
fn base() -> impl Strategy<Value = u64> {
    prop::sample::select(vec![0, 0x4000_0000, 0x1_0000_0000 - 3 * PAGE, (PAGES as u64 * PAGE).wrapping_neg()])
}

fn build(base: u64, layout: &[(Kind, bool)]) -> (Model, Handle) {
    let mut numbers = Vec::new();
    let mut regions: Vec<(u64, u64, Kind)> = Vec::new();
    for (i, &(kind, fresh)) in layout.iter().enumerate() {
        let at = base + i as u64 * PAGE;
        if kind != Kind::Hole {
            match regions.last_mut() {
                Some((_, size, last)) if !fresh && *last == kind && i > 0 && layout[i - 1].0 == kind => {
                    *size += PAGE
                }
                _ => regions.push((at, PAGE, kind)),
            }
        }
        numbers.push(regions.len());
    }
    let made = regions.iter().rev().map(|&(gpa, size, kind)| {
        let config = RegionConfig { gpa, size, backing: Backing::Pages, writable: kind == Kind::Ram };
        Region::new(config).expect("guest RAM")
    });
    let memory = Memory::new(made.collect()).expect("a map");
    let model = Model {
        base,
        pages: layout.iter().map(|&(kind, _)| kind).collect(),
        region: numbers,
        bytes: vec![0; layout.len() * PAGE as usize],
    };
    (model, memory.handle())
}

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed)).collect()
}

/// Pieces of bytes `skip .. skip + len`, and the error of a buffer that is short.
fn cut(segments: &[Segment], mut skip: u64, len: usize) -> (Vec<(u128, usize)>, Result<(), DmaError>) {
    let mut pieces = Vec::new();
    let mut left = len;
    for segment in segments {
        let from = skip.min(u64::from(segment.len));
        skip -= from;
        let n = left.min((u64::from(segment.len) - from) as usize);
        if n > 0 {
            pieces.push((u128::from(segment.addr) + u128::from(from), n));
        }
        left -= n;
    }
    let end = segments.last().map_or(0, |s| s.addr.wrapping_add(u64::from(s.len)));
    let short = DmaError { addr: end, len, done: len - left, fault: DmaFault::Unmapped };
    (pieces, if left == 0 { Ok(()) } else { Err(short) })
}

impl Model {
    fn apply(&mut self, handle: &AccessGuard<'_>, op: &Op) -> Result<(), TestCaseError> {
        let gpa = |offset: &u64| self.base.wrapping_add(*offset);
        let make = |list: &[(u64, u32)]| -> Vec<Segment> {
            list.iter().map(|(at, len)| Segment { addr: gpa(at), len: *len }).collect()
        };
        match op {
            Op::Read { at, len } => {
                let mut out = vec![0xcc; *len];
                let (found, expected) = self.walk(&[(u128::from(gpa(at)), *len)], *len, false);
                prop_assert_eq!(handle.read(gpa(at), &mut out, Access::READ), expected);
                self.compare(&out, &found)?;
            }
            Op::Write { at, len, seed } => {
                let data = pattern(*len, *seed);
                let (found, expected) = self.walk(&[(u128::from(gpa(at)), *len)], *len, true);
                prop_assert_eq!(handle.write(gpa(at), &data, Access::WRITE), expected);
                self.put(&data, &found);
            }
            Op::Fill { at, len, byte } => {
                let (found, expected) = self.walk(&[(u128::from(gpa(at)), *len)], *len, true);
                prop_assert_eq!(handle.fill(gpa(at), *byte, *len, Access::WRITE | Access::RELAXED), expected);
                self.put(&vec![*byte; *len], &found);
            }
            Op::Object { at, value, width } => {
                let len = 1 << width;
                let (found, expected) = self.walk(&[(u128::from(gpa(at)), len)], len, true);
                let at = gpa(at);
                let got = match len {
                    1 => handle.write_obj(at, &(*value as u8), Access::FULL),
                    2 => handle.write_obj(at, &(*value as u16).to_le(), Access::FULL),
                    4 => handle.write_obj(at, &(*value as u32).to_le(), Access::FULL),
                    _ => handle.write_obj(at, &value.to_le(), Access::FULL),
                };
                prop_assert_eq!(got, expected);
                self.put(&value.to_le_bytes()[..len], &found);
                if expected.is_ok() {
                    let got = match len {
                        1 => handle.read_obj::<u8>(at, Access::FULL).map(u64::from),
                        2 => handle.read_obj::<u16>(at, Access::FULL).map(|v| u64::from(u16::from_le(v))),
                        4 => handle.read_obj::<u32>(at, Access::FULL).map(|v| u64::from(u32::from_le(v))),
                        _ => handle.read_obj::<u64>(at, Access::FULL).map(u64::from_le),
                    };
                    prop_assert_eq!(got, Ok(value & (u64::MAX >> (64 - 8 * len))));
                }
            }
            Op::ReadSegments { list, skip, len } => {
                let segments = make(list);
                let mut out = vec![0xcc; *len];
                let (found, expected) = self.walk_segments(&segments, *skip, *len, false);
                prop_assert_eq!(handle.read_segments(&segments, *skip, &mut out, Access::READ), expected);
                self.compare(&out, &found)?;
            }
            Op::WriteSegments { list, skip, len, seed } => {
                let segments = make(list);
                let data = pattern(*len, *seed);
                let (found, expected) = self.walk_segments(&segments, *skip, *len, true);
                prop_assert_eq!(handle.write_segments(&segments, *skip, &data, Access::WRITE), expected);
                self.put(&data, &found);
            }
            Op::Map { at, len, write } => {
                let addr = gpa(at);
                let (found, mut expected) = self.walk(&[(u128::from(addr), *len)], *len, *write);
                let crossed = |pair: &[usize]| self.region_of(pair[0]) != self.region_of(pair[1]);
                if expected.is_ok() && found.windows(2).any(crossed) {
                    expected = Err(DmaError { addr, len: *len, done: 0, fault: DmaFault::NotContiguous });
                }
                let mapping = handle.map(addr, *len, if *write { Access::WRITE } else { Access::READ });
                prop_assert_eq!(mapping.as_ref().map(|_| ()), expected.as_ref().map(|_| ()));
                if let Ok(mapping) = mapping {
                    prop_assert_eq!(mapping.len(), *len);
                    // SAFETY: inside the mapping, and nothing writes.
                    let seen = (0..*len).map(|i| unsafe { mapping.host().as_ptr().add(i).read_volatile() });
                    self.compare(&seen.collect::<Vec<_>>(), &found)?;
                }
            }
            Op::MapSegments { list, skip, len, write } => {
                let segments = make(list);
                let (found, expected) = self.walk_segments(&segments, *skip, *len, *write);
                let mut out = Vec::new();
                let access = if *write { Access::READ | Access::WRITE } else { Access::READ };
                let mapped = handle.map_segments(&segments, *skip, *len as u64, access, &mut out);
                prop_assert_eq!(mapped.as_ref().map(|_| ()), expected.as_ref().map(|_| ()));
                prop_assert!(mapped.is_ok() || out.is_empty());
                prop_assert!(out.iter().all(|slice| slice.len > 0));
                if mapped.is_ok() {
                    let seen: Vec<u8> = out
                        .iter()
                        // SAFETY: the mapping guard keeps the slices mapped, and nothing writes.
                        .flat_map(|s| (0..s.len).map(|i| unsafe { s.ptr.add(i).read_volatile() }))
                        .collect();
                    prop_assert_eq!(seen.len(), *len);
                    self.compare(&seen, &found)?;
                }
            }
        }
        Ok(())
    }

    fn region_of(&self, index: usize) -> usize {
        self.region[index / PAGE as usize]
    }

    fn walk_segments(
        &self,
        segments: &[Segment],
        skip: u64,
        len: usize,
        write: bool,
    ) -> (Vec<usize>, Result<(), DmaError>) {
        let (pieces, complete) = cut(segments, skip, len);
        // A skip that leaves the address space is named by the segment's own start.
        for (i, &(start, _)) in pieces.iter().enumerate() {
            if start > u128::from(u64::MAX) {
                let (found, before) = self.walk(&pieces[..i], len, write);
                // The length with which there are that many pieces; others may reach as far.
                let owner = (0..segments.len()).find(|&k| cut(&segments[..=k], skip, len).0.len() > i);
                let addr = segments[owner.expect("the piece is of a segment")].addr;
                let wraps = Err(DmaError { addr, len, done: found.len(), fault: DmaFault::Wraps });
                return (found, before.and(wraps));
            }
        }
        let (found, result) = self.walk(&pieces, len, write);
        (found, result.and(complete))
    }

    fn compare(&self, out: &[u8], found: &[usize]) -> Result<(), TestCaseError> {
        let expected: Vec<u8> = found.iter().map(|&at| self.bytes[at]).collect();
        prop_assert_eq!(&out[..found.len()], &expected[..]);
        prop_assert!(out[found.len()..].iter().all(|&byte| byte == 0xcc), "bytes after the fault");
        Ok(())
    }

    fn put(&mut self, data: &[u8], found: &[usize]) {
        for (byte, &at) in data.iter().zip(found) {
            self.bytes[at] = *byte;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 4 } else { 400 },
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn every_access_does_what_the_model_does(
        base in base(),
        layout in layout(),
        ops in prop::collection::vec(op(), 1..if cfg!(miri) { 12 } else { 40 }),
    ) {
        let (mut model, mut handle) = build(base, &layout);
        let handle = handle.enter();
        for op in &ops {
            model.apply(&handle, op)?;
        }
        for (i, (kind, _)) in layout.iter().enumerate() {
            if *kind != Kind::Hole {
                let from = i * PAGE as usize;
                let mut page = [0; PAGE as usize];
                handle.read(base + from as u64, &mut page, Access::READ).expect("a page of RAM");
                prop_assert!(page[..] == model.bytes[from..from + PAGE as usize], "page {} differs", i);
            }
        }
    }
}
