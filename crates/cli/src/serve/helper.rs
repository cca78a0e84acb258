//! Processes of this program beside the daemon, each with a socket of the daemon as its stdin.
use super::signals::Signals;
use crate::failure::Failure;
use crate::{fds, log};
use anyhow::Context;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Command, Stdio};

/// A kind of process.
#[derive(Debug)]
pub(super) struct Helper {
    /// Subcommand.
    pub(super) name: &'static str,
    /// "reads the file of devices".
    pub(super) does: &'static str,
}

impl Helper {
    /// Starts the process, with only `variables` in its environment. Returns the daemon's end of the socket.
    ///
    /// Called before the sandbox closes: the process does for the daemon what the sandbox denies the daemon.
    /// It ends when the socket is closed, and is not waited for.
    ///
    /// # Errors
    /// The host refuses a process.
    pub(super) fn start(&self, variables: &[(&str, &str)]) -> Result<OwnedFd, anyhow::Error> {
        let (near, far) = fds::pair().context("cannot create a socket")?;
        let mut command = Command::new("/proc/self/exe");
        command.arg(self.name).stdin(Stdio::from(far)).stdout(Stdio::null());
        command.env_clear().envs(variables.iter().copied());
        command.spawn().with_context(|| format!("cannot start the process that {}", self.does))?;
        Ok(near)
    }

    /// It has ended: nothing but a new daemon starts another one.
    pub(super) fn has_ended(&self) -> String {
        format!("the process that {} has ended: restart the daemon", self.does)
    }
}

/// Begins such a process: sets up its log, and returns its socket.
///
/// The process ends with the daemon, which signals to the process group must not precede: they are blocked
/// until the signals are dropped.
///
/// # Errors
/// Signals cannot be blocked, or stdin is closed.
pub(super) fn begin() -> Result<(OwnedFd, Signals), Failure> {
    log::set_up(log::Settings { base: log::Level::WARN, verbose: 0, json: false, rate: None });
    let blocked = Signals::take().context("cannot block signals")?;
    let socket = io::stdin().as_fd().try_clone_to_owned().context("stdin")?;
    Ok((socket, blocked))
}
