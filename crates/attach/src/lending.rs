//! Lends a queue of a running device to a back end, and takes it back.
//!
//! ```text
//!  lend       off its I/O thread -> what is in flight completed, parked -> grab (signals once) -> the back end starts
//!  take back  the back end stops -> its last call passed on -> resumed at its position, with the same handler
//!             -> release (signals once) -> on the I/O thread that it had before
//! ```
//! The ioeventfd stays registered all the time, and kicks wait in the notifier while nobody has the
//! queue. The driver notices nothing. Both hold the lock of the control path, so that a reset comes
//! before or after.
//!
//! A back end's writes are in no dirty log: none may be on, and none can be turned on meanwhile. It
//! knows guest-physical addresses only: the device may not be behind a domain.
use crate::AttachedDevice;
use crate::backend::{Loan, QueueBackend, Relay};
use crate::device::Control;
use crate::lent_queue::LentQueue;
use crate::lock::lock;
use crate::queue::{Queue, Serving, Started};
use paravane_device::State;
use paravane_dma::{Lent, LogError};
use paravane_io::{HostQueue, NotPutOn, RestingQueue};
use paravane_spec::queue::QueueAddresses;
use std::sync::Arc;
use thiserror::Error;

/// Why a queue is not lent, or not taken back.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LendError {
    /// None of our I/O threads has the queue.
    #[error("queue {queue} is not running, or is lent already")]
    NotOurs {
        /// Queue index.
        queue: u16,
    },
    /// No back end has the queue.
    #[error("queue {queue} is not lent")]
    NotLent {
        /// Queue index.
        queue: u16,
    },
    /// The back end would take the device's addresses for guest-physical ones.
    #[error("the device is behind a domain, whose addresses a back end cannot translate")]
    Translated,
    /// The back end's writes would be missing in the dirty log.
    #[error("guest memory cannot be lent: {0}")]
    Log(#[from] LogError),
    /// The handler holds work that parking would lose.
    #[error("queue {queue} has work that waits for room in its back end; try again later")]
    Busy {
        /// Queue index.
        queue: u16,
    },
    /// The back end has not started. Our thread serves the queue again.
    #[error("the back end refuses the queue: {source}")]
    Refused {
        /// The reason.
        source: std::io::Error,
    },
    /// Nobody serves the queue any more: the driver has to reset the device.
    #[error("queue {queue} was lost: {reason}")]
    Lost {
        /// Queue index.
        queue: u16,
        /// The reason.
        reason: String,
    },
}

impl AttachedDevice {
    /// Lends `queue` to `backend`, with nothing in flight.
    ///
    /// # Errors
    /// See [`LendError`]. After [`LendError::Lost`] the driver has to reset the device; else
    /// nothing has changed.
    pub fn lend_queue(&self, queue: u16, backend: Box<dyn QueueBackend>) -> Result<(), LendError> {
        self.lend(&mut lock(&self.control), queue, backend)
    }

    /// Takes `queue` back from its back end.
    ///
    /// # Errors
    /// See [`LendError`]. After [`LendError::Lost`] the driver has to reset the device.
    pub fn take_back_queue(&self, queue: u16) -> Result<(), LendError> {
        self.take_back(&mut lock(&self.control), queue)
    }

    pub(crate) fn take_back(&self, control: &mut Control, queue: u16) -> Result<(), LendError> {
        let slot = control.queues.get_mut(usize::from(queue)).ok_or(LendError::NotLent { queue })?;
        let lent = match std::mem::take(&mut slot.serving) {
            Serving::Lent(lent) => *lent,
            other => {
                slot.serving = other;
                return Err(LendError::NotLent { queue });
            }
        };
        slot.serving = Serving::Lost;
        let LentQueue { mut backend, relay, mut resting, _memory } = lent;
        let base = backend.stop();
        drop(relay);
        give_back_handler(&mut resting, &mut *backend);
        let position = base
            .map_err(|error| format!("its back end does not report its position: {error}"))
            .and_then(|base| {
                let features = started(slot)?.features;
                State::from_vring_base(base, features).map_err(|error| error.to_string())
            });
        let result = position.and_then(|position| self.resume(slot, resting, position));
        self.or_lost(queue, result)
    }

    /// Addresses of the rings of `queue` at its last start.
    #[must_use]
    pub fn queue_addresses(&self, queue: u16) -> Option<QueueAddresses> {
        let control = lock(&self.control);
        Some(control.queues.get(usize::from(queue))?.started?.addresses)
    }

    /// Lends a queue that no thread has had to the back end for all queues, or puts it on its thread.
    ///
    /// # Errors
    /// The thread does not take it.
    pub(crate) fn lend_or_serve(
        &self,
        slot: &mut Queue,
        queue: u16,
        host_queue: Box<HostQueue>,
    ) -> Result<(), String> {
        if let Some(make) = &self.settings.backend {
            let backend = make(queue);
            let name = backend.name();
            match self.loan(queue) {
                Ok(loan) => {
                    self.log_loan(queue, name, self.lend_parked(slot, queue, host_queue, backend, loan));
                    return Ok(());
                }
                Err(error) => self.log_loan(queue, name, Err(error)),
            }
        }
        self.put_on(slot, host_queue)
    }

    /// Lends a queue that was just resumed to the back end for all queues.
    ///
    /// If that fails, we go on to serve it.
    pub(crate) fn lend_again(&self, control: &mut Control, queue: u16) {
        let Some(make) = &self.settings.backend else { return };
        let backend = make(queue);
        let name = backend.name();
        self.log_loan(queue, name, self.lend(control, queue, backend));
    }

    fn log_loan(&self, queue: u16, name: &str, result: Result<(), LendError>) {
        let device = self.events.number;
        match result {
            Ok(()) => tracing::info!(device, queue, "{name} serves the queue"),
            Err(LendError::Refused { source }) if source.kind() == std::io::ErrorKind::NotConnected => {}
            Err(error) => tracing::warn!(device, queue, "{name} does not serve the queue: {error}"),
        }
    }

    fn lend(
        &self,
        control: &mut Control,
        queue: u16,
        backend: Box<dyn QueueBackend>,
    ) -> Result<(), LendError> {
        let not_ours = || LendError::NotOurs { queue };
        let slot = control.queues.get_mut(usize::from(queue)).ok_or_else(not_ours)?;
        let Serving::Thread(index) = slot.serving else { return Err(not_ours()) };
        let thread = self.settings.placement.thread(index).ok_or_else(not_ours)?;
        let loan = self.loan(queue)?;
        let taken = thread.take_off(self.key(queue)).ok_or_else(not_ours)?;
        if !taken.at_rest() {
            if let Err(refused) = thread.put_on(taken) {
                slot.serving = Serving::Lost;
                self.or_lost(queue, Err(refused.source.to_string()))?;
            }
            return Err(LendError::Busy { queue });
        }
        self.lend_parked(slot, queue, taken, backend, loan)
    }

    /// Guest memory for a back end, and its way to the driver.
    fn loan(&self, queue: u16) -> Result<(Lent, Relay), LendError> {
        if self.settings.domain.is_some() {
            return Err(LendError::Translated);
        }
        let memory = self.settings.memory.lend()?;
        let broken = {
            let events = Arc::clone(&self.events);
            move || {
                tracing::warn!(device = events.number, queue, "queue stopped: its back end finds it broken");
                events.fault(format!("the back end of queue {queue} finds it broken"));
            }
        };
        let relay = Relay::new(queue, Arc::clone(&self.events.interrupts), broken);
        Ok((memory, relay.map_err(|source| LendError::Refused { source })?))
    }

    /// Parks a queue that no thread has, and starts its back end.
    fn lend_parked(
        &self,
        slot: &mut Queue,
        queue: u16,
        host_queue: Box<HostQueue>,
        backend: Box<dyn QueueBackend>,
        (memory, relay): (Lent, Relay),
    ) -> Result<(), LendError> {
        slot.serving = Serving::Lost;
        match host_queue.park() {
            Ok(resting) => {
                self.start_backend(slot, queue, LentQueue { backend, relay, resting, _memory: memory })
            }
            Err(error) => self.or_lost(queue, Err(error.to_string())),
        }
    }

    fn start_backend(&self, slot: &mut Queue, queue: u16, mut lent: LentQueue) -> Result<(), LendError> {
        let Some((Started { features, addresses }, notifier)) = slot.started.zip(slot.notifier.clone())
        else {
            return self.or_lost(queue, Err("it was never started".into()));
        };
        if let Err(error) = notifier.grab() {
            return self.or_lost(queue, Err(error.to_string()));
        }
        let LentQueue { backend, relay, resting, _memory: memory } = &mut lent;
        let (parked, handler) = resting.parts();
        let message = self.events.interrupts.msi().and_then(|table| table.queue_eventfd(queue));
        let started = backend.start(&mut Loan {
            queue,
            features,
            addresses,
            parked,
            handler,
            memory,
            kick: notifier.notifier(),
            call: relay.call(),
            message: message.as_ref(),
            error: relay.error(),
        });
        if let Err(source) = started {
            let LentQueue { mut backend, mut resting, .. } = lent;
            give_back_handler(&mut resting, &mut *backend);
            let position = resting.position();
            let result = self.resume(slot, resting, position);
            self.or_lost(queue, result)?;
            return Err(LendError::Refused { source });
        }
        slot.serving = Serving::Lent(Box::new(lent));
        Ok(())
    }

    /// Serves a queue again, from `position` on, on the thread that it had before.
    fn resume(&self, slot: &mut Queue, resting: RestingQueue, position: State) -> Result<(), String> {
        let notifier = slot.notifier.clone().ok_or("it has no notifier")?;
        let resumed = resting.resume(position).map_err(|error| error.to_string())?;
        notifier.release().map_err(|error| error.to_string())?;
        self.put_on(slot, resumed)
    }

    /// Puts a queue on its thread.
    pub(crate) fn put_on(&self, slot: &mut Queue, queue: Box<HostQueue>) -> Result<(), String> {
        self.settings.placement.put_on(slot.thread, queue).map_err(|NotPutOn { queue, source }| {
            // Its ioeventfd goes with it.
            queue.into_iter().for_each(|queue| queue.abandon());
            source.to_string()
        })?;
        slot.serving = Serving::Thread(slot.thread);
        Ok(())
    }

    /// A queue that nobody serves any more is a device that needs a reset.
    fn or_lost(&self, queue: u16, result: Result<(), String>) -> Result<(), LendError> {
        let Err(reason) = result else { return Ok(()) };
        tracing::warn!(device = self.events.number, queue, "queue lost: {reason}");
        self.events.fault(format!("queue {queue} was lost: {reason}"));
        Err(LendError::Lost { queue, reason })
    }
}

fn give_back_handler(resting: &mut RestingQueue, backend: &mut dyn QueueBackend) {
    let (_, handler) = resting.parts();
    if handler.is_none() {
        *handler = backend.handler();
    }
}

fn started(slot: &Queue) -> Result<Started, String> {
    slot.started.ok_or_else(|| "it was never started".into())
}
