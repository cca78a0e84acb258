//! Listening sockets that only this user may connect to.
use crate::peer::Peer;
use anyhow::bail;
use rustix::fs::Mode;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

/// Most clients that wait to be accepted: as many as the kernel allows.
const BACKLOG: i32 = 4096;

/// Listens with mode 0600. Replaces a socket that nobody will accept from.
///
/// # Errors
/// Another process listens there, another file has the name, or the kernel refuses.
pub(crate) fn bind(path: &Path) -> Result<UnixListener, anyhow::Error> {
    // Of a daemon that was killed while it started another program, that program has the socket until it runs.
    let listens = |stream: UnixStream| !Peer::of(&stream).is_ok_and(|peer| peer.has_ended());
    if UnixStream::connect(path).is_ok_and(listens) {
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
