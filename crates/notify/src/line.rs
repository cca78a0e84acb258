//! Wired interrupt of a virtio-mmio device: a status register and a line.
//!
//! ```text
//! device:  used buffers published -> status |= cause -> edge
//! driver:  interrupt -> reads status -> acknowledges it -> looks for used buffers
//! ```
//! A cause that is added between the driver's read and its acknowledgement may be cleared with it;
//! the driver looks at the ring afterwards and finds the used buffers (the orders below ensure
//! that). A cause that is not cleared would be lost, since edges do not repeat, so
//! [`InterruptLine::acknowledge`] repeats them.
use crate::Notifier;
use crate::sync::{AtomicU32, AtomicU64};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Sink that raises the line: an irqfd, or in-process delivery.
///
/// Edge-triggered: each call is one interrupt.
pub trait InterruptSink: Send + Sync {
    /// Raises one interrupt.
    ///
    /// A release: the interrupted thread sees all that this thread did before.
    fn raise(&self);
}

/// In-process delivery: the driver is a thread that waits on the eventfd.
impl InterruptSink for Notifier {
    fn raise(&self) {
        self.signal();
    }
}

/// Bit beside the causes: the line is silent.
///
/// One word holds both, so that a cause that is added while the bit changes is raised either by the
/// thread that adds it, or by the one that clears the bit.
const SILENT: u32 = 1 << 31;

/// InterruptStatus and the line behind it.
///
/// Any thread may raise; the transport reads and acknowledges.
pub struct InterruptLine {
    sink: Arc<dyn InterruptSink>,
    status: AtomicU32,
    raised: AtomicU64,
}

impl InterruptLine {
    /// Makes a line with no cause pending.
    #[must_use]
    pub fn new(sink: Arc<dyn InterruptSink>) -> Self {
        Self { sink, status: AtomicU32::new(0), raised: AtomicU64::new(0) }
    }

    /// Adds `causes` to the status, and raises the line.
    ///
    /// Causes are `INT_USED_BUFFER` and `INT_CONFIG_CHANGE`.
    ///
    /// Does nothing without causes.
    pub fn raise(&self, causes: u32) {
        if causes == 0 {
            return;
        }
        // Release: pairs with the Acquire in `status` and in `acknowledge`, made by the vCPU that
        // reads the register. The driver that learns of the cause, or clears it unseen, then sees
        // the used buffers (the configuration) that were published before.
        let before = self.status.fetch_or(causes & !SILENT, Ordering::Release);
        if before & SILENT == 0 {
            self.edge();
        }
    }

    /// Silences the line (PCI: INTx is disabled), or ends the silence. Idempotent.
    ///
    /// A silent line raises nothing, but causes are still added to the status. The end of silence
    /// raises once if a cause is pending.
    pub fn silence(&self, silent: bool) {
        if silent {
            // Relaxed: it hands nothing over.
            self.status.fetch_or(SILENT, Ordering::Relaxed);
            return;
        }
        // Acquire: pairs with the Release in `raise`. What a cause stood for happened before the
        // edge.
        let before = self.status.fetch_and(!SILENT, Ordering::Acquire);
        if before & SILENT != 0 && before != SILENT {
            self.edge();
        }
    }

    /// Pending causes.
    #[must_use]
    pub fn status(&self) -> u32 {
        // Acquire: pairs with the Release in `raise`.
        self.status.load(Ordering::Acquire) & !SILENT
    }

    /// Clears `causes`.
    ///
    /// Raises the line again if others stay pending, since it is edge-triggered.
    pub fn acknowledge(&self, causes: u32) {
        // Acquire: pairs with the Release in `raise`. A cause that comes before this in the order
        // of the register is cleared, and the driver, which looks at the ring next, must find what
        // it stood for. As a read-modify-write it does not break the release sequence for a later
        // `status` either.
        let before = self.status.fetch_and(!causes | SILENT, Ordering::Acquire);
        if before & SILENT == 0 && before & !causes != 0 {
            self.edge();
        }
    }

    /// Clears all pending causes (device reset); silence stays.
    ///
    /// Stop all threads that raise first: a cause that is added at the same time may stay.
    pub fn reset(&self) {
        // Relaxed: it hands nothing over; the vCPU that resets the device reads its own write.
        self.status.fetch_and(SILENT, Ordering::Relaxed);
    }

    /// Number of interrupts raised since the start.
    #[must_use]
    pub fn raised(&self) -> u64 {
        // Relaxed: a statistic.
        self.raised.load(Ordering::Relaxed)
    }

    fn edge(&self) {
        // Relaxed: a statistic.
        self.raised.fetch_add(1, Ordering::Relaxed);
        self.sink.raise();
    }
}

impl std::fmt::Debug for InterruptLine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("InterruptLine")
            .field("status", &format_args!("{:#x}", self.status()))
            .field("raised", &self.raised())
            .finish_non_exhaustive()
    }
}
