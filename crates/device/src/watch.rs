//! Descriptors in the epoll instance of an owner.
use rustix::event::epoll;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

/// Told of each time that a descriptor becomes readable.
///
/// Not while it is: a network card without buffers must be able to sleep while frames wait.
const EDGE: epoll::EventFlags = epoll::EventFlags::IN.union(epoll::EventFlags::ET);

/// Has `epoll` tell of a descriptor, with `token`.
pub(crate) fn add(epoll: &OwnedFd, fd: impl AsFd, token: u64) -> io::Result<()> {
    Ok(epoll::add(epoll, fd, epoll::EventData::new_u64(token), EDGE)?)
}

/// Ends [`add`].
pub(crate) fn remove(epoll: &OwnedFd, fd: impl AsFd) {
    if let Err(error) = epoll::delete(epoll, fd) {
        tracing::error!("cannot remove a descriptor from epoll: {error}");
    }
}
