//! Where a device is served, and by which threads.
use crate::choices::{Choice, one_of};
use clap::{ArgGroup, Args, Command};
use std::fmt;
use std::os::fd::RawFd;
use std::path::PathBuf;

const SWITCH: &[Choice<bool>] = &[("on", "Enabled", true), ("off", "Disabled", false)];

/// Options of a device that a file of devices does not have.
pub(crate) const NOT_IN_FILES: [&str; 2] = ["fd", "print-capabilities"];

// Options of every device. A doc comment would describe the command of each.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
#[command(next_help_heading = "Endpoint and threads")]
pub(crate) struct EndpointArgs {
    /// Name in log, status and metrics [default: that of its kind; required in a file]
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// Listen for a VMM on this Unix socket, created with mode 0600
    #[arg(long, visible_alias = "socket-path", value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,
    /// Connect to the Unix socket on which a VMM listens; retry until it succeeds
    #[arg(long, value_name = "PATH")]
    pub(crate) connect: Option<PathBuf>,
    /// Listen on the socket passed by systemd with FileDescriptorName=NAME
    #[arg(long)]
    pub(crate) socket_activation: bool,
    /// Serve the inherited Unix socket with this descriptor number, listening or connected
    ///
    /// If the socket is connected, the daemon exits when the VMM disconnects.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i32).range(3..))]
    pub(crate) fd: Option<i32>,
    /// Number of threads that serve this device alone [default: none, it shares --io-threads]
    ///
    /// A disk with --engine immediate whose image is not in memory always has its own [default: 1].
    #[arg(long, value_name = "N")]
    pub(crate) workers: Option<u16>,
    /// Maximum time to poll a queue before sleeping; 0 disables polling [default: 50, for an image in Ceph 0]
    ///
    /// Only queues whose work recently arrived within this time are polled.
    #[arg(long, value_name = "MICROSECONDS")]
    pub(crate) poll_us: Option<u32>,
    /// Measure the latencies of requests [default: on]
    #[arg(long, value_parser = one_of(SWITCH), value_name = "SWITCH")]
    pub(crate) latencies: Option<bool>,
    /// Offer split virtqueues only
    #[arg(long)]
    pub(crate) no_packed: bool,
    /// Print the capabilities for management software as JSON and exit; other options are ignored
    #[arg(long)]
    pub(crate) print_capabilities: bool,
}

impl EndpointArgs {
    /// A command with these options behind those that `own` adds.
    pub(super) fn behind(command: Command, own: fn(Command) -> Command) -> Command {
        let group = ArgGroup::new("endpoint").args(["socket", "connect", "socket_activation", "fd"]);
        Self::augment_args(own(command.group(group.required(true))))
    }

    /// A command whose device needs no endpoint: these options are hidden.
    #[cfg(feature = "run")]
    pub(crate) fn unused(command: Command) -> Command {
        let own = Self::augment_args(Command::new("endpoint"));
        let ids: Vec<_> = own.get_arguments().map(|arg| arg.get_id().clone()).collect();
        let command = command.mut_group("endpoint", |group| group.required(false));
        ids.into_iter().fold(command, |command, id| command.mut_arg(id, |arg| arg.hide(true)))
    }
}

/// How a VMM connects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Endpoint {
    /// The daemon listens.
    Listen(PathBuf),
    /// The VMM listens.
    Connect(PathBuf),
    /// systemd passed a listening socket with the device's name.
    Activated,
    /// The parent process passed this descriptor, a listening or connected socket.
    Inherited(RawFd),
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Listen(path) => write!(f, "listen {}", path.display()),
            Self::Connect(path) => write!(f, "connect {}", path.display()),
            Self::Activated => f.write_str("activated"),
            Self::Inherited(number) => write!(f, "descriptor {number}"),
        }
    }
}

impl From<&EndpointArgs> for Endpoint {
    fn from(args: &EndpointArgs) -> Self {
        // The argument group guarantees exactly one.
        match (&args.socket, &args.connect, args.fd) {
            (Some(path), _, _) => Self::Listen(path.clone()),
            (None, Some(path), _) => Self::Connect(path.clone()),
            (None, None, Some(number)) => Self::Inherited(number),
            (None, None, None) => Self::Activated,
        }
    }
}
