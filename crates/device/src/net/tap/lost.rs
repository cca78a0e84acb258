//! An interface that is deleted while its queues are open.
//!
//! ```text
//!   read or write: EBADFD --> gone, `told` is called --look: an interface of the name exists--> attached again
//!                              |  ^                                                              |
//!                              '--' look: there is none, or the kernel refuses                   '--> used as before
//! ```
//! The kernel leaves the descriptors open and unattached. They are attached again in place: handlers,
//! epoll instances and copies in other processes stay as they are.
use super::{
    Queue, Shared, Tap, TapError, attach_to, configure, in_call, interface, is_loss, multi_queue_if,
    offloads, set_queue, set_value,
};
use crate::net::BackEnd;
use crate::{HostSide, lock};
use std::io;
use std::sync::atomic::Ordering;

impl Shared {
    pub(super) fn is_gone(&self) -> bool {
        // Relaxed: a stale answer leads to one more error from the kernel.
        self.is_gone.load(Ordering::Relaxed)
    }
}

impl Queue {
    /// Records that the kernel says that the interface is gone.
    pub(super) fn lose(&self) {
        // Relaxed: `told` orders.
        if self.is_in_use()
            && !self.shared.is_gone.swap(true, Ordering::Relaxed)
            && let Some(told) = self.shared.told.get()
        {
            told();
        }
    }
}

impl Tap {
    /// Ignores an error while the interface is gone: it is set up when it is attached again.
    pub(super) fn forgiving(&self, done: io::Result<()>) -> io::Result<()> {
        let is_lost =
            || matches!(interface(&self.queues[0].fd), Err(TapError::NotTap(error)) if is_loss(&error));
        match done {
            Err(_) if is_lost() => {
                self.queues[0].lose();
                Ok(())
            }
            done => done,
        }
    }

    /// Looks whether the interface is there, and attaches to its successor if it is not.
    ///
    /// Never creates an interface: whoever makes it anew would find the name taken.
    pub(super) fn attach_again(&self) -> HostSide {
        let _alone = lock(&self.changing);
        let error = match interface(&self.queues[0].fd) {
            Ok(_) if !self.shared.is_gone() => return HostSide::Present,
            Ok(_) => None,
            Err(TapError::NotTap(error)) => Some(error),
            Err(_) => None,
        };
        // Relaxed: the caller is told.
        self.shared.is_gone.store(true, Ordering::Relaxed);
        let name = self.name();
        if error.is_some_and(|error| error.raw_os_error() == Some(libc::ENOLINK)) {
            return HostSide::Gone(format!(
                "{name}: the macvtap device was deleted; start again with the new one"
            ));
        }
        if self.mtu().is_none() {
            return HostSide::Gone(format!(
                "{name}: the TAP device was deleted; make it anew, and it is attached within a second"
            ));
        }
        match self.attach_all_again() {
            Ok(()) => {
                // Relaxed: as above.
                self.shared.is_gone.store(false, Ordering::Relaxed);
                HostSide::Returned(format!("{name}: attached to the TAP device that was made anew"))
            }
            Err(error) => HostSide::Gone(format!(
                "the TAP device was deleted, and its successor cannot be used: {error}"
            )),
        }
    }

    fn attach_all_again(&self) -> Result<(), TapError> {
        for queue in self.queues.iter().filter(|queue| interface(&queue.fd).is_err()) {
            multi_queue_if(self.queues.len() > 1, |multi| attach_to(&queue.fd, self.name(), multi))?;
            configure(&queue.fd, self.name())?;
        }
        let features = self.features.load(Ordering::Relaxed);
        set_value(&self.queues[0].fd, libc::TUNSETOFFLOAD, offloads(features))
            .map_err(in_call(self.name(), "TUNSETOFFLOAD"))?;
        let in_use = self.shared.in_use.load(Ordering::Relaxed);
        for queue in self.queues.iter().filter(|queue| queue.number >= in_use) {
            set_queue(&queue.fd, libc::IFF_DETACH_QUEUE).map_err(in_call(self.name(), "TUNSETQUEUE"))?;
        }
        Ok(())
    }
}
