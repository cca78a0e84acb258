//! One end of a socket pair that a client hands over.
//!
//! Whoever has the other end can leave descriptors in it, the client's end of its connection to us perhaps, which then stays open
//! for as long as they lie there. So what is sent to us is thrown away: as it comes (`back_channel`), or here, where nobody
//! may send anything any more.
use rustix::io::Errno;
use rustix::net::{RecvFlags, Shutdown, SocketType, recv, shutdown, sockopt};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::{SocketAddr, UnixStream};

/// Whether a descriptor of the client's is one end of a pair of stream sockets.
///
/// An end of a connection to us, or to another server, has a name on one side. With the client's own end in our hands its
/// connection would never be closed. A socket that listens could hold any descriptor in what it has not accepted.
///
/// # Errors
/// It is not.
pub(crate) fn check(fd: &OwnedFd) -> io::Result<()> {
    let refused = || io::Error::new(io::ErrorKind::InvalidInput, "not an end of a pair of stream sockets");
    // Names can be had of any kind of socket; these calls fail if it is of another family, or not connected.
    let stream = UnixStream::from(fd.try_clone()?);
    let unnamed = |name: io::Result<SocketAddr>| name.is_ok_and(|name| name.is_unnamed());
    let is_stream = sockopt::socket_type(fd).is_ok_and(|kind| kind == SocketType::STREAM);
    if is_stream && unnamed(stream.local_addr()) && unnamed(stream.peer_addr()) {
        Ok(())
    } else {
        Err(refused())
    }
}

/// Makes an end that is only written to: the other end can send nothing from now on, and what it has sent is thrown away.
///
/// # Errors
/// It is no end of a pair.
pub(crate) fn write_only(fd: &OwnedFd) -> io::Result<()> {
    check(fd)?;
    shutdown(fd, Shutdown::Read)?;
    let mut bytes = [0; 4096];
    // Nothing is added any more: it ends with what a socket holds.
    loop {
        match recv(fd, &mut bytes[..], RecvFlags::DONTWAIT) {
            Ok((0, _)) => return Ok(()),
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
