//! A device with one queue, in use: the code that all such devices share.
//!
//! ```text
//!   add ---> kick ---> (device) ---> pop
//!     \        \                      /   the first error of any of them latches
//!      disable_interrupts ... enable_interrupts -> sleep -> interrupt
//! ```
use crate::latch::Latch;
use crate::{DriverError, Transport, Virtio};
use paravane_ring::driver::{BufferId, Queue, Used};
use paravane_ring::{QueueError, Segment};

/// The only queue.
pub(crate) const QUEUE: u16 = 0;

/// Adds a buffer to a queue; `None` if there is no room.
///
/// # Errors
/// The queue has latched.
pub(crate) fn add(
    queue: &mut Queue,
    readable: &[Segment],
    writable: &[Segment],
) -> Result<Option<BufferId>, QueueError> {
    match queue.add(readable, writable) {
        Ok(id) => Ok(Some(id)),
        // A latched queue has no room.
        Err(_) => queue.error().map_or(Ok(None), Err),
    }
}

/// The queue, its device, and the latch.
#[derive(Debug)]
pub(crate) struct Channel<T> {
    device: Virtio<T>,
    queue: Queue,
    failed: Latch,
}

impl<T: Transport> Channel<T> {
    /// Of a device that was told DRIVER_OK.
    pub(crate) fn new(device: Virtio<T>, queue: Queue) -> Self {
        Self { device, queue, failed: Latch::default() }
    }

    pub(crate) fn device(&self) -> &Virtio<T> {
        &self.device
    }

    /// Buffers in flight.
    pub(crate) fn in_flight(&self) -> u16 {
        self.queue.in_flight()
    }

    /// The latched error, if there is one.
    pub(crate) fn check_failed(&self) -> Result<(), DriverError> {
        self.failed.check()
    }

    /// Latches the first error, and returns it.
    pub(crate) fn fail(&mut self, error: impl Into<DriverError>) -> DriverError {
        self.failed.set(error)
    }

    /// Adds a buffer; `None` if there is no room.
    pub(crate) fn add(
        &mut self,
        readable: &[Segment],
        writable: &[Segment],
    ) -> Result<Option<BufferId>, DriverError> {
        add(&mut self.queue, readable, writable).map_err(|error| self.fail(error))
    }

    /// Publishes what was added and kicks if the device wants it.
    ///
    /// Says whether it kicked.
    pub(crate) fn kick(&mut self) -> bool {
        let kick = !self.failed.is_set() && self.queue.publish();
        if kick {
            self.device.notify(QUEUE, &self.queue);
        }
        kick
    }

    /// The next buffer that came back.
    pub(crate) fn pop(&mut self) -> Result<Option<Used>, DriverError> {
        self.check_failed()?;
        self.queue.pop_used().map_err(|error| self.fail(error))
    }

    /// Arms interrupts; `true`: something is there, and the caller must not sleep.
    #[must_use = "`true` means that no interrupt comes for what is there"]
    pub(crate) fn enable_interrupts(&mut self) -> bool {
        if self.failed.is_set() {
            return true;
        }
        let token = self.queue.enable_interrupts();
        self.queue.poll(token)
    }

    /// Suppresses interrupts.
    pub(crate) fn disable_interrupts(&mut self) {
        self.queue.disable_interrupts();
    }

    /// After an interrupt of the device: reads and acknowledges its causes.
    pub(crate) fn interrupt(&mut self) -> Result<u32, DriverError> {
        self.check_failed()?;
        self.device.interrupt().map_err(|error| self.fail(error))
    }
}
