//! End of a socket pair that a client sends.
//!
//! The client keeps the other end and can leave descriptors in the pair, the client's end of its
//! own connection perhaps, which then stays open while they lie there. So received data is
//! discarded: as it arrives, or here, where the client may send nothing.
use rustix::io::Errno;
use rustix::net::{RecvFlags, Shutdown, SocketType, recv, shutdown, sockopt};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::{SocketAddr, UnixStream};

/// Checks that a descriptor is one end of a pair of stream sockets.
///
/// One side of a connection to this or another server has a name. If we held the client's own end,
/// its connection would never close. A listening socket could hold any descriptor in its backlog.
///
/// # Errors
/// It is something else.
pub fn check(fd: &OwnedFd) -> io::Result<()> {
    let refused = || io::Error::new(io::ErrorKind::InvalidInput, "not an end of a pair of stream sockets");
    // Any socket has names; these calls fail for another family, or if it is not connected.
    let stream = UnixStream::from(fd.try_clone()?);
    let unnamed = |name: io::Result<SocketAddr>| name.is_ok_and(|name| name.is_unnamed());
    let is_stream = sockopt::socket_type(fd).is_ok_and(|kind| kind == SocketType::STREAM);
    if is_stream && unnamed(stream.local_addr()) && unnamed(stream.peer_addr()) {
        Ok(())
    } else {
        Err(refused())
    }
}

/// Makes an end write-only: nothing is received, and the other end cannot send.
///
/// # Errors
/// It is no end of a pair.
pub fn write_only(fd: &OwnedFd) -> io::Result<()> {
    check(fd)?;
    shutdown(fd, Shutdown::Read)?;
    let mut bytes = [0; 4096];
    // Nothing is added any more, so the loop ends with the contents of the buffer.
    loop {
        match recv(fd, &mut bytes[..], RecvFlags::DONTWAIT) {
            Ok((0, _)) => return Ok(()),
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
