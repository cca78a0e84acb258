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
use crate::store::EDGE;
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
        watched.add(event, EDGE).inspect_err(|_| watched.delete(&watched.timer))?;
        Ok(watched)
    }

    /// Has it tell of a connection, and of room in its socket.
    pub(super) fn connect(&mut self, wire: &Wire, room: bool) -> io::Result<()> {
        self.disconnect();
        let socket = wire.as_fd().try_clone_to_owned()?;
        let room = if room { EventFlags::OUT } else { EventFlags::empty() };
        self.add(&socket, EDGE | room)?;
        self.socket = Some(socket);
        Ok(())
    }

    /// Changes what it tells of a connection.
    pub(super) fn modify(&self, flags: EventFlags) -> io::Result<()> {
        if let Some(socket) = &self.socket {
            epoll::modify(&self.epoll, socket, EventData::new_u64(self.token), flags | EventFlags::ET)?;
        }
        Ok(())
    }

    /// The connection is lost.
    pub(super) fn disconnect(&mut self) {
        if let Some(socket) = self.socket.take() {
            self.delete(&socket);
        }
    }

    /// Nothing is told of any more.
    pub(super) fn end(mut self, event: &OwnedFd) {
        self.disconnect();
        self.delete(&self.timer);
        self.delete(event);
    }

    fn add(&self, fd: &OwnedFd, flags: EventFlags) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, fd, EventData::new_u64(self.token), flags)?)
    }

    fn delete(&self, fd: &OwnedFd) {
        if let Err(error) = epoll::delete(&self.epoll, fd) {
            tracing::error!("cannot remove a descriptor from epoll: {error}");
        }
    }
}
