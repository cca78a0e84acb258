//! A member's part in the epoll instance of the thread that serves it.
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
use crate::store::{EDGE, unwatch};
use rustix::event::epoll::{self, EventData, EventFlags};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// See the module.
#[derive(Debug)]
pub(super) struct Watched {
    epoll: Arc<OwnedFd>,
    token: u64,
    timer: OwnedFd,
    socket: Option<OwnedFd>,
}

impl Watched {
    /// Has `epoll` tell of a member's event and of the timer.
    pub(super) fn new(
        (epoll, token): (&Arc<OwnedFd>, u64),
        event: &OwnedFd,
        timer: &OwnedFd,
    ) -> io::Result<Self> {
        let watched = Self { epoll: epoll.clone(), token, timer: timer.try_clone()?, socket: None };
        watched.add(&watched.timer, EDGE)?;
        // On an error, the duplicate of the timer is closed. The timer itself stays open, and so would
        // the entry.
        watched.add(event, EDGE).inspect_err(|_| unwatch(epoll, &watched.timer))?;
        Ok(watched)
    }

    /// Has it tell of a connection, by flags as for the member's own instance.
    pub(super) fn connect(&mut self, wire: &Wire, flags: EventFlags) -> io::Result<()> {
        self.disconnect();
        let socket = wire.as_fd().try_clone_to_owned()?;
        self.add(&socket, EDGE | flags)?;
        self.socket = Some(socket);
        Ok(())
    }

    /// Changes what it tells of a connection.
    pub(super) fn modify(&self, flags: EventFlags) -> io::Result<()> {
        if let Some(socket) = &self.socket {
            epoll::modify(&self.epoll, socket, EventData::new_u64(self.token), EDGE | flags)?;
        }
        Ok(())
    }

    /// The connection is lost.
    pub(super) fn disconnect(&mut self) {
        if let Some(socket) = self.socket.take() {
            unwatch(&self.epoll, &socket);
        }
    }

    /// Nothing is told of any more.
    pub(super) fn end(mut self, event: &OwnedFd) {
        self.disconnect();
        unwatch(&self.epoll, &self.timer);
        unwatch(&self.epoll, event);
    }

    fn add(&self, fd: &OwnedFd, flags: EventFlags) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, fd, EventData::new_u64(self.token), flags)?)
    }
}
