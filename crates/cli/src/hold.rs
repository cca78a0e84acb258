//! `paravane hold`: keeps descriptors of a daemon while no daemon runs.
//!
//! ```text
//!  RLIMIT_NOFILE raised --> socket bound --> sandbox: Landlock (nothing but to remove the socket), no capabilities,
//!                                            seccomp --> ready --> server --SIGTERM--> socket removed
//! ```
//! The process has no device code that a guest could reach, one thread, and bounds for everything
//! that it keeps. Its log is written by that thread, which loses lines rather than wait for stderr.
mod server;
mod socket;
mod table;

use crate::args::HoldArgs;
use crate::failure::Failure;
use crate::log;
use crate::serve::args::LogFormat;
use crate::serve::sandbox::helpers;
use crate::serve::signals::Signals;
use crate::serve::store::text::MAX_FDS;
use crate::serve::systemd;
use anyhow::{Context, bail};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use sd_notify::NotifyState;
use server::Server;
use socket::Listener;
use std::num::NonZeroU32;
use std::process::ExitCode;

/// Descriptors of the holder itself: sockets, signals, standard streams, and some in reserve.
const OWN: u64 = 32;
/// Log lines per second.
const LOG_RATE: u32 = 1;

pub(crate) fn main(args: &HoldArgs, verbose: u8) -> Result<ExitCode, Failure> {
    log::set_up(log::Settings {
        base: log::Level::INFO,
        verbose,
        json: args.log_format == Some(LogFormat::Json),
        // -v disables the limit.
        rate: NonZeroU32::new(if verbose == 0 { LOG_RATE } else { 0 }),
    });
    raise_descriptor_limit(args.max_descriptors)?;
    let signals = Signals::take().context("cannot block signals")?;
    let manager = systemd::Manager::from_environment()?;
    let listener =
        Listener::bind(&args.socket).with_context(|| format!("socket {}", args.socket.display()))?;
    match args.no_sandbox {
        false => helpers::enter_holder(&args.socket)?,
        true => tracing::warn!("running without a sandbox"),
    }
    // The limit is at most u32::MAX.
    let mut server = Server::new(listener, args.max_descriptors as usize);
    tracing::info!("ready");
    manager.ready();
    let result = server.run(&signals);
    manager.tell(&[NotifyState::Stopping]);
    let held = server.held();
    match held {
        0 => tracing::info!("exiting"),
        _ => tracing::warn!(held, "exiting: held descriptors are closed"),
    }
    result.context("cannot wait for messages")?;
    Ok(ExitCode::SUCCESS)
}

/// Raises the limit of open descriptors to what `held` descriptors and a message need.
fn raise_descriptor_limit(held: u32) -> Result<(), anyhow::Error> {
    let needed = u64::from(held) + MAX_FDS as u64 + OWN;
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if let Some(maximum) = maximum
        && maximum < needed
    {
        bail!(
            "RLIMIT_NOFILE is {maximum}; --max-descriptors {held} needs {needed}: raise LimitNOFILE=, or lower \
             --max-descriptors"
        );
    }
    if current != maximum {
        setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
            .context("cannot raise RLIMIT_NOFILE")?;
    }
    Ok(())
}
