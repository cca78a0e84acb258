//! What a run counts while it goes on.
use crate::guard::lock;
use crate::report::ExitFigures;
use paravane_transport::AccessKind;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::Instant;

/// Most faults that are kept for the report; a hostile guest can make any number.
const MAX_FAULTS: usize = 32;

/// Counters and milestones. All counters are relaxed: they order nothing, and they are read when the
/// threads that count have been joined.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    exits: AtomicU64,
    notify_exits: AtomicU64,
    status_exits: AtomicU64,
    acknowledge_exits: AtomicU64,
    kicks: AtomicU64,
    refused: AtomicU64,
    first_kick: OnceLock<Instant>,
    first_io: OnceLock<Instant>,
    faults: Mutex<Vec<(usize, String)>>,
}

impl Tally {
    /// One exit to user space.
    pub(crate) fn exit(&self) {
        self.exits.fetch_add(1, Ordering::Relaxed);
    }

    /// Exits so far.
    pub(crate) fn exits(&self) -> u64 {
        self.exits.load(Ordering::Relaxed)
    }

    /// One of them was an access of this kind to a device's registers.
    pub(crate) fn access(&self, kind: AccessKind) {
        let count = match kind {
            AccessKind::Notify => &self.notify_exits,
            AccessKind::InterruptStatus => &self.status_exits,
            AccessKind::InterruptAcknowledge => &self.acknowledge_exits,
            AccessKind::Config | AccessKind::Other => return,
        };
        count.fetch_add(1, Ordering::Relaxed);
    }

    /// What the exits so far were about.
    pub(crate) fn exits_by_kind(&self) -> ExitFigures {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let (notify, interrupt_status, interrupt_acknowledge) =
            (read(&self.notify_exits), read(&self.status_exits), read(&self.acknowledge_exits));
        let known = notify + interrupt_status + interrupt_acknowledge;
        ExitFigures {
            notify,
            interrupt_status,
            interrupt_acknowledge,
            other: self.exits().saturating_sub(known),
        }
    }

    /// `count` kicks were taken from a notifier. Signals that we gave ourselves are no kicks.
    pub(crate) fn kicked(&self, count: u64) {
        if count > 0 && self.kicks.fetch_add(count, Ordering::Relaxed) == 0 {
            self.first_kick.get_or_init(Instant::now);
        }
    }

    /// Kicks so far.
    pub(crate) fn kicks(&self) -> u64 {
        self.kicks.load(Ordering::Relaxed)
    }

    /// The host refused an ioeventfd. `true` for the first time, which is the one to be logged.
    pub(crate) fn refused(&self) -> bool {
        self.refused.fetch_add(1, Ordering::Relaxed) == 0
    }

    /// The guest says that it has published its first request.
    pub(crate) fn first_io(&self) {
        self.first_io.get_or_init(Instant::now);
    }

    /// When the guest published its first request; by its own word, else by its first kick.
    pub(crate) fn first_request(&self) -> Option<Instant> {
        self.first_io.get().or_else(|| self.first_kick.get()).copied()
    }

    /// Device `device` could not go on.
    pub(crate) fn fault(&self, device: usize, what: String) {
        let mut faults = lock(&self.faults);
        if faults.len() < MAX_FAULTS {
            faults.push((device, what));
        }
    }

    /// The first fault of a device.
    pub(crate) fn fault_of(&self, device: usize) -> Option<String> {
        lock(&self.faults).iter().find(|(of, _)| *of == device).map(|(_, what)| what.clone())
    }
}
