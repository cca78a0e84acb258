//! A user of a connection: its outcomes, and the descriptors that tell it of work.
use super::watched::Watched;
use super::wire::Wire;
use crate::{Outcome, WakeSet, clear, eventfd, signal};
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Descriptors of a member.
#[derive(Debug)]
pub(super) struct Fds {
    /// Holds the others, also while a thread watches them itself: readable when there is something to do.
    epoll: OwnedFd,
    event: Arc<OwnedFd>,
}

impl AsFd for Fds {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) fds: Arc<Fds>,
    /// Its part in the set of a thread.
    watched: Option<Watched>,
    /// Jobs that it may have.
    pub(super) jobs: usize,
    pub(super) is_used: bool,
    is_signaled: bool,
    pub(super) outcomes: VecDeque<Outcome>,
    pub(super) extents: Vec<(u16, Vec<(u64, u32)>)>,
}

impl Member {
    /// With room for `jobs` jobs. `timer` wakes it, too.
    pub(super) fn new(jobs: usize, timer: &OwnedFd) -> io::Result<Self> {
        let event = eventfd()?;
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &event, EventData::new_u64(0), EventFlags::IN)?;
        epoll::add(&epoll, timer, EventData::new_u64(0), EventFlags::IN)?;
        Ok(Self {
            fds: Arc::new(Fds { epoll, event }),
            watched: None,
            jobs,
            is_used: true,
            is_signaled: false,
            outcomes: VecDeque::with_capacity(jobs),
            extents: Vec::new(),
        })
    }

    /// The member ends.
    pub(super) fn leave(&mut self, wire: Option<&Wire>) {
        self.watched = None;
        self.is_used = false;
        self.outcomes.clear();
        if let Some(wire) = wire {
            self.disconnect(wire);
        }
    }

    /// See [`StoreQueue::register`](crate::StoreQueue::register). `room`: as for [`Member::connect`].
    pub(super) fn register(
        &mut self,
        wakes: Option<&WakeSet>,
        timer: &OwnedFd,
        wire: Option<(&Wire, bool)>,
    ) -> io::Result<()> {
        self.watched = None;
        let Some(wakes) = wakes else { return Ok(()) };
        let mut watched = Watched::new(wakes, &self.fds.event, timer)?;
        if let Some((wire, room)) = wire {
            watched.connect(wire, awaited(room))?;
        }
        self.watched = Some(watched);
        Ok(())
    }

    /// Waits for bytes of a connection, and for room in its socket with `room`.
    pub(super) fn connect(&mut self, wire: &Wire, room: bool) -> io::Result<()> {
        epoll::add(&self.fds.epoll, wire, EventData::new_u64(0), awaited(room))?;
        self.watched.as_mut().map_or(Ok(()), |watched| watched.connect(wire, awaited(room)))
    }

    /// The connection is lost.
    pub(super) fn disconnect(&mut self, wire: &Wire) {
        let _ = epoll::delete(&self.fds.epoll, wire);
        if let Some(watched) = &mut self.watched {
            watched.disconnect();
        }
    }

    /// Waits for room in the socket, too, or no more.
    pub(super) fn await_room(&self, wire: &Wire, room: bool) {
        let own = epoll::modify(&self.fds.epoll, wire, EventData::new_u64(0), awaited(room));
        let watched = self.watched.as_ref().map_or(Ok(()), |watched| watched.modify(awaited(room)));
        if let Err(error) = own.map_err(io::Error::from).and(watched) {
            tracing::warn!(%error, "cannot wait for an NBD server");
        }
    }

    pub(super) fn signal(&mut self) {
        if !self.is_signaled {
            self.is_signaled = true;
            signal(&self.fds.event);
        }
    }

    pub(super) fn clear_signal(&mut self) {
        if self.is_signaled {
            self.is_signaled = false;
            clear(&self.fds.event);
        }
    }
}

/// What members wait for at a socket: bytes, and room if a send is incomplete.
fn awaited(room: bool) -> EventFlags {
    if room { EventFlags::IN | EventFlags::OUT } else { EventFlags::IN }
}
