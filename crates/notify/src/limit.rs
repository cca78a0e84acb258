//! Limit on the number of ioeventfds.
use crate::sync::AtomicU32;
use crate::{IoEventFds, Notifier, NotifyError};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Gives out a limited number of ioeventfds; further kicks exit.
///
/// For hosts that must reserve some for other users, and to test hosts that have few.
pub struct LimitedIoEventFds {
    fds: Arc<dyn IoEventFds>,
    limit: u32,
    left: AtomicU32,
}

impl LimitedIoEventFds {
    /// Limits `fds` to `limit` at a time.
    #[must_use]
    pub fn new(fds: Arc<dyn IoEventFds>, limit: u32) -> Self {
        Self { fds, limit, left: AtomicU32::new(limit) }
    }
}

impl IoEventFds for LimitedIoEventFds {
    fn assign(&self, addr: u64, datamatch: Option<u32>, notifier: &Notifier) -> Result<(), NotifyError> {
        // Relaxed, here and below: a number, which orders nothing. It is changed by
        // read-modify-writes only, so no ioeventfd is given out twice.
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
