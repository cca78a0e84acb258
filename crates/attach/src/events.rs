//! A device as the threads that serve its queues see it.
use crate::counters::Counters;
use paravane_device::ServeError;
use paravane_io::QueueEvents;
use paravane_notify::{Interrupts, Notifier};
use paravane_transport::Transport;
use parking_lot::Mutex;
use std::sync::Arc;

/// Where queues report: to the driver and to the counters.
///
/// The driver learns by interrupts and the transport's status.
pub(crate) struct DeviceEvents {
    pub(crate) number: usize,
    pub(crate) interrupts: Arc<Interrupts>,
    pub(crate) transport: Mutex<Box<dyn Transport>>,
    pub(crate) counters: Arc<Counters>,
}

impl DeviceEvents {
    /// The device cannot go on until its driver resets it.
    pub(crate) fn fault(&self, reason: String) {
        self.counters.fault(self.number, reason);
        self.transport.lock().needs_reset();
    }
}

impl QueueEvents for DeviceEvents {
    fn used_buffer(&self, queue: u16) {
        self.interrupts.used_buffer(queue);
    }

    fn kicked(&self, _queue: u16, count: u64) {
        self.counters.kicked(count);
    }

    fn message(&self, queue: u16) -> Option<Notifier> {
        self.interrupts.msi()?.queue_eventfd(queue)
    }

    fn failed(&self, queue: u16, error: &ServeError) {
        tracing::warn!(device = self.number, queue, "queue stopped: {error}");
        self.fault(error.to_string());
    }
}
