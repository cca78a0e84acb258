//! What wakes the thread of a queue: completions, and changes of the disk.
//!
//! An epoll instance of a thread has the descriptors themselves ([`Wake::watch`]). For others there is
//! one that stands for both ([`Wake::fd`]), which is made when it is first asked for.
use super::engine::Engine;
use crate::watch;
use rustix::event::epoll;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock};

/// The descriptors of a queue; they stay the same when the engine changes.
#[derive(Debug)]
pub(super) struct Wake {
    /// Signalled by engines for files, and by changes.
    event: Arc<OwnedFd>,
    /// Watches it, and the descriptor of an engine that has its own.
    both: OnceLock<OwnedFd>,
    /// The instance of a thread that watches them, and its token.
    watched: Option<(Arc<OwnedFd>, u64)>,
}

impl Wake {
    pub(super) fn new(event: &Arc<OwnedFd>) -> Self {
        Self { event: event.clone(), both: OnceLock::new(), watched: None }
    }

    /// A descriptor that becomes readable each time that one of them does.
    ///
    /// # Errors
    /// The host refuses.
    pub(super) fn fd(&self, engine: &Engine) -> io::Result<BorrowedFd<'_>> {
        let Some(own) = engine.own_fd() else { return Ok(self.event.as_fd()) };
        if let Some(both) = self.both.get() {
            return Ok(both.as_fd());
        }
        let both = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for fd in [own, self.event.as_fd()] {
            // For each time that it becomes readable: nobody clears the event.
            watch::add(&both, fd, 0)?;
        }
        Ok(self.both.get_or_init(|| both).as_fd())
    }

    /// See [`QueueHandler::watch`](crate::QueueHandler::watch).
    pub(super) fn watch(&mut self, engine: &mut Engine, epoll: &Arc<OwnedFd>, token: u64) -> io::Result<()> {
        watch::add(epoll, &self.event, token)?;
        if let Err(error) = engine.watch(epoll, token) {
            watch::remove(epoll, &self.event);
            return Err(error);
        }
        self.watched = Some((epoll.clone(), token));
        Ok(())
    }

    /// See [`QueueHandler::unwatch`](crate::QueueHandler::unwatch).
    pub(super) fn unwatch(&mut self, engine: &mut Engine, epoll: &OwnedFd) {
        self.watched = None;
        watch::remove(epoll, &self.event);
        engine.unwatch(epoll);
    }

    /// The queue goes on with another engine.
    pub(super) fn change(&self, from: &mut Engine, to: &mut Engine) -> io::Result<()> {
        let Some((epoll, token)) = &self.watched else { return Ok(()) };
        from.unwatch(epoll);
        to.watch(epoll, *token)
    }
}
