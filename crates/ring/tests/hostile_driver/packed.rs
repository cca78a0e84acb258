//! Packed queues.
use crate::memory::Memory;
use crate::rig::{DATA, DESC, DEVICE, DRIVER, Hostile, INDIRECT, MEMORY, NEXT, TABLE, WRITE, addresses, seg};
use paravane_ring::device::{AreaRequest, Batch, MAX_CHAIN, QueueConfig};
use paravane_ring::{ConfigError, QueueAddresses, QueueError};
use paravane_spec::feature::{EVENT_IDX, IN_ORDER, INDIRECT_DESC, RING_PACKED};
use paravane_spec::packed::{DESC_F_AVAIL, DESC_F_USED};
use std::cell::Cell;

/// Not a power of two.
const SIZE: u16 = 6;
const BOTH: u16 = DESC_F_AVAIL | DESC_F_USED;

/// The next descriptor, and the wrap counter.
struct Place {
    index: u16,
    wrap: bool,
}

impl Hostile<Place> {
    fn new(features: u64) -> Self {
        Self::start(SIZE, features | RING_PACKED, Place { index: 0, wrap: true })
    }

    fn entry(&self, index: u16, addr: u64, len: u32, flags: u16) {
        self.desc_at(TABLE + u64::from(index) * 16, addr, len, [0xdead, flags]);
    }

    /// Makes the next descriptor available, as it should be.
    fn push(&mut self, addr: u64, len: u32, id: u16, flags: u16) {
        let Place { index, wrap } = self.at;
        let state = if wrap { DESC_F_AVAIL } else { DESC_F_USED };
        self.desc_at(DESC + u64::from(index) * 16, addr, len, [id, flags | state]);
        self.at = if index + 1 == SIZE {
            Place { index: 0, wrap: !wrap }
        } else {
            Place { index: index + 1, wrap }
        };
    }

    /// The flags of a descriptor.
    fn flags(&self, index: u16) -> u16 {
        self.memory.get(DESC + u64::from(index) * 16 + 14, 2) as u16
    }

    fn set_flags(&self, index: u16, flags: u16) {
        self.memory.put(DESC + u64::from(index) * 16 + 14, 2, flags.into());
    }

    /// Length, identifier and flags of a used descriptor.
    fn used(&self, index: u16) -> (u32, u16, u16) {
        let at = DESC + u64::from(index) * 16;
        (self.memory.get(at + 8, 4) as u32, self.memory.get(at + 12, 2) as u16, self.flags(index))
    }
}

// Availability.

#[test]
fn zeroed_memory_has_nothing_available() {
    let mut driver = Hostile::new(0);
    assert_eq!(driver.pop(), Ok(0));
    assert_eq!(driver.queue.arm_kicks(), Ok(false));
    assert_eq!(driver.queue.publish(), Ok(false));
}

#[test]
fn flags_of_the_wrong_lap_are_not_available() {
    let mut driver = Hostile::new(0);
    for flags in [DESC_F_USED, BOTH, 0] {
        driver.desc_at(DESC, DATA, 8, [0, flags]);
        assert_eq!(driver.pop(), Ok(0), "flags {flags:#x}");
        assert_eq!(driver.queue.arm_kicks(), Ok(false));
    }
    driver.set_flags(0, DESC_F_AVAIL);
    assert_eq!(driver.queue.arm_kicks(), Ok(true));
    driver.pops(0, &[seg(DATA, 8)], &[]);
}

#[test]
fn wrap_flags_inverted_in_the_middle_of_the_ring_stop_there() {
    let mut driver = Hostile::new(0);
    for id in 0..4 {
        driver.push(DATA, 8, id, 0);
    }
    driver.set_flags(2, DESC_F_USED);
    assert_eq!(driver.pop(), Ok(2));
    assert_eq!(driver.pop(), Ok(0), "what lies behind is not looked at");
}

#[test]
fn wrap_flags_not_inverted_at_the_end_of_the_ring() {
    let mut driver = Hostile::new(0);
    for id in 0..SIZE {
        driver.push(DATA, 8, id, 0);
    }
    assert_eq!(driver.pop(), Ok(SIZE.into()));
    driver.queue.complete_all((0..SIZE).map(|id| (id, 0))).unwrap();
    driver.queue.publish().unwrap();
    // The second lap with the first one's flags.
    driver.desc_at(DESC, DATA, 8, [0, DESC_F_AVAIL]);
    assert_eq!(driver.pop(), Ok(0));
    driver.set_flags(0, DESC_F_USED);
    driver.pops(0, &[seg(DATA, 8)], &[]);
}

#[test]
fn a_flip_of_all_flags_while_all_is_in_flight_is_an_overrun() {
    let mut driver = Hostile::new(0);
    for id in 0..SIZE {
        driver.push(DATA, 8, id, 0);
    }
    assert_eq!(driver.pop(), Ok(SIZE.into()));
    assert_eq!(driver.pop(), Ok(0), "an honest driver's ring is empty now");
    for index in 0..SIZE {
        driver.set_flags(index, DESC_F_USED);
    }
    assert_eq!(driver.queue.arm_kicks(), Ok(true), "it is for pop to say what that is");
    driver.dies_of(QueueError::Overrun { index: 0, size: SIZE });
}

#[test]
fn an_overrun_of_what_is_staged_and_not_published() {
    let mut driver = Hostile::new(0);
    for id in 0..SIZE {
        driver.push(DATA, 8, id, 0);
    }
    assert_eq!(driver.pop(), Ok(SIZE.into()));
    driver.queue.complete_all((0..SIZE).map(|id| (id, 0))).unwrap();
    assert_eq!(driver.queue.in_flight(), 0);
    driver.push(DATA, 8, 0, 0);
    driver.dies_of(QueueError::Overrun { index: 0, size: SIZE });
}

// Identifiers.

#[test]
fn an_identifier_outside_the_queue() {
    for id in [SIZE, SIZE + 1, 0x7fff, u16::MAX] {
        let mut driver = Hostile::new(0);
        driver.push(DATA, 8, id, 0);
        driver.dies_of(QueueError::BufferId { id, size: SIZE });
    }
}

#[test]
fn the_identifier_is_the_last_descriptors() {
    let mut driver = Hostile::new(0);
    driver.push(DATA, 8, 0xffff, NEXT);
    driver.push(DATA + 8, 8, 5, WRITE);
    driver.pops(5, &[seg(DATA, 8)], &[seg(DATA + 8, 8)]);
    driver.push(DATA, 8, 1, NEXT);
    driver.push(DATA, 8, SIZE, 0);
    driver.dies_of(QueueError::BufferId { id: SIZE, size: SIZE });
}

#[test]
fn an_identifier_twice_in_one_batch() {
    let mut driver = Hostile::new(0);
    driver.push(DATA, 8, 3, 0);
    driver.push(DATA, 8, 3, 0);
    driver.dies_of(QueueError::IdInFlight { id: 3 });
}

#[test]
fn an_identifier_twice_while_in_flight() {
    for flags in [0, NEXT] {
        let mut driver = Hostile::new(0);
        driver.push(DATA, 8, 3, 0);
        assert_eq!(driver.pop(), Ok(1));
        driver.push(DATA, 8, 3, flags);
        driver.push(DATA, 8, 3, 0);
        driver.dies_of(QueueError::IdInFlight { id: 3 });
    }
}

#[test]
fn an_identifier_again_after_its_completion() {
    let mut driver = Hostile::new(0);
    for _ in 0..20 {
        driver.push(DATA, 8, 3, 0);
        driver.pops(3, &[seg(DATA, 8)], &[]);
        driver.queue.complete(3, 0).unwrap();
        assert_eq!(driver.queue.publish(), Ok(true));
    }
}

// Chains.

#[test]
fn a_chain_as_long_as_the_queue_is_allowed() {
    let mut driver = Hostile::new(0);
    for i in 0..SIZE {
        driver.push(DATA, 8, 4, if i + 1 < SIZE { NEXT } else { 0 });
    }
    driver.pops(4, &[seg(DATA, 8); SIZE as usize], &[]);
    assert_eq!(driver.queue.in_flight(), 1);
    driver.queue.complete(4, 0).unwrap();
    driver.queue.publish().unwrap();
    assert_eq!(driver.used(0), (0, 4, BOTH));
    // The whole ring has been skipped.
    driver.push(DATA, 8, 1, 0);
    driver.pops(1, &[seg(DATA, 8)], &[]);
}

#[test]
fn a_chain_around_the_whole_ring_and_on() {
    let mut driver = Hostile::new(0);
    for _ in 0..SIZE {
        driver.push(DATA, 8, 0, NEXT);
    }
    driver.dies_of(QueueError::ChainTooLong { head: 0, limit: SIZE.into() });
}

#[test]
fn a_chain_longer_than_what_is_not_in_flight() {
    let mut driver = Hostile::new(0);
    driver.push(DATA, 8, 0, NEXT);
    driver.push(DATA, 8, 0, 0);
    assert_eq!(driver.pop(), Ok(1));
    for _ in 2..SIZE {
        driver.push(DATA, 8, 1, NEXT);
    }
    driver.dies_of(QueueError::ChainTooLong { head: 2, limit: u32::from(SIZE) - 2 });
}

#[test]
fn a_chain_around_the_end_of_the_ring() {
    let mut driver = Hostile::new(0);
    for id in 0..SIZE - 1 {
        driver.push(DATA, 8, id, 0);
    }
    assert_eq!(driver.pop(), Ok(usize::from(SIZE) - 1));
    driver.queue.complete_all((0..SIZE - 1).map(|id| (id, 0))).unwrap();
    driver.queue.publish().unwrap();
    driver.push(DATA, 8, 0, NEXT);
    driver.push(DATA, 16, 0, NEXT | WRITE);
    driver.push(DATA, 24, 2, WRITE);
    driver.pops(2, &[seg(DATA, 8)], &[seg(DATA, 16), seg(DATA, 24)]);
    driver.queue.complete(2, 30).unwrap();
    driver.queue.publish().unwrap();
    assert_eq!(driver.used(SIZE - 1), (30, 2, BOTH | WRITE), "it is used where it began, in that lap");
}

/// The driver writes the first descriptor's flags last; other flags say nothing.
#[test]
fn a_chain_whose_later_descriptors_are_not_marked_available() {
    let mut driver = Hostile::new(0);
    driver.push(DATA, 8, 0, NEXT);
    driver.push(DATA, 8, 1, 0);
    driver.set_flags(1, 0);
    driver.pops(1, &[seg(DATA, 8); 2], &[]);
}

#[test]
fn unknown_flags_mean_nothing() {
    let mut driver = Hostile::new(0);
    driver.push(DATA, 8, 0, !(NEXT | WRITE | INDIRECT | BOTH));
    driver.pops(0, &[seg(DATA, 8)], &[]);
}

#[test]
fn length_zero() {
    for flags in [0, WRITE] {
        let mut driver = Hostile::new(0);
        driver.push(DATA, 8, 0, 0);
        driver.push(DATA, 0, 1, flags);
        driver.dies_of(QueueError::ZeroLength { index: 1 });
    }
    let mut driver = Hostile::new(0);
    driver.push(DATA, 8, 0, NEXT);
    driver.push(DATA, 0, 0, 0);
    driver.dies_of(QueueError::ZeroLength { index: 1 });
}

#[test]
fn address_plus_length_wraps() {
    for (flags, addr) in [(0, u64::MAX), (WRITE, u64::MAX - 7), (NEXT, u64::MAX - 6)] {
        let mut driver = Hostile::new(0);
        driver.push(addr, 8, 0, flags);
        driver.push(DATA, 8, 0, 0);
        driver.dies_of(QueueError::AddressWraps { index: 0, addr, len: 8 });
    }
    let mut driver = Hostile::new(0);
    driver.push(u64::MAX - 8, 8, 0, 0);
    driver.pops(0, &[seg(u64::MAX - 8, 8)], &[]);
}

#[test]
fn more_than_4_gib_in_all() {
    let mut driver = Hostile::new(0);
    driver.push(DATA, u32::MAX, 0, NEXT);
    driver.push(DATA, 1, 0, WRITE);
    driver.dies_of(QueueError::ChainTooBig { head: 0 });
}

#[test]
fn readable_after_writable() {
    let mut driver = Hostile::new(0);
    driver.push(DATA, 8, 0, NEXT | WRITE);
    driver.push(DATA, 8, 0, 0);
    driver.dies_of(QueueError::ReadableAfterWritable { head: 0 });
}

#[test]
fn chains_before_the_malformed_one_are_lost_with_the_queue() {
    let mut driver = Hostile::new(0);
    driver.push(DATA, 8, 0, 0);
    driver.push(DATA, 8, 1, NEXT);
    driver.push(DATA, 8, 1, 0);
    driver.push(DATA, 0, 2, 0);
    driver.dies_of(QueueError::ZeroLength { index: 3 });
}

// Indirect tables.

#[test]
fn indirect_without_its_feature() {
    let mut driver = Hostile::new(0);
    driver.push(TABLE, 16, 0, INDIRECT);
    driver.dies_of(QueueError::IndirectNotNegotiated { index: 0 });
}

#[test]
fn indirect_with_next() {
    let mut driver = Hostile::new(INDIRECT_DESC);
    driver.push(TABLE, 16, 0, INDIRECT | NEXT);
    driver.dies_of(QueueError::IndirectNested { index: 0 });
}

#[test]
fn indirect_in_indirect() {
    let mut driver = Hostile::new(INDIRECT_DESC);
    driver.entry(0, DATA, 8, 0);
    driver.entry(1, TABLE, 16, INDIRECT);
    driver.push(TABLE, 32, 0, INDIRECT);
    driver.dies_of(QueueError::IndirectNested { index: 1 });
}

#[test]
fn indirect_table_of_a_bad_length() {
    for len in [0, 1, 15, 17, 16 * MAX_CHAIN as u32 + 16, u32::MAX, u32::MAX - 15] {
        let mut driver = Hostile::new(INDIRECT_DESC);
        driver.push(TABLE, len, 0, INDIRECT);
        driver.dies_of(QueueError::IndirectLength { index: 0, len, max: MAX_CHAIN as u32 });
    }
}

#[test]
fn indirect_table_in_no_memory() {
    let mut driver = Hostile::new(INDIRECT_DESC);
    driver.push(0, 32, 0, INDIRECT);
    driver.dies_of(QueueError::Address { addr: 0, len: 32 });
    let mut driver = Hostile::new(INDIRECT_DESC);
    driver.push(u64::MAX - 15, 16, 0, INDIRECT);
    driver.dies_of(QueueError::AddressWraps { index: 0, addr: u64::MAX - 15, len: 16 });
}

/// In a packed queue's table only the order counts (section 2.8.7).
#[test]
fn indirect_entries_are_taken_in_order_and_next_is_ignored() {
    let mut driver = Hostile::new(INDIRECT_DESC);
    driver.entry(0, DATA, 8, 0);
    driver.entry(1, DATA + 8, 8, NEXT | BOTH);
    driver.entry(2, DATA + 16, 8, WRITE | NEXT);
    driver.push(TABLE, 48, 2, INDIRECT | WRITE);
    driver.pops(2, &[seg(DATA, 8), seg(DATA + 8, 8)], &[seg(DATA + 16, 8)]);
}

#[test]
fn indirect_entries_are_checked_like_descriptors() {
    let cases = [
        (DATA, 0, 0, QueueError::ZeroLength { index: 1 }),
        (u64::MAX, 2, 0, QueueError::AddressWraps { index: 1, addr: u64::MAX, len: 2 }),
        (DATA, 8, 0, QueueError::ReadableAfterWritable { head: 0 }),
        (DATA, u32::MAX, WRITE, QueueError::ChainTooBig { head: 0 }),
    ];
    for (addr, len, flags, error) in cases {
        let mut driver = Hostile::new(INDIRECT_DESC);
        driver.entry(0, DATA, 8, WRITE);
        driver.entry(1, addr, len, flags);
        driver.push(TABLE, 32, 0, INDIRECT);
        driver.dies_of(error);
    }
}

#[test]
fn indirect_at_the_end_of_a_direct_chain() {
    let mut driver = Hostile::new(INDIRECT_DESC);
    driver.entry(0, DATA + 8, 8, WRITE);
    driver.push(DATA, 8, 0, NEXT);
    driver.push(TABLE, 16, 3, INDIRECT);
    driver.pops(3, &[seg(DATA, 8)], &[seg(DATA + 8, 8)]);
    driver.queue.complete(3, 8).unwrap();
    driver.queue.publish().unwrap();
    driver.push(DATA, 8, 0, 0);
    driver.pops(0, &[seg(DATA, 8)], &[]);
}

#[test]
fn indirect_table_of_the_greatest_length() {
    let mut driver = Hostile::new(INDIRECT_DESC);
    for i in 0..MAX_CHAIN as u16 {
        driver.entry(i, DATA, 8, 0);
    }
    driver.push(TABLE, 16 * MAX_CHAIN as u32, 1, INDIRECT);
    driver.pops(1, &vec![seg(DATA, 8); MAX_CHAIN], &[]);
    driver.push(DATA, 8, 0, NEXT);
    driver.push(TABLE, 16 * MAX_CHAIN as u32, 0, INDIRECT);
    driver.dies_of(QueueError::ChainTooLong { head: 1, limit: MAX_CHAIN as u32 });
}

#[test]
fn long_chains_fill_a_batch_one_at_a_time() {
    let mut driver = Hostile::new(INDIRECT_DESC);
    for i in 0..MAX_CHAIN as u16 {
        driver.entry(i, DATA, 8, 0);
    }
    for id in 0..3 {
        driver.push(TABLE, 16 * MAX_CHAIN as u32, id, INDIRECT);
    }
    for id in 0..3 {
        driver.pops(id, &vec![seg(DATA, 8); MAX_CHAIN], &[]);
    }
    assert_eq!(driver.queue.in_flight(), 3);
}

/// Which kind came last decides where the next pop begins, and nothing else.
#[test]
fn direct_and_indirect_chains_take_turns() {
    let mut driver = Hostile::new(INDIRECT_DESC);
    driver.entry(0, DATA, 8, WRITE);
    for (ids, direct) in [(0..1, 0b0), (1..2, 0b1), (2..4, 0b10), (4..5, 0b0)] {
        for (bit, id) in ids.clone().enumerate() {
            if direct >> bit & 1 == 1 {
                driver.push(DATA, 8, id, WRITE);
            } else {
                driver.push(TABLE, 16, id, INDIRECT);
            }
        }
        assert_eq!(driver.pop(), Ok(ids.len()));
        for (chain, id) in driver.batch.chains().iter().zip(ids) {
            assert_eq!(chain.head, id);
            assert_eq!(driver.batch.segments(chain), (&[][..], &[seg(DATA, 8)][..]));
        }
        assert_eq!(driver.pop(), Ok(0));
    }
    assert_eq!(driver.queue.in_flight(), 5);
    driver.push(DATA, 0, 5, WRITE);
    driver.dies_of(QueueError::ZeroLength { index: 5 });
}

#[test]
fn indirect_table_changes_while_it_is_read() {
    let mut driver = Hostile::new(INDIRECT_DESC);
    driver.entry(0, DATA, 8, 0);
    driver.push(TABLE, 16, 0, INDIRECT);
    let fetches = Cell::new(0);
    let Hostile { memory, queue, batch, .. } = &mut driver;
    let popped = queue.pop(batch, |addr, out| {
        fetches.set(fetches.get() + 1);
        let done = memory.fetch(addr, out);
        // Right after it was copied, everything about it changes, and the descriptor that points to
        // it.
        memory.put(TABLE, 8, u64::MAX);
        memory.put(TABLE + 8, 8, u64::MAX);
        memory.put(DESC, 8, u64::MAX);
        memory.put(DESC + 8, 8, u64::MAX);
        done
    });
    assert_eq!((popped, fetches.get()), (Ok(1), 1));
    let chain = batch.chains()[0];
    assert_eq!((chain.head, batch.readable(&chain)), (0, &[seg(DATA, 8)][..]));
}

#[test]
fn descriptors_change_after_the_pop() {
    let mut driver = Hostile::new(0);
    driver.push(DATA, 8, 0, NEXT);
    driver.push(DATA, 8, 0, WRITE);
    assert_eq!(driver.pop(), Ok(1));
    for index in 0..SIZE {
        driver.desc_at(DESC + u64::from(index) * 16, 1, 2, [3, 0xffff]);
    }
    let chain = driver.batch.chains()[0];
    assert_eq!(driver.batch.readable(&chain), [seg(DATA, 8)]);
    driver.queue.complete(0, 8).unwrap();
    driver.queue.publish().unwrap();
    assert_eq!(driver.used(0), (8, 0, BOTH | WRITE), "what was popped is what is used");
}

// Using.

/// The first used descriptor of a batch appears last.
#[test]
fn nothing_is_used_before_it_is_published() {
    let mut driver = Hostile::new(0);
    for id in [2, 1, 0] {
        driver.push(DATA, 8, id, WRITE);
    }
    assert_eq!(driver.pop(), Ok(3));
    driver.queue.complete_all([(1, 5), (2, 0), (0, 8)]).unwrap();
    assert_eq!(driver.used(0), (8, 2, DESC_F_AVAIL | WRITE), "the driver sees its own descriptor still");
    assert_eq!(driver.queue.publish(), Ok(true));
    let used: Vec<_> = (0..3).map(|index| driver.used(index)).collect();
    assert_eq!(used, [(5, 1, BOTH | WRITE), (0, 2, BOTH), (8, 0, BOTH | WRITE)]);
}

#[test]
fn a_batch_goes_around_the_end_of_the_ring() {
    let mut driver = Hostile::new(0);
    for round in 0..50 {
        for id in 0..4 {
            driver.push(DATA, 8, id, 0);
        }
        assert_eq!(driver.pop(), Ok(4));
        driver.queue.complete_all((0..4).map(|id| (id, 0))).unwrap();
        driver.queue.publish().unwrap();
        for id in 0..4 {
            let position = round * 4 + id;
            let flags = if (position / SIZE).is_multiple_of(2) { BOTH } else { 0 };
            assert_eq!(driver.used(position % SIZE), (0, id, flags), "position {position}");
        }
    }
}

#[test]
fn the_device_completes_what_is_not_in_flight() {
    for features in [0, IN_ORDER] {
        for id in [0, SIZE - 1, SIZE, u16::MAX] {
            let mut driver = Hostile::new(features);
            let error = QueueError::NotInFlight { id: id.into() };
            assert_eq!(driver.queue.complete(id, 0), Err(error));
            driver.is_latched(error);
        }
        let mut driver = Hostile::new(features);
        driver.push(DATA, 8, 0, 0);
        assert_eq!(driver.pop(), Ok(1));
        assert_eq!(driver.queue.complete_all([(0, 0), (0, 0)]), Err(QueueError::NotInFlight { id: 0 }));
    }
}

#[test]
fn the_device_fails_a_request() {
    let mut driver = Hostile::new(0);
    driver.push(DATA, 8, 0, 0);
    assert_eq!(driver.pop(), Ok(1));
    let error = QueueError::Request { head: 0, what: "header too short" };
    assert_eq!(driver.queue.fail(error), error);
    driver.dies_of(error);
}

// In order.

#[test]
fn in_order_completions_wait_for_their_turn() {
    let mut driver = Hostile::new(IN_ORDER);
    for id in [4, 2, 0] {
        driver.push(DATA, 8, id, WRITE);
    }
    assert_eq!(driver.pop(), Ok(3));
    driver.queue.complete_all([(0, 8), (2, 8)]).unwrap();
    assert_eq!(driver.queue.publish(), Ok(false), "nothing is at the front");
    assert_eq!(driver.queue.in_flight(), 1);
    driver.queue.complete(4, 8).unwrap();
    assert_eq!(driver.queue.publish(), Ok(true));
    assert_eq!(driver.used(0), (8, 0, BOTH | WRITE), "one descriptor for all three, by the last");
    assert_eq!(driver.flags(1), DESC_F_AVAIL | WRITE, "those skipped are left alone");
    driver.push(DATA, 8, 4, 0);
    driver.push(DATA, 8, 2, WRITE);
    driver.push(DATA, 8, 0, WRITE);
    assert_eq!(driver.pop(), Ok(3));
    // One that was not filled ends its batch.
    driver.queue.complete_all([(4, 0), (2, 7), (0, 8)]).unwrap();
    assert_eq!(driver.queue.publish(), Ok(true));
    assert_eq!(driver.used(3), (7, 2, BOTH | WRITE));
    assert_eq!(driver.used(5), (8, 0, BOTH | WRITE));
}

/// A completion held back keeps its places: they cannot be available again.
#[test]
fn in_order_a_driver_reuses_what_is_held_back() {
    let mut driver = Hostile::new(IN_ORDER);
    for id in 0..SIZE {
        driver.push(DATA, 8, id, 0);
    }
    assert_eq!(driver.pop(), Ok(SIZE.into()));
    driver.queue.complete_all((1..SIZE).map(|id| (id, 0))).unwrap();
    driver.queue.publish().unwrap();
    driver.push(DATA, 8, 1, 0);
    driver.dies_of(QueueError::Overrun { index: 0, size: SIZE });
}

// Event suppression.

#[test]
fn every_event_word_is_read_as_something() {
    // Published descriptor 0, then 1.
    for (features, flags, off_wrap, wanted) in [
        (EVENT_IDX, 0, 0, [true, true]),
        (EVENT_IDX, 1, 0, [false, false]),
        (EVENT_IDX, 2, 0x8000, [true, false]),
        (EVENT_IDX, 2, 0x8001, [false, true]),
        (EVENT_IDX, 2, 0x0000, [false, false]),
        (EVENT_IDX, 2, 0x0001, [false, false]),
        (EVENT_IDX, 2, SIZE, [true, true]),
        (EVENT_IDX, 2, 0xffff, [true, true]),
        (EVENT_IDX, 3, 0x8001, [true, true]),
        (EVENT_IDX, 0xfffd, 0, [false, false]),
        (0, 0, 0, [true, true]),
        (0, 1, 0, [false, false]),
        (0, 2, 0x0000, [true, true]),
        (0, 3, 0x0000, [true, true]),
    ] {
        let mut driver = Hostile::new(features);
        driver.memory.put(DRIVER, 2, off_wrap.into());
        driver.memory.put(DRIVER + 2, 2, flags);
        for wanted in wanted {
            driver.push(DATA, 8, 0, 0);
            assert_eq!(driver.pop(), Ok(1));
            driver.queue.complete(0, 0).unwrap();
            assert_eq!(driver.queue.publish(), Ok(wanted), "flags {flags}, off_wrap {off_wrap:#x}");
        }
    }
}

#[test]
fn the_devices_event_word_says_what_it_wants() {
    let word = |driver: &Hostile<Place>| (driver.memory.get(DEVICE, 2), driver.memory.get(DEVICE + 2, 2));
    let mut driver = Hostile::new(0);
    driver.queue.disable_kicks();
    assert_eq!(word(&driver).1, 1);
    assert_eq!(driver.queue.arm_kicks(), Ok(false));
    assert_eq!(word(&driver).1, 0);
    let mut driver = Hostile::new(EVENT_IDX);
    for lap in [0x8000, 0] {
        for index in 0..u64::from(SIZE) {
            driver.queue.disable_kicks();
            assert_eq!(word(&driver).1, 1);
            assert_eq!(driver.queue.arm_kicks(), Ok(false));
            assert_eq!(word(&driver), (lap | index, 2));
            driver.push(DATA, 8, 0, 0);
            assert_eq!(driver.queue.arm_kicks(), Ok(true));
            assert_eq!(driver.pop(), Ok(1));
            driver.queue.complete(0, 0).unwrap();
            driver.queue.publish().unwrap();
        }
    }
}

#[test]
fn an_event_inside_a_chain_is_passed() {
    let mut driver = Hostile::new(EVENT_IDX);
    driver.memory.put(DRIVER, 4, 0x0002_8001);
    driver.push(DATA, 8, 0, NEXT);
    driver.push(DATA, 8, 0, NEXT);
    driver.push(DATA, 8, 0, 0);
    assert_eq!(driver.pop(), Ok(1));
    driver.queue.complete(0, 0).unwrap();
    assert_eq!(driver.queue.publish(), Ok(true));
}

// Configuration.

#[test]
fn sizes_that_are_none() {
    for (size, max) in [(0, 256), (257, 256), (u16::MAX, 32768), (32769, 32768), (4, 0)] {
        let error = QueueConfig::new(addresses(size), max, RING_PACKED).unwrap_err();
        assert_eq!(error, ConfigError::PackedSize { size, max }, "size {size} of {max}");
    }
    for size in [1, 2, 3, 255, 256] {
        assert!(QueueConfig::new(addresses(size), 256, RING_PACKED).is_ok());
    }
    let huge = QueueAddresses { size: 32768, desc: 0, driver: 0x100_0000, device: 0x200_0000 };
    assert!(QueueConfig::new(huge, u16::MAX, RING_PACKED).is_ok());
}

#[test]
fn a_ring_of_one() {
    let memory = Memory::new(MEMORY);
    let mut queue = memory.activate(addresses(1), RING_PACKED | EVENT_IDX);
    let mut batch = Batch::new(2);
    for lap in 0..5 {
        assert_eq!(queue.arm_kicks(), Ok(false));
        let state = if u32::is_multiple_of(lap, 2) { DESC_F_AVAIL } else { DESC_F_USED };
        memory.put(DESC, 8, DATA);
        memory.put(DESC + 8, 8, 8 | u64::from(state) << 48);
        assert_eq!(queue.pop(&mut batch, |_, _| false), Ok(1));
        assert_eq!(queue.pop(&mut batch, |_, _| false), Ok(0));
        queue.complete(0, 0).unwrap();
        queue.publish().unwrap();
        assert_eq!(memory.get(DESC + 14, 2), if u32::is_multiple_of(lap, 2) { BOTH.into() } else { 0 });
    }
}

#[test]
fn areas_that_are_misaligned_or_wrap_around_or_are_short() {
    let good = addresses(SIZE);
    let cases = [
        (QueueAddresses { desc: DESC + 8, ..good }, "descriptor area", DESC + 8, 16),
        (QueueAddresses { driver: DRIVER + 2, ..good }, "driver area", DRIVER + 2, 4),
        (QueueAddresses { device: DEVICE + 2, ..good }, "device area", DEVICE + 2, 4),
    ];
    for (addresses, part, addr, align) in cases {
        let error = QueueConfig::new(addresses, 256, RING_PACKED).unwrap_err();
        assert_eq!(error, ConfigError::Misaligned { part, addr, align });
    }
    let addr = u64::MAX - 15;
    let error = QueueConfig::new(QueueAddresses { desc: addr, ..good }, 256, RING_PACKED).unwrap_err();
    assert_eq!(error, ConfigError::Wraps { part: "descriptor area", addr });

    let memory = Memory::new(MEMORY);
    let config = QueueConfig::new(good, 256, RING_PACKED).unwrap();
    let requests = config.areas();
    assert_eq!(requests.map(|area| area.len), [16 * usize::from(SIZE), 4, 4]);
    assert_eq!(requests.map(|area| area.writable), [true, false, true]);
    let areas = requests.map(|area| memory.at(area.addr, area.len).unwrap());
    for i in 0..3 {
        let AreaRequest { part, len, .. } = requests[i];
        let mut areas = areas;
        areas[i] = areas[i].slice(0, len - 1).unwrap();
        // SAFETY: the areas lie in `memory`, which outlives the attempt.
        let error = unsafe { config.activate(areas[0], areas[1], areas[2]) }.unwrap_err();
        assert_eq!(error, ConfigError::Short { part, needed: len, given: len - 1 });
    }
}
