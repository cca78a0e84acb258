//! Lends queues of a running device to back ends, and takes them back.
//!
//! Both hold the lock of the control path, so that a reset comes before or after.
//!
//! A back end's writes are in no dirty log: none may be on, and none can be turned on meanwhile. It
//! knows guest-physical addresses only: the device may not be behind a domain.
use crate::AttachedDevice;
use crate::control::Control;
use paravane_dma::Lent;
use paravane_io::{LendError, QueueBackend};
use paravane_spec::queue::QueueAddresses;

impl AttachedDevice {
    /// Lends `queue` to `backend`, with nothing in flight.
    ///
    /// # Errors
    /// See [`LendError`]. After [`LendError::Lost`] the driver has to reset the device; else
    /// nothing has changed.
    pub fn lend_queue(&self, queue: u16, backend: Box<dyn QueueBackend>) -> Result<(), LendError> {
        let mut control = self.control.lock();
        // One that the driver or a back end keeps from our threads stays there.
        if control.queues.is_resting(queue) {
            return Err(LendError::NotOurs { queue });
        }
        self.lend(&mut control, queue, backend)
    }

    /// Takes `queue` back from its back end.
    ///
    /// # Errors
    /// See [`LendError`]. After [`LendError::Lost`] the driver has to reset the device.
    pub fn take_back_queue(&self, queue: u16) -> Result<(), LendError> {
        let taken = self.control.lock().queues.take_back(queue);
        taken.inspect_err(|error| self.note_loss(error))
    }

    /// Addresses of the rings of `queue` at its last start.
    #[must_use]
    pub fn queue_addresses(&self, queue: u16) -> Option<QueueAddresses> {
        let control = self.control.lock();
        Some(control.slots.get(usize::from(queue))?.started?.addresses)
    }

    /// Lends a queue that rests to the back end for all queues. If that fails, a thread serves it.
    ///
    /// # Errors
    /// No thread takes it.
    pub(crate) fn lend_or_resume(&self, control: &mut Control, queue: u16) -> Result<(), String> {
        if let Some(make) = &self.settings.backend
            && control.queues.is_resting(queue)
        {
            let backend = make(queue);
            let name = backend.name();
            self.log_loan(queue, name, self.lend(control, queue, backend));
        }
        control.queues.resume(queue)
    }

    fn lend(
        &self,
        control: &mut Control,
        queue: u16,
        backend: Box<dyn QueueBackend>,
    ) -> Result<(), LendError> {
        let lent = self.lent_memory().and_then(|memory| control.queues.lend(queue, backend, memory));
        lent.inspect_err(|error| self.note_loss(error))
    }

    /// Guest memory for a back end.
    fn lent_memory(&self) -> Result<Lent, LendError> {
        match self.settings.domain {
            Some(_) => Err(LendError::Translated),
            None => Ok(self.settings.memory.lend()?),
        }
    }

    fn log_loan(&self, queue: u16, name: &str, result: Result<(), LendError>) {
        let device = self.events.number;
        match result {
            Ok(()) => tracing::info!(device, queue, "{name} serves the queue"),
            Err(LendError::Refused { source }) if source.kind() == std::io::ErrorKind::NotConnected => {}
            Err(error) => tracing::warn!(device, queue, "{name} does not serve the queue: {error}"),
        }
    }

    /// A queue that nobody serves any more is a device that needs a reset.
    fn note_loss(&self, error: &LendError) {
        if let LendError::Lost { queue, .. } = error {
            tracing::warn!(device = self.events.number, queue, "{error}");
            self.events.fault(error.to_string());
        }
    }
}
