//! Interrupts of one device, by its wired line or by messages.
//!
//! ```text
//! queue handler --"queue n"------.                .--> InterruptLine   (MSI off, or none)
//!                                +--> Interrupts -+
//! transport --"configuration"----'                '--> MsiTable        (MSI on)
//! ```
//! While MSI is on, the status register stays 0. Turn it on or off while no queue runs, or accept
//! that an interrupt under way takes the other way.
use crate::msi::MsiTable;
use crate::sync::AtomicBool;
use crate::{InterruptLine, InterruptSink};
use paravane_spec::mmio::{INT_CONFIG_CHANGE, INT_USED_BUFFER};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Interrupts of one device: its wired line, and its messages if it has any.
#[derive(Debug)]
pub struct Interrupts {
    line: InterruptLine,
    msi: Option<MsiTable>,
    /// Whether messages are used instead of the line.
    on: AtomicBool,
}

impl Interrupts {
    /// Makes interrupts with a wired line only.
    #[must_use]
    pub fn wired(sink: Arc<dyn InterruptSink>) -> Self {
        Self { line: InterruptLine::new(sink), msi: None, on: AtomicBool::new(false) }
    }

    /// Makes interrupts with a wired line and messages.
    ///
    /// Messages are off until [`Interrupts::use_msi`].
    #[must_use]
    pub fn with_msi(sink: Arc<dyn InterruptSink>, msi: MsiTable) -> Self {
        Self { msi: Some(msi), ..Self::wired(sink) }
    }

    /// Interrupts the driver for used buffers of `queue`.
    ///
    /// Call it from any thread. Takes at most one lock, that of the vector.
    pub fn used_buffer(&self, queue: u16) {
        match self.messages() {
            Some(msi) => msi.queue(queue),
            None => self.line.raise(INT_USED_BUFFER),
        }
    }

    /// Interrupts the driver for a configuration change or a needed reset.
    pub fn config_change(&self) {
        match self.messages() {
            Some(msi) => msi.configuration(),
            None => self.line.raise(INT_CONFIG_CHANGE),
        }
    }

    fn messages(&self) -> Option<&MsiTable> {
        // Relaxed: see the module.
        self.msi.as_ref().filter(|_| self.on.load(Ordering::Relaxed))
    }

    /// The wired line.
    #[must_use]
    pub fn line(&self) -> &InterruptLine {
        &self.line
    }

    /// The messages, on or off.
    #[must_use]
    pub fn msi(&self) -> Option<&MsiTable> {
        self.msi.as_ref()
    }

    /// Switches to messages or to the line. Without messages, only the line is used.
    pub fn use_msi(&self, on: bool) {
        // Relaxed: see the module.
        self.on.store(on, Ordering::Relaxed);
    }

    /// Whether messages are used.
    #[must_use]
    pub fn msi_on(&self) -> bool {
        self.messages().is_some()
    }

    /// Resets to the defaults: nothing pending, MSI off, no messages.
    ///
    /// Stop all threads that raise interrupts first.
    pub fn reset(&self) {
        self.use_msi(false);
        self.line.reset();
        if let Some(msi) = &self.msi {
            msi.reset();
        }
    }

    /// Number of interrupts raised since the start, by line or message.
    #[must_use]
    pub fn raised(&self) -> u64 {
        self.line.raised() + self.msi.as_ref().map_or(0, MsiTable::sent)
    }
}
