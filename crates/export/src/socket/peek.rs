//! Peek offset of a connection (SO_PEEK_OFF in socket(7)): where the next MSG_PEEK begins.
//!
//! The offset belongs to the open socket, not to a process: it outlives one. The kernel moves it
//! forward by what is peeked, and back by what is taken off the socket.
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// No offset: each MSG_PEEK begins at the first unread byte.
pub(super) const NONE: libc::c_int = -1;

/// Has the next MSG_PEEK begin `offset` bytes after the first unread byte.
pub(super) fn set_offset(socket: BorrowedFd<'_>, offset: libc::c_int) -> io::Result<()> {
    let (value, len) = ((&raw const offset).cast(), size_of_val(&offset) as libc::socklen_t);
    // SAFETY: the option's value is read from `offset`, which lives until the call has returned.
    match unsafe { libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEEK_OFF, value, len) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The offset; negative if it was never set.
pub(super) fn offset(socket: BorrowedFd<'_>) -> io::Result<libc::c_int> {
    let mut offset: libc::c_int = -1;
    let mut len = size_of_val(&offset) as libc::socklen_t;
    let (fd, value) = (socket.as_raw_fd(), (&raw mut offset).cast());
    // SAFETY: the option's value is written to `offset`, whose length is passed along.
    match unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEEK_OFF, value, &raw mut len) } {
        0 => Ok(offset),
        _ => Err(io::Error::last_os_error()),
    }
}
