//! Pipes of other processes.
use nix::sys::signal::{SigSet, Signal};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, IoSlice, IoSliceMut, ReadWriteFlags, preadv2, pwritev2, read, write};
use std::os::fd::AsFd;

/// Blocks SIGPIPE in this thread: a write to a pipe without reader is an error.
///
/// For threads that write to descriptors of other processes. SIGPIPE ends a process that does not
/// ignore it, a C program for instance.
pub fn outlive_pipes() {
    // A signal that arises stays pending, and ends with the thread.
    let blocked = SigSet::from(Signal::SIGPIPE).thread_block();
    debug_assert!(blocked.is_ok(), "the set is a valid one");
}

/// Offset of a file that has no position.
const NO_OFFSET: u64 = u64::MAX;

/// Writes what a pipe or socket takes without a wait. Its flags, which its owner shares, stay.
///
/// # Errors
/// It takes nothing now, or is broken.
pub fn write_now(pipe: impl AsFd, bytes: &[u8]) -> rustix::io::Result<usize> {
    match pwritev2(&pipe, &[IoSlice::new(bytes)], NO_OFFSET, ReadWriteFlags::NOWAIT) {
        // Older hosts lack RWF_NOWAIT for this file.
        Err(Errno::OPNOTSUPP) if is_ready(&pipe, PollFlags::OUT) => write(pipe, bytes),
        written => written,
    }
}

/// Reads what is in a pipe, of which the caller is the only reader; see [`write_now`].
///
/// # Errors
/// It has nothing now.
pub fn read_now(pipe: impl AsFd, bytes: &mut [u8]) -> rustix::io::Result<usize> {
    match preadv2(&pipe, &mut [IoSliceMut::new(bytes)], NO_OFFSET, ReadWriteFlags::NOWAIT) {
        Err(Errno::OPNOTSUPP) if is_ready(&pipe, PollFlags::IN) => read(pipe, bytes),
        read => read,
    }
}

/// Whether a descriptor is ready now.
pub fn is_ready(fd: impl AsFd, what: PollFlags) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut fds = [PollFd::new(&fd, what)];
    poll(&mut fds, Some(&now)).is_ok() && fds[0].revents().contains(what)
}
