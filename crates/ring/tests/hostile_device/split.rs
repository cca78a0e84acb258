//! Split queues.
use crate::memory::Memory;
use crate::rig::{Hostile, SIZE, seg};
use paravane_ring::driver::poll::Position;
use paravane_ring::driver::{DriverConfig, Queue, Used};
use paravane_ring::{ConfigError, DmaArea, Platform, QueueError, Segment};
use paravane_spec::feature::{EVENT_IDX, IN_ORDER, INDIRECT_DESC, ORDER_PLATFORM, RING_PACKED};

/// The used index.
struct Idx(u16);

impl Hostile<Idx> {
    fn new(indirect: u16, features: u64) -> Self {
        Self::start(indirect, features, Idx(0))
    }

    /// Uses buffer `id`, whatever that is.
    fn push(&mut self, id: u32, len: u32) {
        let entry = self.ring.device + 4 + u64::from(self.at.0 % SIZE) * 8;
        self.memory.put(entry, 4, id.into());
        self.memory.put(entry + 4, 4, len.into());
        self.set_idx(self.at.0.wrapping_add(1));
    }

    fn set_idx(&mut self, idx: u16) {
        self.at = Idx(idx);
        self.memory.put(self.ring.device + 2, 2, idx.into());
    }
}

#[test]
fn used_index_jumps_beyond_what_is_in_flight() {
    for new in [3, SIZE, SIZE + 1, 0x8000, u16::MAX] {
        let mut device = Hostile::new(0, 0);
        device.add(&[seg(1)], &[]);
        device.add(&[seg(1)], &[]);
        device.set_idx(new);
        device.fails_with(QueueError::UsedIndex { old: 0, new, in_flight: 2 });
    }
}

#[test]
fn used_index_goes_backwards() {
    let mut device = Hostile::new(0, 0);
    for _ in 0..2 {
        let id = device.add(&[seg(1)], &[]);
        device.push(id.0.into(), 0);
        assert_eq!(device.queue.pop_used(), Ok(Some(Used { id, len: 0 })));
    }
    device.set_idx(1);
    device.fails_with(QueueError::UsedIndex { old: 2, new: 1, in_flight: 0 });
}

#[test]
fn something_is_used_though_nothing_was_published() {
    let mut device = Hostile::new(0, 0);
    device.queue.add(&[seg(1)], &[]).unwrap();
    device.push(0, 0);
    device.fails_with(QueueError::UsedIndex { old: 0, new: 1, in_flight: 0 });
}

#[test]
fn a_buffer_is_used_that_was_not_published() {
    let mut device = Hostile::new(0, 0);
    device.add(&[seg(1)], &[]);
    let secret = device.queue.add(&[seg(1)], &[]).unwrap();
    device.push(secret.0.into(), 0);
    device.fails_with(QueueError::NotInFlight { id: secret.0.into() });
}

#[test]
fn id_is_outside_the_table() {
    for id in [u32::from(SIZE), 0x1_0000, u32::MAX] {
        let mut device = Hostile::new(0, 0);
        device.add(&[seg(1)], &[]);
        device.push(id, 0);
        device.fails_with(QueueError::DescIndex { index: id, size: SIZE.into() });
    }
}

#[test]
fn id_is_in_the_middle_of_a_chain() {
    let mut device = Hostile::new(0, 0);
    let id = device.add(&[seg(1), seg(1)], &[seg(1)]);
    device.push(u32::from(id.0) + 1, 0);
    device.fails_with(QueueError::NotInFlight { id: u32::from(id.0) + 1 });
}

#[test]
fn id_is_used_twice() {
    let mut device = Hostile::new(0, 0);
    let id = device.add(&[seg(1)], &[]);
    device.add(&[seg(1)], &[]);
    device.push(id.0.into(), 0);
    device.push(id.0.into(), 0);
    assert_eq!(device.queue.pop_used(), Ok(Some(Used { id, len: 0 })));
    device.fails_with(QueueError::NotInFlight { id: id.0.into() });
}

#[test]
fn used_length_is_clamped_to_the_writable_part() {
    for (indirect, features) in [(0, 0), (4, INDIRECT_DESC)] {
        let mut device = Hostile::new(indirect, features);
        let cases: [(&[Segment], &[Segment], u32, u32); 5] = [
            (&[seg(100)], &[seg(20), seg(3)], 23, 23),
            (&[seg(100)], &[seg(20), seg(3)], 24, 23),
            (&[seg(100)], &[seg(20), seg(3)], u32::MAX, 23),
            (&[seg(100)], &[], 1, 0),
            (&[], &[seg(u32::MAX)], u32::MAX, u32::MAX),
        ];
        for (readable, writable, says, len) in cases {
            let id = device.add(readable, writable);
            device.push(id.0.into(), says);
            assert_eq!(device.queue.pop_used(), Ok(Some(Used { id, len })));
        }
    }
}

/// All that the driver has written is overwritten: it relies on its own copy.
#[test]
fn descriptors_and_the_available_ring_are_overwritten() {
    for (indirect, features) in [(0, 0), (4, INDIRECT_DESC), (4, INDIRECT_DESC | EVENT_IDX)] {
        for garbage in [0x00, 0xff, 0x01] {
            let mut device = Hostile::new(indirect, features);
            for _ in 0..5 {
                let first = device.add(&[seg(7)], &[seg(8), seg(9)]);
                let second = device.add(&[seg(7)], &[]);
                let keep = [device.ring.device, device.ring.device + 6 + 8 * u64::from(SIZE)];
                let total = device.memory.dma().area.len() as u64;
                for (from, to) in [(device.ring.desc, keep[0]), (keep[1], device.ring.desc + total)] {
                    let bytes = vec![garbage; (to - from) as usize];
                    assert!(device.memory.at(from, bytes.len()).unwrap().write(0, &bytes));
                }
                device.push(second.0.into(), 1);
                device.push(first.0.into(), 17);
                assert_eq!(device.queue.pop_used(), Ok(Some(Used { id: second, len: 0 })));
                assert_eq!(device.queue.pop_used(), Ok(Some(Used { id: first, len: 17 })));
                assert_eq!(device.queue.pop_used(), Ok(None));
                assert_eq!((device.queue.in_flight(), device.queue.room()), (0, SIZE.into()));
            }
            // The free list is whole: the table can be filled with single descriptors once more.
            let mut ids: Vec<u16> = (0..SIZE).map(|_| device.add(&[seg(1)], &[]).0).collect();
            ids.sort_unstable();
            assert_eq!(ids, (0..SIZE).collect::<Vec<_>>());
        }
    }
}

#[test]
fn a_used_entry_changes_after_it_was_taken() {
    let mut device = Hostile::new(0, 0);
    let id = device.add(&[], &[seg(8)]);
    device.push(id.0.into(), 8);
    let used = device.queue.pop_used().unwrap().unwrap();
    device.memory.put(device.ring.device + 4, 8, u64::MAX);
    assert_eq!((used, device.queue.pop_used()), (Used { id, len: 8 }, Ok(None)));
}

#[test]
fn avail_event_at_one_around_the_position() {
    // Published entry 0, then 1: each wants a kick only if avail_event names it.
    for (avail_event, wanted) in [(u16::MAX, [false, false]), (0, [true, false]), (1, [false, true])] {
        let mut device = Hostile::new(0, EVENT_IDX);
        device.memory.put(device.ring.device + 4 + 8 * u64::from(SIZE), 2, avail_event.into());
        for wanted in wanted {
            device.queue.add(&[seg(1)], &[]).unwrap();
            assert_eq!(device.queue.publish(), wanted, "avail_event {avail_event}");
        }
    }
}

#[test]
fn a_token_of_a_latched_queue_says_look() {
    let mut device = Hostile::new(0, 0);
    let token = device.queue.enable_interrupts();
    device.set_idx(5);
    assert!(device.queue.poll(token), "so that the driver comes to see the error");
    device.fails_with(QueueError::UsedIndex { old: 0, new: 5, in_flight: 0 });
}

#[test]
fn layouts_that_are_none() {
    for size in [0, 3, 255, 65_535] {
        assert_eq!(DriverConfig::new(size, 0, 0), Err(ConfigError::Size { size, max: 32768 }));
    }
    let memory = Memory::new(4096);
    for features in [0, RING_PACKED, IN_ORDER] {
        let layout = DriverConfig::new(8, 0, ORDER_PLATFORM | features).unwrap();
        let refused = Queue::new(layout, memory.dma()).unwrap_err();
        assert_eq!(refused, ConfigError::Features(ORDER_PLATFORM), "its barriers order CPUs only");
        assert!(Queue::<Platform, Position>::lay_out(layout, memory.dma()).is_ok());
    }
    assert!(DriverConfig::new(32768, 16, INDIRECT_DESC).is_ok());
}

#[test]
fn memory_that_is_short_misaligned_or_wraps() {
    let layout = DriverConfig::new(SIZE, 4, INDIRECT_DESC).unwrap();
    let memory = Memory::new(layout.memory() + 16);
    let all = memory.dma();
    let needed = layout.memory();
    let part = "queue";
    let short = all.slice(0, needed - 1).unwrap();
    let error = Queue::new(layout, short).unwrap_err();
    assert_eq!(error, ConfigError::Short { part, needed, given: needed - 1 });
    let odd = all.slice(8, needed).unwrap();
    let error = Queue::new(layout, odd).unwrap_err();
    assert_eq!(error, ConfigError::Misaligned { part, addr: odd.addr, align: 16 });
    let addr = u64::MAX - 15;
    let error = Queue::new(layout, DmaArea { addr, ..all }).unwrap_err();
    assert_eq!(error, ConfigError::Wraps { part, addr });
}

#[test]
fn buffers_that_the_specification_does_not_have() {
    let nothing = |readable: &[Segment], writable: &[Segment]| {
        let mut device = Hostile::new(4, INDIRECT_DESC);
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _ = device.queue.add(readable, writable);
        }));
        assert!(result.is_err(), "{readable:?} {writable:?}");
        assert_eq!((device.queue.in_flight(), device.queue.room()), (0, SIZE.into()), "nothing was added");
    };
    nothing(&[], &[]);
    nothing(&[seg(0)], &[]);
    nothing(&[seg(1)], &[seg(1), seg(0)]);
    nothing(&[seg(u32::MAX)], &[seg(1)]);
}
