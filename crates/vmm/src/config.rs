//! What the operator asks for.
mod check;

pub(crate) use check::{check, check_jobs, refuse};

use paravane_attach::RingFeatures;
use paravane_device::blk::EngineChoice;
use std::path::PathBuf;
use std::time::Duration;

/// What runs the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AccelChoice {
    /// KVM if it is usable, else a host thread.
    #[default]
    Auto,
    /// KVM or an error.
    Kvm,
    /// A host thread.
    Thread,
}

/// How the guest learns of completions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Completion {
    /// Interrupts.
    #[default]
    Interrupt,
    /// Polling.
    Poll,
}

/// Whether dirty pages are logged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DirtyLogging {
    /// No.
    #[default]
    Off,
    /// Logged and counted.
    Rate,
    /// Besides, a copy of RAM is kept by what the log says, and must equal RAM at the end.
    Verify,
}

/// What the guest does with a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Job {
    /// Reads all of it and computes its SHA-256; never writes.
    Hash,
    /// Writes a pattern, mixes reads and writes, reads back.
    WriteTest,
}

/// How queues lie in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RingLayout {
    /// Split virtqueues (section 2.7).
    #[default]
    Split,
    /// Packed virtqueues (section 2.8).
    Packed,
}

/// How the guest finds its devices, kicks them and is interrupted by them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TransportChoice {
    /// virtio-mmio, version 2.
    #[default]
    Mmio,
    /// The same with messages and notification addresses (docs/reference/virtio-mmio-msi.md).
    MmioMsi,
    /// virtio-pci with MSI-X.
    Pci,
}

impl TransportChoice {
    /// As the command line and the report have it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Mmio => "mmio",
            Self::MmioMsi => "mmio-msi",
            Self::Pci => "pci",
        }
    }
}

/// How a message reaches the guest under KVM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MsiDelivery {
    /// By KVM_SIGNAL_MSI: one system call that names the message. Measured, it costs three quarters of the other.
    #[default]
    Signal,
    /// By an irqfd with a route, which another process can be given.
    Irqfd,
}

/// Faults that tests inject into the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Inject {
    /// None.
    #[default]
    None,
    /// An undefined instruction.
    Crash,
    /// No more progress.
    Hang,
    /// A panic.
    Panic,
}

/// One disk.
#[derive(Clone, Debug)]
pub struct DiskConfig {
    /// The raw image.
    pub path: PathBuf,
    /// Open it read-only; its job is then [`Job::Hash`].
    pub read_only: bool,
    /// What to do with it.
    pub job: Job,
}

/// What a network card is connected to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Network {
    /// An echo of what the built-in guest sends, at once, by the thread that serves the queue.
    #[default]
    Echo,
    /// Another thread of the host, which answers each frame of the built-in guest's as another machine would.
    Station,
    /// Nothing: what the built-in guest sends, as fast as it can, is swallowed.
    Sink,
    /// A source of frames, as fast as the built-in guest has buffers; it sends none.
    Source,
    /// A TAP device of the host, by its name.
    Tap(String),
    /// A TAP device of the host, by the numbers of descriptors that this process was started with: one for each pair of
    /// queues.
    TapFds(Vec<i32>),
    /// The card whose link has the same name. The built-in guest sends frames on the first one, and is an echo on the
    /// second.
    Link(String),
}

impl Network {
    /// Whether only the built-in guest knows what to do with it.
    pub(crate) fn for_the_builtin_guest(&self) -> bool {
        matches!(self, Self::Echo | Self::Station | Self::Sink | Self::Source)
    }

    /// As on the command line.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Echo => "echo",
            Self::Station => "station",
            Self::Sink => "sink",
            Self::Source => "source",
            Self::Tap(_) => "tap",
            Self::TapFds(_) => "tap-fd",
            Self::Link(_) => "link",
        }
    }
}

/// Which blocks the write test's mixed phase works on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BlockOrder {
    /// Any.
    #[default]
    Random,
    /// One after the other, over and over.
    Sequential,
}

/// Who serves queues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ServingMode {
    /// I/O threads.
    #[default]
    IoThreads,
    /// The vCPU's own thread, in the exit of a kick: for comparison. Works without ioeventfds only.
    Vcpu,
    /// Another process, which is this program started once more ([`crate::owner_main`]): for comparison. It must be KVM,
    /// messages, and [`MsiDelivery::Irqfd`].
    Process,
}

/// One network card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetConfig {
    /// What it is connected to.
    pub network: Network,
    /// Its address.
    pub mac: [u8; 6],
    /// Pairs of queues.
    pub queues: u16,
    /// Largest packet that the guest is told of, without the Ethernet header; with an echo that follows from the frames.
    pub mtu: Option<u16>,
    /// Checksums and segmentation may be left to the far side, as far as it knows them.
    pub offloads: bool,
    /// The kernel's vhost-net moves the frames of a TAP device, where it can.
    pub vhost: bool,
    /// Frames that the guest sends, and that must come back; or that go one way.
    pub frames: u64,
    /// Bytes of each, with the Ethernet header.
    pub size: u32,
    /// Bytes of each that comes back; `None`: as many.
    pub reply: Option<u32>,
}

impl NetConfig {
    /// Bytes of each frame that comes back.
    #[must_use]
    pub fn reply(&self) -> u32 {
        self.reply.unwrap_or(self.size)
    }
}

impl Default for NetConfig {
    fn default() -> Self {
        Self {
            network: Network::Echo,
            mac: [0x52, 0x54, 0, 0, 0, 1],
            queues: 1,
            mtu: None,
            offloads: true,
            vhost: false,
            frames: 10_000,
            size: 64,
            reply: None,
        }
    }
}

/// One run.
#[derive(Clone, Debug)]
pub struct RunConfig {
    /// What runs the guest.
    pub accel: AccelChoice,
    /// Guest RAM in bytes.
    pub memory: u64,
    /// RAM from huge pages.
    pub hugepages: bool,
    /// The disks.
    pub disks: Vec<DiskConfig>,
    /// Requests in flight a disk.
    pub depth: u32,
    /// Bytes a request.
    pub block: u32,
    /// Duration of the mixed phase.
    pub duration: Duration,
    /// Write test: at most so many bytes from the start of each disk.
    pub span: u64,
    /// Write test: percentage of reads in the mixed phase.
    pub read_percent: u32,
    /// Write test: which blocks the mixed phase works on.
    pub order: BlockOrder,
    /// Seed of pattern and order.
    pub seed: u64,
    /// How the guest learns of completions.
    pub completion: Completion,
    /// Host I/O engine.
    pub engine: EngineChoice,
    /// How devices are reached.
    pub transport: TransportChoice,
    /// How messages reach the guest, where the transport has some.
    pub msi_delivery: MsiDelivery,
    /// How queues lie in memory.
    pub ring: RingLayout,
    /// Offer IN_ORDER: buffers are used in the order in which they were made available.
    pub in_order: bool,
    /// Put each device behind an IOMMU domain of its own.
    pub iommu: bool,
    /// Log dirty pages.
    pub dirty_log: DirtyLogging,
    /// Register ioeventfds (off: every kick exits).
    pub ioeventfd: bool,
    /// Most ioeventfds at a time, as on a host with few; `None`: what the host gives. Queues that come too late exit.
    pub max_ioeventfds: Option<u32>,
    /// I/O threads, and each device's queues are dealt out to them; `None`: up to one a device, with all its queues.
    pub io_threads: Option<u16>,
    /// Move queues from busy I/O threads to idle ones.
    pub rebalance: bool,
    /// Longest poll of a queue before its I/O thread waits for a kick; 0: no polling.
    pub longest_poll: Duration,
    /// Who serves queues.
    pub owner: ServingMode,
    /// Have the guest time its kicks.
    pub time_kicks: bool,
    /// The CPU that the guest runs on; `None`: any. The machine's other threads run where the caller's does.
    pub vcpu_cpu: Option<usize>,
    /// Entropy device: bytes that the guest draws (0: no device).
    pub entropy: u64,
    /// The network cards.
    pub nets: Vec<NetConfig>,
    /// No progress for this long is a hang.
    pub hang_timeout: Duration,
    /// Test fault.
    pub inject: Inject,
}

impl RunConfig {
    /// Ring features that the machine offers.
    pub(crate) fn ring_features(&self) -> RingFeatures {
        let rings = match self.ring {
            RingLayout::Split => RingFeatures::default(),
            RingLayout::Packed => RingFeatures::default().packed(),
        };
        if self.in_order { rings.in_order() } else { rings }
    }
}

impl Default for RunConfig {
    fn default() -> Self {
        Self {
            accel: AccelChoice::Auto,
            memory: 128 << 20,
            hugepages: false,
            disks: Vec::new(),
            depth: 16,
            block: 4096,
            duration: Duration::from_secs(1),
            span: 1 << 30,
            read_percent: 50,
            order: BlockOrder::Random,
            seed: 1,
            completion: Completion::Interrupt,
            engine: EngineChoice::Auto,
            transport: TransportChoice::Mmio,
            msi_delivery: MsiDelivery::Signal,
            ring: RingLayout::Split,
            in_order: false,
            iommu: false,
            dirty_log: DirtyLogging::Off,
            ioeventfd: true,
            max_ioeventfds: None,
            io_threads: None,
            rebalance: false,
            longest_poll: Duration::ZERO,
            owner: ServingMode::IoThreads,
            time_kicks: false,
            vcpu_cpu: None,
            entropy: 4096,
            nets: Vec::new(),
            hang_timeout: Duration::from_secs(30),
            inject: Inject::None,
        }
    }
}
