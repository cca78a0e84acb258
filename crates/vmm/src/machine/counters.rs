//! Counters and milestones of a run.
use crate::machine::footprint;
use crate::machine::kvm::stats::VcpuStats;
use crate::report::{CpuFigures, ExitFigures};
use paravane_attach::{AccessCounts, Counters};
use paravane_device::lock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
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
    first_io: OnceLock<Boot>,
}

/// What it took the guest to publish its first request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Boot {
    pub(crate) at: Instant,
    /// Exits to user space.
    pub(crate) exits: u64,
    /// Exits by KVM's count, if it counts them.
    pub(crate) kvm_exits: Option<u64>,
}

/// Counters of one vCPU, in cache lines of their own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct CpuCounters {
    exits: AtomicU64,
    /// CPU time of its ended threads in nanoseconds.
    time: AtomicU64,
    kvm: Mutex<KvmCounters>,
}

/// What KVM counts of one vCPU.
#[derive(Debug, Default)]
struct KvmCounters {
    /// Exits of its ended threads.
    ended: Option<u64>,
    running: Option<VcpuStats>,
}

impl KvmCounters {
    fn exits(&self) -> Option<u64> {
        let running = self.running.as_ref().and_then(|stats| stats.exits().ok());
        // Neither: KVM does not count.
        self.ended.into_iter().chain(running).reduce(u64::saturating_add)
    }
}

impl CpuCounters {
    fn figures(&self) -> CpuFigures {
        CpuFigures {
            exits: self.exits.load(Ordering::Relaxed),
            kvm_exits: lock(&self.kvm).exits(),
            cpu_s: self.time.load(Ordering::Relaxed) as f64 * 1e-9,
        }
    }
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

    /// KVM counts this vCPU's exits in `stats`, until it [`ends`](Self::ends).
    pub(crate) fn counts(&self, cpu: usize, stats: VcpuStats) {
        if let Some(cpu) = self.cpus.get(cpu) {
            lock(&cpu.kvm).running = Some(stats);
        }
    }

    /// The calling thread, which was this vCPU, ends.
    pub(crate) fn ends(&self, cpu: usize) {
        if let Some(cpu) = self.cpus.get(cpu) {
            cpu.time.fetch_add(footprint::thread_ns(), Ordering::Relaxed);
            let mut kvm = lock(&cpu.kvm);
            *kvm = KvmCounters { ended: kvm.exits(), running: None };
        }
    }

    /// Exits so far.
    pub(crate) fn exits(&self) -> u64 {
        self.cpus.iter().map(|cpu| cpu.exits.load(Ordering::Relaxed)).sum()
    }

    /// Exits so far by KVM's count, if it counts them: also those that it handles itself.
    pub(crate) fn kvm_exits(&self) -> Option<u64> {
        self.cpus.iter().filter_map(|cpu| lock(&cpu.kvm).exits()).reduce(u64::saturating_add)
    }

    /// The vCPUs, whose threads have ended.
    pub(crate) fn cpus(&self) -> Vec<CpuFigures> {
        self.cpus.iter().map(CpuCounters::figures).collect()
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
        self.first_io.get_or_init(|| Boot {
            at: Instant::now(),
            exits: self.exits(),
            kvm_exits: self.kvm_exits(),
        });
    }

    /// The guest's first request, if it has reported one.
    pub(crate) fn boot(&self) -> Option<Boot> {
        self.first_io.get().copied()
    }

    /// Time of the guest's first request: as it reports it, else its first kick.
    pub(crate) fn first_request(&self) -> Option<Instant> {
        self.boot().map(|boot| boot.at).or_else(|| self.devices.first_kick())
    }

    /// First fault of device `device`.
    pub(crate) fn fault_of(&self, device: usize) -> Option<String> {
        self.devices.fault_of(device)
    }
}
