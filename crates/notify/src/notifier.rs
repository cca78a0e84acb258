//! Notifier: an eventfd that one side signals and one owner waits on.
use crate::NotifyError;
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
#[cfg(feature = "kvm")]
use std::{marker::PhantomData, mem::ManuallyDrop, ops::Deref, os::fd::FromRawFd};
#[cfg(feature = "kvm")]
use vmm_sys_util::eventfd::EventFd;

/// Non-blocking eventfd. Signals collapse: one test takes all of them.
///
/// A signal is a release, and a take that finds it is an acquire: what was done before the signal
/// is seen after the take. (The kernel changes and tests the count under one lock.)
#[derive(Debug)]
pub struct Notifier {
    event: OwnedFd,
    /// The model checker cannot look into the kernel, so models count here.
    #[cfg(loom)]
    count: std::sync::Arc<loom::sync::atomic::AtomicU64>,
}

impl Notifier {
    /// Makes an eventfd. If `signalled`, it wakes its owner at once.
    ///
    /// The notifier of a queue is made signalled, so that a kick from before it existed is not
    /// lost.
    ///
    /// # Errors
    /// The process has no file descriptors left.
    pub fn new(signalled: bool) -> Result<Self, NotifyError> {
        let event = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)
            .map_err(|error| NotifyError::Os { what: "create an eventfd", source: error.into() })?;
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

    /// Duplicates the descriptor.
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
        // Fails only if the count is full (EAGAIN), and then the owner has been signalled.
        #[cfg(not(loom))]
        let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
    }

    /// Takes all signals; returns their number, 0 if there was none. Never blocks.
    #[must_use]
    pub fn take(&self) -> u64 {
        #[cfg(loom)]
        {
            // Acquire: pairs with the Release in `signal`, as in the kernel.
            self.count.swap(0, std::sync::atomic::Ordering::Acquire)
        }
        #[cfg(not(loom))]
        {
            let mut count = [0; 8];
            // Fails only if there is no signal (EAGAIN).
            match rustix::io::read(&self.event, &mut count) {
                Ok(_) => u64::from_ne_bytes(count),
                Err(_) => 0,
            }
        }
    }

    /// The eventfd as kvm-ioctls and vhost take it.
    #[cfg(feature = "kvm")]
    #[must_use]
    pub fn event(&self) -> BorrowedEventFd<'_> {
        // SAFETY: the descriptor is open as long as `self`, which the result borrows, and the
        // result does not close it.
        let event = unsafe { EventFd::from_raw_fd(self.event.as_raw_fd()) };
        BorrowedEventFd { event: ManuallyDrop::new(event), notifier: PhantomData }
    }
}

/// A notifier's eventfd as the type of the crate vmm-sys-util.
#[cfg(feature = "kvm")]
#[derive(Debug)]
pub struct BorrowedEventFd<'a> {
    event: ManuallyDrop<EventFd>,
    notifier: PhantomData<&'a Notifier>,
}

#[cfg(feature = "kvm")]
impl Deref for BorrowedEventFd<'_> {
    type Target = EventFd;

    fn deref(&self) -> &EventFd {
        &self.event
    }
}

#[cfg(not(loom))]
impl From<OwnedFd> for Notifier {
    /// Takes an eventfd from another process, which must be non-blocking.
    fn from(event: OwnedFd) -> Self {
        Self { event }
    }
}

impl AsFd for Notifier {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

impl AsRawFd for Notifier {
    fn as_raw_fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }
}
