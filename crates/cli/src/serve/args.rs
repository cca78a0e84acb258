//! What `paravane serve` can be told: on the command line, and by the same names in its file (see [`super::config`]).
use crate::args::Engine;
use crate::size::Size;
use clap::{ArgGroup, Args, Subcommand, ValueEnum};
use std::net::SocketAddr;
use std::path::PathBuf;

const AFTER_HELP: &str = "Examples:
  paravane serve blk --image vm.img --socket /run/vm0.sock --queues 4
  paravane serve net --tap tap0 --socket /run/net0.sock
  paravane serve --config devices.toml --check
  paravane serve --config devices.toml

Signals: SIGTERM and SIGINT finish what is in flight, remove the sockets and end; SIGHUP reads --config again, and looks at
the sizes of images.";

/// Serve disks, network cards and entropy to other VMMs over vhost-user: one device, or those of a file
///
/// The daemon stays in the foreground and logs to stderr. A VMM that goes away and comes back is served again. Once all is
/// set up, the daemon gives up what it will not need (see --no-sandbox).
///
/// Exit status: 0 it was asked to end; 1 something failed; 2 the request was at fault and nothing was touched.
#[derive(Debug, Args)]
#[command(after_long_help = AFTER_HELP, args_conflicts_with_subcommands = false, subcommand_required = false)]
pub(crate) struct ServeArgs {
    #[command(subcommand)]
    pub(crate) device: Option<DeviceCommand>,
    /// Serve the devices of this TOML file, in which options are keys, and blk, net, rng and daemon tables
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Only say whether the request is in order, and end
    #[arg(long, global = true)]
    pub(crate) check: bool,
    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
    /// Try to open FILE, to execute it and to make sockets once the sandbox is up, and log what became of it (for tests)
    #[arg(long, value_name = "FILE", global = true, hide = true)]
    pub(crate) try_sandbox: Option<PathBuf>,
}

/// One device on the command line.
#[derive(Debug, Subcommand)]
pub(crate) enum DeviceCommand {
    Blk(BlkArgs),
    Net(NetArgs),
    Rng(RngArgs),
}

/// What concerns the daemon and not a device. On the command line it overrides what the file's table `daemon` says.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args)]
#[command(next_help_heading = "Daemon")]
pub(crate) struct DaemonArgs {
    /// Socket for `paravane status`; `off`: none [default: PID.sock in /run/paravane for root, else in paravane in
    /// XDG_RUNTIME_DIR]
    #[arg(long, value_name = "PATH", global = true)]
    pub(crate) control: Option<PathBuf>,
    /// Serve metrics for Prometheus over HTTP at this address and port, under /metrics
    #[arg(long, value_name = "ADDRESS:PORT", global = true)]
    pub(crate) metrics: Option<SocketAddr>,
    /// Go on as this user (a name or a number) when images, TAP devices and ports are open; sockets are then its
    #[arg(long, value_name = "USER", global = true)]
    pub(crate) user: Option<String>,
    /// With --config: a directory that devices which SIGHUP adds may have images and sockets in, too (may be repeated)
    #[arg(long, value_name = "DIRECTORY", global = true)]
    pub(crate) allow: Vec<PathBuf>,
    /// Keep all rights: a guest that takes over this process can then do whatever its user can, open any file, make any
    /// connection, start any program
    #[arg(long, global = true)]
    pub(crate) no_sandbox: bool,
    /// How the log is written
    #[arg(long, value_enum, value_name = "FORMAT", global = true)]
    pub(crate) log_format: Option<LogFormat>,
    /// Log lines per second and device, after a burst of 20 times as many; 0: no limit [default: 1; with -v: 0]
    #[arg(long, value_name = "LINES", global = true)]
    pub(crate) log_rate: Option<u32>,
    /// Most memory that one VMM may share. Allow twice its guest's: a VMM that replaces its memory has both mapped for a moment
    /// [default: 8 times RAM and swap, at least 1T, at most half of --max-memory]
    #[arg(long, value_name = "SIZE", global = true)]
    pub(crate) max_client_memory: Option<Size>,
    /// Most memory that all VMMs together may share. Half of it is divided evenly among the devices and kept for them [default:
    /// half of the address space, 64T, or half of RLIMIT_AS]
    #[arg(long, value_name = "SIZE", global = true)]
    pub(crate) max_memory: Option<Size>,
    /// Most memory regions of all VMMs together, divided as --max-memory; one VMM has at most 256 [default: three quarters of
    /// vm.max_map_count, at most half of RLIMIT_NOFILE]
    #[arg(long, value_name = "N", global = true)]
    pub(crate) max_mappings: Option<u64>,
    /// Seconds that SIGTERM waits for requests in flight; then the daemon exits with status 1. A second SIGTERM or SIGINT exits
    /// at once [default: 10]
    #[arg(long, value_name = "SECONDS", global = true)]
    pub(crate) stop_timeout: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// Lines for people.
    Text,
    /// One JSON object a line.
    Json,
}

/// What all devices have in common.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
#[command(next_help_heading = "Serving", group = ArgGroup::new("endpoint").args(["socket", "connect", "socket_activation"]).required(true))]
pub(crate) struct EndpointArgs {
    /// Name in the log, in `paravane status` and in metrics [default: the kind of device; required in a file]
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// Listen on this socket for a VMM; it is made with mode 0600
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,
    /// Connect to the socket on which a VMM listens, and keep trying for ever
    #[arg(long, value_name = "PATH")]
    pub(crate) connect: Option<PathBuf>,
    /// Listen on the socket that systemd has passed under the device's name (FileDescriptorName=)
    #[arg(long)]
    pub(crate) socket_activation: bool,
    /// Threads that serve the device's queues [default: 1]
    #[arg(long, value_name = "N")]
    pub(crate) workers: Option<u16>,
    /// Look for new work for up to MICROSECONDS before sleeping, on queues where it comes so soon; 0: never [default: 50]
    #[arg(long, value_name = "MICROSECONDS")]
    pub(crate) poll_us: Option<u32>,
    /// Do not offer packed virtqueues
    #[arg(long)]
    pub(crate) no_packed: bool,
}

/// How much a device may use. Queues share it; a network card has it for each direction.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args)]
#[command(next_help_heading = "Limits")]
pub(crate) struct LimitArgs {
    /// Bytes of data a second [default: no limit]
    #[arg(long, value_name = "SIZE")]
    pub(crate) bytes_per_second: Option<Size>,
    /// Bytes beyond that after a time in which less was used [default: what a tenth of a second allows]
    #[arg(long, value_name = "SIZE", requires = "bytes_per_second")]
    pub(crate) burst_bytes: Option<Size>,
    /// Requests or frames a second [default: no limit]
    #[arg(long, value_name = "N")]
    pub(crate) ops_per_second: Option<u64>,
    /// Requests or frames beyond that after a time in which there were less [default: what a tenth of a second allows]
    #[arg(long, value_name = "N", requires = "ops_per_second")]
    pub(crate) burst_ops: Option<u64>,
}

/// Serve a disk
///
/// The image is locked while it is served (but see --no-lock), and its format is what is said here, never guessed.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub(crate) struct BlkArgs {
    /// The image, or a block device
    #[arg(long, value_name = "PATH")]
    pub(crate) image: PathBuf,
    /// Format of the image [default: raw]
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub(crate) format: Option<Format>,
    /// What a qcow2 image is based on, qcow2:PATH or raw:PATH, and what that is based on, and so on (may be repeated); the names
    /// in images open nothing
    #[arg(long, value_name = "FORMAT:PATH")]
    pub(crate) backing: Vec<Backing>,
    /// Open the image read-only, and say so to the guest
    #[arg(long)]
    pub(crate) read_only: bool,
    /// Do not lock a raw image, so that a second daemon can have it open: for a machine that moves from one to the other. If
    /// two machines write to it, the file system on it is destroyed
    #[arg(long)]
    pub(crate) no_lock: bool,
    /// Go past the host's page cache (O_DIRECT), as with QEMU's cache=none: the guest's data are not kept in the host's memory as well,
    /// and one guest's work does not push out another's. The guest is told the block size that the file asks for. Raw images only
    #[arg(long)]
    pub(crate) direct: bool,
    /// Register the VMM's memory with io_uring, which saves processor time with --direct. All of that memory is then held in place:
    /// it must fit in RLIMIT_MEMLOCK, once for each queue, and the VMM must not use a balloon, virtio-mem or postcopy migration,
    /// or reads come to pages that the guest does not have any more
    #[arg(long)]
    pub(crate) registered_buffers: bool,
    /// Serial number, at most 20 bytes of ASCII [default: from the image's file name]
    #[arg(long, value_name = "TEXT")]
    pub(crate) serial: Option<String>,
    /// Queues to offer [default: 1]
    #[arg(long, value_name = "N")]
    pub(crate) queues: Option<u16>,
    /// Most descriptors of a queue, a power of two from 4 on. The VMM chooses how many, up to this. With less than 128, requests
    /// have fewer segments [default: 1024]
    #[arg(long, value_name = "N")]
    pub(crate) queue_size: Option<u16>,
    /// What does the I/O; auto copies at once if the image is in memory, else takes io_uring when the host allows
    /// it, else threads [default: auto]
    #[arg(long, value_enum, value_name = "ENGINE")]
    pub(crate) engine: Option<Engine>,
    #[command(flatten)]
    pub(crate) limit: LimitArgs,
    #[command(flatten)]
    pub(crate) endpoint: EndpointArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// The disk's bytes.
    Raw,
    /// QEMU's format.
    Qcow2,
}

/// An image that another one is based on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Backing {
    pub(crate) format: Format,
    pub(crate) path: PathBuf,
}

impl std::str::FromStr for Backing {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (format, path) = match text.split_once(':') {
            Some(("raw", path)) => (Format::Raw, path),
            Some(("qcow2", path)) => (Format::Qcow2, path),
            _ => return Err("its format comes first: qcow2:PATH or raw:PATH".to_owned()),
        };
        match path {
            "" => Err("the path is empty".to_owned()),
            path => Ok(Self { format, path: path.into() }),
        }
    }
}

/// Serve a network card
///
/// Exactly one of --tap, --link, --echo, --sink and --source says what it is connected to.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
#[command(group = ArgGroup::new("network").args(["tap", "link", "echo", "sink", "source"]).required(true))]
pub(crate) struct NetArgs {
    /// Connect the card to the host's TAP device NAME; made if there is none, which takes CAP_NET_ADMIN
    #[arg(long, value_name = "NAME")]
    pub(crate) tap: Option<String>,
    /// Connect the card to the other one of this daemon with the same link NAME (needs --config)
    #[arg(long, value_name = "NAME")]
    pub(crate) link: Option<String>,
    /// Send every frame back, its addresses swapped (for measuring)
    #[arg(long)]
    pub(crate) echo: bool,
    /// Swallow every frame (for measuring)
    #[arg(long)]
    pub(crate) sink: bool,
    /// Swallow every frame, and send frames of SIZE bytes as fast as there are buffers (for measuring)
    #[arg(long, value_name = "SIZE")]
    pub(crate) source: Option<Size>,
    /// The card's address [default: 52:54:00 and three bytes made of name and socket]
    #[arg(long, value_name = "MAC")]
    pub(crate) mac: Option<Mac>,
    /// Pairs of queues to offer [default: 1]
    #[arg(long, value_name = "N")]
    pub(crate) queues: Option<u16>,
    /// Most descriptors of a queue, a power of two. The VMM chooses how many, up to this [default: 1024]
    #[arg(long, value_name = "N")]
    pub(crate) queue_size: Option<u16>,
    /// Largest packet that the guest is told of [default: none is named]
    #[arg(long, value_name = "BYTES")]
    pub(crate) mtu: Option<u16>,
    /// Do not leave checksums and segmentation to the far side
    #[arg(long)]
    pub(crate) no_offloads: bool,
    #[command(flatten)]
    pub(crate) limit: LimitArgs,
    #[command(flatten)]
    pub(crate) endpoint: EndpointArgs,
}

/// Serve an entropy source
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub(crate) struct RngArgs {
    #[command(flatten)]
    pub(crate) endpoint: EndpointArgs,
}

/// A card's address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mac(pub(crate) [u8; 6]);

impl std::str::FromStr for Mac {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        crate::net::mac(text).map(Self).ok_or_else(|| "six bytes are written 52:54:00:00:00:01".to_owned())
    }
}

/// Show the devices that daemons of this user serve: clients, queues, rates, errors
///
/// Asks every daemon in /run/paravane (root) or in paravane in XDG_RUNTIME_DIR, twice, and shows what happened in between: a
/// summary of each daemon, a table of its devices, and a line for each problem.
///
/// Exit status: 0 all daemons have answered, if there are any; 1 one has not, or there is no device DEVICE.
#[derive(Debug, Default, Args)]
#[command(after_long_help = AFTER_STATUS)]
pub(crate) struct StatusArgs {
    /// Show these devices only; * and ? in a name match any characters and any one [default: all]
    #[arg(value_name = "DEVICE")]
    pub(crate) devices: Vec<String>,
    /// Ask the daemon with this control socket only
    #[arg(long, value_name = "PATH")]
    pub(crate) control: Option<PathBuf>,
    /// Time between the two questions; 0: ask once, and show no rates
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true, default_value_t = 1.0)]
    pub(crate) seconds: f64,
    /// Show devices with TEXT in their name, kind, endpoint or back end, in upper or lower case
    #[arg(long, value_name = "TEXT")]
    pub(crate) filter: Option<String>,
    /// Show devices with errors, and failed ones
    #[arg(long)]
    pub(crate) problems: bool,
    /// Sort by KEY: names in their order, numbers with the largest first [default: name; with --json the file's order]
    #[arg(long, value_enum, value_name = "KEY")]
    pub(crate) sort: Option<SortKey>,
    /// Sort the other way round
    #[arg(long)]
    pub(crate) reverse: bool,
    /// Show the first N devices of each daemon
    #[arg(long, value_name = "N")]
    pub(crate) limit: Option<usize>,
    /// Show summaries without devices
    #[arg(long, conflicts_with = "json")]
    pub(crate) summary: bool,
    /// Print the reports as a JSON list
    #[arg(long)]
    pub(crate) json: bool,
}

/// What devices are sorted by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum SortKey {
    /// vm2 before vm10.
    Name,
    /// blk, net, rng.
    Kind,
    /// Buffers given back a second.
    Done,
    /// Notifications from the driver a second.
    Kicks,
    /// Interrupts to the driver a second.
    Irqs,
    /// Bytes a second, of network cards.
    Mb,
    /// Connections so far.
    Sessions,
    /// The column ERRORS.
    Errors,
}

const AFTER_STATUS: &str = "Examples:
  paravane status --summary
  paravane status --problems
  paravane status --sort done --limit 20
  paravane status 'vm17-*' --json";
