//! Exports and imports a queue's position; refuses impossible ones.
#![cfg(not(loom))]
mod memory;

use memory::{BASE, Memory};
use paravane_ring::device::{Batch, Queue, QueueConfig, State, StateError};
use paravane_ring::driver::{self, DriverConfig};
use paravane_ring::{QueueAddresses, Segment};
use paravane_spec::feature::{EVENT_IDX, IN_ORDER, RING_PACKED};
use proptest::prelude::*;

struct Rig {
    memory: Memory,
    config: QueueConfig,
    driver: driver::Queue,
    addresses: QueueAddresses,
}

impl Rig {
    fn new(size: u16, features: u64) -> Self {
        let layout = DriverConfig::new(size, 0, features).unwrap();
        let memory = Memory::new(layout.memory());
        let (driver, addresses) = driver::Queue::new(layout, memory.dma()).unwrap();
        let config = QueueConfig::new(addresses, size, features).unwrap();
        Self { memory, config, driver, addresses }
    }

    fn resume(&self, state: State) -> Result<Queue, StateError> {
        let [desc, driver, device] =
            self.config.areas().map(|area| self.memory.at(area.addr, area.len).unwrap());
        // SAFETY: the areas are the ones asked for; the block outlives the queue in every test.
        unsafe { self.config.resume(desc, driver, device, state) }
    }

    fn start(&self, features: u64) -> Queue {
        let base = if features & RING_PACKED != 0 { 0x8000_8000 } else { 0 };
        self.resume(State::from_vring_base(base, features).unwrap()).unwrap()
    }
}

const BUFFER: Segment = Segment { addr: BASE, len: 8 };

#[test]
fn a_queue_goes_on_where_another_has_left_it() {
    for features in [0, EVENT_IDX, IN_ORDER, RING_PACKED, RING_PACKED | EVENT_IDX | IN_ORDER] {
        let mut rig = Rig::new(8, features);
        let mut device = rig.start(features);
        let mut batch = Batch::new(8);
        for move_number in 0..40 {
            let buffers = 1 + move_number % 5;
            let mut ids = vec![];
            for _ in 0..buffers {
                ids.push(rig.driver.add(&[], &[BUFFER]).unwrap());
            }
            rig.driver.publish();
            assert_eq!(device.pop(&mut batch, |_, _| false), Ok(buffers));
            assert_eq!(device.state(), Err(StateError::InFlight(buffers as u16)));
            for chain in batch.chains() {
                device.complete(chain.head, 8).unwrap();
            }
            assert_eq!(device.state(), Err(StateError::Unpublished));
            device.publish().unwrap();
            let base = device.state().unwrap().vring_base();
            drop(device);
            device = rig.resume(State::from_vring_base(base, features).unwrap()).unwrap();
            for id in ids {
                assert_eq!(rig.driver.pop_used().unwrap().unwrap().id, id);
            }
        }
    }
}

#[test]
fn what_is_available_at_the_move_is_served_after_it() {
    for features in [0, RING_PACKED] {
        let mut rig = Rig::new(4, features);
        let device = rig.start(features);
        let id = rig.driver.add(&[], &[BUFFER]).unwrap();
        rig.driver.publish();
        let state = device.state().unwrap();
        drop(device);
        let mut device = rig.resume(state).unwrap();
        let mut batch = Batch::new(4);
        assert_eq!(device.pop(&mut batch, |_, _| false), Ok(1));
        assert_eq!(batch.chains()[0].head, id.0);
    }
}

#[test]
fn a_latched_queue_has_no_state() {
    let rig = Rig::new(4, 0);
    let mut device = rig.start(0);
    let error = device.complete(1, 0).unwrap_err();
    assert_eq!(device.state(), Err(StateError::Latched(error)));
}

#[test]
fn a_position_that_contradicts_the_ring_is_refused() {
    let rig = Rig::new(4, 0);
    let distance = StateError::Distance { used: 0, avail: 3, in_flight: 0 };
    assert_eq!(rig.resume(State::Split { avail: 3 }).unwrap_err(), distance);
    rig.memory.put(rig.addresses.device + 2, 2, 7);
    rig.memory.put(rig.addresses.driver + 2, 2, 12);
    let available = StateError::Available { idx: 12, avail: 7, size: 4 };
    assert_eq!(rig.resume(State::Split { avail: 7 }).unwrap_err(), available);
    rig.memory.put(rig.addresses.driver + 2, 2, 11);
    assert!(rig.resume(State::Split { avail: 7 }).is_ok());
}

#[test]
fn a_base_of_the_other_layout_is_refused() {
    assert_eq!(State::from_vring_base(0x1_0000, 0), Err(StateError::Base(0x1_0000)));
    let error = Rig::new(4, RING_PACKED).resume(State::Split { avail: 0 }).unwrap_err();
    assert_eq!(error, StateError::Layout { state: "split", queue: "packed" });
    let error = Rig::new(4, 0).resume(State::Packed { avail: 0x8000, used: 0x8000 }).unwrap_err();
    assert_eq!(error, StateError::Layout { state: "packed", queue: "split" });
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 20 } else { 2000 },
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// A packed queue takes a position only if both its halves are valid.
    ///
    /// Both are in the ring, and nothing lies between them. Migration streams and vhost-user
    /// messages may hold anything.
    #[test]
    fn any_base_is_taken_or_refused(size in 1u16..40, base in any::<u32>(), near in any::<bool>()) {
        let base = if near { base & 0x8007_8007 } else { base };
        let rig = Rig::new(size.next_power_of_two(), RING_PACKED);
        let (avail, used) = (base as u16, (base >> 16) as u16);
        let possible = avail & 0x7fff < size.next_power_of_two() && avail == used;
        match rig.resume(State::from_vring_base(base, RING_PACKED).unwrap()) {
            Ok(queue) => {
                prop_assert!(possible);
                prop_assert_eq!(queue.state().unwrap().vring_base(), base);
            }
            Err(StateError::Index { index, size }) => prop_assert!(index >= size),
            Err(StateError::Distance { .. }) => prop_assert!(!possible),
            Err(error) => return Err(TestCaseError::fail(error.to_string())),
        }
    }
}

#[test]
fn a_queue_keeps_its_owners_until_it_is_dropped() {
    use std::sync::Arc;
    let rig = Rig::new(8, 0);
    let (first, second) = (Arc::new(()), Arc::new(()));
    let mut kept = rig.start(0).keeping(Arc::clone(&first)).keeping(Arc::clone(&second));
    let mut other = rig.start(0);
    // Owners go where the queue goes.
    std::mem::swap(&mut kept, &mut other);
    drop(kept);
    assert_eq!((Arc::strong_count(&first), Arc::strong_count(&second)), (2, 2));
    drop(other);
    assert_eq!((Arc::strong_count(&first), Arc::strong_count(&second)), (1, 1));
}
