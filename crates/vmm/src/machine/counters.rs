//! Counters and milestones of a run.
use crate::machine::footprint;
use crate::report::{CpuFigures, ExitFigures};
use paravane_attach::{AccessCounts, Counters};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// What a run counts.
///
/// All counters are relaxed: they order nothing, and are read when the threads that count have been
/// joined.
#[derive(Debug)]
pub(crate) struct RunCounters {
    /// Of all devices.
    pub(crate) devices: Arc<Counters>,
    /// Of each vCPU.
    cpus: Vec<CpuCounters>,
    first_io: OnceLock<Instant>,
}

/// Counters of one vCPU, in cache lines of their own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct CpuCounters {
    exits: AtomicU64,
    /// CPU time of its ended threads in nanoseconds.
    time: AtomicU64,
}

impl RunCounters {
    /// For this number of vCPUs.
    pub(crate) fn new(cpus: u16) -> Self {
        let cpus = (0..cpus.max(1)).map(|_| CpuCounters::default()).collect();
        Self { devices: Arc::default(), cpus, first_io: OnceLock::new() }
    }

    /// Counts one exit to user space of a vCPU.
    pub(crate) fn exit(&self, cpu: usize) {
        if let Some(cpu) = self.cpus.get(cpu) {
            // Nobody else writes it.
            cpu.exits.store(cpu.exits.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        }
    }

    /// The calling thread, which was this vCPU, ends.
    pub(crate) fn ends(&self, cpu: usize) {
        if let Some(cpu) = self.cpus.get(cpu) {
            cpu.time.fetch_add(footprint::thread_ns(), Ordering::Relaxed);
        }
    }

    /// Exits so far.
    pub(crate) fn exits(&self) -> u64 {
        self.cpus.iter().map(|cpu| cpu.exits.load(Ordering::Relaxed)).sum()
    }

    /// The vCPUs, whose threads have ended.
    pub(crate) fn cpus(&self) -> Vec<CpuFigures> {
        let figures = |cpu: &CpuCounters| CpuFigures {
            exits: cpu.exits.load(Ordering::Relaxed),
            cpu_s: cpu.time.load(Ordering::Relaxed) as f64 * 1e-9,
        };
        self.cpus.iter().map(figures).collect()
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
