//! A device with a fixed number of queues, in use: the code that all such devices share.
//!
//! ```text
//!   add ---> kick ---> (device) ---> pop      of a queue
//!     \        \                      /   the first error of any of them latches
//!      disable_interrupts ... enable_interrupts -> sleep -> interrupt      of all queues
//! ```
use crate::latch::Latch;
use crate::{DriverError, Transport, Virtio};
use paravane_ring::driver::{BufferId, Queue, Used};
use paravane_ring::{QueueError, Segment};

/// The queue of a device that has one.
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

/// The queues, from 0 on, their device, and the latch.
#[derive(Debug)]
pub(crate) struct Channel<T, const QUEUES: usize = 1> {
    device: Virtio<T>,
    queues: [Queue; QUEUES],
    failed: Latch,
}

impl<T: Transport, const QUEUES: usize> Channel<T, QUEUES> {
    /// Of a device that was told DRIVER_OK.
    pub(crate) fn new(device: Virtio<T>, queues: [Queue; QUEUES]) -> Self {
        Self { device, queues, failed: Latch::default() }
    }

    pub(crate) fn device(&self) -> &Virtio<T> {
        &self.device
    }

    /// Buffers in flight.
    pub(crate) fn in_flight(&self, queue: u16) -> u16 {
        self.queues[usize::from(queue)].in_flight()
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
        queue: u16,
        readable: &[Segment],
        writable: &[Segment],
    ) -> Result<Option<BufferId>, DriverError> {
        add(&mut self.queues[usize::from(queue)], readable, writable).map_err(|error| self.fail(error))
    }

    /// Publishes what was added and kicks if the device wants it.
    ///
    /// Says whether it kicked.
    pub(crate) fn kick(&mut self, queue: u16) -> bool {
        let of_number = &mut self.queues[usize::from(queue)];
        let kick = !self.failed.is_set() && of_number.publish();
        if kick {
            self.device.notify(queue, of_number);
        }
        kick
    }

    /// The next buffer that came back.
    pub(crate) fn pop(&mut self, queue: u16) -> Result<Option<Used>, DriverError> {
        self.check_failed()?;
        self.queues[usize::from(queue)].pop_used().map_err(|error| self.fail(error))
    }

    /// Arms interrupts; `true`: something is there, and the caller must not sleep.
    #[must_use = "`true` means that no interrupt comes for what is there"]
    pub(crate) fn enable_interrupts(&mut self) -> bool {
        if self.failed.is_set() {
            return true;
        }
        // All of them, so that each interrupts.
        self.queues.iter_mut().fold(false, |news, queue| {
            let token = queue.enable_interrupts();
            queue.poll(token) || news
        })
    }

    /// Suppresses interrupts.
    pub(crate) fn disable_interrupts(&mut self) {
        self.queues.iter_mut().for_each(Queue::disable_interrupts);
    }

    /// After an interrupt of the device: reads and acknowledges its causes.
    pub(crate) fn interrupt(&mut self) -> Result<u32, DriverError> {
        self.check_failed()?;
        self.device.interrupt().map_err(|error| self.fail(error))
    }
}
