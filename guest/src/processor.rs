//! One processor at work on its devices.
//!
//! ```text
//! loop { step every device; sleep if all wait }     until its own are done and no other needs those that serve
//! ```
//! Sleeping loses no wake-up: the count of interrupts is sampled first, then every device is armed
//! and looked at once more, as is what other processors tell, and the platform does not sleep if the
//! count is no longer the sampled one.
mod mover;
mod shared;

pub(crate) use shared::Shared;

use crate::console::milestone;
use crate::platform::Platform;
use crate::report::{CpuPage, DiskPage, Failure, Totals};
use crate::worker::{Step, Worker};
use alloc::boxed::Box;
use alloc::vec::Vec;
use mover::Mover;
use paravane_spec::builtin::{BootInfo, event};

/// Polling rounds without work between two readings of the interrupt causes.
///
/// Each reading is an exit, and the only way to learn that a device needs a reset.
const IDLE_ROUNDS: u64 = 1 << 16;

/// The work on one device.
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

/// One device at work.
struct Device<'p, P: Platform> {
    gsi: u32,
    /// Its wire, and the message of its configuration change.
    ///
    /// The message of a queue needs no handling: the loop looks at every queue.
    sources: [InterruptSource; 2],
    worker: Work<'p, P>,
    page: DiskPage,
    number: usize,
    running: bool,
    /// Whether the other devices were told that they can rely on it.
    ready: bool,
    /// `None`: its messages stay where they are.
    mover: Option<Mover>,
}

impl<P: Platform> Device<'_, P> {
    fn moves(&self) -> bool {
        self.running && self.mover.as_ref().is_some_and(Mover::is_active)
    }

    fn end(&mut self, shared: &Shared<'_, P>, cpu: usize) {
        self.running = false;
        if !self.worker.serves() {
            shared.one_is_done(cpu);
        }
    }
}

/// One processor with its devices.
pub(crate) struct Processor<'p, P: Platform> {
    devices: Vec<Device<'p, P>>,
    page: CpuPage,
    totals: Totals,
    /// Whether a device of it is in its measured phase.
    measuring: bool,
    /// Whether all that serve the others can do so.
    ready: bool,
    /// Rounds without work since the last one with some.
    idle: u64,
}

impl<'p, P: Platform> Processor<'p, P> {
    /// Without devices.
    pub(crate) fn new(page: CpuPage) -> Self {
        let totals = Totals::default();
        Self { devices: Vec::new(), page, totals, measuring: false, ready: false, idle: 0 }
    }

    /// Gives it a device.
    pub(crate) fn add(&mut self, number: usize, info: &BootInfo, worker: Work<'p, P>, page: DiskPage) {
        let entry = &info.devices[number];
        let moves = info.moves > 0 && entry.message_count > 0 && worker.completes_by_interrupt();
        let mover = moves.then(|| Mover::new(entry, info.moves));
        let sources = [entry.gsi, entry.messages].map(InterruptSource::new);
        let (gsi, running, ready) = (entry.gsi, true, false);
        self.devices.push(Device { gsi, sources, worker, page, number, running, ready, mover });
    }

    /// Number of its devices: all, and those whose work has an end.
    pub(crate) fn devices(&self) -> [usize; 2] {
        let ending = self.devices.iter().filter(|device| !device.worker.serves());
        [self.devices.len(), ending.count()]
    }

    /// Routes the lines of its devices to itself, unless the program polls.
    pub(crate) fn prepare(&mut self, cpu: usize, shared: &Shared<'_, P>) {
        for device in &mut self.devices {
            device.worker.driver().disable_interrupts();
            if !shared.polling {
                shared.platform.enable_line(device.gsi, cpu);
            }
        }
    }

    /// Works until its devices are done or have failed, and no other processor needs those that serve.
    pub(crate) fn work(&mut self, cpu: usize, shared: &Shared<'_, P>) {
        while self.devices.iter().any(|device| device.running) {
            let mut busy = false;
            for number in 0..self.devices.len() {
                busy |= self.turn(number, cpu, shared);
            }
            self.mark(shared);
            self.totals.interrupts = shared.platform.interrupts(cpu);
            self.page.show(self.totals);
            if shared.all_are_done() {
                self.devices.iter().filter(|device| device.running).for_each(|device| device.worker.finish());
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
            if shared.polling || self.devices.iter().any(Device::moves) {
                core::hint::spin_loop();
            } else {
                self.sleep(cpu, shared);
            }
        }
    }

    /// Steps a device that runs; says whether anything happened.
    fn turn(&mut self, number: usize, cpu: usize, shared: &Shared<'_, P>) -> bool {
        if !self.devices[number].running {
            return false;
        }
        let stepped = self.step(number, cpu, shared);
        let device = &mut self.devices[number];
        if let Err(failure) = &stepped {
            device.page.fail(failure);
            shared.tell(device.number, failure);
        }
        if stepped.is_err() || device.worker.finished() {
            device.end(shared, cpu);
        }
        if !device.ready && (!device.running || device.worker.is_ready()) {
            device.ready = true;
            shared.one_is_ready(cpu);
        }
        stepped.unwrap_or(false)
    }

    /// Reports the begin and the end of the measured phase.
    fn mark(&mut self, shared: &Shared<'_, P>) {
        let measuring = self.devices.iter().any(|device| device.running && device.worker.is_measuring());
        if measuring != self.measuring {
            self.measuring = measuring;
            self.totals.measured_interrupts = shared.mark(measuring);
        }
    }

    /// One device's step; says whether anything happened.
    fn step(&mut self, number: usize, cpu: usize, shared: &Shared<'_, P>) -> Result<bool, Failure> {
        let device = &mut self.devices[number];
        if shared.polling {
            if self.idle % IDLE_ROUNDS == IDLE_ROUNDS - 1 {
                device.worker.driver().interrupt()?;
            }
        } else {
            // Acknowledged before the used ring is looked at, so that what comes later raises a new
            // interrupt.
            for source in &mut device.sources {
                let taken = shared.platform.interrupts_on(cpu, source.number);
                if taken != source.handled {
                    source.handled = taken;
                    device.worker.driver().interrupt()?;
                }
            }
        }
        let Step { completed, sent, kicks, entropy_bytes } =
            device.worker.step(shared.platform, self.ready)?;
        self.totals.entropy_bytes += entropy_bytes;
        self.totals.heartbeat += completed;
        self.totals.kicks += kicks;
        if let Some(mover) = &mut device.mover
            && mover.after(device.worker.driver(), completed, cpu, shared)?
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
        for device in self.devices.iter_mut().filter(|device| device.running) {
            more |= device.worker.driver().enable_interrupts();
            // An interrupt between the last step and the sampling is in the sample, and not looked
            // after yet.
            more |= device
                .sources
                .iter()
                .any(|source| shared.platform.interrupts_on(cpu, source.number) != source.handled);
        }
        if !more {
            shared.platform.wait(cpu, seen);
        }
        for device in self.devices.iter_mut().filter(|device| device.running) {
            device.worker.driver().disable_interrupts();
        }
    }
}
