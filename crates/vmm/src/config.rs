//! Configuration of a run.
mod check;

pub(crate) use check::{check, check_jobs, refuse};

use crate::machine::server::QueueServer;
use paravane_attach::RingFeatures;
use paravane_device::blk::EngineChoice;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Accelerator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AccelChoice {
    /// KVM if it is usable, else a host thread.
    #[default]
    Auto,
    /// KVM, or an error if it is not usable.
    Kvm,
    /// A host thread.
    Thread,
}

/// How the guest waits for completions.
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
    /// Log and verify: a copy of RAM kept from the log alone must equal RAM.
    Verify,
}

/// Job of the built-in guest on a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Job {
    /// Reads all of it and computes its SHA-256; never writes.
    Hash,
    /// Writes a pattern, mixes reads and writes, reads back.
    WriteTest,
}

/// Virtqueue layout.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RingLayout {
    /// Split virtqueues (section 2.7).
    #[default]
    Split,
    /// Packed virtqueues (section 2.8).
    Packed,
}

/// Transport: registers, kicks and interrupts of devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TransportChoice {
    /// virtio-mmio, version 2.
    #[default]
    Mmio,
    /// The same with messages and notification addresses.
    ///
    /// docs/reference/virtio-mmio-msi.md specifies it.
    MmioMsi,
    /// virtio-pci with MSI-X.
    Pci,
}

impl TransportChoice {
    /// Name on the command line and in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Mmio => "mmio",
            Self::MmioMsi => "mmio-msi",
            Self::Pci => "pci",
        }
    }
}

/// Delivery of messages under KVM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MsiDelivery {
    /// KVM_SIGNAL_MSI: one system call with the message.
    ///
    /// It costs three quarters of an irqfd, as measured.
    #[default]
    Signal,
    /// An irqfd with a route, which can be handed to another process.
    Irqfd,
}

/// Fault that a test injects into the guest.
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
    /// Job.
    pub job: Job,
}

/// Network of a card.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Network {
    /// Echo: the thread that serves the queue sends each frame back at once.
    #[default]
    Echo,
    /// Echo peer on a host thread, which answers each frame as another machine would.
    EchoPeer,
    /// Sink: takes frames as fast as the built-in guest sends them.
    Sink,
    /// Source: sends frames as fast as the built-in guest has buffers.
    Source,
    /// TAP device of the host, by name.
    Tap(String),
    /// TAP device of the host, by inherited descriptors: one for each queue pair.
    TapFds(Vec<i32>),
    /// Link to the other card with this name.
    ///
    /// The built-in guest sends on the first card, and echoes on the second.
    Link(String),
}

impl Network {
    /// Whether only the built-in guest can use it.
    pub(crate) fn for_the_builtin_guest(&self) -> bool {
        matches!(self, Self::Echo | Self::EchoPeer | Self::Sink | Self::Source)
    }

    /// Name on the command line.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Echo => "echo",
            Self::EchoPeer => "echo-peer",
            Self::Sink => "sink",
            Self::Source => "source",
            Self::Tap(_) => "tap",
            Self::TapFds(_) => "tap-fd",
            Self::Link(_) => "link",
        }
    }
}

/// Order of blocks in the mixed phase of the write test.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BlockOrder {
    /// Any.
    #[default]
    Random,
    /// Sequential, again from the start at the end.
    Sequential,
}

/// One network card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetConfig {
    /// Network.
    pub network: Network,
    /// MAC address.
    pub mac: [u8; 6],
    /// Pairs of queues.
    pub queues: u16,
    /// MTU in bytes for the guest [from the frames of the job, else none].
    pub mtu: Option<u16>,
    /// Offer checksum and segmentation offloads that the back end supports.
    pub offloads: bool,
    /// Have the kernel's vhost-net serve the queues of a TAP device, where it can.
    pub vhost: bool,
    /// Frames of the built-in guest's job.
    pub frames: u64,
    /// Size of a frame in bytes, with the Ethernet header.
    pub size: u32,
    /// Size of an answer in bytes [the same].
    pub reply: Option<u32>,
}

impl NetConfig {
    /// Size of an answer in bytes.
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

/// Configuration of a run.
#[derive(Clone, Debug)]
pub struct RunConfig {
    /// Accelerator.
    pub accel: AccelChoice,
    /// Guest RAM in bytes.
    pub memory: u64,
    /// RAM from huge pages.
    pub hugepages: bool,
    /// The disks.
    pub disks: Vec<DiskConfig>,
    /// Requests in flight a disk.
    pub depth: u32,
    /// Size of a request in bytes.
    pub block: u32,
    /// Duration of the mixed phase.
    pub duration: Duration,
    /// Write test: most bytes to test, from the start of each disk.
    pub span: u64,
    /// Write test: percentage of reads in the mixed phase.
    pub read_percent: u32,
    /// Write test: order of blocks in the mixed phase.
    pub order: BlockOrder,
    /// Seed of pattern and order.
    pub seed: u64,
    /// How the guest waits for completions.
    pub completion: Completion,
    /// Host I/O engine.
    pub engine: EngineChoice,
    /// Transport.
    pub transport: TransportChoice,
    /// Delivery of messages, if the transport has messages.
    pub msi_delivery: MsiDelivery,
    /// Virtqueue layout.
    pub ring: RingLayout,
    /// Offer VIRTIO_F_IN_ORDER.
    pub in_order: bool,
    /// Put each device behind a separate IOMMU domain.
    pub iommu: bool,
    /// Log dirty pages.
    pub dirty_log: DirtyLogging,
    /// Register ioeventfds. If not, every kick exits.
    pub ioeventfd: bool,
    /// Most ioeventfds at a time, to test hosts with few [no limit].
    ///
    /// Kicks of further queues exit.
    pub max_ioeventfds: Option<u32>,
    /// Number of I/O threads; queues are assigned round-robin.
    ///
    /// Default: one per device for all its queues, at most 4.
    pub io_threads: Option<u16>,
    /// Move queues from busy I/O threads to idle ones.
    pub rebalance: bool,
    /// Longest poll of a queue before its I/O thread waits for a kick [0: no polling].
    pub longest_poll: Duration,
    /// Takes the queues from the I/O threads, for comparisons.
    pub server: Option<Arc<dyn QueueServer>>,
    /// Have the guest time its kicks.
    pub time_kicks: bool,
    /// CPU for the guest; `None`: any.
    ///
    /// Other threads of the machine run where the caller does.
    pub vcpu_cpu: Option<usize>,
    /// Bytes that the guest draws from an entropy device; 0: no device.
    pub entropy: u64,
    /// The network cards.
    pub nets: Vec<NetConfig>,
    /// Time without progress after which the guest counts as hung.
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
            server: None,
            time_kicks: false,
            vcpu_cpu: None,
            entropy: 4096,
            nets: Vec::new(),
            hang_timeout: Duration::from_secs(30),
            inject: Inject::None,
        }
    }
}
