//! Memory map of a guest: published, replaced, logged and lent.
//!
//! A region is unmapped when no snapshot names it any more. A snapshot is dropped when it is
//! neither current nor pinned. A slow holder therefore delays the unmapping, and nothing else.
//! [`Memory::synchronize`] waits until an old snapshot is out of use.
use crate::published::Published;
use crate::snapshot::Snapshot;
use crate::{Busy, DirtyLog, Handle, LogError, MemoryError, Region};
use std::sync::Arc;
use std::time::Duration;

/// Guest memory as devices see it. Cheap to clone; clones are the same memory.
#[derive(Clone, Debug)]
pub struct Memory {
    published: Arc<Published>,
}

impl Memory {
    /// Publishes the first map, which may be empty.
    ///
    /// # Errors
    /// Two regions overlap.
    pub fn new(regions: Vec<Arc<Region>>) -> Result<Self, MemoryError> {
        Ok(Self { published: Published::new(Snapshot::new(regions)?) })
    }

    /// Publishes a new map. Handles see it in their next batch.
    ///
    /// A region that is no longer named stays mapped until the last holder has dropped the old
    /// snapshot.
    ///
    /// # Errors
    /// As [`Memory::new`], or the active dirty log does not cover the regions; the old map then
    /// stays.
    pub fn replace(&self, regions: Vec<Arc<Region>>) -> Result<(), MemoryError> {
        let new = Snapshot::new(regions)?;
        // The last reference to the old snapshot may be dropped here, after the lock: unmapping
        // is slow.
        self.published.publish(|old| {
            new.logged(old.log().cloned()).map_err(|error| match error {
                LogError::TooShort { memory, log } => MemoryError::BeyondLog { end: memory, log },
                other => unreachable!("a log that is there has no other fault: {other}"),
            })
        })?;
        Ok(())
    }

    /// Waits until no batch uses state from before the last publication.
    ///
    /// A handle without a live access guard is not waited for. [`Mapping`](crate::Mapping)s and
    /// [`MappingGuard`](crate::MappingGuard)s are not waited for: they keep their regions mapped.
    ///
    /// # Errors
    /// A batch lasts longer than `timeout`; the error names its holder.
    pub fn synchronize(&self, timeout: Duration) -> Result<(), Busy> {
        self.published.readers().synchronize(timeout, None)
    }

    /// Turns a dirty log on; replaces one that is on.
    ///
    /// When it returns, every later write of a device is marked in `log` by the time that its
    /// access guard (for a mapping: its [`MappingGuard`](crate::MappingGuard)) is dropped. Every
    /// write that is not marked was made before the return, so memory copied after the return has
    /// it.
    ///
    /// # Errors
    /// The log does not cover all regions, or memory is lent ([`Memory::lend`]): nothing was
    /// changed. Or a batch lasts longer than `timeout`: the log is on, and the guarantee holds once
    /// [`Memory::synchronize`] has succeeded.
    pub fn start_log(&self, log: Arc<DirtyLog>, timeout: Duration) -> Result<(), LogError> {
        self.published.start_log(log)?;
        Ok(self.synchronize(timeout)?)
    }

    /// Turns the log off and returns it. Afterwards only live mappings mark in it.
    ///
    /// # Errors
    /// A batch lasts longer than `timeout`; the log is off for all later batches.
    pub fn stop_log(&self, timeout: Duration) -> Result<Option<Arc<DirtyLog>>, LogError> {
        let old = self.published.publish(|old| old.logged(None))?;
        self.synchronize(timeout)?;
        Ok(old.log().cloned())
    }

    /// Active log, if any.
    #[must_use]
    pub fn log(&self) -> Option<Arc<DirtyLog>> {
        self.published.current().log().cloned()
    }

    /// Regions of the current map, by address.
    #[must_use]
    pub fn regions(&self) -> Vec<Arc<Region>> {
        self.published.current().regions().to_vec()
    }

    /// End of the last region; 0 without regions.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.published.current().last().map_or(0, |last| last.saturating_add(1))
    }

    /// Makes a handle for one holder whose addresses are guest-physical.
    #[must_use]
    pub fn handle(&self) -> Handle {
        Handle::new(&self.published, None)
    }

    /// Lends the memory to an accessor that marks nothing.
    ///
    /// It uses host addresses: the kernel, or another process.
    ///
    /// Until the loan is dropped, no dirty log can be turned on, because it would be incomplete.
    ///
    /// # Errors
    /// A log is on.
    pub fn lend(&self) -> Result<Lent, LogError> {
        Ok(Lent { snapshot: self.published.begin_loan()?, published: Arc::clone(&self.published) })
    }

    pub(crate) fn published(&self) -> &Arc<Published> {
        &self.published
    }
}

/// Loan of memory ([`Memory::lend`]). Keeps the regions of its map mapped.
#[derive(Debug)]
pub struct Lent {
    snapshot: Arc<Snapshot>,
    published: Arc<Published>,
}

impl Lent {
    /// Lent regions, by address.
    #[must_use]
    pub fn regions(&self) -> &[Arc<Region>] {
        self.snapshot.regions()
    }

    #[cfg(feature = "vm-memory")]
    pub(crate) fn published(&self) -> &Arc<Published> {
        &self.published
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.published.end_loan();
    }
}
