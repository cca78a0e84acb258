//! Random access sequences against a plain model of the registers.
mod rig;

use paravane_spec::queue::QueueAddresses;
use paravane_spec::{feature, mmio as reg, status};
use paravane_transport::Effect;
use paravane_transport::Transport as _;
use proptest::prelude::*;
use rig::{OFFERED, QUEUE_SIZES, RUNNING, Rig};

/// One queue of the model: what was written, and five independent facts.
#[derive(Clone, Debug, Default)]
struct Queue {
    size: u32,
    areas: [[u32; 2]; 3],
    ready: bool,
    live: bool,
    stopping: bool,
    resetting: bool,
}

/// What a driver should see, independent of the implementation.
#[derive(Clone, Debug)]
struct Model {
    status: u32,
    reset: bool,
    accepted: [u32; 4],
    sel: [u32; 3],
    queues: Vec<Queue>,
    generation: u32,
    pending: u32,
}

const DEVICE_SEL: usize = 0;
const DRIVER_SEL: usize = 1;
const QUEUE_SEL: usize = 2;

impl Model {
    fn new() -> Self {
        Self {
            status: 0,
            reset: false,
            accepted: [0; 4],
            sel: [0; 3],
            queues: vec![Queue::default(); QUEUE_SIZES.len()],
            generation: 0,
            pending: 0,
        }
    }

    fn accepted(&self) -> u64 {
        u64::from(self.accepted[0]) | u64::from(self.accepted[1]) << 32
    }

    fn ring_reset(&self) -> bool {
        self.status & status::FEATURES_OK != 0 && self.accepted() & feature::RING_RESET != 0
    }

    fn read(&self, offset: u64) -> u32 {
        let max = QUEUE_SIZES.get(self.sel[QUEUE_SEL] as usize).copied().unwrap_or(0);
        let queue = self.queues.get(self.sel[QUEUE_SEL] as usize).cloned().unwrap_or_default();
        match offset {
            0x000 => 0x7472_6976,
            0x004 | 0x008 => 2,
            0x00c => 0x4152_4150,
            0x010 if self.sel[DEVICE_SEL] < 2 => (OFFERED >> (32 * self.sel[DEVICE_SEL])) as u32,
            0x034 => max.into(),
            0x044 => queue.ready.into(),
            0x060 => self.pending,
            0x070 => self.status,
            0x0b0..=0x0bc => u32::MAX,
            0x0c0 if self.ring_reset() => queue.resetting.into(),
            0x0fc => self.generation,
            _ => 0,
        }
    }

    fn write(&mut self, offset: u64, value: u32) -> Option<Effect> {
        if offset == reg::STATUS {
            return self.write_status(value);
        }
        if self.reset {
            return None;
        }
        match offset {
            0x014 => self.sel[DEVICE_SEL] = value,
            0x024 => self.sel[DRIVER_SEL] = value,
            0x030 => self.sel[QUEUE_SEL] = value,
            0x020 => {
                let negotiating = self.status & status::DRIVER != 0
                    && self.status & (status::FEATURES_OK | status::FAILED) == 0;
                match self.sel[DRIVER_SEL] {
                    _ if !negotiating => {}
                    word @ 0..4 => self.accepted[word as usize] = value,
                    _ => {}
                }
            }
            0x064 => self.pending &= !value,
            0x050 => {
                let live = self.queues.get(value as usize).is_some_and(|q| q.live);
                let deaf = status::FAILED | status::DEVICE_NEEDS_RESET;
                return (live && self.status & deaf == 0).then_some(Effect::Notify { queue: value as u16 });
            }
            0x038 | 0x044 | 0x080..=0x0a4 | 0x0c0 => return self.write_queue(offset, value),
            _ => {}
        }
        None
    }

    fn write_queue(&mut self, offset: u64, value: u32) -> Option<Effect> {
        let usable = self.status & status::FEATURES_OK != 0 && self.status & status::FAILED == 0;
        let (running, features, ring_reset) =
            (self.status & status::DRIVER_OK != 0, self.accepted(), self.ring_reset());
        let broken = self.status & status::DEVICE_NEEDS_RESET != 0;
        let index = self.sel[QUEUE_SEL];
        let max = QUEUE_SIZES.get(index as usize).copied().filter(|_| usable)?;
        let queue = &mut self.queues[index as usize];
        let index = index as u16;
        match offset {
            _ if max == 0 => {}
            0x038 if !queue.ready => queue.size = value,
            0x080 | 0x084 | 0x090 | 0x094 | 0x0a0 | 0x0a4 if !queue.ready => {
                queue.areas[(offset - 0x080) as usize / 0x10][(offset & 4) as usize / 4] = value;
            }
            0x044 if value == 1 => {
                let startable = queue.size.is_power_of_two() && queue.size <= max.into();
                if !queue.ready && !broken && startable {
                    queue.ready = true;
                    queue.live = running;
                    let addresses = addresses_of(queue);
                    return running.then_some(Effect::StartQueue { features, queue: index, addresses });
                }
            }
            0x044 if value == 0 && queue.live => {
                queue.live = false;
                queue.stopping = true;
                return Some(Effect::ResetQueue { queue: index });
            }
            0x044 if value == 0 && queue.ready && !queue.stopping => queue.ready = false,
            0x0c0 if value == 1 && ring_reset => {
                if queue.live {
                    (queue.live, queue.stopping, queue.resetting) = (false, true, true);
                    return Some(Effect::ResetQueue { queue: index });
                }
                if queue.stopping {
                    queue.resetting = true;
                } else {
                    *queue = Queue::default();
                }
            }
            _ => {}
        }
        None
    }

    fn write_status(&mut self, value: u32) -> Option<Effect> {
        if value == 0 {
            if self.status == 0 {
                self.finish_reset();
                return None;
            }
            let news = !self.reset;
            self.reset = true;
            return news.then_some(Effect::Reset);
        }
        let needs = self.status & status::DEVICE_NEEDS_RESET;
        let before = self.status & !needs;
        let want = value & !needs;
        let offered = self.accepted() & !OFFERED == 0
            && self.accepted[2..] == [0; 2]
            && self.accepted() & feature::VERSION_1 != 0;
        // All legal steps, one by one.
        const LADDER: [u32; 5] = [0, 1, 3, 11, 15];
        let (from, to) = (LADDER.iter().position(|&s| s == before), LADDER.iter().position(|&s| s == want));
        if self.reset {
            return None;
        }
        match (from, to) {
            (Some(from), Some(4)) if from < 3 => None,
            (Some(from), Some(to)) if to >= from => {
                self.status = needs | if to >= 3 && from < 3 && !offered { 3 } else { want };
                if to != 4 || from == 4 || needs != 0 {
                    return None;
                }
                let queues =
                    self.queues.iter_mut().enumerate().filter(|(_, q)| q.ready).map(|(index, queue)| {
                        queue.live = true;
                        (index as u16, addresses_of(queue))
                    });
                let queues = queues.collect();
                Some(Effect::Activate { features: self.accepted(), queues })
            }
            (Some(_), None) if want == before | status::FAILED => {
                self.status |= status::FAILED;
                None
            }
            _ => None,
        }
    }

    fn finish_reset(&mut self) {
        *self = Self { generation: self.generation, ..Self::new() };
    }

    fn config_changed(&mut self) {
        self.generation = self.generation.wrapping_add(1);
        if self.status & status::DRIVER_OK != 0 && !self.reset {
            self.pending |= reg::INT_CONFIG_CHANGE;
        }
    }

    fn needs_reset(&mut self) {
        if self.status == 0 || self.reset || self.status & status::DEVICE_NEEDS_RESET != 0 {
            return;
        }
        self.status |= status::DEVICE_NEEDS_RESET;
        if self.status & status::DRIVER_OK != 0 {
            self.pending |= reg::INT_CONFIG_CHANGE;
        }
    }

    fn reset_done(&mut self) {
        if self.reset {
            self.finish_reset();
        }
    }

    fn queue_reset_done(&mut self, queue: u16) {
        let Some(queue) = self.queues.get_mut(usize::from(queue)) else { return };
        if queue.resetting {
            *queue = Queue::default();
        } else if queue.stopping {
            (queue.ready, queue.stopping) = (false, false);
        }
    }
}

fn addresses_of(queue: &Queue) -> QueueAddresses {
    let [desc, driver, device] = queue.areas.map(|[low, high]| u64::from(low) | u64::from(high) << 32);
    QueueAddresses { size: queue.size as u16, desc, driver, device }
}

#[derive(Clone, Debug)]
enum Step {
    Write(u64, u32),
    Malformed(u64, Vec<u8>),
    Negotiate(u64),
    Queue(u32, u64, u32),
    Ready(u32, u16),
    ResetDone,
    QueueResetDone(u16),
    NeedsReset,
    ConfigChanged,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let offset = prop_oneof![
        8 => (0..0x100_u64 / 4).prop_map(|register| register * 4),
        4 => prop::sample::select(vec![reg::STATUS, reg::QUEUE_SEL, reg::QUEUE_READY, reg::QUEUE_RESET, reg::QUEUE_NOTIFY]),
    ];
    let value = prop_oneof![
        4 => 0..4_u32,
        3 => prop::sample::select(vec![1, 3, 11, 15, RUNNING | status::FAILED, RUNNING | 64, 64, 256, 64]),
        1 => any::<u32>(),
    ];
    let accepted =
        prop_oneof![3 => Just(OFFERED), 1 => Just(OFFERED & !feature::RING_RESET), 1 => any::<u64>()];
    let step = prop_oneof![
        40 => (offset, value).prop_map(|(offset, value)| Step::Write(offset, value)),
        2 => (0..0x100_u64, prop::collection::vec(any::<u8>(), 0..10))
            .prop_filter("well-formed", |(at, data)| data.len() != 4 || at % 4 != 0)
            .prop_map(|(at, data)| Step::Malformed(at, data)),
        6 => accepted.prop_map(Step::Negotiate),
        12 => (0..2_u32, prop::sample::select(vec![reg::QUEUE_READY, reg::QUEUE_RESET]), 0..2_u32)
            .prop_map(|(queue, register, value)| Step::Queue(queue, register, value)),
        3 => Just(Step::Write(reg::STATUS, RUNNING)),
        8 => (0..3_u32, prop::sample::select(vec![0_u16, 1, 2, 3, 64, 128, 256, 512])).prop_map(|(q, size)| Step::Ready(q, size)),
        8 => Just(Step::ResetDone),
        6 => (0..4_u16).prop_map(Step::QueueResetDone),
        1 => Just(Step::NeedsReset),
        1 => Just(Step::ConfigChanged),
    ];
    prop::collection::vec(step, 1..120)
}

/// Both sides, in step.
struct Pair {
    rig: Rig,
    model: Model,
}

impl Pair {
    fn write(&mut self, offset: u64, value: u32) {
        assert_eq!(
            self.rig.write(offset, value),
            self.model.write(offset, value),
            "{offset:#x} = {value:#x}"
        );
        self.compare();
    }

    fn compare(&self) {
        for offset in (0..reg::CONFIG).step_by(4) {
            assert_eq!(
                self.rig.read(offset),
                self.model.read(offset),
                "register {offset:#x}, model {:?}",
                self.model
            );
        }
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Write(offset, value) => self.write(*offset, *value),
            Step::Malformed(offset, data) => assert_eq!(self.rig.mmio.write(*offset, data), None),
            Step::Negotiate(accepted) => {
                self.write(reg::STATUS, 1);
                self.write(reg::STATUS, 3);
                for word in 0..2 {
                    self.write(reg::DRIVER_FEATURES_SEL, word);
                    self.write(reg::DRIVER_FEATURES, (accepted >> (32 * word)) as u32);
                }
                self.write(reg::STATUS, 11);
            }
            Step::Queue(queue, register, value) => {
                self.write(reg::QUEUE_SEL, *queue);
                self.write(*register, *value);
            }
            Step::Ready(queue, size) => {
                self.write(reg::QUEUE_SEL, *queue);
                self.write(reg::QUEUE_SIZE, (*size).into());
                self.write(reg::QUEUE_DESC_LOW, 0x1000);
                self.write(reg::QUEUE_DEVICE_HIGH, 1);
                self.write(reg::QUEUE_READY, 1);
            }
            Step::ResetDone => {
                self.rig.mmio.reset_done();
                self.model.reset_done();
            }
            Step::QueueResetDone(queue) => {
                self.rig.mmio.queue_reset_done(*queue);
                self.model.queue_reset_done(*queue);
            }
            Step::NeedsReset => {
                self.rig.mmio.needs_reset();
                self.model.needs_reset();
            }
            Step::ConfigChanged => {
                self.rig.mmio.config_changed();
                self.model.config_changed();
            }
        }
        self.compare();
    }
}

proptest! {
    #[test]
    fn registers_follow_the_model(steps in steps()) {
        let mut pair = Pair { rig: Rig::new(), model: Model::new() };
        for step in &steps {
            pair.step(step);
        }
    }

    #[test]
    fn any_access_of_any_width_anywhere_is_survived(
        accesses in prop::collection::vec((any::<u64>(), any::<bool>(), prop::collection::vec(any::<u8>(), 0..20)), 1..200)
    ) {
        let mut rig = Rig::running();
        for (offset, near, data) in accesses {
            let offset = if near { offset % 0x1100 } else { offset };
            if rig.mmio.write(offset, &data) == Some(Effect::Reset) {
                rig.mmio.reset_done();
            }
            let mut out = vec![0xee; data.len()];
            rig.mmio.read(offset, &mut out, |at, out| {
                assert!(at as usize + out.len() <= 0xf00, "{at:#x} is outside the window");
                out.fill(0);
            });
            prop_assert!(offset < 0x100 && out.len() == 4 || out.iter().all(|&b| b == 0));
        }
    }
}
