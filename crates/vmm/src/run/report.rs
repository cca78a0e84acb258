//! The report of a run that is over.
use super::Progress;
use super::plan;
use super::report_area::ReportArea;
use super::watch::Verdict;
use super::work::Work;
use crate::config::{RingLayout, RunConfig, TransportChoice};
use crate::machine::counters::RunCounters;
use crate::machine::devices::NamedDevice;
use crate::machine::{Machine, footprint, ram};
use crate::report::{DirtyFigures, Outcome, PhaseFigures, QueueResult, Report};
use paravane_attach::{AttachedDevice, QueueStatus};
use paravane_dma::Region;
use std::sync::Arc;
use std::time::Instant;

/// All that is left of a run whose queues have stopped.
pub(super) struct Over<'a> {
    pub(super) config: &'a RunConfig,
    pub(super) progress: &'a Progress,
    /// When the process started.
    pub(super) started: Instant,
    /// Name of the accelerator, and why it was chosen.
    pub(super) accel: &'static str,
    pub(super) accel_reason: String,
    pub(super) region: &'a Region,
    pub(super) machine: &'a Machine,
    pub(super) work: &'a Work,
    /// The stopped devices.
    pub(super) devices: Vec<NamedDevice>,
    pub(super) area: &'a ReportArea,
    pub(super) counters: &'a RunCounters,
    pub(super) dirty: Option<DirtyFigures>,
    /// Problems that are known already, one a line.
    pub(super) problems: Vec<String>,
    /// CPU seconds of this process when the guest had ended.
    pub(super) host_cpu_s: f64,
}

impl Over<'_> {
    /// Verifies the jobs, and reports.
    pub(super) fn report(mut self, verdict: Verdict) -> Report {
        let Self { config, area, counters, host_cpu_s, work, .. } = self;
        let (mut outcome, disks, mut moved) = self.judge(verdict);
        let finished = !matches!(outcome, Outcome::GuestFailed(_) | Outcome::Cancelled);
        let nets = work.cards.iter().map(|card| {
            let of_server = config.server.as_ref().and_then(|server| server.totals(card.number));
            let totals = of_server.unwrap_or_else(|| card.totals(&self.devices));
            self.judge_net(card, &totals, finished)
        });
        let nets: Vec<_> = nets.collect();
        moved += nets.iter().map(|net| net.frames * u64::from(net.size)).sum::<u64>();
        let mut problems = std::mem::take(&mut self.problems);
        problems.extend(nets.iter().filter_map(|net| net.problem.clone()));
        if !problems.is_empty() {
            outcome = match outcome {
                Outcome::Verified => Outcome::NotVerified(problems),
                Outcome::NotVerified(first) => Outcome::NotVerified([first, problems].concat()),
                other => other,
            };
        }
        let totals = area.totals().unwrap_or_default();
        let entropy_bytes = work.rng.map_or(0, |rng| totals.entropy_bytes.min(rng.bytes));
        let first = counters.boot();
        let boot = counters.first_request().map(|at| at.saturating_duration_since(self.started));
        let attached = self.machine.bus.devices();
        let queues = self.machine.named().flat_map(|named| self.queue_results(named)).collect();
        Report {
            outcome,
            accel: self.accel,
            accel_reason: self.accel_reason,
            transport: self.config.transport.name(),
            mmio_version: (self.config.transport != TransportChoice::Pci)
                .then(|| self.config.mmio_version.number()),
            ring: match (self.config.ring, self.config.in_order) {
                (RingLayout::Split, false) => "split",
                (RingLayout::Split, true) => "split, in order",
                (RingLayout::Packed, false) => "packed",
                (RingLayout::Packed, true) => "packed, in order",
            },
            iommu: self.config.iommu,
            dirty: self.dirty,
            disks,
            nets,
            exits: self.counters.exits(),
            kvm_exits: self.counters.kvm_exits(),
            cpus: self.counters.cpus(),
            exits_by_kind: self.counters.exits_by_kind(),
            measured: self
                .machine
                .bus
                .measured()
                .map(|phase| PhaseFigures { taken: totals.measured_interrupts, ..phase }),
            kick_stops: self.area.kick_stops(),
            kicks: self.counters.kicks(),
            exit_kicks: attached.iter().map(AttachedDevice::exit_kicks).sum(),
            queues,
            io_threads: self.machine.figures(),
            interrupts: attached.iter().map(AttachedDevice::interrupts).sum(),
            messages: attached.iter().map(AttachedDevice::messages).sum(),
            violations: attached.iter().map(AttachedDevice::violations).sum(),
            entropy_bytes,
            moves: totals.moves,
            host_cpu_s,
            mb_per_cpu_s: moved as f64 / 1e6 / host_cpu_s.max(1e-6),
            boot_ms: boot.map_or(0.0, |boot| boot.as_secs_f64() * 1e3),
            boot_exits: first.map(|boot| boot.exits),
            boot_kvm_exits: first.and_then(|boot| boot.kvm_exits),
            wall_s: self.started.elapsed().as_secs_f64(),
            memory: ram::figures(self.region),
            resident_overhead: footprint::resident_beyond(self.region),
        }
    }

    /// The queues of `device` that ran.
    fn queue_results(&self, (device, name): (&AttachedDevice, &Arc<str>)) -> Vec<QueueResult> {
        let number = device.number();
        let cpu = |queue| plan::cpu_of(&self.work.entries, number, queue, self.area.cpus());
        let result = |queue: &QueueStatus| QueueResult {
            device: number,
            device_name: Arc::clone(name),
            queue: queue.queue,
            cpu: cpu(queue.queue),
            io_thread: queue.thread,
            moves: queue.moves,
            kicks_by: queue.kicks_by,
            exit_kicks: queue.exit_kicks,
        };
        device.queues().iter().map(result).collect()
    }
}
