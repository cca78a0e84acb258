//! One sample: a run of the microVM, and the figures of its start or of its measured phase.
use super::case::{Case, Work};
use crate::figures::{Figure, by};
use crate::guest::{self, Boot, Card, HEADERS, Image, OneDevice, Peer, Sample};
use paravane_vmm::{AccelChoice, RunConfig, TransportChoice};
use std::time::Duration;

/// Bytes of a read.
const BLOCK: u32 = 4096;
/// Bytes of the image.
pub(super) const SPAN: u64 = 256 << 10;

/// Size of a sample.
#[derive(Clone, Copy, Debug)]
pub(super) struct SampleSize {
    /// Number of requests over each network card.
    pub(super) exchanges: u64,
    /// Time of disk reads.
    pub(super) reading: Duration,
    /// Samples of each transport in a round.
    pub(super) samples: usize,
}

impl SampleSize {
    /// Full size.
    pub(super) const FULL: Self = Self { exchanges: 400, reading: Duration::from_millis(40), samples: 5 };
}

/// How samples are taken.
pub(super) struct Conditions<'a> {
    pub(super) accel: AccelChoice,
    pub(super) size: SampleSize,
    /// An image for each disk.
    pub(super) images: &'a [Image],
    /// CPUs of the host for the guest's; empty: any.
    pub(super) vcpu_cpus: &'a [usize],
    /// Part of the method.
    pub(super) real_time: bool,
}

impl Conditions<'_> {
    /// Runs the machine once.
    ///
    /// # Errors
    /// Why there are no figures, in one line.
    pub(super) fn sample(
        &self,
        case: Case,
        transport: TransportChoice,
    ) -> Result<Vec<(Figure, f64)>, String> {
        let run = |config: RunConfig| RunConfig {
            accel: self.accel,
            cpus: case.cpus,
            transport,
            vcpu_cpus: self.vcpu_cpus.to_vec(),
            ..config
        };
        if case.work == Work::Boot {
            let disk = OneDevice::Disk(&self.images[0]);
            let config = RunConfig { span: BLOCK.into(), duration: Duration::ZERO, ..disk.machine() };
            return Ok(self.boot_figures(&guest::boot(&run(config), disk)?));
        }
        let devices: Vec<_> =
            self.images.iter().take(case.cpus.into()).map(|image| self.device(case.work, image)).collect();
        let config = match case.work {
            Work::Read { depth } => RunConfig {
                depth,
                block: BLOCK,
                read_percent: 100,
                duration: self.size.reading,
                ..devices[0].machine()
            },
            _ => RunConfig { depth: 1, ..devices[0].machine() },
        };
        Ok(self.figures(&guest::run(&run(config), &devices)?))
    }

    /// The device of one CPU.
    fn device<'a>(&self, work: Work, image: &'a Image) -> OneDevice<'a> {
        let Work::Exchange { request, response } = work else { return OneDevice::Disk(image) };
        let (size, reply, frames) = (HEADERS + request, HEADERS + response, self.size.exchanges);
        OneDevice::Card(Card { peer: Peer::Echo, frames, size, reply })
    }

    fn boot_figures(&self, boot: &Boot) -> Vec<(Figure, f64)> {
        let figure = |metric, unit, method| Figure::new(metric, unit, by(method, boot.accel, self.real_time));
        let mut figures = vec![
            (figure("start-time", "ms", "clock"), boot.ms),
            (figure("exits", "1/start", "count"), boot.exits as f64),
        ];
        figures.extend(boot.kvm_exits.map(|exits| (figure("kvm-exits", "1/start", "count"), exits as f64)));
        figures
    }

    fn figures(&self, sample: &Sample) -> Vec<(Figure, f64)> {
        let Sample { accel, phase, count, .. } = sample;
        let figure = |metric, unit, method| Figure::new(metric, unit, by(method, accel, self.real_time));
        let mut figures = vec![(figure("rate", "transactions/s", "clock"), sample.per_s)];
        for (metric, value) in ["latency-p50", "latency-p99", "latency-p999"].into_iter().zip(sample.latency)
        {
            figures.push((figure(metric, "us", "clock"), value));
        }
        let exits = phase.exits;
        let mut counts = vec![
            ("exits", exits.total()),
            ("exits-notify", exits.notify),
            ("exits-status", exits.interrupt_status),
            ("exits-acknowledge", exits.interrupt_acknowledge),
            ("exits-other", exits.other),
        ];
        if *accel == "kvm" {
            counts.extend(phase.kvm_exits.map(|exits| ("kvm-exits", exits)));
            counts.push(("kernel-notify", phase.kicks.saturating_sub(exits.notify)));
            counts.push(("kernel-eoi", phase.taken));
        }
        counts.push(("interrupts", phase.interrupts));
        for (metric, value) in counts {
            figures.push((figure(metric, "1/transaction", "count"), value as f64 / count));
        }
        figures.push((figure("cpu", "us/transaction", "process clock"), sample.cpu_us()));
        figures
    }
}
