//! Packed queues.
use crate::memory::{BASE, Memory};
use crate::rig::{Hostile, SIZE, seg};
use paravane_ring::driver::{BufferId, DriverConfig, Queue, Used};
use paravane_ring::{ConfigError, QueueError, Segment};
use paravane_spec::feature::{EVENT_IDX, IN_ORDER, INDIRECT_DESC, RING_PACKED};
use paravane_spec::packed::{
    DESC_F_AVAIL, DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_USED, DESC_F_WRITE, EVENT_F_DESC, EVENT_F_DISABLE,
    EVENT_F_ENABLE,
};

/// Flags of a used descriptor in the first lap.
const USED: u16 = DESC_F_AVAIL | DESC_F_USED;

/// Where the next used descriptor belongs, counted from the start.
struct Next(u64);

/// A descriptor as it lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Desc {
    addr: u64,
    len: u32,
    id: u16,
    flags: u16,
}

impl Hostile<Next> {
    fn new(indirect: u16, features: u64) -> Self {
        Self::start(indirect, features | RING_PACKED, Next(0))
    }

    fn desc(&self, slot: u64) -> Desc {
        self.desc_at(self.ring.desc + slot % u64::from(SIZE) * 16)
    }

    fn desc_at(&self, at: u64) -> Desc {
        let meta = self.memory.get(at + 8, 8);
        Desc {
            addr: self.memory.get(at, 8),
            len: meta as u32,
            id: (meta >> 32) as u16,
            flags: (meta >> 48) as u16,
        }
    }

    fn put(&self, slot: u64, len: u32, id: u16, flags: u16) {
        let meta = u64::from(len) | u64::from(id) << 32 | u64::from(flags) << 48;
        self.memory.put(self.ring.desc + slot % u64::from(SIZE) * 16 + 8, 8, meta);
    }

    /// Uses buffer `id`, whatever that is, and moves on by `places`.
    fn push(&mut self, id: u16, len: u32, places: u64) {
        let Next(next) = self.at;
        let wrap = if next & u64::from(SIZE) == 0 { USED } else { 0 };
        self.put(next, len, id, wrap | DESC_F_WRITE);
        self.at = Next(next + places);
    }

    fn want_kicks(&self, off_wrap: u16, flags: u16) {
        self.memory.put(self.ring.device, 4, u64::from(off_wrap) | u64::from(flags) << 16);
    }

    /// As [`Hostile::fails_with`], also with the same slot.
    #[track_caller]
    fn dies_of(&mut self, error: QueueError) {
        self.fails_with(error);
        for (id, flags) in (0..SIZE).map(|id| (id, USED)).chain([(0, 0)]) {
            for slot in 0..SIZE.into() {
                self.put(slot, 0, id, flags);
            }
            self.is_latched(error);
        }
    }
}

#[test]
fn descriptors_are_written_as_the_specification_has_them() {
    let mut device = Hostile::new(0, 0);
    let BufferId(first) = device.queue.add(&[seg(1)], &[seg(2), seg(3)]).unwrap();
    let BufferId(second) = device.queue.add(&[], &[seg(4)]).unwrap();
    assert_eq!(device.desc(0).flags & USED, 0, "the first flags are withheld");
    assert_eq!(device.desc(1).flags & USED, DESC_F_AVAIL);
    assert!(device.queue.publish());
    let desc = |len, id, flags| Desc { addr: 0x9000_0000, len, id, flags: flags | DESC_F_AVAIL };
    assert_eq!(device.desc(0), desc(1, first, DESC_F_NEXT));
    assert_eq!(device.desc(1), desc(2, first, DESC_F_NEXT | DESC_F_WRITE));
    assert_eq!(device.desc(2), desc(3, first, DESC_F_WRITE));
    assert_eq!(device.desc(3), desc(4, second, DESC_F_WRITE));
    // Around the end: the other wrap counter.
    device.add(&[seg(5), seg(5), seg(5), seg(5)], &[]);
    device.push(second, 0, 1);
    device.push(first, 0, 3);
    assert!(device.queue.pop_used().unwrap().is_some() && device.queue.pop_used().unwrap().is_some());
    let BufferId(third) = device.add(&[seg(6)], &[seg(7)]);
    assert_eq!(device.desc(8), Desc { flags: DESC_F_USED | DESC_F_NEXT, ..desc(6, third, 0) });
    assert_eq!(device.desc(9), Desc { flags: DESC_F_USED | DESC_F_WRITE, ..desc(7, third, 0) });
}

#[test]
fn tables_are_written_as_the_specification_has_them() {
    let mut device = Hostile::new(4, INDIRECT_DESC);
    let BufferId(id) = device.add(&[seg(1), seg(2)], &[seg(3)]);
    let table = device.desc(0);
    assert_eq!((table.len, table.id, table.flags), (48, id, DESC_F_INDIRECT | DESC_F_AVAIL));
    assert!(table.addr >= BASE);
    for (i, (len, flags)) in [(1, 0), (2, 0), (3, DESC_F_WRITE)].into_iter().enumerate() {
        let desc = device.desc_at(table.addr + 16 * i as u64);
        assert_eq!((desc.addr, desc.len, desc.flags), (0x9000_0000, len, flags));
    }
    // One segment needs no table, and more than fit go into the ring.
    device.add(&[seg(4)], &[]);
    assert_eq!(device.desc(1).flags, DESC_F_AVAIL);
    device.add(&[seg(5); 5], &[]);
    assert_eq!(device.desc(2).flags, DESC_F_AVAIL | DESC_F_NEXT);
}

#[test]
fn id_is_outside_the_table() {
    for id in [SIZE, 0x8000, u16::MAX] {
        let mut device = Hostile::new(0, 0);
        device.add(&[seg(1)], &[]);
        device.push(id, 0, 1);
        device.dies_of(QueueError::DescIndex { index: id.into(), size: SIZE.into() });
    }
}

#[test]
fn id_is_not_in_flight() {
    for in_order in [0, IN_ORDER] {
        let mut device = Hostile::new(0, in_order);
        let id = device.add(&[seg(1)], &[]).0;
        device.push(id + 1, 0, 1);
        device.dies_of(QueueError::NotInFlight { id: u32::from(id) + 1 });
    }
}

#[test]
fn id_is_used_twice() {
    for in_order in [0, IN_ORDER] {
        let mut device = Hostile::new(0, in_order);
        let id = device.add(&[seg(1)], &[]);
        device.add(&[seg(1)], &[]);
        device.push(id.0, 0, 1);
        device.push(id.0, 0, 1);
        assert_eq!(device.queue.pop_used(), Ok(Some(Used { id, len: 0 })));
        device.dies_of(QueueError::NotInFlight { id: id.0.into() });
    }
}

#[test]
fn a_buffer_is_used_that_was_not_published() {
    for in_order in [0, IN_ORDER] {
        let mut device = Hostile::new(0, in_order);
        device.add(&[seg(1)], &[]);
        let secret = device.queue.add(&[seg(1)], &[]).unwrap();
        device.push(secret.0, 0, 1);
        device.dies_of(QueueError::NotInFlight { id: secret.0.into() });
    }
}

#[test]
fn something_is_used_in_an_empty_queue() {
    let mut device = Hostile::new(0, 0);
    device.push(0, 0, 1);
    device.dies_of(QueueError::NotInFlight { id: 0 });
}

/// All looks used, for ever: the driver takes what is in flight, and latches.
#[test]
fn the_whole_ring_is_marked_used() {
    for in_order in [0, IN_ORDER] {
        let mut device = Hostile::new(0, in_order);
        let ids: Vec<_> = (0..4).map(|_| device.add(&[seg(1)], &[])).collect();
        for slot in 0..SIZE {
            device.put(slot.into(), 0, slot % 4, USED);
        }
        for id in ids {
            assert_eq!(device.queue.pop_used(), Ok(Some(Used { id, len: 0 })));
        }
        device.at.0 = 4;
        device.dies_of(QueueError::NotInFlight { id: 0 });
    }
}

#[test]
fn flags_of_the_other_lap_mean_nothing() {
    let mut device = Hostile::new(0, 0);
    let id = device.add(&[seg(1)], &[]);
    for flags in [0, DESC_F_AVAIL, DESC_F_USED, 0x7f7f] {
        device.put(0, 0, id.0, flags);
        assert_eq!(device.queue.pop_used(), Ok(None));
    }
    device.put(0, 0, id.0, 0xffff);
    assert_eq!(device.queue.pop_used(), Ok(Some(Used { id, len: 0 })));
}

#[test]
fn used_length_is_clamped_to_the_writable_part() {
    for (indirect, features) in [(0, 0), (4, INDIRECT_DESC), (4, INDIRECT_DESC | IN_ORDER)] {
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
            let places = if indirect > 0 { 1 } else { (readable.len() + writable.len()) as u64 };
            device.push(id.0, says, places);
            assert_eq!(device.queue.pop_used(), Ok(Some(Used { id, len })));
        }
    }
}

/// Without the WRITE flag nothing was written, whatever the length says.
#[test]
fn a_length_without_the_write_flag_is_none() {
    let mut device = Hostile::new(0, 0);
    let id = device.add(&[], &[seg(8)]);
    device.put(0, 8, id.0, USED);
    assert_eq!(device.queue.pop_used(), Ok(Some(Used { id, len: 0 })));
}

/// A batch in order, reported by its last buffer.
///
/// Those before count as written completely.
#[test]
fn a_batch_in_order_is_told_of_by_its_last_buffer() {
    let mut device = Hostile::new(0, IN_ORDER);
    for _ in 0..10 {
        let ids = [
            device.add(&[seg(1)], &[seg(100)]),
            device.add(&[seg(1)], &[]),
            device.add(&[], &[seg(30), seg(3)]),
            device.add(&[], &[seg(9)]),
        ];
        device.push(ids[2].0, 7, 5);
        let token = device.queue.enable_interrupts();
        assert!(device.queue.poll(token));
        let mut taken = Vec::new();
        for _ in 0..3 {
            let now = device.queue.enable_interrupts();
            assert!(device.queue.poll(now), "in the middle of a batch");
            taken.push(device.queue.pop_used().unwrap().unwrap());
        }
        let expected = [100, 0, 7];
        for ((used, id), len) in taken.into_iter().zip(ids).zip(expected) {
            assert_eq!(used, Used { id, len });
        }
        assert_eq!(device.queue.pop_used(), Ok(None));
        assert!(device.queue.poll(token));
        let now = device.queue.enable_interrupts();
        assert!(!device.queue.poll(now));
        device.push(ids[3].0, 9, 1);
        assert_eq!(device.queue.pop_used(), Ok(Some(Used { id: ids[3], len: 9 })));
        assert_eq!((device.queue.in_flight(), device.queue.room()), (0, SIZE.into()));
    }
}

/// All that the driver has written is overwritten: it relies on its own copy.
#[test]
fn descriptors_and_tables_are_overwritten() {
    for (indirect, features) in [(0, 0), (4, INDIRECT_DESC), (4, INDIRECT_DESC | EVENT_IDX)] {
        for garbage in [0x00, 0x5a, 0x01] {
            let mut device = Hostile::new(indirect, features);
            for _ in 0..5 {
                let first = device.add(&[seg(7)], &[seg(8), seg(9)]);
                let second = device.add(&[seg(7)], &[]);
                let bytes = vec![garbage; device.memory.dma().area.len()];
                assert!(device.memory.dma().area.write(0, &bytes));
                let places = if indirect > 0 { 1 } else { 3 };
                device.push(second.0, 1, 1);
                assert_eq!(device.queue.pop_used(), Ok(Some(Used { id: second, len: 0 })));
                device.push(first.0, 17, places);
                assert_eq!(device.queue.pop_used(), Ok(Some(Used { id: first, len: 17 })));
                assert_eq!((device.queue.in_flight(), device.queue.room()), (0, SIZE.into()));
            }
            let mut ids: Vec<u16> = (0..SIZE).map(|_| device.add(&[seg(1)], &[]).0).collect();
            ids.sort_unstable();
            assert_eq!(ids, (0..SIZE).collect::<Vec<_>>(), "the free list is whole");
        }
    }
}

#[test]
fn a_used_descriptor_changes_after_it_was_taken() {
    let mut device = Hostile::new(0, 0);
    let id = device.add(&[], &[seg(8)]);
    device.push(id.0, 8, 1);
    let used = device.queue.pop_used().unwrap().unwrap();
    device.put(0, u32::MAX, 0xffff, 0xffff);
    assert_eq!((used, device.queue.pop_used()), (Used { id, len: 8 }, Ok(None)));
}

/// Buffers before the error are returned first.
#[test]
fn a_batch_with_an_error_in_it() {
    let mut device = Hostile::new(0, 0);
    let ids = [(); 3].map(|()| device.add(&[seg(1)], &[]));
    device.push(ids[2].0, 0, 1);
    device.push(77, 0, 1);
    device.push(ids[0].0, 0, 1);
    let mut out = [Used::default(); 8];
    assert_eq!(device.queue.take_used(&mut out), Ok(1));
    assert_eq!(out[0], Used { id: ids[2], len: 0 });
    let error = QueueError::DescIndex { index: 77, size: SIZE.into() };
    assert_eq!(device.queue.take_used(&mut out), Err(error));
    device.at.0 = 1;
    device.dies_of(error);
}

#[test]
fn kicks_as_the_device_asks_for_them() {
    // Slots 0 and 1 in one publication, then 2, then 3.
    for (off_wrap, flags, event_idx, wanted) in [
        (0, EVENT_F_ENABLE, true, [true, true, true]),
        (0, EVENT_F_DISABLE, true, [false, false, false]),
        (0x8000, EVENT_F_DESC, true, [true, false, false]),
        (0x8001, EVENT_F_DESC, true, [true, false, false]),
        (0x8002, EVENT_F_DESC, true, [false, true, false]),
        (0x0002, EVENT_F_DESC, true, [false, false, false]),
        (0x0000, EVENT_F_DESC, true, [false, false, false]),
        // What has no meaning brings a kick too many rather than one too few.
        (0x8008, EVENT_F_DESC, true, [true, true, true]),
        (0x8002, EVENT_F_DESC, false, [true, true, true]),
        (0x8002, 3, true, [true, true, true]),
        (0x8002, 0xfffc | EVENT_F_DISABLE, true, [false, false, false]),
    ] {
        let mut device = Hostile::new(0, if event_idx { EVENT_IDX } else { 0 });
        device.want_kicks(off_wrap, flags);
        let mut kicks = Vec::new();
        for count in [2, 1, 1] {
            for _ in 0..count {
                device.queue.add(&[seg(1)], &[]).unwrap();
            }
            kicks.push(device.queue.publish());
            assert!(!device.queue.publish(), "nothing new");
        }
        assert_eq!(kicks, wanted, "{off_wrap:#x} {flags:#x}");
    }
}

#[test]
fn what_the_driver_asks_for_in_its_event_suppression() {
    for (event_idx, on) in [(0, 0), (EVENT_IDX, u32::from(EVENT_F_DESC) << 16)] {
        let mut device = Hostile::new(0, event_idx);
        let event = |device: &Hostile<Next>| device.memory.get(device.ring.driver, 4) as u32;
        assert_eq!(event(&device), 0, "a new queue wants all");
        device.queue.disable_interrupts();
        assert_eq!(event(&device), u32::from(EVENT_F_DISABLE) << 16);
        let _ = device.queue.enable_interrupts();
        let at = |place| if event_idx == 0 { 0 } else { on | place };
        assert_eq!(event(&device), at(0x8000));
        for _ in 0..9 {
            let id = device.add(&[seg(1)], &[]);
            device.push(id.0, 0, 1);
            device.queue.pop_used().unwrap().unwrap();
        }
        let _ = device.queue.enable_interrupts();
        assert_eq!(event(&device), at(1));
    }
}

#[test]
fn memory_that_is_short_or_misaligned() {
    let layout = DriverConfig::new(SIZE, 4, INDIRECT_DESC | RING_PACKED).unwrap();
    let memory = Memory::new(layout.memory() + 16);
    let (all, needed, part) = (memory.dma(), layout.memory(), "queue");
    let error = Queue::new(layout, all.slice(0, needed - 1).unwrap()).unwrap_err();
    assert_eq!(error, ConfigError::Short { part, needed, given: needed - 1 });
    let odd = all.slice(8, needed).unwrap();
    let error = Queue::new(layout, odd).unwrap_err();
    assert_eq!(error, ConfigError::Misaligned { part, addr: odd.addr, align: 16 });
}
