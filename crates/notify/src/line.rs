//! The wired interrupt of a virtio-mmio device: a status register and a line.
use std::sync::Arc;

/// What raises the line: an irqfd, or in-process delivery. Edge: every call is one interrupt.
pub trait InterruptSink: Send + Sync {
    /// Raises one interrupt.
    fn raise(&self);
}

/// InterruptStatus and the line behind it. Any thread may raise; the transport reads and acknowledges.
pub struct InterruptLine {
    _sink: Arc<dyn InterruptSink>,
}

impl InterruptLine {
    /// A line with no cause pending.
    #[must_use]
    pub fn new(sink: Arc<dyn InterruptSink>) -> Self {
        Self { _sink: sink }
    }

    /// Adds `causes` (`INT_USED_BUFFER`, `INT_CONFIG_CHANGE`) to the status and raises the line.
    pub fn raise(&self, causes: u32) {
        let _ = causes;
        todo!()
    }

    /// Pending causes.
    #[must_use]
    pub fn status(&self) -> u32 {
        todo!()
    }

    /// Clears `causes`. If others stay pending the line is raised again, since it is an edge.
    pub fn acknowledge(&self, causes: u32) {
        let _ = causes;
        todo!()
    }

    /// Forgets everything pending (device reset).
    pub fn reset(&self) {
        todo!()
    }

    /// Interrupts raised since the start.
    #[must_use]
    pub fn raised(&self) -> u64 {
        todo!()
    }
}
