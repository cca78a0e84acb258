//! Whether a socket takes descriptors (SCM_RIGHTS).
//!
//! A connection that waits for its turn takes none. Nobody reads it yet, and what lies there stays open: with the end of the
//! connection that is served in it, that session would never be seen to end. No client sends a descriptor before it has
//! the answer to GET_FEATURES.
//!
//! Kernels before Linux 6.16 do not know the option. There the waiting connection is the only place that is left for such a
//! descriptor.
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// asm-generic/socket.h, which x86, Arm and RISC-V use.
const SO_PASSRIGHTS: libc::c_int = 83;

/// Lets the socket take descriptors, or refuses them to whoever sends. Connections get it from the socket that listens.
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
