//! Listening sockets that only this user may connect to.
use anyhow::bail;
use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

/// Most clients that wait to be accepted: as many as the kernel allows.
const BACKLOG: i32 = 4096;

/// Listens with mode 0600. Replaces a socket that nobody will accept from.
///
/// # Errors
/// Another process listens there, another file has the name, or the kernel refuses.
pub(crate) fn bind(path: &Path) -> Result<UnixListener, anyhow::Error> {
    if UnixStream::connect(path).is_ok_and(|stream| !has_ended(&stream)) {
        bail!("in use by another process");
    }
    if path.symlink_metadata().is_ok_and(|file| std::os::unix::fs::FileTypeExt::is_socket(&file.file_type()))
    {
        std::fs::remove_file(path)?;
    }
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // The file gets the mode of the socket: there is no moment for others, and no path to follow.
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

/// Whether the process that listens has ended.
///
/// Of a daemon that was killed while it started another program, that program has the socket until it runs.
fn has_ended(stream: &UnixStream) -> bool {
    // It names the process that called listen(2); 0 if that is in another name space.
    let Ok(peer) = getsockopt(stream, PeerCredentials) else { return false };
    let Some(pid) = Pid::from_raw(peer.pid()) else { return false };
    match pidfd_open(pid, PidfdFlags::empty()) {
        // Readable: it has ended, and its parent has not looked yet.
        Ok(process) => {
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&now)).is_ok_and(|ready| ready > 0)
        }
        Err(error) => error == Errno::SRCH,
    }
}
