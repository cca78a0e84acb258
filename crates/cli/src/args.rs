//! The command line.
use crate::choices::{Choice, one_of};
use crate::disk::DiskArgs;
#[cfg(feature = "run")]
use crate::run::args::RunArgs;
use crate::serve::args::{LogFormat, ReloadArgs, ServeArgs, StatusArgs, TopArgs, TraceArgs};
use clap::{Args, Parser, Subcommand};
use clap_complete::Shell;
use paravane_command_line::LogArgs;
#[cfg(feature = "bench")]
use paravane_command_line::bench::BenchArgs;
use std::path::PathBuf;

/// Virtio devices for virtual machines: a vhost-user daemon, a microVM, benchmarks
#[derive(Debug, Parser)]
#[command(name = "paravane", version, propagate_version = true, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
    #[command(flatten)]
    pub(crate) log: LogArgs,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    #[cfg(feature = "run")]
    Run(RunArgs),
    Serve(Box<ServeArgs>),
    Hold(HoldArgs),
    Reload(ReloadArgs),
    Status(StatusArgs),
    Top(TopArgs),
    Trace(TraceArgs),
    Disk(DiskArgs),
    Doctor(DoctorArgs),
    #[cfg(feature = "bench")]
    Bench(BenchArgs),
    Completions(CompletionsArgs),
    /// Connect to servers for a daemon, which starts this
    #[command(hide = true)]
    Broker,
    /// Look at descriptors of clients for a daemon, which starts this
    #[command(hide = true)]
    Inspector,
    /// Read the file of devices for a daemon, which starts this
    #[command(hide = true)]
    Reader,
    #[command(hide = true)]
    Manuals(FolderArgs),
    #[command(hide = true)]
    Reference(FolderArgs),
}

/// Keep the descriptors of a daemon that dies, for the next daemon
///
/// A daemon stores copies of its descriptors in this process: connections to VMMs, guest memory,
/// eventfds. They stay open when the daemon is killed, and the next daemon takes them. The protocol
/// is that of systemd's descriptor store; a service of systemd does not need this process.
///
/// The process stays in the foreground and logs to stderr. It serves one daemon at a time, of the
/// same user or root. It has one thread, no device code, and a sandbox of its own: Landlock, seccomp,
/// no capabilities.
#[derive(Debug, Args)]
pub(crate) struct HoldArgs {
    /// Listen for a daemon at PATH
    ///
    /// The socket has mode 0600. A socket without a listener is replaced.
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: PathBuf,
    /// Maximum number of held descriptors
    ///
    /// A session needs about 10, and 4 for each queue; the largest one 140, and 4 for each queue. Half
    /// of N is divided evenly among the devices. RLIMIT_NOFILE (LimitNOFILE= of systemd) must
    /// allow 285 more.
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) max_descriptors: u32,
    /// Run without a sandbox, on hosts without Landlock
    #[arg(long)]
    pub(crate) no_sandbox: bool,
    /// Format of the log [default: text]
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub(crate) log_format: Option<LogFormat>,
}

/// Check this host, or explain what a VMM has negotiated, and what to mend
///
/// Prints a finding for each item: its name, `ok`, `warn` (works, with a loss) or `missing`, what
/// was found, and behind an arrow the remedy. Takes less than a second and changes nothing.
///
/// With --config, checks what the devices of that file need, and nothing else. Limits are those of
/// this shell: run it as the daemon's user.
///
/// With --client, explains what the VMM of a device and the driver of its guest have negotiated,
/// and what that costs.
#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Check the needs of the devices in this file
    #[arg(long, value_name = "FILE", conflicts_with = "client")]
    pub(crate) config: Option<PathBuf>,
    /// Explain the VMM of the device with this vhost-user socket or name
    #[arg(long, value_name = "SOCKET")]
    pub(crate) client: Option<PathBuf>,
    /// With --client: ask only the daemon with this control socket
    #[arg(long, value_name = "PATH", requires = "client")]
    pub(crate) control: Option<PathBuf>,
    /// Print the findings as a JSON list
    #[arg(long)]
    pub(crate) json: bool,
}

/// Print the completions of a shell
///
/// The Debian package installs them. Otherwise write them where the shell looks for them.
#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// Shell
    #[arg(value_parser = one_of(SHELLS), value_name = "SHELL")]
    pub(crate) shell: Shell,
}

/// The shells for which Debian has a directory of completions.
pub(crate) const SHELLS: &[Choice<Shell>] =
    &[("bash", "GNU Bash", Shell::Bash), ("zsh", "Zsh", Shell::Zsh), ("fish", "fish", Shell::Fish)];

/// Write generated pages to a folder (for packagers and maintainers)
///
/// `manuals` writes manual pages and shell completions, `reference` the reference chapters of the
/// documentation.
#[derive(Debug, Args)]
pub(crate) struct FolderArgs {
    /// Created if missing
    pub(crate) directory: PathBuf,
}
