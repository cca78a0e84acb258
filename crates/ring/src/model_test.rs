//! Both sides against a plain model: queues without rings, in which everything is obvious.
use crate::device::{Batch, Queue as Device, QueueConfig};
use crate::driver::{BufferId, Layout, PollToken, Queue as Driver};
use crate::{Area, DmaArea, Segment};
use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec;
use alloc::vec::Vec;
use core::ptr::NonNull;
use paravane_spec::feature::{EVENT_IDX, INDIRECT_DESC};
use proptest::prelude::*;

const BASE: u64 = 0x7000_0000;

#[derive(Clone, Debug)]
enum Op {
    /// The driver adds a buffer of so many readable and writable segments.
    Add(usize, usize),
    /// The driver publishes.
    Publish,
    /// The device pops.
    Pop,
    /// The device completes one of those in flight (modulo their number), with more or less than fits in it.
    Complete(usize, u32),
    /// The device publishes.
    PublishUsed,
    /// The driver takes back what was used, so many at most.
    TakeBack(usize),
    Arm,
    DisableKicks,
    Enable,
    DisableNotifications,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        6 => (0..6usize, 0..6usize).prop_map(|(readable, writable)| Op::Add(readable, writable)),
        4 => Just(Op::Publish),
        4 => Just(Op::Pop),
        6 => (0..64usize, 0..20_000u32).prop_map(|(which, len)| Op::Complete(which, len)),
        4 => Just(Op::PublishUsed),
        4 => (1..8usize).prop_map(Op::TakeBack),
        1 => Just(Op::Arm),
        1 => Just(Op::DisableKicks),
        1 => Just(Op::Enable),
        1 => Just(Op::DisableNotifications),
    ];
    prop::collection::vec(op, 1..if cfg!(miri) { 60 } else { 600 })
}

/// A buffer, as the driver made it.
#[derive(Clone, Debug)]
struct Buffer {
    id: BufferId,
    readable: Vec<Segment>,
    writable: Vec<Segment>,
}

impl Buffer {
    fn writable_len(&self) -> u32 {
        self.writable.iter().map(|segment| segment.len).sum()
    }
}

/// What one side has asked of the other.
#[derive(Debug)]
struct Wish {
    /// With EVENT_IDX: the number of the entry that is to be told of.
    event: u16,
    /// Without.
    wanted: bool,
}

/// The model: where each buffer is, and what each side has asked for.
struct Model {
    event_idx: bool,
    added: VecDeque<Buffer>,
    available: VecDeque<Buffer>,
    in_flight: BTreeMap<u16, Buffer>,
    completed: VecDeque<(Buffer, u32)>,
    used: VecDeque<(Buffer, u32)>,
    /// Buffers published, by the driver and by the device, ever, and where the rings started.
    published: u64,
    published_used: u64,
    taken_back: u64,
    kick: Wish,
    interrupt: Wish,
}

impl Model {
    /// Whether filling `count` entries from `from` on brings a notification.
    fn told(&self, wish: &Wish, from: u64, count: usize) -> bool {
        match (count, self.event_idx) {
            (0, _) => false,
            (_, false) => wish.wanted,
            (_, true) => (from..from + count as u64).any(|entry| entry as u16 == wish.event),
        }
    }
}

fn run(size: u16, indirect: u16, features: u64, slots: usize, start: u16, ops: &[Op]) {
    let layout = Layout::new(size, indirect, features).unwrap();
    let mut memory = vec![0u128; layout.memory().div_ceil(16)];
    // SAFETY: `memory` outlives both queues, and is not touched but through the area.
    let area = unsafe { Area::new(NonNull::new(memory.as_mut_ptr().cast()).unwrap(), memory.len() * 16) };
    let (mut driver, addresses): (Driver, _) =
        Driver::lay_out_at(layout, DmaArea { area, addr: BASE }, start).unwrap();
    let config = QueueConfig::new(addresses, size, features).unwrap();
    let [desc, avail, used] =
        config.areas().map(|part| area.slice((part.addr - BASE) as usize, part.len).unwrap());
    // SAFETY: as above.
    let mut device: Device = unsafe { config.activate_at(desc, avail, used, start) }.unwrap();
    let mut batch = Batch::new(slots);
    let mut tag = 0;
    let mut token: Option<(PollToken, u64)> = None;
    let mut model = Model {
        event_idx: features & EVENT_IDX != 0,
        added: VecDeque::new(),
        available: VecDeque::new(),
        in_flight: BTreeMap::new(),
        completed: VecDeque::new(),
        used: VecDeque::new(),
        published: start.into(),
        published_used: start.into(),
        taken_back: start.into(),
        kick: Wish { event: 0, wanted: true },
        interrupt: Wish { event: 0, wanted: true },
    };
    for op in ops {
        match op {
            Op::Add(readable, writable) => {
                let mut segment = || {
                    tag += 1;
                    Segment { addr: tag << 20, len: 1 + (tag as u32 * 37) % 4000 }
                };
                let readable: Vec<_> = (0..*readable).map(|_| segment()).collect();
                let writable: Vec<_> = (0..*writable).map(|_| segment()).collect();
                let count = readable.len() + writable.len();
                if count == 0 {
                    continue;
                }
                let room = driver.room();
                match driver.add(&readable, &writable) {
                    Ok(id) => {
                        assert!(count <= room, "{count} went into a room of {room}");
                        model.added.push_back(Buffer { id, readable, writable });
                    }
                    Err(full) => {
                        assert!(count > room, "{count} did not go into a room of {room}");
                        assert!(full.needed > full.free);
                    }
                }
            }
            Op::Publish => {
                let kick = model.told(&model.kick, model.published, model.added.len());
                assert_eq!(driver.publish(), kick, "kick");
                model.published += model.added.len() as u64;
                model.available.append(&mut model.added);
            }
            Op::Pop => {
                let popped =
                    device.pop(&mut batch, |addr, out| area.read((addr - BASE) as usize, out)).unwrap();
                assert_eq!(popped, batch.chains().len());
                // Chains here are short, so only slots bound a batch.
                assert_eq!(popped, model.available.len().min(slots));
                for (chain, buffer) in batch.chains().iter().zip(model.available.drain(..popped)) {
                    assert_eq!(chain.head, buffer.id.0);
                    assert_eq!(batch.readable(chain), buffer.readable);
                    assert_eq!(batch.writable(chain), buffer.writable);
                    assert_eq!(chain.writable_len(), buffer.writable_len());
                    assert!(model.in_flight.insert(chain.head, buffer).is_none());
                }
            }
            Op::Complete(which, len) => {
                if model.in_flight.is_empty() {
                    continue;
                }
                let head = *model.in_flight.keys().nth(which % model.in_flight.len()).unwrap();
                device.complete(head, *len).unwrap();
                model.completed.push_back((model.in_flight.remove(&head).unwrap(), *len));
            }
            Op::PublishUsed => {
                let interrupt = model.told(&model.interrupt, model.published_used, model.completed.len());
                assert_eq!(device.publish(), Ok(interrupt), "interrupt");
                model.published_used += model.completed.len() as u64;
                model.used.append(&mut model.completed);
            }
            Op::TakeBack(count) => {
                for _ in 0..*count {
                    let Some((buffer, len)) = model.used.pop_front() else {
                        assert_eq!(driver.pop_used(), Ok(None));
                        break;
                    };
                    let used = driver.pop_used().unwrap().unwrap();
                    assert_eq!((used.id, used.len), (buffer.id, len.min(buffer.writable_len())));
                    model.taken_back += 1;
                }
            }
            Op::Arm => {
                assert_eq!(device.arm_kicks(), Ok(!model.available.is_empty()));
                let next = model.published - model.available.len() as u64;
                model.kick = Wish { event: next as u16, wanted: true };
            }
            Op::DisableKicks => {
                device.disable_kicks();
                model.kick.wanted = false;
            }
            Op::Enable => {
                token = Some((driver.enable_notifications(), model.taken_back));
                model.interrupt = Wish { event: model.taken_back as u16, wanted: true };
            }
            Op::DisableNotifications => {
                driver.disable_notifications();
                if model.interrupt.wanted {
                    model.interrupt =
                        Wish { event: (model.taken_back as u16).wrapping_sub(1), wanted: false };
                }
            }
        }
        if let Some((token, taken_back)) = token {
            let news = model.published_used != taken_back || model.taken_back != taken_back;
            assert_eq!(driver.poll(token), news);
        }
        assert_eq!(usize::from(device.in_flight()), model.in_flight.len());
        let with_device = model.in_flight.len() + model.completed.len();
        let away = model.added.len() + model.available.len() + with_device + model.used.len();
        assert_eq!(usize::from(driver.in_flight()), away);
        assert_eq!((driver.error(), device.error()), (None, None));
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 6 } else { 512 },
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn both_sides_behave_as_the_model(
        size_log in 0u32..=6,
        indirect in prop_oneof![Just(0u16), 0u16..12],
        event_idx in any::<bool>(),
        indirect_negotiated in any::<bool>(),
        slots in 1usize..20,
        start in prop_oneof![Just(0u16), Just(0x7ff0), 0xff80u16..],
        ops in ops(),
    ) {
        let features = if event_idx { EVENT_IDX } else { 0 } | if indirect_negotiated { INDIRECT_DESC } else { 0 };
        run(1 << size_log, indirect, features, slots, start, &ops);
    }
}

/// The same work at full length over several turns of the 16-bit positions.
#[test]
#[cfg_attr(miri, ignore = "200000 buffers take the interpreter too long")]
fn positions_wrap_around_again_and_again() {
    for features in [0, EVENT_IDX, EVENT_IDX | INDIRECT_DESC] {
        let mut ops = Vec::new();
        for i in 0..40_000 {
            ops.extend([Op::Add(1, i % 3), Op::Add(2, 0), Op::Add(0, 1), Op::Publish, Op::Pop]);
            ops.extend((0..3).map(|_| Op::Complete(i, 1)));
            ops.extend([Op::PublishUsed, Op::TakeBack(4)]);
            match i % 7 {
                0 => ops.extend([Op::Arm, Op::Enable]),
                3 => ops.extend([Op::DisableKicks, Op::DisableNotifications]),
                _ => {}
            }
        }
        run(16, 4, features, 8, 0, &ops);
    }
}
