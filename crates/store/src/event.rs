//! The descriptors by which other threads wake a queue.
use rustix::event::{EventfdFlags, PollFd, PollFlags, poll};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// An eventfd that does not block.
///
/// # Errors
/// The host refuses a descriptor.
pub fn eventfd() -> io::Result<Arc<OwnedFd>> {
    let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    Ok(Arc::new(event))
}

/// Makes an eventfd readable.
pub fn signal(event: &OwnedFd) {
    // It fails if the counter is full, and then it is readable.
    let _ = rustix::io::write(event, &1_u64.to_ne_bytes());
}

/// Makes an eventfd or a timer unreadable.
pub fn clear(event: &OwnedFd) {
    // It fails if there is nothing to read.
    let _ = rustix::io::read(event, &mut [0; 8]);
}

/// Waits until a descriptor is readable, or for a signal.
pub(crate) fn wait(fd: &impl AsFd) -> io::Result<()> {
    match poll(&mut [PollFd::new(fd, PollFlags::IN)], None) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
