//! What a run found.
use paravane_attach::KickPath;
use paravane_io::IoThreadFigures;
use std::path::PathBuf;

/// How the guest failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestFailure {
    /// One line.
    pub reason: String,
    /// Registers, one `NAME=value` a field, lines as they are to be printed; empty for a host thread.
    pub registers: Vec<String>,
}

impl GuestFailure {
    /// What there is to say of a triple fault.
    pub(crate) fn triple_fault(registers: Vec<String>) -> Self {
        Self { reason: "triple fault".into(), registers }
    }
}

/// How the run ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All jobs done and verified.
    Verified,
    /// A job failed or did not verify: one line a problem.
    NotVerified(Vec<String>),
    /// The operator stopped it.
    Cancelled,
    /// The guest crashed, panicked or hung.
    GuestFailed(GuestFailure),
}

/// One disk's figures.
#[derive(Clone, Debug)]
pub struct DiskResult {
    /// The image.
    pub path: PathBuf,
    /// "hash" or "write-test".
    pub job: &'static str,
    /// Size in bytes.
    pub bytes: u64,
    /// SHA-256 in hex: for a hash job the guest's, compared with the host's; for a write test the host's of the image afterwards. Empty if the run ended before.
    pub sha256: String,
    /// Bytes whose content was checked by the host against what they must be.
    pub bytes_verified: u64,
    /// Requests in the measured phase.
    pub requests: u64,
    /// Requests a second in the measured phase.
    pub iops: f64,
    /// Megabytes (10^6) a second in the measured phase.
    pub mb_s: f64,
    /// Latency percentiles in microseconds.
    pub p50_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
    /// 99.9th percentile.
    pub p999_us: f64,
    /// Host I/O engine.
    pub engine: String,
    /// What is wrong with this disk's job, if anything.
    pub problem: Option<String>,
}

/// What the dirty log says.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DirtyFigures {
    /// How often it was harvested.
    pub harvests: u64,
    /// Pages of 4 KiB that were dirty at a harvest, summed over all.
    pub pages: u64,
    /// Of those, pages that devices (and the VMM) had written.
    pub device_pages: u64,
    /// Of those, pages that the guest had written; `None` where nothing logs them.
    pub vcpu_pages: Option<u64>,
    /// Dirty pages a second, from the guest's start to its end.
    pub pages_per_s: f64,
    /// Whether a copy of RAM that was kept by the log alone was equal to RAM at the end; `None` if none was kept.
    pub verified: Option<bool>,
}

/// What the exits to user space were about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExitFigures {
    /// Kicks.
    pub notify: u64,
    /// Readings of the interrupt status.
    pub interrupt_status: u64,
    /// Acknowledgements of interrupts; where reading the status acknowledges, there are none.
    pub interrupt_acknowledge: u64,
    /// All others: set-up, configuration space, the control page, and exits that are no access to a device.
    pub other: u64,
}

impl ExitFigures {
    /// All of them.
    #[must_use]
    pub fn total(&self) -> u64 {
        let Self { notify, interrupt_status, interrupt_acknowledge, other } = *self;
        notify + interrupt_status + interrupt_acknowledge + other
    }
}

/// What the measured phase took, by the guest's word on when it was: a disk's mixed phase or the reading of its hash
/// job, a card's exchange of frames; of several devices from the first one's begin to the last one's end.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PhaseFigures {
    /// Exits to user space.
    pub exits: ExitFigures,
    /// Kicks that reached a device.
    pub kicks: u64,
    /// Interrupts raised by devices.
    pub interrupts: u64,
    /// Interrupts that the guest took, and ended (EOI), by its own count: several raised at once may be one.
    pub taken: u64,
    /// CPU seconds of this process, user and system, all threads.
    pub cpu_s: f64,
}

/// For how long kicks stopped the guest, by its own clock: from right before the write to the notification address until
/// right after it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct KickFigures {
    /// Kicks.
    pub count: u64,
    /// Mean in nanoseconds.
    pub mean_ns: f64,
    /// Median in nanoseconds.
    pub median_ns: f64,
}

/// What became of one network card's job.
#[derive(Clone, Debug)]
pub struct NetResult {
    /// What it was connected to: "echo" or "link".
    pub network: &'static str,
    /// Its address.
    pub mac: [u8; 6],
    /// Pairs of queues.
    pub queues: u16,
    /// Bytes of a frame.
    pub size: u32,
    /// Bytes of one that came back.
    pub reply: u32,
    /// Frames that were sent, and came back as they should, by the guest's word and the device's count.
    pub frames: u64,
    /// Frames there and back a second.
    pub per_s: f64,
    /// Latency there and back: median, in microseconds.
    pub p50_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
    /// 99.9th percentile.
    pub p999_us: f64,
    /// What is wrong, if anything is.
    pub problem: Option<String>,
}

/// One queue that ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueResult {
    /// Number of its device: disks first, then the entropy device, then network cards.
    pub device: usize,
    /// Its index.
    pub queue: u16,
    /// Number of the I/O thread that served it last.
    pub io_thread: usize,
    /// How often it changed threads.
    pub moves: u64,
    /// How its kicks came, since it was started last.
    pub kicks_by: KickPath,
    /// Kicks that came by an exit.
    pub exit_kicks: u64,
}
/// One run's figures.
#[derive(Clone, Debug)]
pub struct Report {
    /// How it ended.
    pub outcome: Outcome,
    /// "kvm" or "thread".
    pub accel: &'static str,
    /// Why that one.
    pub accel_reason: String,
    /// "mmio", "mmio-msi" or "pci".
    pub transport: &'static str,
    /// "split" or "packed", with ", in order" behind it where IN_ORDER was offered.
    pub ring: &'static str,
    /// Whether the devices were behind IOMMU domains.
    pub iommu: bool,
    /// The dirty log, if it was on.
    pub dirty: Option<DirtyFigures>,
    /// The disks.
    pub disks: Vec<DiskResult>,
    /// The network cards.
    pub nets: Vec<NetResult>,
    /// Exits to user space.
    pub exits: u64,
    /// What they were about.
    pub exits_by_kind: ExitFigures,
    /// The measured phase alone; `None` if the guest has not ended one.
    pub measured: Option<PhaseFigures>,
    /// For how long kicks stopped the guest; `None` if it did not time any.
    pub kick_stops: Option<KickFigures>,
    /// Kicks that reached a device.
    pub kicks: u64,
    /// Of those, kicks that came by an exit.
    pub exit_kicks: u64,
    /// The queues that ran, by device and index.
    pub queues: Vec<QueueResult>,
    /// The I/O threads.
    pub io_threads: Vec<IoThreadFigures>,
    /// Interrupts raised by devices.
    pub interrupts: u64,
    /// Of those, messages.
    pub messages: u64,
    /// Accesses to devices' registers that the specification forbids drivers; they had no effect.
    pub violations: u64,
    /// Entropy bytes that the guest drew.
    pub entropy_bytes: u64,
    /// CPU seconds of this process, user and system, all threads.
    pub host_cpu_s: f64,
    /// Megabytes (10^6) moved a CPU second, over all phases: both count from start to the guest's end.
    pub mb_per_cpu_s: f64,
    /// From process start to the guest's first request, in milliseconds.
    pub boot_ms: f64,
    /// Wall-clock seconds of the whole run.
    pub wall_s: f64,
    /// Resident memory beyond guest RAM at the end, in bytes.
    pub resident_overhead: u64,
}
