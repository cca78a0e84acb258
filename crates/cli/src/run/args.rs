//! Options of `paravane run`.
use super::device_arg::DeviceArg;
use super::disk_arg::DiskArg;
use super::net::NetArg;
use crate::choices::{Choice, one_of};
use crate::engine::ENGINES;
use crate::size::Size;
use clap::Args;
use paravane_device::blk::EngineChoice;
use paravane_vmm::{
    AccelChoice, Completion, DirtyLogging, Inject, MmioVersion, MsiDelivery, OnReboot, RingLayout,
    TransportChoice,
};
use std::path::PathBuf;

/// Options of the built-in guest and its report, which a Linux kernel lacks.
const FOR_THE_BUILTIN_GUEST: [&str; 14] = [
    "write_test",
    "depth",
    "block",
    "seconds",
    "span",
    "read_percent",
    "seed",
    "completion",
    "iommu",
    "dirty_log",
    "hang_timeout",
    "json",
    "quiet",
    "inject",
];

const NET_HELP: &str = "Attach a network card (repeatable)

NETWORK is one of:
  echo       echo on the host, for the built-in guest
  link=NAME  another card of this machine with the same NAME
  tap=NAME   TAP device NAME of the host, for a kernel;
             created if missing (needs CAP_NET_ADMIN)
  tap-fd=N[:N]...
             inherited descriptors of /dev/net/tun, one for each
             pair of queues, for a kernel

OPTION is one of:
  mac=MAC       MAC address [default: 52:54:00:00:00:01 and up]
  queues=N      number of queue pairs; not with tap-fd [default: one
                for each CPU, up to 8; 1 with --kernel]
  frames=N      echo, link: number of frames that the built-in
                guest sends [default: 10000]
  size=SIZE     echo, link: bytes of each frame [default: 64]
  reply=SIZE    echo: bytes of each reply [default: as size]
  mtu=N         link, tap: MTU reported to the guest [default: none]
  offloads=off  link, tap: disable checksum and segmentation offloads
  vhost=on      tap: serve the queues by vhost-net, if available

The built-in guest keeps --depth frames in flight on each pair of queues and verifies every reply. \
On a link it sends from the first card and echoes on the second.";

/// Boot a virtual machine, exercise its devices, verify the data, report
///
/// Without --disk and --net, `run` creates a temporary 64 MiB disk, write-tests it and verifies it.
/// With --disk, the built-in guest reads each image in full, computes its SHA-256 and compares it
/// with the host's. Images are opened read-only, except with --write-test, which OVERWRITES THEM.
///
/// The write test fills the first --span bytes of each disk with a pattern made of sector number
/// and pass, mixes random reads and writes for --seconds, flushes, and reads everything back. The
/// host then verifies every sector in the image file. The guest measures IOPS, MB/s and latencies
/// in the mixed phase; without --write-test, over the whole read.
///
/// With --iommu, devices reach only the guest's heap, by translated addresses. With --dirty-log,
/// `run` logs every page that a device writes and, under KVM, every page that the vCPU writes: the
/// pages that a live migration would send.
///
/// With --kernel, a Linux kernel replaces the built-in guest. It gets the disks, the network cards
/// and an entropy source. At the end, a line on stderr says how the guest ended.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// Boot this Linux kernel (bzImage or vmlinux) instead of the built-in guest; needs KVM
    ///
    /// Its serial console (ttyS0) is stdout. Disks are writable unless marked `,ro`. The run ends
    /// when the kernel powers off.
    #[arg(long, value_name = "IMAGE", conflicts_with_all = FOR_THE_BUILTIN_GUEST)]
    pub(crate) kernel: Option<PathBuf>,
    /// Initial RAM disk of the kernel
    #[arg(long, value_name = "FILE", requires = "kernel")]
    pub(crate) initrd: Option<PathBuf>,
    /// Command line of the kernel
    #[arg(long, value_name = "STRING", requires = "kernel", default_value = "console=ttyS0 panic=-1")]
    pub(crate) cmdline: String,
    /// Action when the kernel reboots or resets after a panic
    #[arg(long, value_parser = one_of(ON_REBOOT), value_name = "ACTION", requires = "kernel", default_value = "exit")]
    pub(crate) on_reboot: OnReboot,
    /// Attach a raw image or block device, read-only with `,ro` (repeatable)
    ///
    /// `,queues=N` sets the number of queues: by default one for each CPU, and 1 with --kernel. A path
    /// that contains a comma needs `,rw` or another option behind it.
    #[arg(long, value_name = "PATH[,ro][,queues=N]")]
    pub(crate) disk: Vec<DiskArg>,
    /// Write-test the disks not marked `,ro`: OVERWRITES the images
    #[arg(long)]
    pub(crate) write_test: bool,
    /// Attach a network card: echo, link=NAME, tap=NAME or tap-fd=N (repeatable; see --help)
    #[arg(long, value_name = "NETWORK[,OPTION]...", long_help = NET_HELP)]
    pub(crate) net: Vec<NetArg>,
    /// Attach a device of a kind that `paravane serve` has: KIND[,OPTION[=VALUE]]... (repeatable)
    ///
    /// Options are those of `paravane serve KIND`, but for endpoint and threads; a value cannot
    /// contain a comma. `--device console,terminal-socket=con0` is hvc0.
    /// `--disk` and `--net` are short forms of `blk` and `net`.
    #[arg(long, value_name = "DEVICE", requires = "kernel")]
    pub(crate) device: Vec<DeviceArg>,
    /// Where the guest runs
    #[arg(long, value_parser = one_of(ACCELS), value_name = "WHERE", default_value = "auto")]
    pub(crate) accel: AccelChoice,
    /// Number of the guest's CPUs, 1 to 64
    ///
    /// The built-in guest works on queue (or pair of queues) q of device n with CPU n + q, modulo their
    /// number, and that CPU takes the queue's interrupts. Each queue of a disk does a part of the work.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) cpus: u16,
    /// Guest memory; k, M, G and T are powers of 1024
    #[arg(long, value_name = "SIZE", default_value = "128M")]
    pub(crate) memory: Size,
    /// Take guest memory from the pool of 2 MiB huge pages (vm.nr_hugepages)
    ///
    /// Without it, guest memory is in transparent huge pages where the host has them.
    #[arg(long)]
    pub(crate) hugepages: bool,
    /// Allocate all guest memory at the start
    #[arg(long)]
    pub(crate) prefault: bool,
    /// Requests in flight on each queue of a disk, frames in flight on each pair of network queues
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub(crate) depth: u32,
    /// Request size, a multiple of 512 bytes; reading a whole image uses at least 64k
    #[arg(long, value_name = "SIZE", default_value = "4k")]
    pub(crate) block: Size,
    /// Length of the mixed phase of the write test
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true, default_value_t = 1.0)]
    pub(crate) seconds: f64,
    /// Maximum size of the write-tested area at the start of each disk
    #[arg(long, value_name = "SIZE", default_value = "1G")]
    pub(crate) span: Size,
    /// Share of reads in the mixed phase
    #[arg(long, value_name = "PERCENT", default_value_t = 50, value_parser = clap::value_parser!(u32).range(0..=100))]
    pub(crate) read_percent: u32,
    /// Random seed of the pattern and order of the write test
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) seed: u64,
    /// How the guest waits for completions
    #[arg(long, value_parser = one_of(COMPLETIONS), value_name = "HOW", default_value = "interrupt")]
    pub(crate) completion: Completion,
    /// Transport of the devices
    #[arg(long, value_parser = one_of(TRANSPORTS), value_name = "TRANSPORT", default_value = "mmio")]
    pub(crate) transport: TransportChoice,
    /// Register version of virtio-mmio (mmio, mmio-msi)
    #[arg(long, value_parser = one_of(MMIO_VERSIONS), value_name = "VERSION", default_value = "2")]
    pub(crate) mmio_version: MmioVersion,
    /// Delivery of MSI messages under KVM
    #[arg(long, value_parser = one_of(DELIVERIES), value_name = "HOW", default_value = "signal")]
    pub(crate) msi_delivery: MsiDelivery,
    /// Virtqueue layout
    #[arg(long, value_parser = one_of(RINGS), value_name = "LAYOUT", default_value = "split")]
    pub(crate) ring: RingLayout,
    /// Offer VIRTIO_F_IN_ORDER: buffers are used in the order in which they were made available
    #[arg(long)]
    pub(crate) in_order: bool,
    /// Put each device behind an IOMMU domain: the guest hands out IOVAs
    #[arg(long)]
    pub(crate) iommu: bool,
    /// Log written pages of guest memory and report their rate
    #[arg(long, value_parser = one_of(DIRTY_LOGS), value_name = "MODE", num_args = 0..=1, require_equals = true, default_missing_value = "rate")]
    pub(crate) dirty_log: Option<DirtyLogging>,
    /// I/O engine of the disks
    #[arg(long, value_parser = one_of(ENGINES), value_name = "ENGINE", default_value = "auto")]
    pub(crate) engine: EngineChoice,
    /// Register no ioeventfds: every kick exits to this process (for comparison)
    #[arg(long)]
    pub(crate) no_ioeventfd: bool,
    /// Limit the number of ioeventfds; kicks of further queues exit to this process
    #[arg(long, value_name = "N", conflicts_with = "no_ioeventfd")]
    pub(crate) max_ioeventfds: Option<u32>,
    /// Number of I/O threads; queues are assigned round-robin
    ///
    /// Without this option there are up to 4 threads, and all queues of a device are on one.
    #[arg(long, value_name = "N")]
    pub(crate) io_threads: Option<u16>,
    /// Every 50 ms, move a queue from the busiest to the idlest I/O thread if that balances them
    #[arg(long)]
    pub(crate) rebalance: bool,
    /// Maximum time to poll a queue before waiting for a kick; 0 disables polling
    ///
    /// Only queues whose work recently arrived within this time are polled.
    #[arg(long, value_name = "MICROSECONDS", default_value_t = 0)]
    pub(crate) poll_us: u32,
    /// Report the guest as hung after this time without progress
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true, default_value_t = 30.0)]
    pub(crate) hang_timeout: f64,
    /// Print the report as a JSON object on stdout
    #[arg(long)]
    pub(crate) json: bool,
    /// Hide the progress bar
    #[arg(short, long)]
    pub(crate) quiet: bool,
    /// Move the interrupts of each queue of disks and echoes N times between CPUs (mmio-msi, pci)
    ///
    /// The guest checks that none is lost, and that the old CPU takes none afterwards. The mixed phase of
    /// a write test lasts until the moves are done; reading an image or an echo may end before.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) move_interrupts: u32,
    /// Make the guest fail after its first request (for tests of the report)
    #[arg(long, value_parser = one_of(INJECTIONS), default_value = "none", hide = true)]
    pub(crate) inject: Inject,
}

/// Where the guest runs.
const ACCELS: &[Choice<AccelChoice>] = &[
    ("auto", "KVM if usable, else a thread", AccelChoice::Auto),
    ("kvm", "A KVM virtual machine", AccelChoice::Kvm),
    ("thread", "A thread of this process; built-in guest only", AccelChoice::Thread),
];
const ON_REBOOT: &[Choice<OnReboot>] = &[
    ("exit", "End the run", OnReboot::Exit),
    ("restart", "Boot again; a guest in a reboot loop runs until you signal the process", OnReboot::Restart),
];
const COMPLETIONS: &[Choice<Completion>] = &[
    ("interrupt", "Wait for interrupts", Completion::Interrupt),
    ("poll", "Poll the used ring", Completion::Poll),
];
const TRANSPORTS: &[Choice<TransportChoice>] = &[
    ("mmio", "virtio-mmio", TransportChoice::Mmio),
    (
        "mmio-msi",
        "virtio-mmio with MSI interrupts and a kick address for each queue",
        TransportChoice::MmioMsi,
    ),
    ("pci", "virtio-pci with MSI-X", TransportChoice::Pci),
];
const MMIO_VERSIONS: &[Choice<MmioVersion>] = &[
    ("2", "A reset is done when the write to Status returns; all kernels", MmioVersion::V2),
    ("3", "The driver polls until a reset is done; Linux 7.3 and later", MmioVersion::V3),
];
const DELIVERIES: &[Choice<MsiDelivery>] = &[
    ("signal", "A system call for each message (KVM_SIGNAL_MSI)", MsiDelivery::Signal),
    ("irqfd", "An irqfd with a route for each vector", MsiDelivery::Irqfd),
];
const RINGS: &[Choice<RingLayout>] =
    &[("split", "Split virtqueues", RingLayout::Split), ("packed", "Packed virtqueues", RingLayout::Packed)];
const DIRTY_LOGS: &[Choice<DirtyLogging>] = &[
    ("rate", "Report dirty pages per second", DirtyLogging::Rate),
    (
        "verify",
        "Also rebuild guest memory from the log and compare at the end; needs KVM",
        DirtyLogging::Verify,
    ),
];
const INJECTIONS: &[Choice<Inject>] = &[
    ("none", "", Inject::None),
    ("crash", "", Inject::Crash),
    ("hang", "", Inject::Hang),
    ("panic", "", Inject::Panic),
];
