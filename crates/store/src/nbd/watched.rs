//! A member's part in the wake set of the thread that serves it.
//!
//! ```text
//!   thread's epoll <- the member's event
//!                  <- the timer of the channel, and its socket while it is connected: duplicates
//! ```
//! The member's own instance, which others may wait for, has them, too. If the thread watched that one,
//! each part that a server sends would wake one epoll instance within another, on the server's processor:
//! `paravane bench blk --filter nbd/split/read4k`, depth 32, had 0.93 of the rate. (To take the socket out of
//! the member's own meanwhile gained up to 2 %, and was not kept.)
//!
//! Duplicates, because an instance takes a descriptor once, and a thread may serve several members.
use super::wire::Wire;
use crate::{WakeSet, WakeSource};
use rustix::event::epoll::EventFlags;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// See the module.
#[derive(Debug)]
pub(super) struct Watched {
    wakes: WakeSet,
    _timer: WakeSource,
    _event: WakeSource,
    socket: Option<WakeSource>,
}

impl Watched {
    /// Adds a member's event and the timer.
    pub(super) fn new(wakes: &WakeSet, event: &Arc<OwnedFd>, timer: &OwnedFd) -> io::Result<Self> {
        let timer = wakes.add(&Arc::new(timer.try_clone()?))?;
        Ok(Self { wakes: wakes.clone(), _timer: timer, _event: wakes.add(event)?, socket: None })
    }

    /// Adds a connection, with flags as for the member's own instance.
    pub(super) fn connect(&mut self, wire: &Wire, flags: EventFlags) -> io::Result<()> {
        self.disconnect();
        self.socket = Some(self.wakes.add_for(&Arc::new(wire.as_fd().try_clone_to_owned()?), flags)?);
        Ok(())
    }

    /// Changes the events of a connection.
    pub(super) fn modify(&self, flags: EventFlags) -> io::Result<()> {
        self.socket.as_ref().map_or(Ok(()), |socket| socket.modify(flags))
    }

    /// The connection is lost.
    pub(super) fn disconnect(&mut self) {
        self.socket = None;
    }
}
