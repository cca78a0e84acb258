//! Starts the queues of a device.
use crate::AttachedDevice;
use crate::control::Control;
use crate::device::{NO_WINDOW, Settings};
use crate::queue::Started;
use crate::saved::SavedQueue;
use crate::status::KickPath;
use paravane_device::State;
use paravane_dma::Domain;
use paravane_io::{NotPutOn, QueueStart};
use paravane_notify::{HostNotifier, NoIoEventFds, NotifyError};
use paravane_spec::feature;
use paravane_spec::packed::EVENT_WRAP;
use paravane_transport::NotifyAddress;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl AttachedDevice {
    pub(crate) fn start_queue(&self, control: &mut Control, queue: u16, started: Started) {
        if let Err(reason) = self.try_start_queue(control, queue, started, None) {
            tracing::warn!(device = self.events.number, queue, "queue not started: {reason}");
            self.events.fault(reason);
        }
    }

    /// Starts a queue, a new one or one that another process has saved.
    pub(crate) fn try_start_queue(
        &self,
        control: &mut Control,
        queue: u16,
        started: Started,
        saved: Option<SavedQueue>,
    ) -> Result<(), String> {
        let Control { device, queues, slots, suspended, .. } = control;
        let Some(slot) = slots.get_mut(usize::from(queue)) else {
            return Err("there is no such queue".into());
        };
        let Some(device) = device else {
            return Err("the device has been stopped".into());
        };
        if queues.is_live(queue) {
            return Err("it is running already".into());
        }
        let (notifier, wanted) = self.notifier(queue).map_err(|error| error.to_string())?;
        let notifier = Arc::new(notifier);
        let key = queues.threads().key(queue);
        let start = QueueStart::new(key, started.addresses, started.features, self.handle(queue));
        let mut host_queue = self
            .tracked(start, queue, started, saved)?
            .counted_by(Arc::clone(&slot.work))
            .build(&mut **device, Arc::clone(&notifier).into(), self.events.clone())
            .map_err(|error| error.to_string())?;
        slot.set_notifier(notifier);
        slot.kicks_by = self.kick_path(queue, wanted.then(|| host_queue.assign()));
        slot.started = Some(started);
        let has_requests = saved.is_some_and(|saved| saved.has_requests);
        if *suspended || self.settings.backend.is_some() && !has_requests {
            // No thread serves it before the driver resumes the device, or before the back end.
            queues.start_at_rest(host_queue).map_err(|error| error.to_string())?;
            return if *suspended { Ok(()) } else { self.lend_or_resume(control, queue) };
        }
        queues.start(host_queue).map_err(|NotPutOn { queue, source }| {
            // Its ioeventfd goes with it.
            queue.into_iter().for_each(|queue| queue.abandon());
            source.to_string()
        })
    }

    /// A queue at its position, whose requests in flight are recorded if there is memory for that.
    fn tracked(
        &self,
        start: QueueStart,
        queue: u16,
        Started { features, addresses }: Started,
        saved: Option<SavedQueue>,
    ) -> Result<QueueStart, String> {
        let is_packed = features & feature::RING_PACKED != 0;
        let position = match saved {
            Some(saved) => State::from_vring_base(saved.base, features).map_err(|error| error.to_string())?,
            None if is_packed => State::Packed { avail: EVENT_WRAP, used: EVENT_WRAP },
            None => State::Split { avail: 0 },
        };
        // With IN_ORDER the ring itself says what is in flight.
        let Some(tracking) = self.settings.tracking.as_ref().filter(|_| features & feature::IN_ORDER == 0)
        else {
            return Ok(start.at(position));
        };
        if !saved.is_some_and(|saved| saved.has_requests) {
            tracking.clear(queue).map_err(|error| format!("cannot clear in-flight memory: {error}"))?;
        }
        let mapping = tracking.mapping(queue, addresses.size, is_packed);
        Ok(start.tracked(position, mapping.map_err(|error| format!("in-flight memory: {error}"))?))
    }

    /// Guest memory, as the device addresses it.
    fn handle(&self, queue: u16) -> paravane_dma::Handle {
        let Settings { memory, domain, .. } = &self.settings;
        let handle = domain.as_ref().map_or_else(|| memory.handle(), Domain::handle);
        handle.named(format!("device {}, queue {queue}", self.events.number))
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
        let address = self.events.transport.lock().notify_address(queue);
        // Relaxed: this is the thread that moves windows, or it holds the same lock.
        let base = self.window.load(Ordering::Relaxed);
        Ok(match (address, &self.settings.ioeventfds) {
            (Some(NotifyAddress { offset, datamatch }), Some(fds)) if base != NO_WINDOW => {
                (HostNotifier::new(Arc::clone(fds), base.wrapping_add(offset), datamatch)?, true)
            }
            _ => (HostNotifier::new(Arc::new(NoIoEventFds), 0, None)?, false),
        })
    }
}
