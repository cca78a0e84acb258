//! Configuration of a run.
mod check;

pub(crate) use check::{check, refuse, size};

use crate::machine::server::QueueServer;
use paravane_attach::RingFeatures;
use paravane_spec::mmio;
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
    /// virtio-mmio.
    #[default]
    Mmio,
    /// The same with messages and notification addresses.
    ///
    /// docs/reference/virtio-mmio-msi.md specifies it.
    MmioMsi,
    /// virtio-pci with MSI-X.
    Pci,
}

impl MmioVersion {
    /// Value of the register.
    #[must_use]
    pub fn number(self) -> u32 {
        match self {
            Self::V2 => mmio::VERSION_2,
            Self::V3 => mmio::VERSION_3,
        }
    }
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

/// Register version of virtio-mmio.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MmioVersion {
    /// A reset is done when the write that asks for it is.
    #[default]
    V2,
    /// The driver polls until a reset is done (virtio 1.5).
    V3,
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

/// Order of blocks in the mixed phase of the write test.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BlockOrder {
    /// Any.
    #[default]
    Random,
    /// Sequential, again from the start at the end.
    Sequential,
}

/// Configuration of a run.
#[derive(Clone, Debug)]
pub struct RunConfig {
    /// Accelerator.
    pub accel: AccelChoice,
    /// Number of vCPUs, 1 to 64.
    pub cpus: u16,
    /// Guest RAM in bytes.
    pub memory: u64,
    /// RAM from the host's pool of 2 MiB pages, not in transparent huge pages.
    pub hugepages: bool,
    /// Allocate all RAM at the start.
    pub prefault: bool,
    /// Requests in flight on each queue of a disk.
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
    /// Transport.
    pub transport: TransportChoice,
    /// Register version, if the transport is virtio-mmio.
    pub mmio_version: MmioVersion,
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
    /// CPUs of the host for the guest's CPUs; empty: any.
    ///
    /// Other threads of the machine run where the caller does.
    pub vcpu_cpus: Vec<usize>,
    /// Time without progress after which the guest counts as hung.
    pub hang_timeout: Duration,
    /// How often the messages of each queue of a disk or echo are moved to another vCPU while it works.
    ///
    /// The guest checks that no interrupt is lost, and that the old vCPU takes none afterwards.
    pub moves: u32,
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
            cpus: 1,
            memory: 128 << 20,
            hugepages: false,
            prefault: false,
            depth: 16,
            block: 4096,
            duration: Duration::from_secs(1),
            span: 1 << 30,
            read_percent: 50,
            order: BlockOrder::Random,
            seed: 1,
            completion: Completion::Interrupt,
            transport: TransportChoice::Mmio,
            mmio_version: MmioVersion::V2,
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
            vcpu_cpus: Vec::new(),
            hang_timeout: Duration::from_secs(30),
            moves: 0,
            inject: Inject::None,
        }
    }
}
