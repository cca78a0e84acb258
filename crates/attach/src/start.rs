//! Starts and stops the queues of a device, wherever its placement serves them.
use crate::AttachedDevice;
use crate::device::{Control, NO_WINDOW, Settings};
use crate::lock::lock;
use crate::placement::Kind;
use crate::queue::{Serving, Started};
use crate::status::KickPath;
use paravane_dma::Domain;
use paravane_io::QueueStart;
use paravane_notify::{HostNotifier, NoIoEventFds, NotifyError};
use paravane_transport::NotifyAddress;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl AttachedDevice {
    pub(crate) fn start_queue(&self, control: &mut Control, queue: u16, started: Started) {
        if let Err(reason) = self.try_start_queue(control, queue, started) {
            tracing::warn!(device = self.events.number, queue, "queue not started: {reason}");
            self.events.fault(reason);
        }
    }

    fn try_start_queue(&self, control: &mut Control, queue: u16, started: Started) -> Result<(), String> {
        let Some(slot) = control.queues.get_mut(usize::from(queue)) else {
            return Err("there is no such queue".into());
        };
        let Some(device) = &mut control.device else {
            return Err("the device has been stopped".into());
        };
        if slot.is_live() {
            return Err("it is running already".into());
        }
        let (notifier, wanted) = self.notifier(queue).map_err(|error| error.to_string())?;
        let notifier = Arc::new(notifier);
        let mut host_queue = self
            .begin(queue, started)
            .counted_by(Arc::clone(&slot.work))
            .build(&mut **device, Arc::clone(&notifier).into(), self.events.clone())
            .map_err(|error| error.to_string())?;
        slot.set_notifier(Some(notifier));
        slot.kicks_by = self.kick_path(queue, wanted.then(|| host_queue.assign()));
        slot.started = Some(started);
        match self.settings.placement.kind() {
            Kind::Inline(inline) => {
                inline.put_on(host_queue).map_err(|error| error.to_string())?;
                slot.serving = Serving::Inline;
                Ok(())
            }
            Kind::Pool { .. } => {
                slot.thread = self.settings.placement.first(self.events.number, queue);
                self.lend_or_serve(slot, queue, host_queue)
            }
        }
    }

    /// A queue with its view of guest memory.
    fn begin(&self, queue: u16, Started { features, addresses }: Started) -> QueueStart {
        let Settings { memory, domain, .. } = &self.settings;
        let handle = domain.as_ref().map_or_else(|| memory.handle(), Domain::handle);
        let handle = handle.named(format!("device {}, queue {queue}", self.events.number));
        QueueStart::new(self.key(queue), addresses, features, handle)
    }

    /// How kicks arrive, now that an ioeventfd was asked for or not.
    fn kick_path(&self, queue: u16, assigned: Option<Result<(), NotifyError>>) -> KickPath {
        match assigned {
            None => KickPath::Exits,
            Some(Ok(())) => KickPath::IoEventFd,
            Some(Err(error)) => {
                if self.events.counters.refused() {
                    tracing::warn!(device = self.events.number, queue, "kicks will exit: {error}");
                }
                KickPath::Refused
            }
        }
    }

    /// Makes the notifier of `queue`, and says whether to ask for an ioeventfd.
    fn notifier(&self, queue: u16) -> Result<(HostNotifier, bool), NotifyError> {
        let address = lock(&self.events.transport).notify_address(queue);
        // Relaxed: this is the thread that moves windows, or it holds the same lock.
        let base = self.window.load(Ordering::Relaxed);
        Ok(match (address, &self.settings.ioeventfds) {
            (Some(NotifyAddress { offset, datamatch }), Some(fds)) if base != NO_WINDOW => {
                (HostNotifier::new(Arc::clone(fds), base.wrapping_add(offset), datamatch)?, true)
            }
            _ => (HostNotifier::new(Arc::new(NoIoEventFds), 0, None)?, false),
        })
    }

    pub(crate) fn stop_queue(&self, control: &mut Control, queue: u16, complete: bool) {
        let Some(slot) = control.queues.get_mut(usize::from(queue)) else { return };
        let key = self.key(queue);
        let placement = &self.settings.placement;
        let stopping = match std::mem::take(&mut slot.serving) {
            Serving::Stopped => return,
            Serving::Thread(index) => placement.thread(index).and_then(|thread| thread.take_off(key)),
            Serving::Inline => match placement.kind() {
                Kind::Inline(inline) => inline.take_off(key),
                Kind::Pool { .. } => None,
            },
            Serving::Lent(lent) => {
                lent.stop();
                None
            }
            Serving::Resting(resting) => {
                // Nothing is in flight, and nothing is served any more.
                drop(resting);
                None
            }
            Serving::Lost => None,
        };
        match stopping {
            Some(stopping) => stopping.stop(complete),
            None => slot.release_notifier(),
        }
    }

    pub(crate) fn stop_queues(&self, control: &mut Control, complete: bool) {
        for queue in 0..control.queues.len() {
            self.stop_queue(control, u16::try_from(queue).unwrap_or(u16::MAX), complete);
        }
    }
}
