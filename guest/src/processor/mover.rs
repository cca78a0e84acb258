//! Moves the messages of a queue or pair from processor to processor while it works.
//!
//! ```text
//! arm interrupts -> move to the next processor -> a request completes: an interrupt must have come, somewhere
//!                     '--> from then on none may come to the processor before
//! ```
use super::shared::Shared;
use crate::connection::queues_of_lane;
use crate::platform::Platform;
use crate::report::Failure;
use crate::worker::Interrupts;
use core::ops::Range;
use paravane_driver::Message;
use paravane_spec::builtin::{DeviceEntry, IRQ_VECTOR_BASE, error, message_address};

/// Time in nanoseconds for an interrupt to arrive.
const PATIENCE: u64 = 20_000_000_000;
/// Looks between two that let the host run other threads.
const SPINS: u32 = 1000;
/// Interrupt that a processor takes after all messages that were sent to it before.
const FENCE: u32 = 0;

/// The messages of one lane.
pub(super) struct Mover {
    /// Their numbers at the device.
    sources: Range<u16>,
    /// The interrupt of the first one; those of the others follow.
    first: u32,
    /// The processor that they go to now.
    to: usize,
    /// The processor that they must not go to, and its count.
    quiet: Option<(usize, u64)>,
    /// Interrupts taken when they were armed last, unless one has come since.
    armed: Option<u64>,
    left: u32,
    /// When it moved last; 0: not yet.
    moved_at: u64,
}

impl Mover {
    /// Of queue or pair `lane` of the device of `entry`, whose work is on processor `cpu`.
    ///
    /// Its messages are to move `moves` times.
    pub(super) fn new(entry: &DeviceEntry, lane: u32, cpu: usize, moves: u32) -> Self {
        let queues = queues_of_lane(entry);
        // The first one has the configuration change's as well.
        let start = if lane == 0 { 0 } else { lane * queues + 1 };
        let end = ((lane + 1) * queues + 1).min(entry.message_count);
        let sources = start as u16..end as u16;
        let first = entry.messages + start;
        Self { sources, first, to: cpu, quiet: None, armed: None, left: moves, moved_at: 0 }
    }

    /// Whether there is something left to do.
    pub(super) fn is_active(&self) -> bool {
        self.left > 0 || self.armed.is_some()
    }

    /// Interrupts that a processor has taken on these messages.
    fn taken_by<P: Platform>(&self, platform: &P, cpu: usize) -> u64 {
        let numbers = self.first..self.first + self.sources.len() as u32;
        numbers.map(|number| platform.interrupts_on(cpu, number)).sum()
    }

    fn taken<P: Platform>(&self, shared: &Shared<'_, P>) -> u64 {
        (0..shared.cpus).map(|cpu| self.taken_by(shared.platform, cpu)).sum()
    }

    /// After a step in which `completed` requests came back. Says whether it moved.
    ///
    /// # Errors
    /// An interrupt was lost, or came to the wrong processor; or the device refuses a message.
    pub(super) fn after<P: Platform>(
        &mut self,
        driver: &mut dyn Interrupts,
        completed: u64,
        home: usize,
        shared: &Shared<'_, P>,
    ) -> Result<bool, Failure> {
        if completed > 0
            && let Some(before) = self.armed.take()
        {
            self.wait(shared, "an interrupt was lost", || self.taken(shared) != before)?;
            self.check_quiet(shared)?;
            driver.disable_interrupts();
        }
        if self.armed.is_some() || self.left == 0 {
            return Ok(false);
        }
        let now = shared.platform.now_ns();
        if self.moved_at == 0 {
            self.moved_at = now;
        }
        if now.saturating_sub(self.moved_at) > PATIENCE {
            return Err(failure(u64::from(self.left), "interrupts are never awaited, and cannot be moved"));
        }
        let before = self.taken(shared);
        if driver.enable_interrupts() {
            // No interrupt comes for what is there.
            driver.disable_interrupts();
            return Ok(false);
        }
        self.armed = Some(before);
        self.left -= 1;
        // They are at home in the end.
        let next = if self.left == 0 { home } else { (self.to + 1) % shared.cpus };
        self.move_to(next, driver, shared)?;
        self.moved_at = now;
        Ok(true)
    }

    fn move_to<P: Platform>(
        &mut self,
        next: usize,
        driver: &mut dyn Interrupts,
        shared: &Shared<'_, P>,
    ) -> Result<(), Failure> {
        self.check_quiet(shared)?;
        self.quiet = None;
        let before = core::mem::replace(&mut self.to, next);
        for (source, number) in self.sources.clone().zip(self.first..) {
            let data = u32::from(IRQ_VECTOR_BASE) + number;
            driver.set_message(source, Message { address: message_address(next as u32), data })?;
        }
        if before != next {
            // Messages that were sent before may be pending at the processor.
            self.fence(before, shared)?;
            self.quiet = Some((before, self.taken_by(shared.platform, before)));
        }
        Ok(())
    }

    /// Waits until a processor has taken all messages that were sent to it.
    fn fence<P: Platform>(&self, cpu: usize, shared: &Shared<'_, P>) -> Result<(), Failure> {
        let platform = shared.platform;
        let slow = "a processor takes no interrupts";
        self.wait(shared, slow, || shared.begin_fence(cpu))?;
        let fences = platform.interrupts_on(cpu, FENCE);
        platform.interrupt(cpu, FENCE);
        let taken = self.wait(shared, slow, || platform.interrupts_on(cpu, FENCE) != fences);
        shared.end_fence(cpu);
        taken
    }

    fn check_quiet<P: Platform>(&self, shared: &Shared<'_, P>) -> Result<(), Failure> {
        match self.quiet {
            Some((cpu, count)) if self.taken_by(shared.platform, cpu) != count => {
                Err(failure(cpu as u64, "an interrupt came to the processor that it was moved away from"))
            }
            _ => Ok(()),
        }
    }

    fn wait<P: Platform>(
        &self,
        shared: &Shared<'_, P>,
        reason: &'static str,
        is_over: impl Fn() -> bool,
    ) -> Result<(), Failure> {
        let start = shared.platform.now_ns();
        loop {
            for _ in 0..SPINS {
                if is_over() {
                    return Ok(());
                }
                core::hint::spin_loop();
            }
            if shared.platform.now_ns() - start > PATIENCE {
                return Err(failure(self.to as u64, reason));
            }
            // What it waits for may wait for the host's CPU.
            shared.platform.relax();
        }
    }
}

fn failure(detail: u64, reason: &'static str) -> Failure {
    Failure { error: error::RING, detail, sector: 0, reason }
}
