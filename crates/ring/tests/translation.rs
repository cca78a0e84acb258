//! Chains that the device cannot reach yet stay in the ring, in both layouts.
//!
//! Nothing of them is taken, and nothing is lost or comes twice when they can be reached.
#![cfg(not(loom))]
mod memory;

use memory::{BASE, Memory};
use paravane_ring::device::{Batch, Fetched, Queue, QueueConfig, State, TranslationCheck};
use paravane_ring::driver::{self, DriverConfig};
use paravane_ring::{Area, QueueError, Segment};
use paravane_spec::feature::{EVENT_IDX, IN_ORDER, INDIRECT_DESC, RING_PACKED};
use proptest::prelude::*;
use std::collections::{BTreeSet, VecDeque};

const SIZE: u16 = 16;
/// Address of the buffers: each has its page, by its number.
const BUFFERS: u64 = 0x1_0000_0000;
const PAGE: u64 = 4096;

/// Pages that can be reached; tables, if they can, are in the ring's memory.
struct Known<'a> {
    memory: &'a Memory,
    pages: &'a BTreeSet<u64>,
    tables: Fetched,
    /// Chains that were asked for and cannot be reached.
    refused: usize,
}

impl TranslationCheck for Known<'_> {
    fn fetch(&mut self, addr: u64, table: &mut [u8]) -> Fetched {
        if self.tables == Fetched::Done {
            assert!(self.memory.fetch(addr, table));
        } else {
            self.refused += 1;
        }
        self.tables
    }

    fn translates(&mut self, readable: &[Segment], writable: &[Segment]) -> bool {
        let mut all = readable.iter().chain(writable);
        let reached = all.all(|segment| self.pages.contains(&(segment.addr / PAGE)));
        self.refused += usize::from(!reached);
        reached
    }
}

struct Rig {
    memory: Memory,
    config: QueueConfig,
    driver: driver::Queue,
    features: u64,
    region: Vec<u64>,
}

impl Rig {
    fn new(features: u64) -> Self {
        let layout = DriverConfig::new(SIZE, 4, features).unwrap();
        let memory = Memory::new(layout.memory());
        let (driver, addresses) = driver::Queue::new(layout, memory.dma()).unwrap();
        let config = QueueConfig::new(addresses, SIZE, features).unwrap();
        let region = vec![0; config.tracking_bytes().div_ceil(8)];
        Self { memory, config, driver, features, region }
    }

    /// At its beginning, or where what is tracked says.
    fn device(&mut self, tracked: bool) -> Queue {
        let [desc, driver, device] =
            self.config.areas().map(|area| self.memory.at(area.addr, area.len).unwrap());
        let base = if self.features & RING_PACKED != 0 { 0x8000_8000 } else { 0 };
        let state = State::from_vring_base(base, self.features).unwrap();
        // SAFETY: the areas are the ones asked for, and like the region they outlive the queue in
        // every test.
        unsafe {
            if tracked {
                let ptr = std::ptr::NonNull::new(self.region.as_mut_ptr().cast()).unwrap();
                let region = Area::new(ptr, self.region.len() * 8);
                self.config.resume_tracked(desc, driver, device, state, region).unwrap()
            } else {
                self.config.resume(desc, driver, device, state).unwrap()
            }
        }
    }
}

const LAYOUTS: [u64; 6] = [
    0,
    EVENT_IDX | INDIRECT_DESC,
    IN_ORDER | INDIRECT_DESC,
    RING_PACKED,
    RING_PACKED | INDIRECT_DESC,
    RING_PACKED | IN_ORDER,
];

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 6 } else { 256 }, ..ProptestConfig::default() })]

    #[test]
    fn chains_come_once_and_in_order_as_they_can_be_reached(
        layout in prop::sample::select(&LAYOUTS[..]),
        tracked in any::<bool>(),
        room in 1..6_usize,
        steps in prop::collection::vec((0..5_u8, 1..4_u64), 1..if cfg!(miri) { 20 } else { 200 }),
    ) {
        let tracked = tracked && layout & IN_ORDER == 0;
        let mut rig = Rig::new(layout);
        let mut device = rig.device(tracked);
        let mut batch = Batch::new(room);
        let mut pages = BTreeSet::new();
        // By number: what the driver has made available, and what the device has taken.
        let (mut next, mut available, mut taken) = (0_u64, VecDeque::new(), VecDeque::new());
        for (step, count) in steps {
            match step {
                // One more chain, of `count` pages.
                0 | 1 => {
                    let segments: Vec<_> = (0..count)
                        .map(|page| Segment { addr: BUFFERS + (next * 4 + page) * PAGE, len: 8 })
                        .collect();
                    let (readable, writable) = segments.split_at(usize::from(count > 1));
                    if let Ok(id) = rig.driver.add(readable, writable) {
                        rig.driver.publish();
                        available.push_back((next, count, id));
                        next += 1;
                    }
                }
                // A page of the first chain that is not all there.
                2 => {
                    let all = available.iter().flat_map(|(number, count, _)| (0..*count).map(move |page| number * 4 + page));
                    let missing = all.map(|page| BUFFERS / PAGE + page).find(|page| !pages.contains(page));
                    pages.extend(missing);
                }
                3 => {
                    let tables = if count == 1 { Fetched::Later } else { Fetched::Done };
                    let mut some = Known { memory: &rig.memory, pages: &pages, tables, refused: 0 };
                    let popped = device.pop_translated(&mut batch, &mut some).unwrap();
                    prop_assert!(some.refused <= 1, "nothing is asked for behind a chain that is left");
                    if tables == Fetched::Done {
                        let ready = |(number, count, _): &&(u64, u64, _)| {
                            (0..*count).all(|page| pages.contains(&(BUFFERS / PAGE + number * 4 + page)))
                        };
                        prop_assert_eq!(popped, available.iter().take_while(ready).count().min(room));
                    }
                    for (chain, readable, writable) in batch.iter() {
                        let (number, count, id) = available.pop_front().unwrap();
                        let first = readable.iter().chain(writable).next().unwrap();
                        prop_assert_eq!(first.addr, BUFFERS + number * 4 * PAGE);
                        prop_assert_eq!(readable.len() + writable.len(), count as usize);
                        taken.push_back((chain.head, id));
                    }
                    prop_assert_eq!(usize::from(device.in_flight()), taken.len());
                }
                // The oldest is done; or it was not, and another process goes on.
                _ if tracked && count == 3 => {
                    drop(device);
                    device = rig.device(true);
                    prop_assert_eq!(usize::from(device.in_flight()), taken.len());
                    // Those that were in flight come first, when they can be reached.
                    let none = BTreeSet::new();
                    let mut nothing =
                        Known { memory: &rig.memory, pages: &none, tables: Fetched::Later, refused: 0 };
                    let popped = device.pop_translated(&mut batch, &mut nothing).unwrap();
                    prop_assert_eq!(popped, 0);
                    let mut again = 0;
                    while again < taken.len() {
                        let mut all =
                            Known { memory: &rig.memory, pages: &pages, tables: Fetched::Done, refused: 0 };
                        let popped = device.pop_translated(&mut batch, &mut all).unwrap();
                        prop_assert!(popped > 0);
                        for chain in batch.chains() {
                            prop_assert_eq!(chain.head, taken[again].0);
                            again += 1;
                        }
                    }
                }
                _ => {
                    if let Some((head, id)) = taken.pop_front() {
                        device.complete(head, 0).unwrap();
                        device.publish().unwrap();
                        prop_assert_eq!(rig.driver.pop_used().unwrap().unwrap().id, id);
                    }
                }
            }
        }
    }
}

#[test]
fn a_chain_with_an_unreadable_table_is_an_error() {
    for features in [INDIRECT_DESC, INDIRECT_DESC | RING_PACKED] {
        let mut rig = Rig::new(features);
        let mut device = rig.device(false);
        let buffer = Segment { addr: BASE, len: 8 };
        // Of several segments, and so in a table.
        rig.driver.add(&[buffer], &[buffer, buffer]).unwrap();
        rig.driver.publish();
        let mut batch = Batch::new(4);
        let pages = BTreeSet::new();
        let mut pop = |tables| {
            let mut some = Known { memory: &rig.memory, pages: &pages, tables, refused: 0 };
            device.pop_translated(&mut batch, &mut some)
        };
        assert_eq!((pop(Fetched::Later), pop(Fetched::Done)), (Ok(0), Ok(0)));
        let never = pop(Fetched::Never);
        assert!(matches!(never, Err(QueueError::Address { .. })), "{never:?}");
        assert_eq!(pop(Fetched::Done), never);
    }
}
