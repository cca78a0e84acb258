//! A device of the machine, as the I/O threads that serve its queues see it.
use crate::guard::lock;
use crate::tally::Tally;
use paravane_device::ServeError;
use paravane_io::QueueEvents;
use paravane_notify::Interrupts;
use paravane_transport::Transport;
use std::sync::{Arc, Mutex};

/// What a queue of device `number` has to tell goes to its driver, and to the report.
pub(crate) struct MachineSite {
    pub(crate) number: usize,
    pub(crate) interrupts: Arc<Interrupts>,
    pub(crate) transport: Mutex<Box<dyn Transport>>,
    pub(crate) tally: Arc<Tally>,
}

impl MachineSite {
    /// The device cannot go on until its driver resets it.
    pub(crate) fn fault(&self, what: String) {
        self.tally.fault(self.number, what);
        lock(&self.transport).needs_reset();
    }
}

impl QueueEvents for MachineSite {
    fn used_buffer(&self, queue: u16) {
        self.interrupts.used_buffer(queue);
    }

    fn kicked(&self, _queue: u16, count: u64) {
        self.tally.kicked(count);
    }

    fn failed(&self, queue: u16, error: &ServeError) {
        tracing::warn!(device = self.number, queue, "queue stopped: {error}");
        self.fault(error.to_string());
    }
}
