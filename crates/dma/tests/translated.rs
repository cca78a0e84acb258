//! Accesses through a domain against a plain model of it.
//!
//! Long accesses over single pages, large leaves, holes, forbidden pages, and the edges of regions;
//! their faults, misses and marks in the log.
use paravane_dma::{
    Access, AccessGuard, Backing, DirtyLog, DirtyPages, DmaError, DmaFault, Domain, Memory, Miss, Region,
    RegionConfig,
};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const PAGE: u64 = 4096;
const BOTH: Access = Access::READ.union(Access::WRITE);
const LONG: Duration = Duration::from_secs(60);
/// Pages of a large leaf.
const LARGE: u64 = 512;
/// Single pages on each side of a possible large leaf.
const SIDE: u64 = 24;
/// Regions: first page of RAM, number of pages, whether it is writable.
///
/// The first two are adjacent; a gap follows.
const RAM: [(u64, u64, bool); 3] = [(0, 2 * LARGE, true), (2 * LARGE, 16, false), (3 * LARGE, 64, true)];

/// Translation of a device page.
type Page = Option<(u64, Access)>;

/// Guest-physical memory and the device pages, one by one.
struct Model {
    /// The first of `device`.
    first: u64,
    device: Vec<Page>,
    guest: BTreeMap<u64, Vec<u8>>,
    dirty: BTreeSet<u64>,
}

/// Guest page, offset in it, length in bytes.
type Pieces = Vec<(u64, usize, usize)>;

impl Model {
    /// Pages of `len` bytes at `addr`, up to the first fault, and the fault.
    fn walk(&self, addr: u64, len: usize, access: Access) -> (Pieces, Result<(), DmaError>, Option<Miss>) {
        let (mut pieces, mut done) = (Vec::new(), 0);
        while done < len {
            let addr = addr + done as u64;
            let Some((page, allows)) = self.device[(addr / PAGE - self.first) as usize] else {
                let error = DmaError { addr, len, done, fault: DmaFault::Untranslated };
                return (pieces, Err(error), Some(Miss { addr, access, denied: false }));
            };
            let region = RAM.iter().find(|(first, pages, _)| (*first..first + pages).contains(&page));
            let Some(&(_, _, writable)) = region else {
                return (pieces, Err(DmaError { addr, len, done, fault: DmaFault::Unmapped }), None);
            };
            let forbidden = access - if writable { allows } else { allows & Access::READ };
            if !forbidden.is_empty() {
                let error = DmaError { addr, len, done, fault: DmaFault::Denied(forbidden) };
                return (pieces, Err(error), Some(Miss { addr, access, denied: true }));
            }
            let offset = (addr % PAGE) as usize;
            let n = (PAGE as usize - offset).min(len - done);
            pieces.push((page, offset, n));
            done += n;
        }
        (pieces, Ok(()), None)
    }

    fn page(&mut self, page: u64) -> &mut Vec<u8> {
        self.guest.entry(page).or_insert_with(|| vec![0; PAGE as usize])
    }

    fn read(&mut self, pieces: &[(u64, usize, usize)]) -> Vec<u8> {
        pieces.iter().flat_map(|&(page, at, n)| self.page(page)[at..at + n].to_vec()).collect()
    }

    fn write(&mut self, pieces: &[(u64, usize, usize)], mut data: &[u8]) {
        for &(page, at, n) in pieces {
            let (now, rest) = data.split_at(n);
            self.page(page)[at..at + n].copy_from_slice(now);
            self.dirty.insert(page * PAGE);
            data = rest;
        }
    }

    /// Host pieces that a mapping must have: runs of guest memory in one region.
    fn runs(pieces: &[(u64, usize, usize)]) -> usize {
        let region = |page| RAM.iter().position(|(first, pages, _)| (*first..first + pages).contains(&page));
        let adjoin = |pair: &&[(u64, usize, usize)]| {
            pair[0].0 + 1 == pair[1].0 && region(pair[0].0) == region(pair[1].0)
        };
        pieces.len() - pieces.windows(2).filter(adjoin).count()
    }
}

#[derive(Clone, Copy, Debug)]
enum What {
    Read,
    Write(u8),
    Fill(u8),
    Map(bool),
    /// Maps the page if it is not mapped.
    Translate(Page),
}

/// Address, length, contents.
type Op = (u64, usize, What);

/// A guest page near an edge, or anywhere near the start.
fn page() -> impl Strategy<Value = u64> {
    let edges = vec![LARGE, 2 * LARGE, 2 * LARGE + 16, 3 * LARGE, 3 * LARGE + 64];
    prop_oneof![
        2 => 0..40_u64,
        1 => (prop::sample::select(edges), 0..6_u64).prop_map(|(edge, near)| edge + near - 3),
    ]
}

fn access() -> impl Strategy<Value = Access> {
    prop_oneof![8 => Just(BOTH), 1 => Just(Access::READ), 1 => Just(Access::WRITE)]
}

/// Device pages: holes, scattered ones, rows.
fn side() -> impl Strategy<Value = Vec<Page>> {
    let row = prop_oneof![
        1 => Just(vec![None]),
        6 => (page(), access(), 1..8_u64)
            .prop_map(|(page, access, n)| (page..page + n).map(|page| Some((page, access))).collect::<Vec<_>>()),
        6 => prop::collection::vec((page(), access()).prop_map(Some), 1..8),
    ];
    prop::collection::vec(row, SIDE as usize)
        .prop_map(|rows| rows.into_iter().flatten().take(SIDE as usize).collect())
}

/// The middle between the two sides: one leaf, single pages, or nothing.
fn middle() -> impl Strategy<Value = (bool, Vec<Page>)> {
    let row = |first| (0..LARGE).map(|page| Some((first + page, BOTH))).collect::<Vec<_>>();
    prop_oneof![
        prop::sample::select(vec![0, LARGE]).prop_map(move |first| (true, row(first))),
        (0..LARGE).prop_map(move |first| (false, row(first))),
        (0..LARGE).prop_map(move |first| (false, row(first).into_iter().rev().collect())),
        Just((false, vec![None; LARGE as usize])),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    // From the start to a little into the middle, or from there to the end.
    let at = (any::<bool>(), 0..(SIDE + 4) * PAGE, prop_oneof![Just(0), Just(PAGE - 8), 0..PAGE]).prop_map(
        |(late, at, within)| (if late { LARGE + SIDE - 4 } else { 0 }) * PAGE + at / PAGE * PAGE + within,
    );
    let len = prop_oneof![
        1 => 1..100_usize,
        4 => 1..9000_usize,
        4 => (2..24_usize).prop_map(|pages| pages * PAGE as usize),
        2 => 1..24 * PAGE as usize,
    ];
    let what = prop_oneof![
        4 => Just(What::Read),
        4 => any::<u8>().prop_map(What::Write),
        1 => any::<u8>().prop_map(What::Fill),
        1 => any::<bool>().prop_map(What::Map),
        1 => (page(), access()).prop_map(|page| What::Translate(Some(page))),
    ];
    (at, len, what)
}

/// First page around a large leaf: low, above 4 GiB, or at the end of addresses.
fn first_page() -> impl Strategy<Value = u64> {
    let all = 1 << 52;
    prop::sample::select(vec![LARGE - SIDE, (1 << 20) - SIDE, all - 2 * LARGE - SIDE])
}

struct World {
    model: Model,
    domain: Domain,
    told: Arc<Mutex<Vec<Miss>>>,
}

impl World {
    fn new(first: u64, before: Vec<Page>, (large, middle): (bool, Vec<Page>), after: Vec<Page>) -> Self {
        let regions = RAM.map(|(first, pages, writable)| {
            let (gpa, size) = (first * PAGE, pages * PAGE);
            Region::new(RegionConfig { gpa, size, backing: Backing::Pages, writable }).expect("guest RAM")
        });
        let memory = Memory::new(regions.into()).expect("a map");
        memory.start_log(DirtyLog::new(memory.end(), PAGE).expect("a log"), LONG).expect("it starts");
        let domain = Domain::new(&memory);
        let told = Arc::new(Mutex::new(Vec::new()));
        let list = Arc::clone(&told);
        domain.on_miss(move |miss| list.lock().expect("a list").push(miss));
        let mut device = before;
        let block = device.len();
        device.extend(middle);
        device.extend(after);
        for (number, page) in (first..).zip(&device) {
            let inside = number >= first + block as u64 && number < first + block as u64 + LARGE;
            if let Some((gpa, access)) = *page
                && !(large && inside)
            {
                domain.map(number * PAGE, gpa * PAGE, PAGE, access).expect("free");
            }
        }
        if large && let Some((gpa, access)) = device[block] {
            let addr = (first + block as u64) * PAGE;
            domain.map(addr, gpa * PAGE, LARGE * PAGE, access).expect("free");
        }
        let model = Model { first, device, guest: BTreeMap::new(), dirty: BTreeSet::new() };
        Self { model, domain, told }
    }

    fn apply(&mut self, guard: &AccessGuard<'_>, &(at, len, what): &Op) -> Result<(), TestCaseError> {
        let model = &mut self.model;
        let addr = model.first * PAGE + at;
        // The model has no more pages.
        let len = len.min((model.device.len() as u64 * PAGE - at) as usize);
        let access = match what {
            What::Read | What::Map(false) => Access::READ,
            _ => Access::WRITE,
        };
        let (pieces, mut expected, miss) = model.walk(addr, len, access);
        match what {
            What::Read => {
                let mut out = vec![0xcc; len];
                prop_assert_eq!(guard.read(addr, &mut out, access), expected);
                let mut wanted = model.read(&pieces);
                wanted.resize(len, 0xcc);
                prop_assert!(out == wanted, "{} bytes at {:#x} differ", len, addr);
            }
            What::Write(seed) => {
                let data: Vec<u8> = (0..len).map(|i| (i * 7 + i / 256) as u8 ^ seed).collect();
                prop_assert_eq!(guard.write(addr, &data, access), expected);
                model.write(&pieces, &data);
            }
            What::Fill(byte) => {
                prop_assert_eq!(guard.fill(addr, byte, len, access), expected);
                model.write(&pieces, &vec![byte; len]);
            }
            What::Map(write) => {
                if expected.is_ok() && Model::runs(&pieces) > 1 {
                    expected = Err(DmaError { addr, len, done: 0, fault: DmaFault::NotContiguous });
                }
                let mapping = guard.map(addr, len, access);
                prop_assert_eq!(
                    mapping.as_ref().map(|mapping| mapping.len()).map_err(|&e| e),
                    expected.map(|()| len)
                );
                if mapping.is_ok() && write {
                    // It marks all that it covers when it ends.
                    model.dirty.extend(pieces.iter().map(|piece| piece.0 * PAGE));
                }
            }
            What::Translate(page) => {
                let number = addr / PAGE;
                let free = &mut model.device[(number - model.first) as usize];
                if let (None, Some((gpa, access))) = (&free, page) {
                    self.domain.map(number * PAGE, gpa * PAGE, PAGE, access).expect("free");
                    *free = page;
                }
                return Ok(());
            }
        }
        let told = std::mem::take(&mut *self.told.lock().expect("a list"));
        prop_assert_eq!(told, miss.into_iter().collect::<Vec<_>>());
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 1 } else { 200 },
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn every_access_through_a_domain_does_what_the_model_does(
        first in first_page(),
        before in side(),
        middle in middle(),
        after in side(),
        batches in prop::collection::vec(
            (prop::collection::vec(op(), 1..8), 0..LARGE + 2 * SIDE),
            1..if cfg!(miri) { 2 } else { 6 },
        ),
    ) {
        let mut world = World::new(first, before, middle, after);
        let memory = world.domain.memory().clone();
        let mut handle = world.domain.handle();
        for (ops, gone) in &batches {
            let guard = handle.enter();
            for op in ops {
                world.apply(&guard, op)?;
            }
            drop(guard);
            let mut pages = DirtyPages::new(0, memory.end(), PAGE).expect("pages");
            memory.log().expect("a log").harvest(&mut pages);
            let dirty = std::mem::take(&mut world.model.dirty);
            prop_assert_eq!(pages.iter().collect::<Vec<_>>(), dirty.into_iter().collect::<Vec<_>>());
            // Also in a large leaf, which is split into single pages.
            let was = world.model.device[*gone as usize].take();
            let removed = world.domain.unmap((first + gone) * PAGE, PAGE, LONG).expect("nobody is inside");
            prop_assert_eq!(removed, was.map_or(0, |_| PAGE));
        }
    }
}
