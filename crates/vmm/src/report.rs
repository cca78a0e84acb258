//! Report of a run.
use paravane_attach::KickPath;
use paravane_io::IoThreadFigures;
use serde::{Serialize, Serializer};
use std::path::PathBuf;
use std::sync::Arc;

/// Failure of the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestFailure {
    /// The reason, in one line.
    pub reason: String,
    /// Registers as lines of `NAME=value` fields; empty for a guest on a host thread.
    pub registers: Vec<String>,
}

impl GuestFailure {
    /// A triple fault.
    pub(crate) fn triple_fault(registers: Vec<String>) -> Self {
        Self { reason: "triple fault".into(), registers }
    }
}

/// Outcome of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All jobs done and verified.
    Verified,
    /// A job failed or was not verified; one line for each problem.
    NotVerified(Vec<String>),
    /// The operator stopped it.
    Cancelled,
    /// The guest crashed, panicked or hung.
    GuestFailed(GuestFailure),
}

/// Figures of one disk.
#[derive(Clone, Debug, Serialize)]
pub struct DiskResult {
    /// The image.
    pub path: PathBuf,
    /// Job: "hash" or "write-test".
    pub job: &'static str,
    /// Size in bytes.
    pub bytes: u64,
    /// Number of queues that the guest used, each for a part of the job.
    pub queues: u32,
    /// SHA-256 in hex.
    ///
    /// Hash job: the host's, if the guest's of each queue's part is right. Write test: the host's, of
    /// the image afterwards. Empty if the run ended before.
    pub sha256: String,
    /// Bytes whose content the host has verified.
    pub bytes_verified: u64,
    /// Requests in the measured phase.
    #[serde(skip)]
    pub requests: u64,
    /// Requests per second in the measured phase.
    pub iops: f64,
    /// Megabytes (10^6 bytes) per second in the measured phase.
    pub mb_s: f64,
    /// Median latency in microseconds.
    pub p50_us: f64,
    /// 99th percentile, in microseconds.
    pub p99_us: f64,
    /// 99.9th percentile, in microseconds.
    pub p999_us: f64,
    /// Host I/O engine.
    pub engine: String,
    /// Problem of this disk's job.
    pub problem: Option<String>,
}

/// Figures of the dirty log.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct DirtyFigures {
    /// Number of harvests.
    pub harvests: u64,
    /// Pages of 4 KiB that were dirty at a harvest, summed over all.
    pub pages: u64,
    /// Of those, pages that devices (and the VMM) had written.
    pub device_pages: u64,
    /// Of those, pages that the guest had written; `None`: nothing logs them.
    pub vcpu_pages: Option<u64>,
    /// Dirty pages per second, from the guest's start to its end.
    pub pages_per_s: f64,
    /// Whether a copy of RAM, kept from the log alone, equals RAM at the end.
    ///
    /// `None`: no copy was kept.
    pub verified: Option<bool>,
}

/// Figures of one vCPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct CpuFigures {
    /// Exits to user space.
    pub exits: u64,
    /// Exits by KVM's count: those to user space, and those that KVM handles itself.
    ///
    /// `None`: without KVM, or with one older than Linux 5.14.
    pub kvm_exits: Option<u64>,
    /// CPU time of its thread in seconds: guest code, exits, and the kernel.
    pub cpu_s: f64,
}

/// Guest RAM, and what the host gave of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MemoryFigures {
    /// Size in bytes.
    pub bytes: u64,
    /// Whether it is a file that another process can map.
    #[serde(rename = "shared")]
    pub is_shared: bool,
    /// Bytes that the guest and its devices have touched, or that were allocated at the start.
    #[serde(rename = "resident_bytes")]
    pub resident: u64,
    /// Of those, bytes in pages of 2 MiB or more.
    #[serde(rename = "huge_bytes")]
    pub huge: u64,
}

/// Exits to user space, by cause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ExitFigures {
    /// Kicks.
    pub notify: u64,
    /// Readings of the interrupt status.
    pub interrupt_status: u64,
    /// Interrupt acknowledgements; none where reading the status acknowledges.
    pub interrupt_acknowledge: u64,
    /// All others: set-up, configuration space, control page, exits without an access.
    pub other: u64,
}

impl ExitFigures {
    /// Sum of all.
    #[must_use]
    pub fn total(&self) -> u64 {
        let Self { notify, interrupt_status, interrupt_acknowledge, other } = *self;
        notify + interrupt_status + interrupt_acknowledge + other
    }
}

/// Cost of the measured phase, whose begin and end the guest announces.
///
/// It is a disk's mixed phase or hash job, or a card's exchange of frames. Of several devices, it
/// lasts from the first begin to the last end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct PhaseFigures {
    /// Exits to user space.
    #[serde(rename = "exits_by_kind")]
    pub exits: ExitFigures,
    /// Exits by KVM's count, if it counts them.
    pub kvm_exits: Option<u64>,
    /// Kicks that reached a device.
    pub kicks: u64,
    /// Interrupts raised by devices.
    pub interrupts: u64,
    /// Interrupts that the guest took and ended (EOI), by its count.
    ///
    /// Several raised at once may be one.
    pub taken: u64,
    /// CPU time of all threads in seconds: user (with guest) and system.
    pub cpu_s: f64,
    /// Duration in seconds.
    pub wall_s: f64,
}

/// Time of a kick by the guest's clock.
///
/// From before the write to the notification address until after it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct KickFigures {
    /// Kicks.
    pub count: u64,
    /// Mean in nanoseconds.
    pub mean_ns: f64,
    /// Median in nanoseconds.
    pub median_ns: f64,
}

/// Result of one network card's job.
#[derive(Clone, Debug, Serialize)]
pub struct NetResult {
    /// Network: "echo", "link" and so on.
    pub network: &'static str,
    /// MAC address.
    #[serde(serialize_with = "mac")]
    pub mac: [u8; 6],
    /// Pairs of queues.
    pub queues: u16,
    /// Size of a frame in bytes.
    pub size: u32,
    /// Size of an answer in bytes.
    pub reply: u32,
    /// Frames exchanged, as guest and device agree.
    pub frames: u64,
    /// Frames there and back per second.
    pub per_s: f64,
    /// Median latency there and back, in microseconds.
    pub p50_us: f64,
    /// 99th percentile, in microseconds.
    pub p99_us: f64,
    /// 99.9th percentile, in microseconds.
    pub p999_us: f64,
    /// Problem of the job.
    pub problem: Option<String>,
}

/// One queue that ran.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct QueueResult {
    /// Device number.
    pub device: usize,
    /// Device name: "disk 0", "rng", "net 0".
    #[serde(skip)]
    pub device_name: Arc<str>,
    /// Queue index.
    pub queue: u16,
    /// Number of the guest's CPU that works on it; `None`: it has no CPU of its own.
    pub cpu: Option<u32>,
    /// Number of the I/O thread that served it last.
    pub io_thread: usize,
    /// Changes of thread.
    pub moves: u64,
    /// How kicks arrived, since the last start.
    #[serde(serialize_with = "path")]
    pub kicks_by: KickPath,
    /// Kicks that came as exits.
    pub exit_kicks: u64,
}
/// Report of a run. It serializes without its outcome, with names and units that are stable.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Outcome.
    #[serde(skip)]
    pub outcome: Outcome,
    /// Accelerator: "kvm" or "thread".
    pub accel: &'static str,
    /// Reason for the choice of accelerator.
    pub accel_reason: String,
    /// Transport: "mmio", "mmio-msi" or "pci".
    pub transport: &'static str,
    /// Register version of virtio-mmio; `None`: PCI.
    pub mmio_version: Option<u32>,
    /// Ring layout: "split" or "packed"; ", in order" follows if offered.
    pub ring: &'static str,
    /// Whether the devices were behind IOMMU domains.
    pub iommu: bool,
    /// The dirty log, if it was on.
    #[serde(rename = "dirty_log")]
    pub dirty: Option<DirtyFigures>,
    /// The disks.
    pub disks: Vec<DiskResult>,
    /// The network cards.
    pub nets: Vec<NetResult>,
    /// Exits to user space.
    pub exits: u64,
    /// Exits by KVM's count: those to user space, and those that KVM handles itself.
    ///
    /// `None`: without KVM, or with one older than Linux 5.14.
    pub kvm_exits: Option<u64>,
    /// Each processor.
    pub cpus: Vec<CpuFigures>,
    /// Exits by cause.
    pub exits_by_kind: ExitFigures,
    /// The measured phase; `None`: the guest has not ended one.
    pub measured: Option<PhaseFigures>,
    /// Time that the guest spends in kicks; `None`: it timed none.
    #[serde(skip)]
    pub kick_stops: Option<KickFigures>,
    /// Kicks that reached a device.
    pub kicks: u64,
    /// Of those, kicks that came as exits.
    pub exit_kicks: u64,
    /// The queues that ran, by device and index.
    pub queues: Vec<QueueResult>,
    /// The I/O threads.
    #[serde(serialize_with = "threads")]
    pub io_threads: Vec<IoThreadFigures>,
    /// Interrupts raised by devices.
    pub interrupts: u64,
    /// Of those, messages.
    pub messages: u64,
    /// Register accesses that the specification forbids drivers. They had no effect.
    pub violations: u64,
    /// Entropy bytes that the guest drew.
    pub entropy_bytes: u64,
    /// Times that the guest moved a queue's or pair's messages to another processor.
    pub moves: u64,
    /// CPU time of all threads in seconds: user (with guest) and system.
    pub host_cpu_s: f64,
    /// Megabytes (10^6 bytes) moved per CPU second, over all phases.
    pub mb_per_cpu_s: f64,
    /// Time from process start to the guest's first request, in milliseconds.
    pub boot_ms: f64,
    /// Exits to user space until then; `None`: the guest reported no request.
    pub boot_exits: Option<u64>,
    /// Exits by KVM's count until then, if it counts them.
    pub boot_kvm_exits: Option<u64>,
    /// Wall-clock time of the run in seconds.
    pub wall_s: f64,
    /// Guest RAM.
    pub memory: MemoryFigures,
    /// Resident memory beyond guest RAM at the end, in bytes.
    #[serde(rename = "resident_overhead_bytes")]
    pub resident_overhead: u64,
}

fn mac<S: Serializer>(mac: &[u8; 6], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&mac.map(|byte| format!("{byte:02x}")).join(":"))
}

// serde passes a reference.
#[expect(clippy::trivially_copy_pass_by_ref)]
fn path<S: Serializer>(path: &KickPath, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(path.name())
}

fn threads<S: Serializer>(threads: &[IoThreadFigures], serializer: S) -> Result<S::Ok, S::Error> {
    #[derive(Serialize)]
    #[serde(remote = "IoThreadFigures")]
    struct Figures {
        turns: u64,
        polled_ns: u64,
        fruitful_polls: u64,
        fruitless_polls: u64,
    }
    #[derive(Serialize)]
    struct Thread<'a>(#[serde(with = "Figures")] &'a IoThreadFigures);
    serializer.collect_seq(threads.iter().map(Thread))
}
