//! Moves the messages of a device from processor to processor while it works.
//!
//! ```text
//! arm interrupts -> move to the next processor -> a request completes: an interrupt must have come, somewhere
//!                     '--> from then on none may come to the processor before
//! ```
use super::shared::Shared;
use crate::platform::Platform;
use crate::report::Failure;
use crate::worker::Interrupts;
use paravane_driver::Message;
use paravane_spec::builtin::{DeviceEntry, IRQ_VECTOR_BASE, error, message_address};

/// Time in nanoseconds for an interrupt to arrive.
const PATIENCE: u64 = 20_000_000_000;
/// Interrupt that a processor takes after all messages that were sent to it before.
const FENCE: u32 = 0;

/// The messages of one device.
pub(super) struct Mover {
    first: u32,
    count: u32,
    /// The processor that they go to now.
    to: usize,
    /// The processor that they must not go to, and its count.
    quiet: Option<(usize, u64)>,
    /// Interrupts taken when they were armed last, unless one has come since.
    armed: Option<u64>,
    left: u32,
}

impl Mover {
    /// Of the device of `entry`, whose messages are to move `moves` times.
    pub(super) fn new(entry: &DeviceEntry, moves: u32) -> Self {
        let (first, count) = (entry.messages, entry.message_count);
        Self { first, count, to: entry.cpu as usize, quiet: None, armed: None, left: moves }
    }

    /// Whether there is something left to do.
    pub(super) fn is_active(&self) -> bool {
        self.left > 0 || self.armed.is_some()
    }

    /// Interrupts that a processor has taken on these messages.
    fn taken_by<P: Platform>(&self, platform: &P, cpu: usize) -> u64 {
        (self.first..self.first + self.count).map(|number| platform.interrupts_on(cpu, number)).sum()
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
            driver.disable_interrupts();
        }
        if self.armed.is_some() || self.left == 0 {
            return Ok(false);
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
        Ok(true)
    }

    fn move_to<P: Platform>(
        &mut self,
        next: usize,
        driver: &mut dyn Interrupts,
        shared: &Shared<'_, P>,
    ) -> Result<(), Failure> {
        self.check_quiet(shared)?;
        let before = core::mem::replace(&mut self.to, next);
        for (source, number) in (self.first..self.first + self.count).enumerate() {
            let data = u32::from(IRQ_VECTOR_BASE) + number;
            driver.set_message(source as u16, Message { address: message_address(next as u32), data })?;
        }
        if before != next {
            // Messages that were sent before may be pending at the processor.
            let platform = shared.platform;
            let fences = platform.interrupts_on(before, FENCE);
            platform.interrupt(before, FENCE);
            self.wait(shared, "a processor takes no interrupts", || {
                platform.interrupts_on(before, FENCE) != fences
            })?;
            self.quiet = Some((before, self.taken_by(platform, before)));
        }
        Ok(())
    }

    fn check_quiet<P: Platform>(&mut self, shared: &Shared<'_, P>) -> Result<(), Failure> {
        match self.quiet.take() {
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
        while !is_over() {
            if shared.platform.now_ns() - start > PATIENCE {
                return Err(failure(self.to as u64, reason));
            }
            core::hint::spin_loop();
        }
        Ok(())
    }
}

fn failure(detail: u64, reason: &'static str) -> Failure {
    Failure { error: error::RING, detail, sector: 0, reason }
}
