//! SO_PASSRIGHTS: whether a socket accepts descriptors (SCM_RIGHTS).
//!
//! A connection in the backlog accepts none. Nothing reads it yet, and descriptors in it stay open:
//! if one were the end of the connection that is served, that session would never be seen to end.
//! No client sends a descriptor before it has the answer to GET_FEATURES.
//!
//! Kernels before Linux 6.16 lack the option. There a connection in the backlog is the only place
//! where such a descriptor can hide.
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Value in asm-generic/socket.h, which x86, Arm and RISC-V use.
const SO_PASSRIGHTS: libc::c_int = 83;

/// Allows or refuses descriptors.
///
/// Accepted connections inherit the setting of their listener.
///
/// # Errors
/// The kernel does not know the option.
pub(super) fn set(socket: BorrowedFd<'_>, takes: bool) -> io::Result<()> {
    let value = libc::c_int::from(takes);
    let (name, len) = ((&raw const value).cast(), size_of_val(&value) as libc::socklen_t);
    // SAFETY: the option's value is read from `value`, which lives until the call has returned.
    match unsafe { libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_PASSRIGHTS, name, len) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
