//! An eventfd that one side signals and one owner waits on.
use crate::NotifyError;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};

/// An eventfd, non-blocking. Signals collapse: a test takes all of them at once.
#[derive(Debug)]
pub struct Notifier {}

impl Notifier {
    /// A new eventfd; `signalled` ones wake their owner at once (a queue's notifier is born so, DESIGN 2.2).
    ///
    /// # Errors
    /// The process has no file descriptors left.
    pub fn new(signalled: bool) -> Result<Self, NotifyError> {
        let _ = signalled;
        todo!()
    }

    /// A second descriptor of the same eventfd.
    ///
    /// # Errors
    /// The process has no file descriptors left.
    pub fn try_clone(&self) -> Result<Self, NotifyError> {
        todo!()
    }

    /// Wakes the owner.
    pub fn signal(&self) {
        todo!()
    }

    /// Takes all signals: their number, 0 if there was none. Never blocks.
    #[must_use]
    pub fn take(&self) -> u64 {
        todo!()
    }
}

impl AsFd for Notifier {
    fn as_fd(&self) -> BorrowedFd<'_> {
        todo!()
    }
}

impl AsRawFd for Notifier {
    fn as_raw_fd(&self) -> RawFd {
        todo!()
    }
}
