//! Counters and milestones of a run.
use crate::report::ExitFigures;
use paravane_attach::{AccessCounts, Counters};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// What a run counts.
///
/// All counters are relaxed: they order nothing, and are read when the threads that count have been
/// joined.
#[derive(Debug, Default)]
pub(crate) struct RunCounters {
    /// Of all devices.
    pub(crate) devices: Arc<Counters>,
    exits: AtomicU64,
    first_io: OnceLock<Instant>,
}

impl RunCounters {
    /// Counts one exit to user space.
    pub(crate) fn exit(&self) {
        self.exits.fetch_add(1, Ordering::Relaxed);
    }

    /// Exits so far.
    pub(crate) fn exits(&self) -> u64 {
        self.exits.load(Ordering::Relaxed)
    }

    /// Exits so far, by cause.
    pub(crate) fn exits_by_kind(&self) -> ExitFigures {
        let AccessCounts { notify, interrupt_status, interrupt_acknowledge, .. } = self.devices.accesses();
        let known = notify + interrupt_status + interrupt_acknowledge;
        ExitFigures {
            notify,
            interrupt_status,
            interrupt_acknowledge,
            other: self.exits().saturating_sub(known),
        }
    }

    /// Kicks so far.
    pub(crate) fn kicks(&self) -> u64 {
        self.devices.kicks()
    }

    /// The guest reports that it has published its first request.
    pub(crate) fn first_io(&self) {
        self.first_io.get_or_init(Instant::now);
    }

    /// Time of the guest's first request: as it reports it, else its first kick.
    pub(crate) fn first_request(&self) -> Option<Instant> {
        self.first_io.get().copied().or_else(|| self.devices.first_kick())
    }

    /// First fault of device `device`.
    pub(crate) fn fault_of(&self, device: usize) -> Option<String> {
        self.devices.fault_of(device)
    }
}
