//! A queue of a running device, lent to an owner outside our I/O threads, and taken back.
//!
//! ```text
//!  lend       off its I/O thread -> what is in flight completed, parked -> grab (signals once) -> the owner starts
//!  take back  the owner stops -> its last call passed on -> resumed where it stopped, with the same handler
//!             -> release (signals once) -> on the I/O thread that it had before
//! ```
//! The ioeventfd stays all the time, and kicks wait in the notifier while nobody has the queue. The driver notices
//! nothing. Whoever lends or takes back holds the lock of the control path, so that a reset comes before or after.
//!
//! Writes of such an owner are in no dirty log, so none can be turned on meanwhile, and none may be on; and it knows
//! guest-physical addresses only, so the device may not be behind a domain.
use super::{Control, Slot};
use crate::guard::lock;
use crate::queue_backend::{Loan, QueueBackend, Relay, VhostNet};
use paravane_device::{ParkedQueue, QueueHandler, State};
use paravane_dma::{Lent, LogError};
use paravane_io::{NotPutOn, QueueKey};
use paravane_notify::NotifierState;
use paravane_spec::queue::QueueAddresses;
use std::sync::Arc;
use thiserror::Error;

/// Why a queue does not change hands.
#[derive(Debug, Error)]
pub(crate) enum LendError {
    /// queue {queue} is not running, or is lent
    #[error("queue {queue} is not running, or is lent")]
    NotOurs {
        /// Which.
        queue: u16,
    },
    /// queue {queue} is not lent
    #[error("queue {queue} is not lent")]
    NotLent {
        /// Which.
        queue: u16,
    },
    /// the device is behind a domain, and only we translate its addresses
    #[error("the device is behind a domain, and only we translate its addresses")]
    Translated,
    /// the dirty log: {0}
    #[error("the dirty log: {0}")]
    Log(#[from] LogError),
    /// queue {queue} has work at hand that its back end has no room for: later
    #[error("queue {queue} has work at hand that its back end has no room for: later")]
    Busy {
        /// Which.
        queue: u16,
    },
    /// the owner does not take the queue: {source}
    #[error("the owner does not take the queue: {source}")]
    Refused {
        /// Why.
        source: std::io::Error,
    },
    /// queue {queue} was lost: {what}
    #[error("queue {queue} was lost: {what}")]
    Lost {
        /// Which.
        queue: u16,
        /// Why.
        what: String,
    },
}

/// What a started queue was started with.
#[derive(Clone, Copy)]
pub(super) struct Started {
    pub(super) features: u64,
    pub(super) addresses: QueueAddresses,
}

/// A queue while its owner has it. In the order in which things end: first nobody serves any more, then nobody calls,
/// then the memory may go.
pub(super) struct LentQueue {
    owner: Box<dyn QueueBackend>,
    relay: Relay,
    resting: Resting,
    _memory: Lent,
}

/// What is left of a queue that we do not serve.
struct Resting {
    parked: ParkedQueue,
    /// `None` while the owner has it.
    handler: Option<Box<dyn QueueHandler>>,
}

impl Slot {
    /// Lends `queue` to `owner`.
    ///
    /// # Errors
    /// See [`LendError`]. After [`LendError::Lost`] the driver has to reset the device; else nothing has changed.
    #[cfg_attr(not(test), expect(dead_code, reason = "for the tests, until somebody lends queues"))]
    pub(crate) fn lend_queue(&self, queue: u16, owner: Box<dyn QueueBackend>) -> Result<(), LendError> {
        self.lend(&mut lock(&self.control), queue, owner)
    }

    /// Takes `queue` back from its owner.
    ///
    /// # Errors
    /// See [`LendError`]. After [`LendError::Lost`] the driver has to reset the device.
    #[cfg_attr(not(test), expect(dead_code, reason = "for the tests, until somebody lends queues"))]
    pub(crate) fn take_back_queue(&self, queue: u16) -> Result<(), LendError> {
        let mut control = lock(&self.control);
        let slot = control.queues.get_mut(usize::from(queue));
        let Some(lent) = slot.and_then(|slot| slot.lent.take()) else {
            return Err(LendError::NotLent { queue });
        };
        let LentQueue { mut owner, relay, mut resting, _memory } = lent;
        let base = owner.stop();
        drop(relay);
        resting.handler = resting.handler.or_else(|| owner.handler());
        let state = base
            .map_err(|error| format!("its owner does not say where it has come to: {error}"))
            .and_then(|base| {
                let features = started(&control, queue)?.features;
                State::from_vring_base(base, features).map_err(|error| error.to_string())
            });
        let result = state.and_then(|state| self.resume(&mut control, queue, resting, state));
        self.lost(queue, result)
    }

    /// Lends `queue` to the kernel's vhost-net. Where that is not possible we go on to serve it.
    pub(super) fn lend_to_kernel(&self, control: &mut Control, queue: u16) {
        let device = self.site.number;
        match self.lend(control, queue, Box::new(VhostNet::default())) {
            Ok(()) => tracing::info!(device, queue, "vhost-net serves the queue"),
            Err(LendError::Refused { source }) if source.kind() == std::io::ErrorKind::NotConnected => {}
            Err(error) => tracing::warn!(device, queue, "vhost-net does not serve the queue: {error}"),
        }
    }

    /// Where the driver has put the rings of `queue`.
    #[cfg(test)]
    pub(crate) fn addresses(&self, queue: u16) -> Option<QueueAddresses> {
        started(&lock(&self.control), queue).ok().map(|started| started.addresses)
    }

    fn lend(&self, control: &mut Control, queue: u16, owner: Box<dyn QueueBackend>) -> Result<(), LendError> {
        if self.surroundings.domain.is_some() {
            return Err(LendError::Translated);
        }
        let slot = control.queues.get(usize::from(queue)).filter(|slot| slot.live && slot.lent.is_none());
        let thread = slot.and_then(|slot| self.surroundings.crew.thread(slot.thread));
        let thread = thread.ok_or(LendError::NotOurs { queue })?;
        let memory = self.surroundings.memory.lend()?;
        let broken = {
            let site = Arc::clone(&self.site);
            move || {
                tracing::warn!(device = site.number, queue, "queue stopped: its owner finds it broken");
                site.fault(format!("the owner of queue {queue} finds it broken"));
            }
        };
        let relay = Relay::new(queue, Arc::clone(&self.site.interrupts), broken);
        let relay = relay.map_err(|source| LendError::Refused { source })?;
        let key = QueueKey { device: self.site.number, queue };
        let taken = thread.take_off(key).ok_or(LendError::NotOurs { queue })?;
        if !taken.at_rest() {
            let back = thread.put_on(taken).map_err(|refused| refused.source.to_string());
            self.lost(queue, back)?;
            return Err(LendError::Busy { queue });
        }
        let resting = match taken.park() {
            Ok((parked, handler)) => Resting { parked, handler: Some(handler) },
            Err(error) => return self.lost(queue, Err(error.to_string())),
        };
        self.start_owner(control, queue, LentQueue { owner, relay, resting, _memory: memory })
    }

    fn start_owner(&self, control: &mut Control, queue: u16, mut lent: LentQueue) -> Result<(), LendError> {
        let Ok(Started { features, addresses }) = started(control, queue) else {
            return self.lost(queue, Err("it was never started".into()));
        };
        let slot = control.queues.get_mut(usize::from(queue));
        let Some((slot, notifier)) = slot.and_then(|slot| slot.notifier.clone().map(|held| (slot, held)))
        else {
            return self.lost(queue, Err("it has no notifier".into()));
        };
        if let Err(error) = notifier.grab() {
            return self.lost(queue, Err(error.to_string()));
        }
        let LentQueue { owner, relay, resting, _memory: memory } = &mut lent;
        let started = owner.start(&mut Loan {
            queue,
            features,
            addresses,
            parked: &resting.parked,
            handler: &mut resting.handler,
            memory,
            kick: notifier.notifier(),
            call: relay.call(),
            error: relay.error(),
        });
        if let Err(source) = started {
            let LentQueue { mut owner, mut resting, .. } = lent;
            resting.handler = resting.handler.or_else(|| owner.handler());
            let state = resting.parked.state();
            let result = self.resume(control, queue, resting, state);
            self.lost(queue, result)?;
            return Err(LendError::Refused { source });
        }
        slot.lent = Some(lent);
        Ok(())
    }

    /// Serves a queue again, from `state` on.
    fn resume(
        &self,
        control: &mut Control,
        queue: u16,
        resting: Resting,
        state: State,
    ) -> Result<(), String> {
        let slot = control.queues.get(usize::from(queue)).ok_or("there is no such queue")?;
        let notifier = slot.notifier.clone().ok_or("it has no notifier")?;
        let handler = resting.handler.ok_or("its owner keeps the handler")?;
        let live = resting.parked.resume(state).map_err(|error| error.to_string())?;
        notifier.release().map_err(|error| error.to_string())?;
        let resumed = self.host_queue(queue, live, handler, notifier, &slot.work);
        self.put_on(slot.thread, resumed).map_err(|NotPutOn { queue, source }| {
            queue.into_iter().for_each(|queue| queue.abandon());
            source.to_string()
        })
    }

    /// A queue that nobody serves any more is a device that needs a reset.
    fn lost(&self, queue: u16, result: Result<(), String>) -> Result<(), LendError> {
        let Err(what) = result else { return Ok(()) };
        tracing::warn!(device = self.site.number, queue, "queue lost: {what}");
        self.site.fault(format!("queue {queue} was lost: {what}"));
        Err(LendError::Lost { queue, what })
    }
}

/// What `queue` was started with.
fn started(control: &Control, queue: u16) -> Result<Started, String> {
    let slot = control.queues.get(usize::from(queue));
    slot.and_then(|slot| slot.started).ok_or_else(|| "it was never started".into())
}

impl super::Queue {
    /// Ends the owner's work for good: the driver has reset the queue, or the machine stops. Whatever the owner had in
    /// flight is completed.
    pub(super) fn stop_lent(&mut self) {
        if let Some(mut lent) = self.lent.take()
            && let Err(error) = lent.owner.stop()
        {
            tracing::debug!("an owner that is stopped does not say where it has come to: {error}");
        }
        let Some(notifier) = &self.notifier else { return };
        while notifier.state() == NotifierState::OffLimits && notifier.release().is_ok() {}
        if notifier.state() == NotifierState::Assigned
            && let Err(error) = notifier.deassign()
        {
            tracing::error!("cannot remove an ioeventfd: {error}");
        }
    }
}
