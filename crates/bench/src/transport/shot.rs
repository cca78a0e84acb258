//! One sample: a run of the microVM, and what its measured phase came to.
use super::Case;
use crate::BenchError;
use nix::sys::memfd::{MFdFlags, memfd_create};
use paravane_vmm::{
    AccelChoice, DiskConfig, Job, NetConfig, Outcome, PhaseFigures, Report, RunConfig, TransportChoice,
};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// What stands before the payload: as much as Ethernet, IPv4, and TCP with time stamps take.
const HEADERS: u32 = 14 + 20 + 32;
/// Bytes of a read.
const BLOCK: u32 = 4096;
/// Bytes of the image.
const SPAN: u64 = 1 << 20;
/// Bytes of guest RAM.
const MEMORY: u64 = 32 << 20;

/// How much a sample does.
#[derive(Clone, Copy, Debug)]
pub(super) struct Amount {
    /// Requests over the network.
    pub(super) exchanges: u64,
    /// How long disks are read.
    pub(super) reading: Duration,
}

impl Amount {
    /// For figures.
    pub(super) const FULL: Self = Self { exchanges: 4000, reading: Duration::from_millis(200) };
}

/// What a figure is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Figure {
    pub(super) metric: &'static str,
    pub(super) unit: &'static str,
    pub(super) method: &'static str,
}

/// The figures of a sample.
pub(super) struct Shot {
    /// "kvm" or "thread".
    pub(super) accel: &'static str,
    pub(super) figures: Vec<(Figure, f64)>,
}

/// An image in memory, so that no disk is measured.
pub(super) struct Image(File);

impl Image {
    /// # Errors
    /// The host refuses.
    pub(super) fn new() -> Result<Self, BenchError> {
        let failed = |source| BenchError::Os { what: "make an image in memory", source };
        let fd =
            memfd_create("bench-transport", MFdFlags::MFD_CLOEXEC).map_err(|error| failed(error.into()))?;
        let file = File::from(fd);
        file.set_len(SPAN).map_err(failed)?;
        Ok(Self(file))
    }

    fn path(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.0.as_raw_fd()).into()
    }
}

/// Runs the machine once.
///
/// # Errors
/// One line on why there are no figures.
pub(super) fn shoot(
    case: Case,
    transport: TransportChoice,
    accel: AccelChoice,
    amount: Amount,
    image: &Image,
) -> Result<Shot, String> {
    let config = config(case, amount, image);
    let config = RunConfig { accel, transport, ..config };
    let report =
        paravane_vmm::run(config, Default::default(), Instant::now()).map_err(|error| error.to_string())?;
    match &report.outcome {
        Outcome::Verified => {}
        Outcome::NotVerified(problems) => return Err(problems.join("; ")),
        Outcome::Cancelled => return Err("the run was stopped".into()),
        Outcome::GuestFailed(failure) => return Err(failure.reason.clone()),
    }
    let phase = report.measured.ok_or("the guest did not say when it measured")?;
    let done = done(&report).filter(|done| done.count > 0).ok_or("nothing was done in the measured phase")?;
    Ok(Shot { accel: report.accel, figures: figures(&done, &phase, report.accel == "kvm") })
}

fn config(case: Case, amount: Amount, image: &Image) -> RunConfig {
    let config = RunConfig { memory: MEMORY, entropy: 0, ..RunConfig::default() };
    match case {
        Case::Exchange { request, response } => RunConfig {
            depth: 1,
            nets: vec![NetConfig {
                frames: amount.exchanges,
                size: HEADERS + request,
                reply: Some(HEADERS + response),
                ..NetConfig::default()
            }],
            ..config
        },
        Case::Read { depth } => RunConfig {
            depth,
            block: BLOCK,
            span: SPAN,
            read_percent: 100,
            duration: amount.reading,
            disks: vec![DiskConfig { path: image.path(), read_only: false, job: Job::WriteTest }],
            ..config
        },
    }
}

/// Transactions, by the guest's word and the device's.
struct Done {
    count: u64,
    per_s: f64,
    /// Microseconds: median, 99th percentile, 99.9th.
    latency: [f64; 3],
}

fn done(report: &Report) -> Option<Done> {
    let net = report.nets.first().map(|net| Done {
        count: net.frames,
        per_s: net.per_s,
        latency: [net.p50_us, net.p99_us, net.p999_us],
    });
    net.or_else(|| {
        report.disks.first().map(|disk| Done {
            count: disk.requests,
            per_s: disk.iops,
            latency: [disk.p50_us, disk.p99_us, disk.p999_us],
        })
    })
}

fn figures(done: &Done, phase: &PhaseFigures, kvm: bool) -> Vec<(Figure, f64)> {
    let mut figures = vec![(Figure { metric: "rate", unit: "transactions/s", method: "clock" }, done.per_s)];
    for (metric, value) in ["latency-p50", "latency-p99", "latency-p999"].into_iter().zip(done.latency) {
        figures.push((Figure { metric, unit: "us", method: "clock" }, value));
    }
    let count = done.count as f64;
    let exits = phase.exits;
    let mut counts = vec![
        ("exits", exits.total()),
        ("exits-notify", exits.notify),
        ("exits-status", exits.interrupt_status),
        ("exits-acknowledge", exits.interrupt_acknowledge),
        ("exits-other", exits.other),
    ];
    if kvm {
        counts.push(("kernel-notify", phase.kicks.saturating_sub(exits.notify)));
        counts.push(("kernel-eoi", phase.interrupts));
    }
    counts.push(("interrupts", phase.interrupts));
    for (metric, value) in counts {
        figures.push((Figure { metric, unit: "1/transaction", method: "count" }, value as f64 / count));
    }
    let cpu = phase.cpu_s * 1e6 / count;
    figures.push((Figure { metric: "cpu", unit: "us/transaction", method: "process clock" }, cpu));
    figures
}
