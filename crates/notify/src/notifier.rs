//! An eventfd that one side signals and one owner waits on.
use crate::NotifyError;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
#[cfg(not(loom))]
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// An eventfd, non-blocking. Signals collapse: a test takes all of them at once.
///
/// A signal is a release and a take that finds it an acquire: what was done before the signal is seen after
/// the take. (The kernel changes and tests the count under one lock.)
#[derive(Debug)]
pub struct Notifier {
    event: EventFd,
    /// The model checker cannot look into the kernel, so there the count is its own.
    #[cfg(loom)]
    count: std::sync::Arc<loom::sync::atomic::AtomicU64>,
}

impl Notifier {
    /// A new eventfd; `signalled` ones wake their owner at once (a queue's notifier is born so, as the ioeventfd seed
    /// came to do: a kick from before the birth cannot be lost).
    ///
    /// # Errors
    /// The process has no file descriptors left.
    pub fn new(signalled: bool) -> Result<Self, NotifyError> {
        let event = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)
            .map_err(|source| NotifyError::Os { what: "create an eventfd", source })?;
        let notifier = Self {
            event,
            #[cfg(loom)]
            count: std::sync::Arc::new(loom::sync::atomic::AtomicU64::new(0)),
        };
        if signalled {
            notifier.signal();
        }
        Ok(notifier)
    }

    /// A second descriptor of the same eventfd.
    ///
    /// # Errors
    /// The process has no file descriptors left.
    pub fn try_clone(&self) -> Result<Self, NotifyError> {
        let event = self
            .event
            .try_clone()
            .map_err(|source| NotifyError::Os { what: "duplicate an eventfd", source })?;
        Ok(Self {
            event,
            #[cfg(loom)]
            count: std::sync::Arc::clone(&self.count),
        })
    }

    /// Wakes the owner. Never blocks.
    pub fn signal(&self) {
        #[cfg(loom)]
        {
            // Release: pairs with the Acquire in `take`, as in the kernel.
            self.count.fetch_add(1, std::sync::atomic::Ordering::Release);
        }
        // The only way that this fails is a count that is full (EAGAIN), and then the owner has been signalled.
        #[cfg(not(loom))]
        let _ = self.event.write(1);
    }

    /// Takes all signals: their number, 0 if there was none. Never blocks.
    #[must_use]
    pub fn take(&self) -> u64 {
        #[cfg(loom)]
        {
            // Acquire: pairs with the Release in `signal`, as in the kernel.
            self.count.swap(0, std::sync::atomic::Ordering::Acquire)
        }
        // The only way that this fails is that there is no signal (EAGAIN).
        #[cfg(not(loom))]
        self.event.read().unwrap_or(0)
    }

    /// What kvm-ioctls and vhost take.
    #[must_use]
    pub fn event(&self) -> &EventFd {
        &self.event
    }
}

#[cfg(not(loom))]
impl From<OwnedFd> for Notifier {
    /// An eventfd from another process, which must be non-blocking.
    fn from(fd: OwnedFd) -> Self {
        // SAFETY: the descriptor is open and ours, and from here on the event's.
        Self { event: unsafe { EventFd::from_raw_fd(fd.into_raw_fd()) } }
    }
}

impl AsFd for Notifier {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the eventfd is open as long as `self`, which the result borrows.
        unsafe { BorrowedFd::borrow_raw(self.event.as_raw_fd()) }
    }
}

impl AsRawFd for Notifier {
    fn as_raw_fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }
}
