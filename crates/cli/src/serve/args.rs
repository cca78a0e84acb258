//! Options of `paravane serve` and `paravane status`.
//!
//! A file of devices has the same names as keys (see [`super::config`]).
use crate::choices::{Choice, one_of};
use crate::kinds::DeviceCommand;
use crate::log;
use crate::size::Size;
use clap::builder::{PossibleValue, PossibleValuesParser};
use clap::{Args, ValueEnum};
use paravane_device::blk::operation::OPERATIONS;
use paravane_device::latency::Operation;
use std::net::SocketAddr;
use std::path::PathBuf;

/// Serve disks, network cards and other devices to VMMs over vhost-user
///
/// Serves one device, or the devices of a file (--config, see paravane-devices.toml(5)).
///
/// The daemon stays in the foreground and logs to stderr. A VMM may disconnect and reconnect at any
/// time. After opening its files the daemon enters a sandbox: Landlock, seccomp, no capabilities
/// beyond those that the devices need (see --no-sandbox).
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = false, subcommand_required = false)]
pub(crate) struct ServeArgs {
    #[command(subcommand)]
    pub(crate) device: Option<DeviceCommand>,
    /// Serve the devices of this TOML file
    ///
    /// SIGHUP reads the file again. Keys are options without dashes, in a table for each device and
    /// one for the daemon: see paravane-devices.toml(5).
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Take the devices over from the running daemon, which then exits
    ///
    /// Asks the daemon behind --control [default: the only one of this user]. VMMs stay connected.
    /// Name, kind and socket of each device must be the same.
    #[arg(long, global = true)]
    pub(crate) take_over: bool,
    /// Validate the configuration and exit
    #[arg(long, global = true)]
    pub(crate) check: bool,
    /// With --check and --config: print what a reload of the file would do to the daemon behind CONTROL
    ///
    /// The daemon must have been started with the same file. Nothing is changed.
    #[arg(long, value_name = "CONTROL", requires = "config", requires = "check")]
    pub(crate) against: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
    /// Try to open and execute FILE and to make sockets in the sandbox, and log the results (for
    /// tests)
    #[arg(long, value_name = "FILE", global = true, hide = true)]
    pub(crate) try_sandbox: Option<PathBuf>,
}

/// Options of the daemon.
///
/// Those of the command line override those of the file's table `daemon`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args)]
#[command(next_help_heading = "Daemon")]
pub(crate) struct DaemonArgs {
    /// Control socket for `paravane status`; `off` disables it [default: DIRECTORY/PID.sock]
    ///
    /// DIRECTORY is RUNTIME_DIRECTORY if set (by systemd), /run/paravane for root, else
    /// XDG_RUNTIME_DIR/paravane.
    #[arg(long, value_name = "PATH", global = true)]
    pub(crate) control: Option<PathBuf>,
    /// Serve Prometheus metrics at http://ADDRESS:PORT/metrics [default: none]
    #[arg(long, value_name = "ADDRESS:PORT", global = true)]
    pub(crate) metrics: Option<SocketAddr>,
    /// Keep sessions for the next daemon: at the holder behind PATH, or `systemd` [default: none]
    ///
    /// If this daemon dies or is stopped, the next one resumes its sessions, and VMMs notice nothing.
    /// PATH is the socket of `paravane hold`. `systemd` needs FileDescriptorStoreMax= in the unit.
    /// Drivers are not offered IN_ORDER then.
    #[arg(long, value_name = "PATH", global = true)]
    pub(crate) holder: Option<PathBuf>,
    /// Drop privileges to USER (name or number) after startup [default: none]
    ///
    /// The daemon opens images, TAP devices and ports before it drops privileges. USER owns the
    /// sockets, that of --control included.
    #[arg(long, value_name = "USER", global = true)]
    pub(crate) user: Option<String>,
    /// With --config: allow images and sockets of new devices in DIRECTORY (repeatable)
    ///
    /// Devices that SIGHUP adds may use the directories of the devices that were there at startup,
    /// and these.
    #[arg(long, value_name = "DIRECTORY", global = true)]
    pub(crate) allow: Vec<PathBuf>,
    /// Run without a sandbox
    ///
    /// A guest that takes over the daemon can then open any file, make any connection and start any
    /// program that the daemon's user can.
    #[arg(long, global = true)]
    pub(crate) no_sandbox: bool,
    /// Format of the log [default: text]
    #[arg(long, value_enum, value_name = "FORMAT", global = true)]
    pub(crate) log_format: Option<LogFormat>,
    /// Least severe lines that are logged; -v logs more [default: info]
    #[arg(long, value_parser = one_of(LOG_LEVELS), value_name = "LEVEL", global = true)]
    pub(crate) log_level: Option<log::Level>,
    /// Maximum log lines per second and device; 0 disables the limit [default: 1; with -v: 0]
    ///
    /// A burst of 20 times as many lines passes first. Errors, slow requests
    /// and other lines are counted separately.
    #[arg(long, value_name = "LINES", global = true)]
    pub(crate) log_rate: Option<u32>,
    /// Maximum memory shared by one VMM [default: 8 times RAM and swap]
    ///
    /// Allow twice the guest's memory: a VMM that replaces its memory has both mappings for a
    /// moment. The default is at least 1T and at most half of --max-memory.
    #[arg(long, value_name = "SIZE", global = true)]
    pub(crate) max_client_memory: Option<Size>,
    /// Accept guest memory in files of any file system
    ///
    /// Without it, memory must be a memfd, or a file on tmpfs or hugetlbfs. Whoever serves the file system (a disk, a server, a process by FUSE or below overlayfs) can
    /// then stop the I/O threads of other VMs, and keep the daemon from ending. Only for VMMs that
    /// you trust.
    #[arg(long, global = true)]
    pub(crate) any_memory_file: bool,
    /// Maximum memory shared by all VMMs [default: half of the address space (64T) or of RLIMIT_AS]
    ///
    /// Half of it is reserved for the devices in equal shares.
    #[arg(long, value_name = "SIZE", global = true)]
    pub(crate) max_memory: Option<Size>,
    /// Maximum memory regions of all VMMs [default: 3/4 of vm.max_map_count]
    ///
    /// Half of them are reserved for the devices in equal shares. One VMM may have 256. The default
    /// is at most half of RLIMIT_NOFILE.
    #[arg(long, value_name = "N", global = true)]
    pub(crate) max_mappings: Option<u64>,
    /// Number of I/O threads for the devices without --workers [default: CPUs, at most 8]
    ///
    /// Queues move between them while they are live, so that all are equally busy.
    #[arg(long, value_name = "N", global = true)]
    pub(crate) io_threads: Option<u16>,
    /// Keep chunks of images on HTTP and S3 servers in DIRECTORY [default: 64M in memory for each]
    ///
    /// All devices share it. Chunks survive restarts and are checked before they are used again.
    #[arg(long, value_name = "DIRECTORY", global = true)]
    pub(crate) cache: Option<PathBuf>,
    /// Maximum bytes in --cache [default: 10G]
    #[arg(long, value_name = "SIZE", global = true)]
    pub(crate) cache_size: Option<Size>,
    /// Time that SIGTERM waits for requests in flight [default: 10]
    ///
    /// After it the daemon exits with status 1. A second SIGTERM or SIGINT ends the wait.
    #[arg(long, value_name = "SECONDS", global = true)]
    pub(crate) stop_timeout: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// Lines of text
    Text,
    /// A JSON object in each line
    Json,
}

const LOG_LEVELS: &[Choice<log::Level>] = &[
    ("error", "What failed", log::Level::ERROR),
    ("warn", "What needs attention", log::Level::WARN),
    ("info", "Devices and clients that come and go", log::Level::INFO),
    ("debug", "Each step", log::Level::DEBUG),
    ("trace", "Everything", log::Level::TRACE),
];

/// Show the devices of running daemons: clients, queues, rates, errors
///
/// Asks every daemon in the control directory twice and shows the difference: a summary of each
/// daemon, a table of its devices, and a line for each problem. The control directory is
/// /run/paravane for root, else XDG_RUNTIME_DIR/paravane.
///
/// Columns: CLIENT is the state of the connection. SESSIONS counts connections. QUEUES shows
/// enabled and offered queues. DONE/s counts buffers returned to the driver. P50, P99 and P99.9 are
/// percentiles of the latency of requests. DEPTH is the mean number of requests in flight. KICKS/s
/// counts available buffer notifications, IRQS/s interrupts, MB/s bytes from and to the guest
/// (network cards).
/// ERRORS sums protocol errors, refused connections, failed queues and storage errors.
#[derive(Debug, Default, Args)]
pub(crate) struct StatusArgs {
    /// Devices to show; `*` matches any characters, `?` any one [default: all]
    #[arg(value_name = "DEVICE")]
    pub(crate) devices: Vec<String>,
    /// Ask only the daemon with this control socket
    #[arg(long, value_name = "PATH")]
    pub(crate) control: Option<PathBuf>,
    /// Time over which rates are measured; 0: ask once, show no rates
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true, default_value_t = 1.0)]
    pub(crate) seconds: f64,
    /// Show devices with TEXT in name, kind, endpoint or back end, ignoring case
    #[arg(long, value_name = "TEXT")]
    pub(crate) filter: Option<String>,
    /// Show devices with errors and failed devices only
    #[arg(long)]
    pub(crate) problems: bool,
    /// Sort by KEY: names ascending, numbers descending [default: name; with --json: as in the
    /// file]
    #[arg(long, value_enum, value_name = "KEY")]
    pub(crate) sort: Option<SortKey>,
    /// Reverse the order
    #[arg(long)]
    pub(crate) reverse: bool,
    /// Show the first N devices of each daemon
    #[arg(long, value_name = "N")]
    pub(crate) limit: Option<usize>,
    /// Show summaries without devices
    #[arg(long, conflicts_with = "json")]
    pub(crate) summary: bool,
    /// Add latencies by operation and stage, and queues, since each device started
    #[arg(long, conflicts_with_all = ["json", "summary"])]
    pub(crate) details: bool,
    /// Print the reports as a JSON list
    #[arg(long)]
    pub(crate) json: bool,
}

/// Have a daemon read its file of devices again, and wait for the outcome
///
/// Prints what has become of each device. Rate limits, `slow`, `poll-us`, `on-full`, `latencies` and
/// the daemon's `log-level` and `log-rate` change while guests use their devices. Other changes have the device
/// opened again; its session goes on, and the guest notices nothing, if it would find the same device.
///
/// A change for which a VMM would have to reconnect is refused, and the device goes on as it was,
/// unless it is named with --restart. SIGHUP does not refuse: it restarts such a device, and logs a
/// warning.
#[derive(Debug, Args)]
pub(crate) struct ReloadArgs {
    /// Let device NAME restart even if its VMM has to reconnect (repeatable)
    #[arg(long, value_name = "NAME")]
    pub(crate) restart: Vec<String>,
    /// Ask the daemon with this control socket [default: the only one of this user]
    #[arg(long, value_name = "PATH")]
    pub(crate) control: Option<PathBuf>,
    /// Longest wait for devices that start and stop, up to 3600
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub(crate) timeout: u64,
    /// Print the outcomes as a JSON list
    #[arg(long)]
    pub(crate) json: bool,
}

/// Order of devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum SortKey {
    /// Name; vm2 before vm10
    Name,
    /// Kind of the device
    Kind,
    /// Buffers returned to the driver per second
    Done,
    /// Available buffer notifications per second
    Kicks,
    /// Interrupts per second
    Irqs,
    /// 99th percentile of the latency
    P99,
    /// Mean number of requests in flight
    Depth,
    /// Bytes per second of network cards
    Mb,
    /// Number of connections
    Sessions,
    /// The column ERRORS
    Errors,
}

/// Show all devices of running daemons live: rates, latencies, CPU time
///
/// Asks every daemon as `paravane status` does, again and again. Without a terminal, use --once or
/// --json.
///
/// Columns: DONE/s counts buffers returned to the driver. P50 and P99 are percentiles of the latency
/// of requests. STAGE is the stage in which requests spent most of their time: ring (waiting for
/// the I/O thread), throttled (rate limit), host (storage or network) or interrupt. DEPTH is the
/// mean number of requests in flight. /KICK and /IRQ are buffers per kick and per interrupt: the
/// more, the fewer notifications. CPU% is the CPU time of the I/O threads, WAIT% the time for which
/// they could run and no CPU ran them. ERRORS sums as in `paravane status`. HISTORY shows DONE/s of
/// the last intervals, relative to the device's highest. Wide terminals also show P99.9, MB/s,
/// WAIT%, KIND and PID.
///
/// Keys: q quits; s and S choose the column to sort by, r reverses the order; arrows and page keys
/// scroll; p shows only devices with problems; space pauses.
#[derive(Debug, Default, Args)]
pub(crate) struct TopArgs {
    /// Devices to show; `*` matches any characters, `?` any one [default: all]
    #[arg(value_name = "DEVICE")]
    pub(crate) devices: Vec<String>,
    /// Ask only the daemon with this control socket
    #[arg(long, value_name = "PATH")]
    pub(crate) control: Option<PathBuf>,
    /// Time between updates, from 0.1 to 3600
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0)]
    pub(crate) interval: f64,
    /// Sort by KEY: names ascending, numbers descending
    #[arg(long, value_enum, value_name = "KEY", default_value_t = TopKey::Done)]
    pub(crate) sort: TopKey,
    /// Reverse the order
    #[arg(long)]
    pub(crate) reverse: bool,
    /// Print one interval and exit
    #[arg(long)]
    pub(crate) once: bool,
    /// Print a JSON list of devices for each interval, one a line
    #[arg(long)]
    pub(crate) json: bool,
}

/// Order of devices in `paravane top`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum TopKey {
    /// Buffers returned to the driver per second
    #[default]
    Done,
    /// 50th percentile of the latency
    P50,
    /// 99th percentile of the latency
    P99,
    /// Mean number of requests in flight
    Depth,
    /// CPU time of the I/O threads
    Cpu,
    /// The column ERRORS
    Errors,
    /// Name; vm2 before vm10
    Name,
}

/// Show each request of a disk as it ends, with the time in each stage
///
/// Asks every daemon in the control directory for the device. The daemon sends requests from then
/// on, and never waits: requests that find no room are dropped and counted. Only
/// disks are traced: network cards and entropy sources measure whole batches.
///
/// Columns: TIME is the end of the request (UTC). Q is the queue. SECTOR is the first sector (512
/// bytes), SIZE the bytes of data. RING is the time in the ring until the I/O thread took the
/// request, THROTTLED the time held by a rate limit, HOST the time in storage, INTERRUPT the time
/// from there to the interrupt. TOTAL is their sum; what the guest sees beyond it is spent in the
/// guest or its VMM. A failed request ends with its status.
#[derive(Debug, Args)]
pub(crate) struct TraceArgs {
    /// Name of the device
    #[arg(value_name = "DEVICE")]
    pub(crate) device: String,
    /// Ask only the daemon with this control socket
    #[arg(long, value_name = "PATH")]
    pub(crate) control: Option<PathBuf>,
    /// Show requests that took TIME or longer, for example 5ms
    #[arg(long, value_name = "TIME")]
    pub(crate) slower_than: Option<humantime::Duration>,
    /// Show these operations, separated by commas [default: all]
    #[arg(long, value_parser = operations(), value_name = "OPERATION", value_delimiter = ',')]
    pub(crate) operation: Vec<String>,
    /// Show requests of queue N
    #[arg(long, value_name = "N")]
    pub(crate) queue: Option<u16>,
    /// End after N requests [default: no limit; with --chrome: 100000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) count: Option<u64>,
    /// End after TIME, for example 10s
    #[arg(long, value_name = "TIME")]
    pub(crate) duration: Option<humantime::Duration>,
    /// Print a JSON object for each request, one a line
    #[arg(long)]
    pub(crate) json: bool,
    /// Write a Chrome trace to FILE instead, for ui.perfetto.dev; at most 1000000 requests
    #[arg(long, value_name = "FILE", conflicts_with = "json")]
    pub(crate) chrome: Option<PathBuf>,
}

/// Names of the operations of disks.
fn operations() -> PossibleValuesParser {
    let value = |operation: &'static Operation| PossibleValue::new(operation.name()).help(operation.about());
    OPERATIONS.iter().map(value).into()
}
