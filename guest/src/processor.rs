//! One processor at work on its lanes: queues of disks, pairs of cards, whole devices.
//!
//! ```text
//! loop { step every lane; sleep if all wait }     until its own are done and no other needs them
//!
//! wire, or message of a configuration change --> first lane of the device: reads the causes --wakes--> its others
//! message of a queue ------------------------> the queue's lane
//! ```
//! Sleeping loses no wake-up: the count of interrupts is sampled first, then every lane is armed
//! and looked at once more, as is what other processors tell, and the platform does not sleep if the
//! count is no longer the sampled one.
mod mover;
mod shared;
#[cfg(test)]
mod tests;

pub(crate) use shared::Shared;

use crate::connection::lane_cpu;
use crate::console::milestone;
use crate::platform::Platform;
use crate::report::{CpuPage, DiskPage, Failure, Totals};
use crate::worker::{Step, Worker};
use alloc::boxed::Box;
use alloc::vec::Vec;
use mover::Mover;
use paravane_spec::builtin::{BootInfo, DeviceEntry, event};

/// Polling rounds without work between two readings of the interrupt causes.
///
/// Each reading is an exit, and the only way to learn that a device needs a reset.
const IDLE_ROUNDS: u64 = 1 << 16;

/// Rounds without work, while messages move, between two that let the host run other threads.
const RELAX_ROUNDS: u64 = 64;

/// The work on one queue or pair of a device.
pub(crate) type Work<'p, P> = Box<dyn Worker<P> + Send + 'p>;

/// An interrupt whose causes must be read from the device.
struct InterruptSource {
    number: u32,
    /// Interrupts handled so far.
    handled: u64,
}

impl InterruptSource {
    fn new(number: u32) -> Self {
        Self { number, handled: 0 }
    }
}

/// The device of a first lane, which takes its interrupts.
struct Device {
    gsi: u32,
    /// Its wire, and the message of its configuration change.
    ///
    /// The message of a queue needs no handling: the loop looks at every queue.
    sources: [InterruptSource; 2],
    /// Processors of its other lanes, which its interrupts may concern.
    others: Vec<usize>,
}

impl Device {
    fn new(entry: &DeviceEntry, info: &BootInfo) -> Self {
        let sources = [entry.gsi, entry.messages].map(InterruptSource::new);
        let mut others = Vec::new();
        if entry.queues > 1 {
            others.extend((1..entry.queues).map(|lane| lane_cpu(info, entry, lane) as usize));
            others.sort_unstable();
            others.dedup();
            others.retain(|&cpu| cpu != entry.cpu as usize);
        }
        Self { gsi: entry.gsi, sources, others }
    }
}

/// One queue or pair of a device at work.
pub(crate) struct Lane<'p, P: Platform> {
    device: Option<Device>,
    worker: Work<'p, P>,
    page: DiskPage,
    /// Numbers of the device, and of its queue or pair.
    number: usize,
    lane: u32,
    running: bool,
    /// Whether the others were told that they can rely on it.
    ready: bool,
    /// `None`: its messages stay where they are.
    mover: Option<Mover>,
}

impl<'p, P: Platform> Lane<'p, P> {
    /// The work on queue or pair `lane` of device `number`.
    pub(crate) fn new(
        number: usize,
        lane: u32,
        info: &BootInfo,
        worker: Work<'p, P>,
        page: DiskPage,
    ) -> Self {
        let entry = &info.devices[number];
        let device = (lane == 0).then(|| Device::new(entry, info));
        let moves = info.moves > 0 && entry.message_count > 0 && worker.completes_by_interrupt();
        let cpu = lane_cpu(info, entry, lane) as usize;
        let mover = moves.then(|| Mover::new(entry, lane, cpu, info.moves));
        Self { device, worker, page, number, lane, running: true, ready: false, mover }
    }

    fn moves(&self) -> bool {
        self.running && self.mover.as_ref().is_some_and(Mover::is_active)
    }

    fn end(&mut self, shared: &Shared<'_, P>, cpu: usize) {
        self.running = false;
        if !self.worker.serves() {
            shared.one_is_done(cpu);
        }
    }

    /// Whether the processor has to look after it.
    fn is_needed(&self) -> bool {
        self.running || self.device.as_ref().is_some_and(|device| !device.others.is_empty())
    }

    /// Handles the interrupts of the device, and wakes its other lanes.
    fn take_interrupts(&mut self, cpu: usize, shared: &Shared<'_, P>) -> Result<(), Failure> {
        let Some(device) = &mut self.device else { return Ok(()) };
        let mut result = Ok(());
        // Acknowledged before the used ring is looked at, so that what comes later raises a new
        // interrupt.
        for source in &mut device.sources {
            let taken = shared.platform.interrupts_on(cpu, source.number);
            if taken != source.handled {
                source.handled = taken;
                let causes = self.worker.driver().interrupt();
                result = result.and(causes.map(|_| ()));
                // At an error, too, which concerns them.
                device.others.iter().for_each(|&other| shared.wake(other));
            }
        }
        Ok(result?)
    }

    /// Whether an interrupt of the device is not handled yet.
    fn has_interrupt(&self, cpu: usize, shared: &Shared<'_, P>) -> bool {
        let sources = self.device.iter().flat_map(|device| &device.sources);
        sources.into_iter().any(|source| shared.platform.interrupts_on(cpu, source.number) != source.handled)
    }
}

/// One processor with its lanes.
pub(crate) struct Processor<'p, P: Platform> {
    lanes: Vec<Lane<'p, P>>,
    page: CpuPage,
    totals: Totals,
    /// Whether a lane of it is in its measured phase.
    measuring: bool,
    /// Whether all that serve the others can do so.
    ready: bool,
    /// Rounds without work since the last one with some.
    idle: u64,
}

impl<'p, P: Platform> Processor<'p, P> {
    /// Without lanes.
    pub(crate) fn new(page: CpuPage) -> Self {
        let totals = Totals::default();
        Self { lanes: Vec::new(), page, totals, measuring: false, ready: false, idle: 0 }
    }

    /// Gives it a lane.
    pub(crate) fn add(&mut self, lane: Lane<'p, P>) {
        self.lanes.push(lane);
    }

    /// Number of its lanes: all, and those whose work has an end.
    pub(crate) fn lanes(&self) -> [usize; 2] {
        let ending = self.lanes.iter().filter(|lane| !lane.worker.serves());
        [self.lanes.len(), ending.count()]
    }

    /// Routes the lines of its devices to itself, unless the program polls.
    pub(crate) fn prepare(&mut self, cpu: usize, shared: &Shared<'_, P>) {
        for lane in &mut self.lanes {
            lane.worker.driver().disable_interrupts();
            if let Some(device) = &lane.device
                && !shared.polling
            {
                shared.platform.enable_line(device.gsi, cpu);
            }
        }
    }

    /// Works until its lanes are done or have failed, and no other processor needs them.
    pub(crate) fn work(&mut self, cpu: usize, shared: &Shared<'_, P>) {
        while self.lanes.iter().any(Lane::is_needed) {
            let mut busy = false;
            for number in 0..self.lanes.len() {
                busy |= self.turn(number, cpu, shared);
            }
            self.mark(shared);
            self.totals.interrupts = shared.platform.interrupts(cpu);
            self.page.show(self.totals);
            if shared.all_are_done() {
                self.lanes.iter().filter(|lane| lane.running).for_each(|lane| lane.worker.finish());
                return;
            }
            if !self.ready && shared.all_are_ready() {
                self.ready = true;
                continue;
            }
            self.idle = if busy { 0 } else { self.idle + 1 };
            if busy {
                continue;
            }
            if shared.polling {
                core::hint::spin_loop();
            } else if self.lanes.iter().any(Lane::moves) {
                // Interrupts go to other processors, so it does not sleep.
                if self.idle.is_multiple_of(RELAX_ROUNDS) {
                    shared.platform.relax();
                }
            } else {
                self.sleep(cpu, shared);
            }
        }
    }

    /// Steps a lane that runs; says whether anything happened.
    fn turn(&mut self, number: usize, cpu: usize, shared: &Shared<'_, P>) -> bool {
        let taken = if shared.polling { Ok(()) } else { self.lanes[number].take_interrupts(cpu, shared) };
        if !self.lanes[number].running {
            return false;
        }
        let stepped = taken.and_then(|()| self.step(number, cpu, shared));
        let lane = &mut self.lanes[number];
        if let Err(failure) = &stepped {
            lane.page.fail(failure);
            shared.tell(lane.number, lane.lane, failure);
        }
        if stepped.is_err() || lane.worker.finished() {
            lane.end(shared, cpu);
        }
        if !lane.ready && (!lane.running || lane.worker.is_ready()) {
            lane.ready = true;
            shared.one_is_ready(cpu);
        }
        stepped.unwrap_or(false)
    }

    /// Reports the begin and the end of the measured phase.
    fn mark(&mut self, shared: &Shared<'_, P>) {
        let measuring = self.lanes.iter().any(|lane| lane.running && lane.worker.is_measuring());
        if measuring != self.measuring {
            self.measuring = measuring;
            self.totals.measured_interrupts = shared.mark(measuring);
        }
    }

    /// One lane's step; says whether anything happened.
    fn step(&mut self, number: usize, cpu: usize, shared: &Shared<'_, P>) -> Result<bool, Failure> {
        let lane = &mut self.lanes[number];
        if shared.polling && lane.device.is_some() && self.idle % IDLE_ROUNDS == IDLE_ROUNDS - 1 {
            lane.worker.driver().interrupt()?;
        }
        if let Some(mover) = &lane.mover {
            lane.worker.hold(mover.is_active());
        }
        let Step { completed, sent, kicks, entropy_bytes } = lane.worker.step(shared.platform, self.ready)?;
        self.totals.entropy_bytes += entropy_bytes;
        self.totals.heartbeat += completed;
        self.totals.kicks += kicks;
        if let Some(mover) = &mut lane.mover
            && mover.after(lane.worker.driver(), completed, cpu, shared)?
        {
            self.totals.moves += 1;
        }
        if sent > 0 && shared.is_first() {
            milestone(shared.platform, event::FIRST_IO);
            shared.inject(cpu);
        }
        Ok(completed + sent > 0)
    }

    /// Sleeps until something may have happened.
    fn sleep(&mut self, cpu: usize, shared: &Shared<'_, P>) {
        let seen = shared.platform.interrupts(cpu);
        // What another processor has told since the last look.
        let mut more = shared.all_are_done() || !self.ready && shared.all_are_ready();
        for lane in &mut self.lanes {
            more |= lane.running && lane.worker.driver().enable_interrupts();
            // An interrupt between the last step and the sampling is in the sample, and not looked
            // after yet.
            more |= lane.has_interrupt(cpu, shared);
        }
        if !more {
            shared.platform.wait(cpu, seen);
        }
        for lane in self.lanes.iter_mut().filter(|lane| lane.running) {
            lane.worker.driver().disable_interrupts();
        }
    }
}
