//! What wakes the thread of a queue: completions, and changes of the disk.
use rustix::event::epoll;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// A descriptor that stays the same when the engine changes.
#[derive(Debug)]
pub(super) struct Wake {
    /// Signalled by engines for files, and by changes.
    event: Arc<OwnedFd>,
    /// Watches it, and the descriptor of an engine that has its own.
    both: Option<OwnedFd>,
}

impl Wake {
    /// Of `event`, and the engine's own descriptor.
    pub(super) fn new(event: &Arc<OwnedFd>, own: Option<BorrowedFd<'_>>) -> io::Result<Self> {
        let both = match own {
            None => None,
            Some(own) => {
                let both = epoll::create(epoll::CreateFlags::CLOEXEC)?;
                for fd in [own, event.as_fd()] {
                    // For each time that it becomes readable: nobody clears the event.
                    let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
                    epoll::add(&both, fd, epoll::EventData::new_u64(0), flags)?;
                }
                Some(both)
            }
        };
        Ok(Self { event: event.clone(), both })
    }
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.both.as_ref().unwrap_or(&self.event).as_fd()
    }
}
