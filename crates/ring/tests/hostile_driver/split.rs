//! Split queues.
use crate::memory::{BASE, Memory};
use crate::rig::{
    DATA, DESC, DEVICE as USED, DRIVER as AVAIL, Hostile, INDIRECT, MEMORY, NEXT, TABLE, WRITE, addresses,
    seg,
};
use paravane_ring::device::{AreaRequest, Batch, MAX_CHAIN, QueueConfig};
use paravane_ring::{ConfigError, Platform, QueueAddresses, QueueError};
use paravane_spec::feature::{EVENT_IDX, INDIRECT_DESC, ORDER_PLATFORM};
use std::cell::Cell;

const SIZE: u16 = 8;

/// The available index.
struct Idx(u16);

impl Hostile<Idx> {
    fn new(features: u64) -> Self {
        Self::start(SIZE, features, Idx(0))
    }

    /// Writes descriptor `index` of the table.
    fn desc(&self, index: u16, addr: u64, len: u32, flags: u16, next: u16) {
        self.desc_at(DESC + u64::from(index) * 16, addr, len, [flags, next]);
    }

    /// Writes entry `index` of the indirect table.
    fn entry(&self, index: u16, addr: u64, len: u32, flags: u16, next: u16) {
        self.desc_at(TABLE + u64::from(index) * 16, addr, len, [flags, next]);
    }

    /// Makes `head` available.
    fn push(&mut self, head: u16) {
        self.memory.put(AVAIL + 4 + u64::from(self.at.0 % SIZE) * 2, 2, head.into());
        self.set_idx(self.at.0.wrapping_add(1));
    }

    fn set_idx(&mut self, idx: u16) {
        self.at = Idx(idx);
        self.memory.put(AVAIL + 2, 2, idx.into());
    }
}

// Chains.

#[test]
fn next_points_to_itself() {
    let mut driver = Hostile::new(0);
    driver.desc(3, DATA, 8, NEXT, 3);
    driver.push(3);
    driver.dies_of(QueueError::ChainTooLong { head: 3, limit: SIZE.into() });
}

#[test]
fn next_points_to_one_another() {
    let mut driver = Hostile::new(0);
    driver.desc(1, DATA, 8, NEXT, 2);
    driver.desc(2, DATA, 8, NEXT, 1);
    driver.push(1);
    driver.dies_of(QueueError::ChainTooLong { head: 1, limit: SIZE.into() });
}

#[test]
fn a_chain_as_long_as_the_queue_is_allowed() {
    let mut driver = Hostile::new(0);
    for i in 0..SIZE {
        driver.desc(i, DATA, 8, if i + 1 < SIZE { NEXT } else { 0 }, i + 1);
    }
    driver.push(0);
    driver.pops(0, &[seg(DATA, 8); SIZE as usize], &[]);
}

#[test]
fn next_is_outside_the_table() {
    for next in [SIZE, SIZE + 1, 0x7fff, u16::MAX] {
        let mut driver = Hostile::new(0);
        driver.desc(0, DATA, 8, NEXT, next);
        driver.push(0);
        driver.dies_of(QueueError::DescIndex { index: next.into(), size: SIZE.into() });
    }
}

#[test]
fn next_without_its_flag_is_not_followed() {
    let mut driver = Hostile::new(0);
    driver.desc(0, DATA, 8, 0, u16::MAX);
    driver.push(0);
    driver.pops(0, &[seg(DATA, 8)], &[]);
}

#[test]
fn unknown_flags_mean_nothing() {
    let mut driver = Hostile::new(INDIRECT_DESC);
    driver.desc(0, DATA, 8, !(NEXT | INDIRECT), 5);
    driver.push(0);
    driver.pops(0, &[], &[seg(DATA, 8)]);
}

#[test]
fn head_is_outside_the_table() {
    for head in [SIZE, 0x8000, u16::MAX] {
        let mut driver = Hostile::new(0);
        driver.push(head);
        driver.dies_of(QueueError::DescIndex { index: head.into(), size: SIZE.into() });
    }
}

#[test]
fn length_zero() {
    for flags in [0, WRITE] {
        let mut driver = Hostile::new(0);
        driver.desc(2, DATA, 0, flags, 0);
        driver.push(2);
        driver.dies_of(QueueError::ZeroLength { index: 2 });
    }
}

#[test]
fn length_zero_in_the_middle_of_a_chain() {
    let mut driver = Hostile::new(0);
    driver.desc(0, DATA, 8, NEXT, 1);
    driver.desc(1, DATA, 0, NEXT, 2);
    driver.desc(2, DATA, 8, 0, 0);
    driver.push(0);
    driver.dies_of(QueueError::ZeroLength { index: 1 });
}

#[test]
fn the_longest_length_is_handed_out_as_it_is() {
    let mut driver = Hostile::new(0);
    driver.desc(0, DATA, u32::MAX, WRITE, 0);
    driver.push(0);
    driver.pops(0, &[], &[seg(DATA, u32::MAX)]);
}

#[test]
fn address_plus_length_wraps() {
    for (addr, len) in [(u64::MAX, 1), (u64::MAX, u32::MAX), (u64::MAX - 6, 8), (u64::MAX - 7, 8)] {
        for first in [0, NEXT] {
            let mut driver = Hostile::new(0);
            driver.desc(0, addr, len, first, 1);
            driver.desc(1, DATA, 8, 0, 0);
            driver.push(0);
            driver.dies_of(QueueError::AddressWraps { index: 0, addr, len });
        }
    }
}

#[test]
fn a_buffer_up_to_the_end_of_the_address_space() {
    let mut driver = Hostile::new(0);
    driver.desc(0, u64::MAX - 8, 8, 0, 0);
    driver.push(0);
    driver.pops(0, &[seg(u64::MAX - 8, 8)], &[]);
}

#[test]
fn more_than_4_gib_in_all() {
    let mut driver = Hostile::new(0);
    driver.desc(0, DATA, u32::MAX, NEXT, 1);
    driver.desc(1, DATA, 1, WRITE, 0);
    driver.push(0);
    driver.dies_of(QueueError::ChainTooBig { head: 0 });
}

#[test]
fn exactly_4_gib_less_one_in_all() {
    let mut driver = Hostile::new(0);
    driver.desc(0, DATA, u32::MAX - 1, NEXT, 1);
    driver.desc(1, DATA, 1, WRITE, 0);
    driver.push(0);
    driver.pops(0, &[seg(DATA, u32::MAX - 1)], &[seg(DATA, 1)]);
}

#[test]
fn readable_after_writable() {
    let mut driver = Hostile::new(0);
    driver.desc(0, DATA, 8, WRITE | NEXT, 1);
    driver.desc(1, DATA, 8, 0, 0);
    driver.push(0);
    driver.dies_of(QueueError::ReadableAfterWritable { head: 0 });
}

#[test]
fn buffers_overlap_one_another_and_the_ring_itself() {
    // The queue does not care where buffers lie: it has no reference to them, and its state is
    // private.
    let mut driver = Hostile::new(0);
    driver.desc(0, USED, 64, NEXT, 1);
    driver.desc(1, DESC, 128, NEXT | WRITE, 2);
    driver.desc(2, DESC + 4, 128, WRITE, 0);
    driver.push(0);
    driver.pops(0, &[seg(USED, 64)], &[seg(DESC, 128), seg(DESC + 4, 128)]);
    assert!(driver.memory.at(DESC, 128).unwrap().write(0, &[0xff; 128]));
    assert_eq!(driver.queue.complete(0, 128), Ok(()));
    assert_eq!(driver.queue.publish(), Ok(true));
    assert_eq!(driver.memory.get(USED + 2, 2), 1);
}

// Indirect tables.

#[test]
fn indirect_without_its_feature() {
    let mut driver = Hostile::new(EVENT_IDX);
    driver.entry(0, DATA, 8, 0, 0);
    driver.desc(0, TABLE, 16, INDIRECT, 0);
    driver.push(0);
    driver.dies_of(QueueError::IndirectNotNegotiated { index: 0 });
}

#[test]
fn indirect_with_next() {
    let mut driver = Hostile::new(INDIRECT_DESC);
    driver.entry(0, DATA, 8, 0, 0);
    driver.desc(0, TABLE, 16, INDIRECT | NEXT, 1);
    driver.push(0);
    driver.dies_of(QueueError::IndirectNested { index: 0 });
}

#[test]
fn indirect_in_indirect() {
    let mut driver = Hostile::new(INDIRECT_DESC);
    driver.entry(0, DATA, 8, NEXT, 1);
    driver.entry(1, TABLE, 16, INDIRECT, 0);
    driver.desc(0, TABLE, 32, INDIRECT, 0);
    driver.push(0);
    driver.dies_of(QueueError::IndirectNested { index: 1 });
}

#[test]
fn indirect_table_of_an_odd_length() {
    for len in [0, 1, 15, 17, 31, u32::MAX] {
        let mut driver = Hostile::new(INDIRECT_DESC);
        driver.entry(0, DATA, 8, 0, 0);
        driver.desc(4, TABLE, len, INDIRECT, 0);
        driver.push(4);
        driver.dies_of(QueueError::IndirectLength { index: 4, len, max: MAX_CHAIN as u32 });
    }
}

#[test]
fn indirect_table_too_huge() {
    for len in [(MAX_CHAIN as u32 + 1) * 16, 0x8000_0000, u32::MAX - 15] {
        let mut driver = Hostile::new(INDIRECT_DESC);
        driver.desc(0, TABLE, len, INDIRECT, 0);
        driver.push(0);
        driver.dies_of(QueueError::IndirectLength { index: 0, len, max: MAX_CHAIN as u32 });
    }
}

#[test]
fn indirect_table_in_no_memory() {
    for addr in [0, BASE - 1, BASE + MEMORY as u64 - 15, u64::MAX - 16] {
        let mut driver = Hostile::new(INDIRECT_DESC);
        driver.desc(0, addr, 16, INDIRECT, 0);
        driver.push(0);
        driver.dies_of(QueueError::Address { addr, len: 16 });
    }
}

#[test]
fn indirect_table_wraps_around_the_address_space() {
    let mut driver = Hostile::new(INDIRECT_DESC);
    driver.desc(0, u64::MAX - 15, 32, INDIRECT, 0);
    driver.push(0);
    driver.dies_of(QueueError::AddressWraps { index: 0, addr: u64::MAX - 15, len: 32 });
}

#[test]
fn indirect_loops() {
    let mut driver = Hostile::new(INDIRECT_DESC);
    driver.entry(0, DATA, 8, NEXT, 1);
    driver.entry(1, DATA, 8, NEXT, 0);
    driver.desc(5, TABLE, 32, INDIRECT, 0);
    driver.push(5);
    driver.dies_of(QueueError::ChainTooLong { head: 5, limit: 2 });
}

#[test]
fn indirect_next_is_outside_its_table() {
    for next in [2, 3, u16::MAX] {
        let mut driver = Hostile::new(INDIRECT_DESC);
        driver.entry(0, DATA, 8, NEXT, next);
        driver.entry(2, DATA, 8, 0, 0);
        driver.desc(0, TABLE, 32, INDIRECT, 0);
        driver.push(0);
        driver.dies_of(QueueError::DescIndex { index: next.into(), size: 2 });
    }
}

#[test]
fn indirect_entries_are_checked_like_descriptors() {
    let cases: [(u64, u32, u16, QueueError); 4] = [
        (DATA, 0, 0, QueueError::ZeroLength { index: 1 }),
        (u64::MAX - 6, 8, 0, QueueError::AddressWraps { index: 1, addr: u64::MAX - 6, len: 8 }),
        (DATA, u32::MAX, WRITE, QueueError::ChainTooBig { head: 0 }),
        (DATA, 8, 0, QueueError::ReadableAfterWritable { head: 0 }),
    ];
    for (addr, len, flags, error) in cases {
        let mut driver = Hostile::new(INDIRECT_DESC);
        driver.entry(0, DATA, 8, NEXT | WRITE, 1);
        driver.entry(1, addr, len, flags, 0);
        driver.desc(0, TABLE, 32, INDIRECT, 0);
        driver.push(0);
        driver.dies_of(error);
    }
}

#[test]
fn indirect_write_flag_is_ignored() {
    let mut driver = Hostile::new(INDIRECT_DESC);
    driver.entry(0, DATA, 8, 0, 0);
    driver.desc(0, TABLE, 16, INDIRECT | WRITE, 7);
    driver.push(0);
    driver.pops(0, &[seg(DATA, 8)], &[]);
}

#[test]
fn indirect_at_the_end_of_a_direct_chain() {
    let mut driver = Hostile::new(INDIRECT_DESC);
    driver.entry(0, DATA + 1, 2, NEXT, 2);
    driver.entry(2, DATA + 2, 3, WRITE, 0);
    driver.desc(0, DATA, 1, NEXT, 6);
    driver.desc(6, TABLE, 48, INDIRECT, 0);
    driver.push(0);
    driver.pops(0, &[seg(DATA, 1), seg(DATA + 1, 2)], &[seg(DATA + 2, 3)]);
}

#[test]
fn indirect_table_of_the_greatest_length() {
    let mut driver = Hostile::new(INDIRECT_DESC);
    for i in 0..MAX_CHAIN as u16 {
        driver.entry(i, DATA, 8, if usize::from(i) + 1 < MAX_CHAIN { NEXT } else { 0 }, i + 1);
    }
    driver.desc(0, TABLE, MAX_CHAIN as u32 * 16, INDIRECT, 0);
    driver.push(0);
    driver.pops(0, &[seg(DATA, 8); MAX_CHAIN], &[]);

    // With one more in front it is too long.
    driver.desc(1, DATA, 8, NEXT, 0);
    driver.desc(0, TABLE, MAX_CHAIN as u32 * 16, INDIRECT, 0);
    driver.queue.complete(0, 0).unwrap();
    driver.push(1);
    driver.dies_of(QueueError::ChainTooLong { head: 1, limit: MAX_CHAIN as u32 });
}

#[test]
fn long_chains_fill_a_batch_one_at_a_time() {
    let mut driver = Hostile::new(INDIRECT_DESC);
    driver.batch = Batch::new(2);
    for i in 0..MAX_CHAIN as u16 {
        driver.entry(i, DATA, 8, if usize::from(i) + 1 < MAX_CHAIN { NEXT } else { 0 }, i + 1);
    }
    for head in 0..3 {
        driver.desc(head, TABLE, MAX_CHAIN as u32 * 16, INDIRECT, 0);
        driver.push(head);
    }
    driver.desc(3, DATA, 1, 0, 0);
    driver.push(3);
    for (head, popped) in [(0, 1), (1, 1), (2, 2)] {
        assert_eq!(driver.pop(), Ok(popped));
        let chain = driver.batch.chains()[0];
        assert_eq!(chain.head, head);
        assert_eq!(driver.batch.readable(&chain), [seg(DATA, 8); MAX_CHAIN]);
    }
    assert_eq!(driver.batch.readable(&driver.batch.chains()[1]), [seg(DATA, 1)]);
    assert_eq!(driver.queue.in_flight(), 4);
}

/// Which kind came last decides where the next pop begins, and nothing else.
#[test]
fn direct_and_indirect_chains_take_turns() {
    let mut driver = Hostile::new(INDIRECT_DESC);
    driver.entry(0, DATA, 8, WRITE, 0);
    for (heads, direct) in [(0..1, 0b0), (1..2, 0b1), (2..4, 0b10), (4..6, 0b01), (6..7, 0b0)] {
        for (bit, head) in heads.clone().enumerate() {
            if direct >> bit & 1 == 1 {
                driver.desc(head, DATA, 8, WRITE, 0);
            } else {
                driver.desc(head, TABLE, 16, INDIRECT, 0);
            }
            driver.push(head);
        }
        assert_eq!(driver.pop(), Ok(heads.len()));
        for (chain, head) in driver.batch.chains().iter().zip(heads) {
            assert_eq!(chain.head, head);
            assert_eq!(driver.batch.segments(chain), (&[][..], &[seg(DATA, 8)][..]));
        }
        assert_eq!(driver.pop(), Ok(0));
    }
    assert_eq!(driver.queue.in_flight(), 7);
    driver.desc(7, DATA, 0, WRITE, 0);
    driver.push(7);
    driver.dies_of(QueueError::ZeroLength { index: 7 });
}

#[test]
fn indirect_table_changes_while_it_is_read() {
    let mut driver = Hostile::new(INDIRECT_DESC);
    driver.entry(0, DATA, 8, 0, 0);
    driver.desc(0, TABLE, 16, INDIRECT, 0);
    driver.push(0);
    let fetched = Cell::new(0);
    let memory = &driver.memory;
    let popped = driver.queue.pop(&mut driver.batch, |addr, out| {
        fetched.set(fetched.get() + 1);
        let done = memory.fetch(addr, out);
        // Now the driver makes everything else of it: the table, its descriptor and the entry.
        memory.put(TABLE, 8, u64::MAX);
        memory.put(TABLE + 8, 8, u64::MAX);
        memory.put(DESC, 8, u64::MAX);
        memory.put(DESC + 8, 8, u64::MAX);
        memory.put(AVAIL + 4, 2, 0xffff);
        done
    });
    assert_eq!((popped, fetched.get()), (Ok(1), 1), "fetched once");
    assert_eq!(driver.batch.readable(&driver.batch.chains()[0]), [seg(DATA, 8)]);
}

#[test]
fn descriptors_change_after_the_pop() {
    let mut driver = Hostile::new(0);
    driver.desc(0, DATA, 8, NEXT, 1);
    driver.desc(1, DATA, 8, WRITE, 0);
    driver.push(0);
    driver.pops(0, &[seg(DATA, 8)], &[seg(DATA, 8)]);
    driver.desc(0, 0, 0, INDIRECT | NEXT, 0xffff);
    driver.set_idx(1);
    driver.memory.put(AVAIL + 4, 2, 7);
    let chain = driver.batch.chains()[0];
    assert_eq!(driver.batch.readable(&chain), [seg(DATA, 8)], "what was popped is private");
    assert_eq!(driver.queue.complete(chain.head, 8), Ok(()));
    assert_eq!(driver.queue.publish(), Ok(true));
    assert_eq!(driver.memory.get(USED + 4, 4), 0, "the head is the popped one");
}

// Indexes.

#[test]
fn available_index_jumps_more_than_the_queue() {
    for new in [SIZE + 1, 0x7fff, 0x8000, u16::MAX] {
        let mut driver = Hostile::new(0);
        driver.set_idx(new);
        driver.dies_of(QueueError::AvailIndex { old: 0, new, size: SIZE });
    }
}

#[test]
fn available_index_goes_backwards() {
    let mut driver = Hostile::new(0);
    driver.desc(0, DATA, 8, 0, 0);
    driver.desc(1, DATA, 8, 0, 0);
    driver.push(0);
    driver.push(1);
    assert_eq!(driver.pop(), Ok(2));
    driver.set_idx(1);
    driver.dies_of(QueueError::AvailIndex { old: 2, new: 1, size: SIZE });
}

#[test]
fn available_index_jumps_before_kicks_are_armed() {
    let mut driver = Hostile::new(EVENT_IDX);
    driver.set_idx(SIZE + 1);
    let error = QueueError::AvailIndex { old: 0, new: SIZE + 1, size: SIZE };
    assert_eq!(driver.queue.arm_kicks(), Err(error));
    driver.is_latched(error);
}

#[test]
fn a_head_twice_in_one_batch() {
    let mut driver = Hostile::new(0);
    driver.desc(2, DATA, 8, 0, 0);
    driver.push(2);
    driver.push(2);
    driver.dies_of(QueueError::HeadInFlight { head: 2 });
}

#[test]
fn a_head_twice_while_in_flight() {
    for (features, flags) in [(0, NEXT), (INDIRECT_DESC, INDIRECT), (0, 0)] {
        let mut driver = Hostile::new(features);
        driver.entry(0, DATA, 8, 0, 0);
        driver.desc(1, DATA, 8, 0, 0);
        driver.desc(2, TABLE, 16, flags, 1);
        driver.push(2);
        assert_eq!(driver.pop(), Ok(1));
        driver.push(2);
        driver.dies_of(QueueError::HeadInFlight { head: 2 });
    }
}

#[test]
fn a_head_again_after_its_completion() {
    let mut driver = Hostile::new(0);
    driver.desc(2, DATA, 8, 0, 0);
    for _ in 0..3 * SIZE {
        driver.push(2);
        driver.pops(2, &[seg(DATA, 8)], &[]);
        assert_eq!(driver.queue.complete(2, 0), Ok(()));
        assert_eq!(driver.queue.publish(), Ok(true));
    }
}

#[test]
fn every_head_in_flight_and_one_more() {
    let mut driver = Hostile::new(0);
    for head in 0..SIZE {
        driver.desc(head, DATA, 8, 0, 0);
        driver.push(head);
    }
    assert_eq!(driver.pop(), Ok(SIZE.into()));
    assert_eq!(driver.queue.in_flight(), SIZE);
    driver.push(4);
    driver.dies_of(QueueError::AvailIndex { old: SIZE, new: SIZE + 1, size: SIZE });
}

#[test]
fn a_storm_of_kicks_finds_nothing() {
    let mut driver = Hostile::new(EVENT_IDX);
    for _ in 0..1000 {
        assert_eq!(driver.pop(), Ok(0));
        assert_eq!(driver.queue.arm_kicks(), Ok(false));
        assert_eq!(driver.queue.publish(), Ok(false));
    }
}

#[test]
fn used_event_at_one_around_the_position() {
    // Published entry 0, then 1: each asks for an interrupt only if used_event names it.
    for (used_event, wanted) in [(u16::MAX, [false, false]), (0, [true, false]), (1, [false, true])] {
        let mut driver = Hostile::new(EVENT_IDX);
        driver.memory.put(AVAIL + 4 + 2 * u64::from(SIZE), 2, used_event.into());
        for (head, wanted) in (0..).zip(wanted) {
            driver.desc(head, DATA, 8, 0, 0);
            driver.push(head);
            assert_eq!(driver.pop(), Ok(1));
            driver.queue.complete(head, 0).unwrap();
            assert_eq!(driver.queue.publish(), Ok(wanted), "used_event {used_event}, entry {head}");
        }
    }
}

#[test]
fn the_device_completes_what_is_not_in_flight() {
    for head in [0, SIZE - 1, SIZE, u16::MAX] {
        let mut driver = Hostile::new(0);
        let error = QueueError::NotInFlight { id: head.into() };
        assert_eq!(driver.queue.complete(head, 0), Err(error));
        driver.is_latched(error);
    }
}

#[test]
fn the_device_completes_twice() {
    let mut driver = Hostile::new(0);
    driver.desc(0, DATA, 8, 0, 0);
    driver.push(0);
    assert_eq!(driver.pop(), Ok(1));
    assert_eq!(driver.queue.complete(0, 0), Ok(()));
    assert_eq!(driver.queue.complete(0, 0), Err(QueueError::NotInFlight { id: 0 }));
}

#[test]
fn the_device_fails_a_request() {
    let mut driver = Hostile::new(0);
    driver.desc(0, DATA, 8, 0, 0);
    driver.push(0);
    assert_eq!(driver.pop(), Ok(1));
    let error = QueueError::Request { head: 0, what: "header too short" };
    assert_eq!(driver.queue.fail(error), error);
    driver.dies_of(error);
}

#[test]
fn chains_before_the_malformed_one_are_lost_with_the_queue() {
    let mut driver = Hostile::new(0);
    driver.desc(0, DATA, 8, 0, 0);
    driver.desc(1, DATA, 0, 0, 0);
    driver.push(0);
    driver.push(1);
    driver.dies_of(QueueError::ZeroLength { index: 1 });
    assert_eq!(driver.memory.get(USED + 2, 2), 0);
}

// Configuration.

#[test]
fn sizes_that_are_none() {
    for (size, max) in [(0, 256), (3, 256), (255, 256), (512, 256), (u16::MAX, 32768), (4, 0)] {
        assert_eq!(
            QueueConfig::new(addresses(size), max, 0).unwrap_err(),
            ConfigError::Size { size, max },
            "size {size} of {max}"
        );
    }
    for size in [1, 2, 256] {
        assert!(QueueConfig::new(addresses(size), 256, 0).is_ok());
    }
    let huge = QueueAddresses { size: 32768, desc: 0, driver: 0x100_0000, device: 0x200_0000 };
    assert!(QueueConfig::new(huge, u16::MAX, 0).is_ok());
}

#[test]
fn areas_that_are_misaligned() {
    let good = addresses(SIZE);
    let cases = [
        (QueueAddresses { desc: DESC + 8, ..good }, "descriptor area", DESC + 8, 16),
        (QueueAddresses { driver: AVAIL + 1, ..good }, "driver area", AVAIL + 1, 2),
        (QueueAddresses { device: USED + 2, ..good }, "device area", USED + 2, 4),
    ];
    for (addresses, part, addr, align) in cases {
        let error = QueueConfig::new(addresses, 256, 0).unwrap_err();
        assert_eq!(error, ConfigError::Misaligned { part, addr, align });
    }
}

#[test]
fn areas_that_wrap_around() {
    let good = addresses(SIZE);
    let cases = [
        (QueueAddresses { desc: u64::MAX - 15, ..good }, "descriptor area", u64::MAX - 15),
        (QueueAddresses { driver: u64::MAX - 1, ..good }, "driver area", u64::MAX - 1),
        (QueueAddresses { device: u64::MAX - 3, ..good }, "device area", u64::MAX - 3),
    ];
    for (addresses, part, addr) in cases {
        let error = QueueConfig::new(addresses, 256, 0).unwrap_err();
        assert_eq!(error, ConfigError::Wraps { part, addr });
    }
}

#[test]
fn features_that_change_the_ring() {
    let memory = Memory::new(MEMORY);
    let config = QueueConfig::new(addresses(SIZE), 256, ORDER_PLATFORM | 1).unwrap();
    let [desc, driver, device] = config.areas().map(|area| memory.at(area.addr, area.len).unwrap());
    // SAFETY: the areas lie in `memory`, which outlives the queue.
    let error = unsafe { config.activate(desc, driver, device) }.unwrap_err();
    assert_eq!(error, ConfigError::Features(ORDER_PLATFORM), "our barriers would be too weak");
    // SAFETY: as above.
    let queue = unsafe { config.activate_as::<Platform>(desc, driver, device) };
    assert_eq!(queue.unwrap().size(), SIZE);
    assert!(QueueConfig::new(addresses(SIZE), 256, 1 | 1 << 63).is_ok(), "a device's own bits are not ours");
}

#[test]
fn areas_that_are_short_or_misaligned_in_host_memory() {
    let memory = Memory::new(MEMORY);
    let config = QueueConfig::new(addresses(SIZE), 256, 0).unwrap();
    let requests = config.areas();
    assert_eq!(requests.map(|area| area.len), [16 * 8, 6 + 2 * 8, 6 + 8 * 8]);
    assert_eq!(requests.map(|area| area.writable), [false, false, true]);
    let good = requests.map(|area| memory.at(area.addr, area.len).unwrap());
    for (i, align) in [8, 2, 4].into_iter().enumerate() {
        let AreaRequest { part, addr, len, .. } = requests[i];
        let mut areas = good;
        areas[i] = good[i].slice(0, len - 1).unwrap();
        // SAFETY: the areas lie in `memory`, which outlives the attempt.
        let error = unsafe { config.activate(areas[0], areas[1], areas[2]) }.unwrap_err();
        assert_eq!(error, ConfigError::Short { part, needed: len, given: len - 1 });
        areas[i] = memory.at(addr + align / 2, len).unwrap();
        // SAFETY: as above.
        let error = unsafe { config.activate(areas[0], areas[1], areas[2]) }.unwrap_err();
        assert_eq!(error, ConfigError::Misaligned { part, addr, align });
    }
}
