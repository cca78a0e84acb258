//! The inspector's process: `paravane inspector`, started by the daemon with a socket as its stdin.
//!
//! Each look is a process of its own, forked from one that has a single thread. One that cannot close
//! a descriptor waits for its file system, and holds up no other.
use super::GOOD;
use crate::failure::Failure;
use crate::fds::{self, Received};
use crate::serve::helper;
use crate::serve::sandbox::helpers;
use anyhow::{Context, anyhow};
use rustix::fs::{CWD, fcntl_get_seals, readlinkat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, sockopt};
use rustix::process::{WaitOptions, waitpid};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::process::ExitCode;

/// Most descriptors of a message, and most bytes: see `paravane_vhost::message`.
const MAX_FDS: usize = 8;
const MAX_BYTES: usize = 8192;

pub(crate) fn main() -> Result<ExitCode, Failure> {
    let (socket, _blocked) = helper::begin()?;
    let mut wanted = [0];
    let (received, _) = rustix::net::recv(&socket, &mut wanted, RecvFlags::empty())
        .context("stdin is not the socket of a daemon")?;
    // A daemon that ends before it has asked.
    if received == 0 {
        return Ok(ExitCode::SUCCESS);
    }
    if wanted == [1] {
        helpers::enter_inspector()?;
    }
    while let Some((len, connection, answer)) =
        receive(&socket).map_err(|error| Failure::request(anyhow!("cannot read a message: {error}")))?
    {
        // Those that have ended.
        while matches!(waitpid(None, WaitOptions::NOHANG), Ok(Some(_))) {}
        // SAFETY: this process has one thread, so the child has all that it may use.
        match unsafe { libc::fork() } {
            0 => {
                // The daemon notices the end of this process's parent by it.
                drop(socket);
                let verdict = look(connection.as_fd(), len);
                let text = verdict.as_ref().map_or_else(|why| why.as_bytes(), |()| GOOD);
                let _ = rustix::net::send(&answer, text, SendFlags::NOSIGNAL);
                return Ok(ExitCode::SUCCESS);
            }
            // The daemon hears of it by the end of the answer's socket.
            -1 => tracing::warn!("cannot fork: {}", io::Error::last_os_error()),
            _ => {}
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Receives a request: a number of bytes, a connection, and a socket for the answer.
///
/// `None`: the daemon has gone.
pub(super) fn receive(socket: &OwnedFd) -> io::Result<Option<(usize, OwnedFd, OwnedFd)>> {
    let mut len = [0; 4];
    let mut fds = match fds::receive(socket, &mut len, 2, RecvFlags::empty()) {
        Err(Errno::CONNRESET) => return Ok(None),
        received => match received? {
            Received { len: 0, .. } => return Ok(None),
            Received { fds, .. } => fds.into_iter(),
        },
    };
    match (fds.next(), fds.next()) {
        (Some(connection), Some(answer)) => Ok(Some((u32::from_ne_bytes(len) as usize, connection, answer))),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Peeks `len` bytes of a connection, and judges the descriptors that come with them.
///
/// Their copies are leaked: the end of the process closes them.
///
/// # Errors
/// One must not be taken: why.
pub(super) fn look(connection: BorrowedFd<'_>, len: usize) -> Result<(), String> {
    let mut bytes = vec![0; len.min(MAX_BYTES)];
    let received = fds::receive(&connection, &mut bytes, MAX_FDS, RecvFlags::PEEK | RecvFlags::DONTWAIT)
        .map_err(|error| format!("cannot peek the message: {error}"))?;
    let mut verdict = Ok(());
    for fd in received.fds {
        verdict = verdict.and_then(|()| judge(fd.as_fd()));
        // After the answer.
        std::mem::forget(fd);
    }
    if received.fds_cut {
        return Err(format!("more than {MAX_FDS} file descriptors"));
    }
    verdict
}

/// Whether the kernel alone serves a descriptor. Asks no file system.
fn judge(fd: BorrowedFd<'_>) -> Result<(), String> {
    // Files in memory are the only ones with seals.
    if fcntl_get_seals(fd).is_ok() || sockopt::socket_domain(fd) == Ok(AddressFamily::UNIX) {
        return Ok(());
    }
    let link = readlinkat(CWD, format!("/proc/self/fd/{}", fd.as_raw_fd()), Vec::new());
    let name = link.map_err(|error| format!("cannot examine a descriptor: {error}"))?;
    let name = name.to_string_lossy();
    // Names of files begin with a slash, or "(unreachable)".
    if name == "anon_inode:[eventfd]" || name.starts_with("pipe:[") {
        return Ok(());
    }
    Err(format!(
        "a descriptor of {name:?}: need memory (a memfd, or a file on tmpfs or hugetlbfs), an eventfd, a pipe \
         or a Unix socket (--any-memory-file accepts others)"
    ))
}
