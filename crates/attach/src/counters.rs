//! Counters of devices, for reports.
use paravane_transport::AccessKind;
use parking_lot::Mutex;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Most faults that are kept: a hostile driver can cause any number.
const MAX_FAULTS: usize = 32;

/// Register accesses by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AccessCounts {
    /// Kicks that came as an exit.
    pub notify: u64,
    /// Reads of the interrupt status.
    pub interrupt_status: u64,
    /// Interrupt acknowledgements.
    pub interrupt_acknowledge: u64,
    /// All others: set-up and configuration space.
    pub other: u64,
}

/// A device that needs a reset.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Device number.
    pub device: usize,
    /// The reason, in one line.
    pub reason: String,
}

/// What devices count. Devices that share one value are counted together.
///
/// All counters are relaxed: they order nothing, and a reader may be a little behind.
#[derive(Debug, Default)]
pub struct Counters {
    notify: AtomicU64,
    interrupt_status: AtomicU64,
    interrupt_acknowledge: AtomicU64,
    other: AtomicU64,
    kicks: AtomicU64,
    refused: AtomicU64,
    first_kick: OnceLock<Instant>,
    faults: Mutex<Vec<Fault>>,
}

impl Counters {
    /// Register accesses.
    #[must_use]
    pub fn accesses(&self) -> AccessCounts {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        AccessCounts {
            notify: read(&self.notify),
            interrupt_status: read(&self.interrupt_status),
            interrupt_acknowledge: read(&self.interrupt_acknowledge),
            other: read(&self.other),
        }
    }

    /// Kicks that reached a queue, by ioeventfd or by exit.
    #[must_use]
    pub fn kicks(&self) -> u64 {
        self.kicks.load(Ordering::Relaxed)
    }

    /// Time of the first kick.
    #[must_use]
    pub fn first_kick(&self) -> Option<Instant> {
        self.first_kick.get().copied()
    }

    /// The first 32 faults, in order.
    #[must_use]
    pub fn faults(&self) -> Vec<Fault> {
        self.faults.lock().clone()
    }

    /// The first fault of device `device`.
    #[must_use]
    pub fn fault_of(&self, device: usize) -> Option<String> {
        self.faults.lock().iter().find(|fault| fault.device == device).map(|fault| fault.reason.clone())
    }

    pub(crate) fn access(&self, kind: AccessKind) {
        let count = match kind {
            AccessKind::Notify => &self.notify,
            AccessKind::InterruptStatus => &self.interrupt_status,
            AccessKind::InterruptAcknowledge => &self.interrupt_acknowledge,
            AccessKind::Config | AccessKind::Other => &self.other,
        };
        count.fetch_add(1, Ordering::Relaxed);
    }

    /// `count` kicks were taken from a notifier. Our own signals do not count.
    pub(crate) fn kicked(&self, count: u64) {
        if count > 0 && self.kicks.fetch_add(count, Ordering::Relaxed) == 0 {
            self.first_kick.get_or_init(Instant::now);
        }
    }

    /// The host refused an ioeventfd. `true` the first time: that one is logged.
    pub(crate) fn refused(&self) -> bool {
        self.refused.fetch_add(1, Ordering::Relaxed) == 0
    }

    pub(crate) fn fault(&self, device: usize, reason: String) {
        let mut faults = self.faults.lock();
        if faults.len() < MAX_FAULTS {
            faults.push(Fault { device, reason });
        }
    }
}
