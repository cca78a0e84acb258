//! A host with few ioeventfds.
use crate::sync::AtomicU32;
use crate::{IoEventFds, Notifier, NotifyError};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Gives out at most so many ioeventfds of another's: who comes too late gets exits. For hosts that are to keep some for
/// others, and to try out what happens on one that has few.
pub struct LimitedIoEventFds {
    fds: Arc<dyn IoEventFds>,
    limit: u32,
    left: AtomicU32,
}

impl LimitedIoEventFds {
    /// At most `limit` of `fds` at a time.
    #[must_use]
    pub fn new(fds: Arc<dyn IoEventFds>, limit: u32) -> Self {
        Self { fds, limit, left: AtomicU32::new(limit) }
    }
}

impl IoEventFds for LimitedIoEventFds {
    fn assign(&self, addr: u64, datamatch: Option<u32>, notifier: &Notifier) -> Result<(), NotifyError> {
        // Relaxed, here and below: a number, which orders nothing. It is changed by read-modify-writes only, so no place
        // is given out twice.
        let one_less = |left: u32| left.checked_sub(1);
        let taken = self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less);
        taken.map_err(|_| NotifyError::Limit { limit: self.limit })?;
        self.fds.assign(addr, datamatch, notifier).inspect_err(|_| {
            self.left.fetch_add(1, Ordering::Relaxed);
        })
    }

    fn deassign(&self, addr: u64, datamatch: Option<u32>, notifier: &Notifier) -> Result<(), NotifyError> {
        self.fds.deassign(addr, datamatch, notifier)?;
        self.left.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}
