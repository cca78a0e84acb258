//! Both sides against a plain model: queues without rings.
use crate::device::{Batch, Queue as Device, QueueConfig};
use crate::driver::poll::{PollError, Poller};
use crate::driver::{BufferId, DriverConfig, PollToken, Queue as Driver, Used};
use crate::{Area, DmaArea, Segment};
use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec;
use alloc::vec::Vec;
use core::ptr::NonNull;
use paravane_spec::feature::{EVENT_IDX, IN_ORDER, INDIRECT_DESC, RING_PACKED};
use proptest::prelude::*;

const BASE: u64 = 0x7000_0000;

#[derive(Clone, Debug)]
enum Op {
    /// The driver adds a buffer: number of readable and of writable segments.
    Add(usize, usize),
    /// The driver publishes.
    Publish,
    /// The device pops.
    Pop,
    /// The device completes a request in flight, with any length.
    ///
    /// Chosen modulo their number; the length may exceed its room.
    Complete(usize, u32),
    /// The same of several in one call: each is the first one, or chosen as above; and its length, or
    /// all of its room.
    CompleteAll(Vec<(Option<usize>, Option<u32>)>),
    /// The device publishes.
    PublishUsed,
    /// The driver takes back at most this number of used buffers.
    TakeBack(usize),
    /// The same in one call.
    TakeBatch(usize),
    /// The driver resets the queue and lays it out anew.
    Reset,
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
        4 => prop::collection::vec((prop::option::of(0..64usize), prop::option::of(0..20_000u32)), 0..12)
            .prop_map(Op::CompleteAll),
        4 => Just(Op::PublishUsed),
        3 => (1..8usize).prop_map(Op::TakeBack),
        2 => (0..8usize).prop_map(Op::TakeBatch),
        1 => Just(Op::Arm),
        1 => Just(Op::DisableKicks),
        1 => Just(Op::Enable),
        1 => Just(Op::DisableNotifications),
        // Rare, so that queues live long enough to come around.
        1 => prop_oneof![1 => Just(Op::Reset), 9 => Just(Op::Publish)],
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
#[derive(Clone, Copy, Debug)]
enum Wish {
    /// Every notification.
    All,
    Nothing,
    /// The notification at this position.
    At(u64),
}

/// The model: where each buffer is, and what each side has asked for.
struct Model {
    features: u64,
    size: u64,
    indirect: usize,
    added: VecDeque<Buffer>,
    available: VecDeque<Buffer>,
    /// By identifier; with the order in which they were popped.
    in_flight: BTreeMap<u16, (u64, Buffer)>,
    popped: u64,
    completed: Vec<(u64, Buffer, u32)>,
    used: VecDeque<(Buffer, u32)>,
    /// The positions, in buffers (split) or descriptors (packed).
    published: u64,
    published_used: u64,
    taken_back: u64,
    /// The next buffer that is used, counted as popped, if the queue is in order.
    next_used: u64,
    kick: Wish,
    interrupt: Wish,
    interrupts_off: bool,
}

impl Model {
    fn new(size: u16, indirect: u16, features: u64, start: u16) -> Self {
        let wish = if features & (RING_PACKED | EVENT_IDX) == EVENT_IDX { Wish::At(0) } else { Wish::All };
        let indirect = if features & INDIRECT_DESC != 0 { indirect.min(size) } else { 0 };
        Self {
            features,
            size: size.into(),
            indirect: indirect.into(),
            added: VecDeque::new(),
            available: VecDeque::new(),
            in_flight: BTreeMap::new(),
            popped: 0,
            completed: Vec::new(),
            used: VecDeque::new(),
            published: start.into(),
            published_used: start.into(),
            taken_back: start.into(),
            next_used: 0,
            kick: wish,
            interrupt: wish,
            interrupts_off: false,
        }
    }

    fn has(&self, feature: u64) -> bool {
        self.features & feature != 0
    }

    /// How far buffers move a position.
    fn steps<'a>(&self, buffers: impl IntoIterator<Item = &'a Buffer>) -> u64 {
        let steps = buffers.into_iter().map(|buffer| {
            let count = buffer.readable.len() + buffer.writable.len();
            if !self.has(RING_PACKED) || (2..=self.indirect).contains(&count) { 1 } else { count as u64 }
        });
        steps.sum()
    }

    /// Whether moving from `from` on by `steps` brings a notification.
    fn told(&self, wish: Wish, from: u64, steps: u64) -> bool {
        let turn = if self.has(RING_PACKED) { 2 * self.size } else { 1 << 16 };
        match (steps, wish) {
            (0, _) | (_, Wish::Nothing) => false,
            (_, Wish::All) => true,
            (_, Wish::At(event)) => (from..from + steps).any(|position| position % turn == event % turn),
        }
    }

    /// What asks for a notification from a position on.
    fn wish(&self, position: u64) -> Wish {
        if self.has(EVENT_IDX) { Wish::At(position) } else { Wish::All }
    }

    /// What the device publishes now: with IN_ORDER, as far as nothing is missing.
    fn publish_used(&mut self) -> (u64, Vec<(Buffer, u32)>) {
        let mut ready = Vec::new();
        if self.has(IN_ORDER) {
            while let Some(at) = self.completed.iter().position(|(order, ..)| *order == self.next_used) {
                let (_, buffer, len) = self.completed.swap_remove(at);
                ready.push((buffer, len));
                self.next_used += 1;
            }
        } else {
            ready.extend(self.completed.drain(..).map(|(_, buffer, len)| (buffer, len)));
        }
        (self.steps(ready.iter().map(|(buffer, _)| buffer)), ready)
    }
}

/// Both sides, on one piece of memory.
struct Rig {
    driver: Driver,
    poller: Poller,
    device: Device,
}

impl Rig {
    fn new(layout: DriverConfig, memory: DmaArea, features: u64, start: u16) -> Self {
        let area = memory.area;
        let (mut driver, addresses): (Driver, _) = Driver::lay_out_at(layout, memory, start).unwrap();
        let poller = driver.poller().unwrap();
        let config = QueueConfig::new(addresses, addresses.size, features).unwrap();
        let [desc, avail, used] =
            config.areas().map(|part| area.slice((part.addr - BASE) as usize, part.len).unwrap());
        // SAFETY: the memory outlives the queue.
        let device: Device = unsafe { config.activate_at(desc, avail, used, start) }.unwrap();
        Self { driver, poller, device }
    }
}

fn run(size: u16, indirect: u16, features: u64, slots: usize, start: u16, ops: &[Op]) {
    let layout = DriverConfig::new(size, indirect, features).unwrap();
    let mut memory = vec![0u128; layout.memory().div_ceil(16)];
    // SAFETY: `memory` outlives both queues, and is not touched but through the area.
    let area = unsafe { Area::new(NonNull::new(memory.as_mut_ptr().cast()).unwrap(), memory.len() * 16) };
    let mut rig = Rig::new(layout, DmaArea { area, addr: BASE }, features, start);
    let mut batch = Batch::new(slots);
    let (mut tag, mut in_place) = (0, false);
    let mut token: Option<(PollToken, u64)> = None;
    let mut model = Model::new(size, indirect, features, start);
    for op in ops {
        let Rig { driver, device, .. } = &mut rig;
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
                let steps = model.steps(&model.added);
                let kick = model.told(model.kick, model.published, steps);
                assert_eq!(driver.publish(), kick, "kick");
                model.published += steps;
                model.available.append(&mut model.added);
                if model.published != u64::from(start) {
                    assert_eq!(driver.poller().unwrap_err(), PollError::Ready);
                }
            }
            Op::Pop => {
                in_place = !in_place;
                let popped = if in_place {
                    device.pop_in_place(&mut batch, DmaArea { area, addr: BASE })
                } else {
                    device.pop(&mut batch, |addr, out| area.read((addr - BASE) as usize, out))
                };
                let popped = popped.unwrap();
                assert_eq!(popped, batch.chains().len());
                // Chains here are short, so only slots bound a batch.
                assert_eq!(popped, model.available.len().min(slots));
                for (chain, buffer) in batch.chains().iter().zip(model.available.drain(..popped)) {
                    assert_eq!(chain.head, buffer.id.0);
                    assert_eq!(batch.readable(chain), buffer.readable);
                    assert_eq!(batch.writable(chain), buffer.writable);
                    assert_eq!(chain.writable_len(), buffer.writable_len());
                    assert!(model.in_flight.insert(chain.head, (model.popped, buffer)).is_none());
                    model.popped += 1;
                }
            }
            Op::Complete(which, len) => {
                if model.in_flight.is_empty() {
                    continue;
                }
                let head = *model.in_flight.keys().nth(which % model.in_flight.len()).unwrap();
                device.complete(head, *len).unwrap();
                let (order, buffer) = model.in_flight.remove(&head).unwrap();
                model.completed.push((order, buffer, *len));
            }
            Op::CompleteAll(choices) => {
                let mut chains = Vec::new();
                for (which, len) in choices {
                    let first = || model.in_flight.iter().min_by_key(|(_, (order, _))| *order);
                    let Some((&first, _)) = first() else { break };
                    let chosen = |which| model.in_flight.keys().nth(which % model.in_flight.len());
                    let head = which.map_or(first, |which| *chosen(which).unwrap());
                    let (order, buffer) = model.in_flight.remove(&head).unwrap();
                    let len = len.unwrap_or(buffer.writable_len());
                    chains.push((head, len));
                    model.completed.push((order, buffer, len));
                }
                device.complete_all(chains).unwrap();
            }
            Op::PublishUsed => {
                let (steps, ready) = model.publish_used();
                let interrupt = model.told(model.interrupt, model.published_used, steps);
                assert_eq!(device.publish(), Ok(interrupt), "interrupt");
                model.published_used += steps;
                model.used.extend(ready);
            }
            Op::TakeBack(count) => {
                for _ in 0..*count {
                    let Some((buffer, len)) = model.used.pop_front() else {
                        assert_eq!(driver.pop_used(), Ok(None));
                        break;
                    };
                    let used = driver.pop_used().unwrap().unwrap();
                    assert_eq!((used.id, used.len), (buffer.id, len.min(buffer.writable_len())));
                    model.taken_back += model.steps([&buffer]);
                }
            }
            Op::TakeBatch(count) => {
                let mut out = vec![Used::default(); *count];
                let taken = driver.take_used(&mut out).unwrap();
                assert!(taken <= model.used.len().min(*count));
                assert_eq!(taken == 0, model.used.is_empty() || *count == 0);
                for (used, (buffer, len)) in
                    out[..taken].iter().zip(model.used.drain(..taken).collect::<Vec<_>>())
                {
                    assert_eq!((used.id, used.len), (buffer.id, len.min(buffer.writable_len())));
                    model.taken_back += model.steps([&buffer]);
                }
            }
            Op::Arm => {
                assert_eq!(device.arm_kicks(), Ok(!model.available.is_empty()));
                model.kick = model.wish(model.published - model.steps(&model.available));
            }
            Op::DisableKicks => {
                device.disable_kicks();
                if !model.has(EVENT_IDX) || model.has(RING_PACKED) {
                    model.kick = Wish::Nothing;
                }
            }
            Op::Enable => {
                token = Some((driver.enable_interrupts(), model.taken_back));
                model.interrupt = model.wish(model.taken_back);
                model.interrupts_off = false;
            }
            Op::DisableNotifications => {
                driver.disable_interrupts();
                if !model.interrupts_off {
                    model.interrupts_off = true;
                    model.interrupt = if model.has(EVENT_IDX) && !model.has(RING_PACKED) {
                        Wish::At(model.taken_back + 0xffff)
                    } else {
                        Wish::Nothing
                    };
                }
            }
            Op::Reset => {
                let Rig { mut driver, poller, .. } = rig;
                let last = driver.enable_interrupts();
                let memory = driver.into_memory();
                assert!(poller.poll(last), "the queue is gone");
                rig = Rig::new(layout, memory, features, start);
                assert!(poller.poll(last), "and the new one is another");
                token = None;
                model = Model::new(size, indirect, features, start);
                continue;
            }
        }
        if let Some((token, taken_back)) = token {
            let news = model.published_used != taken_back || model.taken_back != taken_back;
            assert_eq!(rig.driver.poll(token), news);
            assert_eq!(rig.poller.poll(token), news || model.published_used != model.taken_back);
        }
        let Rig { driver, device, .. } = &rig;
        assert_eq!(usize::from(device.in_flight()), model.in_flight.len());
        let with_device = model.in_flight.len() + model.completed.len();
        let away = model.added.len() + model.available.len() + with_device + model.used.len();
        assert_eq!(usize::from(driver.in_flight()), away);
        assert_eq!((driver.error(), device.error()), (None, None));
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 2 } else { 512 },
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn both_sides_behave_as_the_model(
        size_log in 0u32..=6,
        indirect in prop_oneof![Just(0u16), 0u16..12],
        features in proptest::sample::subsequence(vec![EVENT_IDX, INDIRECT_DESC, IN_ORDER, RING_PACKED], 0..=4),
        slots in 1usize..20,
        start in prop_oneof![Just(0u16), Just(0x7ff0), 0xff80u16..],
        ops in ops(),
    ) {
        let features = features.into_iter().sum();
        let size = 1 << size_log;
        // A packed ring's position is one of two laps.
        let start = if features & RING_PACKED != 0 { start % (2 * size) } else { start };
        run(size, indirect, features, slots, start, &ops);
    }
}

/// The same work at full length over several turns of the 16-bit positions.
#[test]
#[cfg_attr(miri, ignore = "200000 buffers take the interpreter too long")]
fn positions_wrap_around_again_and_again() {
    let layouts = [0, IN_ORDER, RING_PACKED, RING_PACKED | IN_ORDER];
    for features in layouts
        .into_iter()
        .flat_map(|layout| [layout, layout | EVENT_IDX, layout | EVENT_IDX | INDIRECT_DESC])
    {
        let mut ops = Vec::new();
        for i in 0..25_000 {
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
