//! NBD servers of images: nbdkit, one process for each.
use super::case::Storage;
use crate::BenchError;
use crate::daemon::{Daemon, is_installed};
use crate::error::broken;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The program (Debian: nbdkit).
const SERVER: &str = "nbdkit";
/// Time for a server to listen.
const PATIENCE: Duration = Duration::from_secs(10);
/// Requests that a server does at once.
const THREADS: &str = "128";

/// Whether images can be behind NBD servers.
pub(super) fn is_there() -> bool {
    is_installed(SERVER)
}

/// Serves `image` at `socket`, on `cpu`.
///
/// # Errors
/// The server does not listen.
pub(super) fn start(
    image: &Path,
    socket: &Path,
    storage: Storage,
    cpu: Option<usize>,
) -> Result<Daemon, BenchError> {
    let mut command = Command::new(SERVER);
    command.args(["--foreground", "--exit-with-parent", "--threads", THREADS, "--unix"]).arg(socket);
    if storage == Storage::NbdFar {
        command.arg("--filter=delay");
    }
    command.arg("file").arg(image);
    if storage == Storage::NbdFar {
        command.args(["rdelay=1ms", "wdelay=1ms"]);
    }
    command.stdin(Stdio::null()).stdout(Stdio::null());
    let mut daemon = Daemon::start(command, SERVER, cpu)?;
    let end = Instant::now() + PATIENCE;
    while !socket.exists() {
        if let Some(ended) = daemon.ended() {
            return Err(broken(SERVER, ended));
        }
        if Instant::now() > end {
            return Err(broken(SERVER, "the server does not listen"));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(daemon)
}
