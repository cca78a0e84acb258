//! One sample: a run of the microVM, and the figures of its measured phase.
use super::case::Case;
use crate::figures::{Figure, by};
use crate::guest::{self, Card, HEADERS, Image, OneDevice, Peer, Sample};
use paravane_vmm::{AccelChoice, RunConfig, TransportChoice};
use std::time::Duration;

/// Bytes of a read.
const BLOCK: u32 = 4096;
/// Bytes of the image.
pub(super) const SPAN: u64 = 256 << 10;

/// Size of a sample.
#[derive(Clone, Copy, Debug)]
pub(super) struct SampleSize {
    /// Number of requests over the network.
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

/// Runs the machine once, with the guest on `cpu`.
///
/// `real_time` is part of the method.
///
/// # Errors
/// Why there are no figures, in one line.
pub(super) fn sample(
    case: Case,
    transport: TransportChoice,
    accel: AccelChoice,
    size: SampleSize,
    image: &Image,
    cpu: Option<usize>,
    real_time: bool,
) -> Result<Vec<(Figure, f64)>, String> {
    let (config, device) = machine(case, size, image);
    let config = RunConfig { accel, transport, vcpu_cpu: cpu, ..config };
    let sample = guest::run(&config, device)?;
    Ok(figures(&sample, real_time))
}

fn machine(case: Case, size: SampleSize, image: &Image) -> (RunConfig, OneDevice<'_>) {
    match case {
        Case::Exchange { request, response } => {
            let (size, reply, frames) = (HEADERS + request, HEADERS + response, size.exchanges);
            let device = OneDevice::Card(Card { peer: Peer::Echo, frames, size, reply });
            (RunConfig { depth: 1, ..device.machine() }, device)
        }
        Case::Read { depth } => {
            let (device, duration) = (OneDevice::Disk(image), size.reading);
            let config = RunConfig { depth, block: BLOCK, read_percent: 100, duration, ..device.machine() };
            (config, device)
        }
    }
}

fn figures(sample: &Sample, real_time: bool) -> Vec<(Figure, f64)> {
    let Sample { accel, phase, count, .. } = sample;
    let figure = |metric, unit, method| Figure::new(metric, unit, by(method, accel, real_time));
    let mut figures = vec![(figure("rate", "transactions/s", "clock"), sample.per_s)];
    for (metric, value) in ["latency-p50", "latency-p99", "latency-p999"].into_iter().zip(sample.latency) {
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
