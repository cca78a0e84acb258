//! Sleep of a queue: what it knows of its next event, and the descriptors that wake its owner.
//!
//! ```text
//!   register(set): the queue adds its descriptors ......... register(None): they leave the set
//!   owner: serve, nothing done -> rest(false) -> polls -> rest(true) -> sleeps on the set
//! ```
use rustix::event::epoll::{self, EventData, EventFlags};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// What a queue knows of its next event, after a call that did nothing.
///
/// Of two sources of events, the greater answer counts ([`Ord::max`]). `kicks`: new requests are of use
/// to the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rest {
    /// No event is there. Another call finds the next one without a system call.
    Poll {
        /// See [`Rest`].
        kicks: bool,
    },
    /// Only the descriptors tell of the next event. A thread that asks for it all the time ends the jobs
    /// in flight sooner than one that sleeps.
    Ask {
        /// See [`Rest`].
        kicks: bool,
    },
    /// Only the descriptors tell of the next event. A thread that asks for it all the time gains nothing.
    Sleep {
        /// See [`Rest`].
        kicks: bool,
    },
    /// There is something to do now.
    Serve,
}

impl Rest {
    /// [`Rest::Serve`] if there is something to do, else [`Rest::Poll`], which waits for kicks.
    #[must_use]
    pub fn serve_if(there_is_work: bool) -> Self {
        if there_is_work { Self::Serve } else { Self::Poll { kicks: true } }
    }

    /// Whether new requests are of use to the queue; so they may be to one that must be served first.
    #[must_use]
    pub fn kicks(self) -> bool {
        match self {
            Self::Poll { kicks } | Self::Ask { kicks } | Self::Sleep { kicks } => kicks,
            Self::Serve => true,
        }
    }

    /// The same for a queue that waits for new requests or, with `false`, does not.
    #[must_use]
    pub fn with_kicks(self, kicks: bool) -> Self {
        match self {
            Self::Poll { .. } => Self::Poll { kicks },
            Self::Ask { .. } => Self::Ask { kicks },
            Self::Sleep { .. } => Self::Sleep { kicks },
            Self::Serve => Self::Serve,
        }
    }
}

/// Events of an epoll instance that wake the owner of one queue.
///
/// They are edge-triggered: a network card without buffers sleeps while frames wait.
#[derive(Clone, Debug)]
pub struct WakeSet {
    epoll: Arc<OwnedFd>,
    token: u64,
}

impl WakeSet {
    /// Events of `epoll` with `token`.
    #[must_use]
    pub fn new(epoll: &Arc<OwnedFd>, token: u64) -> Self {
        Self { epoll: Arc::clone(epoll), token }
    }

    /// Adds a descriptor, which wakes the owner each time that it becomes readable.
    ///
    /// # Errors
    /// The host refuses.
    pub fn add(&self, fd: &Arc<OwnedFd>) -> io::Result<WakeSource> {
        self.add_for(fd, EventFlags::IN)
    }

    /// Adds a descriptor, which wakes the owner at these events.
    pub(crate) fn add_for(&self, fd: &Arc<OwnedFd>, flags: EventFlags) -> io::Result<WakeSource> {
        epoll::add(&self.epoll, fd, EventData::new_u64(self.token), flags | EventFlags::ET)?;
        Ok(WakeSource { set: self.clone(), fd: Arc::clone(fd) })
    }
}

/// A descriptor in a [`WakeSet`]. It leaves the set on drop; later events wait for the next set.
#[derive(Debug)]
pub struct WakeSource {
    set: WakeSet,
    fd: Arc<OwnedFd>,
}

impl WakeSource {
    /// Moves a descriptor from the set of `source` to `wakes`.
    ///
    /// # Errors
    /// The host refuses; it is in no set.
    pub fn register(source: &mut Option<Self>, fd: &Arc<OwnedFd>, wakes: Option<&WakeSet>) -> io::Result<()> {
        *source = None;
        *source = wakes.map(|wakes| wakes.add(fd)).transpose()?;
        Ok(())
    }

    /// Wakes the owner at other events.
    pub(crate) fn modify(&self, flags: EventFlags) -> io::Result<()> {
        let data = EventData::new_u64(self.set.token);
        Ok(epoll::modify(&self.set.epoll, &self.fd, data, flags | EventFlags::ET)?)
    }
}

impl Drop for WakeSource {
    fn drop(&mut self) {
        if let Err(error) = epoll::delete(&self.set.epoll, &self.fd) {
            tracing::error!("cannot remove a descriptor from epoll: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

    #[test]
    fn of_two_sources_work_comes_first_then_the_wish_to_sleep() {
        let kicks = true;
        assert_eq!(Rest::Serve.max(Rest::Sleep { kicks }), Rest::Serve);
        assert_eq!(Rest::Sleep { kicks }.max(Rest::Ask { kicks }), Rest::Sleep { kicks });
        assert_eq!(Rest::Ask { kicks }.max(Rest::Poll { kicks }), Rest::Ask { kicks });
        assert!(Rest::Serve.kicks() && !Rest::Poll { kicks }.with_kicks(false).kicks());
    }

    #[test]
    fn a_source_leaves_the_set_on_drop() {
        let set = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC).unwrap());
        let event = Arc::new(eventfd(1, EventfdFlags::NONBLOCK).unwrap());
        let wakes = |set: &OwnedFd| {
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            poll(&mut [PollFd::new(set, PollFlags::IN)], Some(&now)).unwrap() == 1
        };
        let source = WakeSet::new(&set, 7).add(&event).unwrap();
        assert!(wakes(&set));
        assert!(WakeSet::new(&set, 8).add(&event).is_err(), "it is there already");
        drop(source);
        assert!(!wakes(&set));
        drop(WakeSet::new(&set, 8).add(&event).unwrap());
    }
}
