//! One run of the microVM; only its start or its measured phase counts.
use crate::BenchError;
use nix::sys::memfd::{MFdFlags, memfd_create};
use paravane_device::Device;
use paravane_device::blk::{Blk, BlkConfig};
use paravane_device::net::{BackEnd, Counters, Generator, LinkEnd, Net, NetConfig};
use paravane_device::rng::Rng;
use paravane_vmm::{
    AccelChoice, DiskJob, DiskWork, Job, KickFigures, NamedDevice, NetJob, Outcome, PhaseFigures, Report,
    RunConfig, Traffic,
};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
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

    /// A write test of all of it.
    fn disk(&self, number: usize) -> Result<NamedDevice, String> {
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        let disk = Blk::open(BlkConfig::new(&path)).map_err(|error| error.to_string())?;
        let image = disk.image().map_err(|error| error.to_string())?;
        let job = DiskJob { work: DiskWork::WriteTest, path: path.into(), image, engine: disk.engine() };
        Ok(NamedDevice::new(&format!("disk {number}"), Box::new(disk)).with_job(Job::Disk(job)))
    }
}

/// Far side of a network card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Peer {
    /// A host thread, which answers each frame as another machine would.
    Echo,
    /// Takes frames as fast as the guest sends them.
    Sink,
    /// Sends frames as fast as the guest has buffers.
    Source,
}

/// A network card and its traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Card {
    pub(crate) peer: Peer,
    pub(crate) frames: u64,
    /// Size of a frame in bytes.
    pub(crate) size: u32,
    /// Size of an answer in bytes.
    pub(crate) reply: u32,
}

impl Card {
    /// Makes the card.
    ///
    /// # Errors
    /// The host refuses.
    pub(crate) fn open(&self) -> io::Result<(Box<dyn Device>, Arc<Counters>)> {
        let reply = self.reply as usize;
        match self.peer {
            Peer::Echo => self.over(LinkEnd::to_echo_peer(1, reply)?),
            Peer::Sink => self.over(Generator::new(1, 0, reply)?),
            Peer::Source => self.over(Generator::new(1, self.frames, reply)?),
        }
    }

    fn over<B: BackEnd>(&self, back_end: B) -> io::Result<(Box<dyn Device>, Arc<Counters>)> {
        let longest = self.size.max(self.reply);
        let mtu = (longest > 1500).then(|| u16::try_from(longest).unwrap_or(u16::MAX));
        let config = NetConfig { mtu, ..NetConfig::new([0x52, 0x54, 0, 0, 0, 1]) };
        let card = Net::new(config, back_end).map_err(io::Error::other)?;
        let counters = card.counters();
        Ok((Box::new(card), counters))
    }

    fn device(&self, number: usize) -> Result<NamedDevice, String> {
        let (network, traffic) = match self.peer {
            Peer::Echo => ("echo-peer", Traffic::Exchange),
            Peer::Sink => ("sink", Traffic::Send),
            Peer::Source => ("source", Traffic::Receive),
        };
        let Self { frames, size, reply, .. } = *self;
        let (device, _) = self.open().map_err(|error| error.to_string())?;
        let job = NetJob { network, traffic, frames, size, reply };
        Ok(NamedDevice::new(&format!("net {number}"), device).with_job(Job::Net(job)))
    }
}

/// A device of a machine.
#[derive(Clone, Copy)]
pub(crate) enum OneDevice<'a> {
    /// A disk with this image.
    Disk(&'a Image),
    /// A network card.
    Card(Card),
}

impl OneDevice<'_> {
    /// A machine for it.
    pub(crate) fn machine(&self) -> RunConfig {
        let config = RunConfig { memory: MEMORY, ..RunConfig::default() };
        match self {
            Self::Disk(image) => RunConfig { span: image.bytes, ..config },
            Self::Card(_) => config,
        }
    }

    /// Makes it; `number` is for its name.
    fn open(&self, number: usize) -> Result<NamedDevice, String> {
        match self {
            Self::Disk(image) => image.disk(number),
            Self::Card(card) => card.device(number),
        }
    }
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
    ///
    /// Of several devices, the highest.
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

/// What it took a guest to publish its first request.
pub(crate) struct Boot {
    /// "kvm" or "thread".
    pub(crate) accel: &'static str,
    /// Milliseconds since the machine was asked for.
    pub(crate) ms: f64,
    /// Exits to user space.
    pub(crate) exits: u64,
    /// Exits by KVM's count, if it counts them.
    pub(crate) kvm_exits: Option<u64>,
}

/// Runs the machine once, for its measured phase.
///
/// # Errors
/// Why there are no figures, in one line.
pub(crate) fn run(config: &RunConfig, devices: &[OneDevice<'_>]) -> Result<Sample, String> {
    let report = report(config, devices)?;
    let phase = report.measured.ok_or("the guest reported no measured phase")?;
    let devices = done(&report);
    let count = devices.iter().map(|(count, ..)| *count).sum::<u64>() as f64;
    if count == 0.0 {
        return Err("no request completed in the measured phase".into());
    }
    let per_s = match devices.as_slice() {
        [(_, per_s, _)] => *per_s,
        // Each has a rate of its own time, and these differ.
        _ => count / phase.wall_s.max(1e-9),
    };
    let highest = |all: [f64; 3], (_, _, one): &(u64, f64, [f64; 3])| {
        std::array::from_fn(|percentile| all[percentile].max(one[percentile]))
    };
    let latency = devices.iter().fold([0.0; 3], highest);
    Ok(Sample { accel: report.accel, count, per_s, latency, phase, stops: report.kick_stops })
}

/// Runs the machine once, for its start.
///
/// # Errors
/// Why there are no figures, in one line.
pub(crate) fn boot(config: &RunConfig, device: OneDevice<'_>) -> Result<Boot, String> {
    let report = report(config, &[device])?;
    let exits = report.boot_exits.ok_or("the guest reported no request")?;
    Ok(Boot { accel: report.accel, ms: report.boot_ms, exits, kvm_exits: report.boot_kvm_exits })
}

/// The report of a run that verified.
fn report(config: &RunConfig, devices: &[OneDevice<'_>]) -> Result<Report, String> {
    let devices = devices.iter().enumerate().map(|(number, device)| device.open(number));
    let devices = devices.collect::<Result<_, _>>()?;
    let report = paravane_vmm::run(config, devices, &Default::default(), Instant::now())
        .map_err(|error| error.to_string())?;
    match &report.outcome {
        Outcome::Verified => Ok(report),
        Outcome::NotVerified(problems) => Err(problems.join("; ")),
        Outcome::Cancelled => Err("the run was cancelled".into()),
        Outcome::GuestFailed(failure) => Err(failure.reason.clone()),
    }
}

/// Requests, rate and latencies of each device.
fn done(report: &Report) -> Vec<(u64, f64, [f64; 3])> {
    let nets = report.nets.iter().map(|net| (net.frames, net.per_s, [net.p50_us, net.p99_us, net.p999_us]));
    let disks =
        report.disks.iter().map(|disk| (disk.requests, disk.iops, [disk.p50_us, disk.p99_us, disk.p999_us]));
    nets.chain(disks).collect()
}

/// Checks that KVM can run the guest.
///
/// # Errors
/// Why it cannot.
pub(crate) fn runs_under_kvm() -> Result<(), String> {
    let config = RunConfig { accel: AccelChoice::Kvm, ..RunConfig::default() };
    let rng = NamedDevice::new("rng", Box::new(Rng::new())).with_job(Job::Entropy(16));
    let report = paravane_vmm::run(&config, vec![rng], &Default::default(), Instant::now());
    report.map(drop).map_err(|error| error.to_string())
}

/// Checks for KVM; without it, reports that `test` is skipped.
#[cfg(test)]
pub(crate) fn kvm(test: &str) -> bool {
    let Err(why) = runs_under_kvm() else { return true };
    paravane_test_support::skip(test, why);
    false
}
