//! The command line.
use crate::disk::DiskArg;
use crate::net::NetArg;
use crate::serve::args::{ServeArgs, StatusArgs};
use crate::size::Size;
use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;

/// The I/O half of a virtual machine: virtio devices for a microVM, and what measures them.
#[derive(Debug, Parser)]
#[command(name = "paravane", version, propagate_version = true, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
    /// Log more on stderr (-v info, -vv debug, -vvv trace; `serve` begins at info); RUST_LOG overrides it
    #[arg(short, long, action = ArgAction::Count, global = true)]
    pub(crate) verbose: u8,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Run(RunArgs),
    Serve(Box<ServeArgs>),
    Status(StatusArgs),
    Doctor(DoctorArgs),
    Bench(BenchArgs),
    #[command(hide = true)]
    Manuals(ManualArgs),
}

/// What tells the built-in guest what to do, or is said of what it did.
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

const NET_HELP: &str = "Attach a network card (may be repeated):

  echo[,frames=N][,size=SIZE][,reply=REPLY]
           for the built-in guest: it sends N frames (10000) of SIZE bytes (64) with --depth in flight on each of its
           pairs of queues, and compares what comes back: as much, or REPLY bytes
  link=NAME[,frames=N][,size=SIZE]
           the other card that has NAME; the built-in guest sends frames on the first one, as above, and is itself the
           echo on the second one
  tap=NAME for a kernel: the host's TAP device NAME; made if there is none, which takes CAP_NET_ADMIN
  tap-fd=N[:N]...
           the same by descriptors of /dev/net/tun that this process has inherited, one for each pair of queues

Options of all: mac=MAC (52:54:00:00:00:01 and up), queues=N pairs of queues (1; not with tap-fd). Of all but echo:
mtu=N (the guest is told of none), offloads=off (checksums and segmentation are not left to the far side). Of TAP
devices: vhost=on (the host's kernel moves the frames, where it can).";

/// Start a virtual machine, let its built-in guest work on disks, verify, and report
///
/// Without --disk and --net it makes a temporary 64 MiB disk, write-tests it and verifies it. With --disk it reads every
/// image whole inside the guest, computes its SHA-256 there and compares it with the host's: images are opened
/// read-only and never written. Only --write-test writes to the images that --disk names: IT OVERWRITES THEM.
///
/// The write test writes a pattern that depends on sector and pass over the first --span bytes of each disk,
/// mixes random reads and writes for --seconds, flushes, and reads everything back; then the host re-reads the
/// image file and verifies every sector itself. IOPS, MB/s and latencies are those of the mixed phase (of the
/// whole reading, without --write-test), as the guest sees them.
///
/// With --iommu no device can reach anything but the guest's heap, and that only at addresses of its own. With
/// --dirty-log every page that a device writes is logged while it runs, and every page that the vCPU writes in
/// KVM's own log (a guest in a host thread writes without one): what a live migration would have to send.
///
/// With --kernel a Linux kernel runs in place of the built-in guest, with the disks, network cards and an entropy
/// source; a line on stderr says how it ended.
///
/// Exit status: 0 all verified, or a kernel powered off or rebooted; 1 it ran and something is wrong; 2 the request was
/// at fault and nothing was touched; 130 stopped by Ctrl-C, with the report so far.
#[derive(Debug, Args)]
#[command(after_long_help = "Examples:
  paravane run
  paravane run --disk vm.img
  paravane run --iommu --dirty-log=verify
  paravane run --net echo,size=1k,frames=100000 --depth 1
  paravane run --disk a.img --disk b.img,ro --write-test --depth 16 --block 4k --seconds 5
  paravane run --kernel vmlinuz --initrd initrd.img --disk root.img --transport pci --net tap=tap0")]
pub(crate) struct RunArgs {
    /// Boot this bzImage or vmlinux instead of the built-in guest: its serial console (ttyS0) is stdout, its disks are
    /// written unless they are `,ro`, and the run ends when it powers off (needs KVM)
    #[arg(long, value_name = "IMAGE", conflicts_with_all = FOR_THE_BUILTIN_GUEST)]
    pub(crate) kernel: Option<PathBuf>,
    /// The kernel's initial RAM disk
    #[arg(long, value_name = "FILE", requires = "kernel")]
    pub(crate) initrd: Option<PathBuf>,
    /// The kernel's command line
    #[arg(long, value_name = "STRING", requires = "kernel", default_value = "console=ttyS0 panic=-1")]
    pub(crate) cmdline: String,
    /// What follows when the kernel reboots, after a panic too if it was told to: the run ends, or the machine starts anew
    #[arg(long, value_enum, requires = "kernel", default_value_t = OnReboot::Exit)]
    pub(crate) on_reboot: OnReboot,
    /// Attach a raw image or block device: PATH, or PATH,ro to open it read-only (may be repeated)
    #[arg(long, value_name = "PATH[,ro]")]
    pub(crate) disk: Vec<DiskArg>,
    /// Write-test the disks that are not `,ro`: OVERWRITES the images
    #[arg(long)]
    pub(crate) write_test: bool,
    /// Attach a network card: echo, tap=NAME, tap-fd=N, or link=NAME, with options behind commas (may be repeated; see
    /// --help)
    #[arg(long, value_name = "NETWORK[,OPTION]...", long_help = NET_HELP)]
    pub(crate) net: Vec<NetArg>,
    /// What runs the guest: KVM, or a thread of this process; auto takes KVM when it is usable
    #[arg(long, value_enum, default_value_t = Accel::Auto)]
    pub(crate) accel: Accel,
    /// Guest memory (k, M, G are powers of 1024)
    #[arg(long, value_name = "SIZE", default_value = "128M")]
    pub(crate) memory: Size,
    /// Take guest memory from the host's pool of 2 MiB pages (vm.nr_hugepages)
    #[arg(long)]
    pub(crate) hugepages: bool,
    /// Requests in flight on each disk
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub(crate) depth: u32,
    /// Bytes a request, a multiple of 512 (the whole-image read uses at least 64k)
    #[arg(long, value_name = "SIZE", default_value = "4k")]
    pub(crate) block: Size,
    /// Length of the write test's mixed phase
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true, default_value_t = 1.0)]
    pub(crate) seconds: f64,
    /// Write-test at most so many bytes from the start of each disk
    #[arg(long, value_name = "SIZE", default_value = "1G")]
    pub(crate) span: Size,
    /// Percentage of reads in the mixed phase
    #[arg(long, value_name = "PERCENT", default_value_t = 50, value_parser = clap::value_parser!(u32).range(0..=100))]
    pub(crate) read_percent: u32,
    /// Seed of the write test's pattern and order
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) seed: u64,
    /// How the guest learns of completions
    #[arg(long, value_enum, default_value_t = Completion::Interrupt)]
    pub(crate) completion: Completion,
    /// How devices are reached: mmio, mmio-msi with messages for interrupts and a kick address for every
    /// queue, or pci with MSI-X
    #[arg(long, value_enum, default_value_t = Transport::Mmio)]
    pub(crate) transport: Transport,
    /// How messages reach the guest under KVM: one system call each, or an irqfd with a route
    #[arg(long, value_enum, default_value_t = MsiDelivery::Signal)]
    pub(crate) msi_delivery: MsiDelivery,
    /// How virtqueues lie in memory
    #[arg(long, value_enum, default_value_t = Ring::Split)]
    pub(crate) ring: Ring,
    /// Offer IN_ORDER: buffers are used in the order in which they were made available
    #[arg(long)]
    pub(crate) in_order: bool,
    /// Put each device behind an IOMMU domain of its own: addresses that the guest hands out are translated
    #[arg(long)]
    pub(crate) iommu: bool,
    /// Log which pages of guest memory are written, and print how many a second; `verify` also keeps a copy of
    /// guest memory by what the log says and compares it at the end (needs KVM)
    #[arg(long, value_enum, value_name = "WHAT", num_args = 0..=1, require_equals = true, default_missing_value = "rate")]
    pub(crate) dirty_log: Option<DirtyLog>,
    /// What does the I/O on the host; auto copies at once if the image is in memory, else takes io_uring when the host
    /// allows it, else threads
    #[arg(long, value_enum, default_value_t = Engine::Auto)]
    pub(crate) engine: Engine,
    /// Register no ioeventfds: every kick stops the guest (for comparison)
    #[arg(long)]
    pub(crate) no_ioeventfd: bool,
    /// Register at most so many ioeventfds at a time, as on a host with few: kicks of the other queues stop the guest
    #[arg(long, value_name = "N", conflicts_with = "no_ioeventfd")]
    pub(crate) max_ioeventfds: Option<u32>,
    /// Serve by so many I/O threads, and deal each device's queues out to them; without it there are up to 4, and a
    /// device's queues are on one
    #[arg(long, value_name = "N")]
    pub(crate) io_threads: Option<u16>,
    /// Every 50 ms move a queue from the busiest I/O thread to the idlest, if that evens what they do
    #[arg(long)]
    pub(crate) rebalance: bool,
    /// Look for new work for up to MICROSECONDS before waiting for a kick, on queues where it comes so soon; 0: never
    #[arg(long, value_name = "MICROSECONDS", default_value_t = 0)]
    pub(crate) poll_us: u32,
    /// Take a guest that makes no progress for so long as hung
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true, default_value_t = 30.0)]
    pub(crate) hang_timeout: f64,
    /// Print the report as one JSON object on stdout
    #[arg(long)]
    pub(crate) json: bool,
    /// Show no progress bar
    #[arg(short, long)]
    pub(crate) quiet: bool,
    /// Make the guest fail after its first request (for tests of the report)
    #[arg(long, value_enum, default_value_t = Inject::None, hide = true)]
    pub(crate) inject: Inject,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Accel {
    Auto,
    Kvm,
    Thread,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum OnReboot {
    Exit,
    Restart,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Completion {
    Interrupt,
    Poll,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Transport {
    Mmio,
    MmioMsi,
    Pci,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum MsiDelivery {
    Signal,
    Irqfd,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Ring {
    Split,
    Packed,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum DirtyLog {
    Rate,
    Verify,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Engine {
    Auto,
    #[value(name = "io_uring")]
    IoUring,
    Threads,
    Immediate,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Inject {
    None,
    Crash,
    Hang,
    Panic,
}

/// Show what this host offers a microVM and what it costs, one line each, with a remedy
///
/// Exit status: 0 whatever was found.
#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Print the findings as a JSON list
    #[arg(long)]
    pub(crate) json: bool,
}

/// Measure: ours beside its peers, in one run, rounds interleaved
#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// Benchmark to run, or `list`
    pub(crate) name: String,
    /// Interleaved rounds (at least 5); medians are printed
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub(crate) rounds: u32,
    /// Only cases whose path contains TEXT
    #[arg(long, value_name = "TEXT")]
    pub(crate) filter: Option<String>,
    /// Fewer cases and shorter samples (notify, blk, net)
    #[arg(long)]
    pub(crate) quick: bool,
    /// How the client learns of completions (blk)
    #[arg(long, value_enum, default_value_t = Client::Event)]
    pub(crate) client: Client,
    /// Print the rows as a JSON list
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Client {
    Event,
    Poll,
}

/// Write manual pages and shell completions, made from this command line, into a directory (for packagers)
#[derive(Debug, Args)]
pub(crate) struct ManualArgs {
    /// Made if it is not there
    pub(crate) directory: PathBuf,
}
