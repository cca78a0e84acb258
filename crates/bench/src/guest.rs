//! One run of the microVM with one device; only the measured phase counts.
use crate::BenchError;
use nix::sys::memfd::{MFdFlags, memfd_create};
use paravane_vmm::{
    AccelChoice, DiskConfig, Job, KickFigures, NetConfig, Outcome, PhaseFigures, Report, RunConfig,
};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::PathBuf;
use std::time::Instant;

/// Bytes before the payload of a frame: Ethernet, IPv4, TCP with time stamps.
pub(crate) const HEADERS: u32 = 14 + 20 + 32;
/// Bytes of guest memory.
const MEMORY: u64 = 32 << 20;

/// A disk image in memory.
pub(crate) struct Image {
    file: File,
    bytes: u64,
}

impl Image {
    /// Makes an image of `bytes` zeroes.
    ///
    /// # Errors
    /// The host refuses.
    pub(crate) fn new(bytes: u64) -> Result<Self, BenchError> {
        let failed = |source| BenchError::Os { what: "make an image in memory", source };
        let fd = memfd_create("bench-image", MFdFlags::MFD_CLOEXEC).map_err(|error| failed(error.into()))?;
        let file = File::from(fd);
        file.set_len(bytes).map_err(failed)?;
        Ok(Self { file, bytes })
    }

    /// The image itself.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// A machine with this image as its disk.
    pub(crate) fn machine(&self) -> RunConfig {
        let path = PathBuf::from(format!("/proc/self/fd/{}", self.file.as_raw_fd()));
        let disk = DiskConfig { path, read_only: false, job: Job::WriteTest };
        RunConfig { span: self.bytes, disks: vec![disk], ..machine() }
    }
}

/// A machine with one network card.
pub(crate) fn machine_with(net: NetConfig) -> RunConfig {
    RunConfig { nets: vec![net], ..machine() }
}

fn machine() -> RunConfig {
    RunConfig { memory: MEMORY, entropy: 0, ..RunConfig::default() }
}

/// The figures of a run.
pub(crate) struct Sample {
    /// "kvm" or "thread".
    pub(crate) accel: &'static str,
    /// Requests (frames or blocks) that guest and device agree on; not 0.
    pub(crate) count: f64,
    /// Requests per second.
    pub(crate) per_s: f64,
    /// Microseconds from publishing to completion: median, 99th and 99.9th percentile.
    pub(crate) latency: [f64; 3],
    /// Counters of the measured phase.
    pub(crate) phase: PhaseFigures,
    /// Time for which kicks stopped the guest, if measured.
    pub(crate) stops: Option<KickFigures>,
}

impl Sample {
    /// Microseconds of CPU time of the process per request.
    pub(crate) fn cpu_us(&self) -> f64 {
        self.phase.cpu_s * 1e6 / self.count
    }
}

/// Runs the machine once.
///
/// # Errors
/// Why there are no figures, in one line.
pub(crate) fn run(config: RunConfig) -> Result<Sample, String> {
    let report =
        paravane_vmm::run(config, Default::default(), Instant::now()).map_err(|error| error.to_string())?;
    match &report.outcome {
        Outcome::Verified => {}
        Outcome::NotVerified(problems) => return Err(problems.join("; ")),
        Outcome::Cancelled => return Err("the run was cancelled".into()),
        Outcome::GuestFailed(failure) => return Err(failure.reason.clone()),
    }
    let phase = report.measured.ok_or("the guest reported no measured phase")?;
    let (count, per_s, latency) = done(&report).ok_or("the machine has no device")?;
    if count == 0 {
        return Err("no request completed in the measured phase".into());
    }
    let stops = report.kick_stops;
    Ok(Sample { accel: report.accel, count: count as f64, per_s, latency, phase, stops })
}

fn done(report: &Report) -> Option<(u64, f64, [f64; 3])> {
    let net = report.nets.first().map(|net| (net.frames, net.per_s, [net.p50_us, net.p99_us, net.p999_us]));
    net.or_else(|| {
        let disk = report.disks.first()?;
        Some((disk.requests, disk.iops, [disk.p50_us, disk.p99_us, disk.p999_us]))
    })
}

/// Checks that KVM can run the guest.
///
/// # Errors
/// Why it cannot.
pub(crate) fn runs_under_kvm() -> Result<(), String> {
    let config = RunConfig { accel: AccelChoice::Kvm, entropy: 16, ..RunConfig::default() };
    let report = paravane_vmm::run(config, Default::default(), Instant::now());
    report.map(drop).map_err(|error| error.to_string())
}

/// Checks for KVM; without it, reports that `test` is skipped.
#[cfg(test)]
pub(crate) fn kvm(test: &str) -> bool {
    let Err(why) = runs_under_kvm() else { return true };
    paravane_test_support::skip(test, why);
    false
}
