//! Memory map: a published snapshot that holders pin, and that can be replaced.
//!
//! ```text
//! publish:  [lock] current = new snapshot, generation += 1 [unlock]      drop the old snapshot
//! enter:    generation as pinned? ---- yes ---> nothing to do            one load, no write
//!                |
//!                no --> [lock] pin = a new SnapshotPin(current) [unlock]    drop the old pin
//!
//! region <-- snapshot <-- pin <-- handle           the handle's own pin: no other handle counts on it
//!                          ^----- MappingGuard, Mapping    so a mapping writes no cache line that handles share
//! ```
//! A region is unmapped when no snapshot names it any more. A snapshot is dropped when it is
//! neither current nor pinned. A slow holder therefore delays the unmapping, and nothing else.
//! [`Memory::synchronize`] waits until an old snapshot is out of use.
use crate::reader_slot::{ReaderSlot, ReaderSlots};
use crate::snapshot::Snapshot;
use crate::sync::{AtomicU64, Mutex, MutexGuard};
use crate::{Busy, DirtyLog, Handle, LogError, MemoryError, Region};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

/// Guest memory as devices see it. Cheap to clone; clones are the same memory.
#[derive(Clone, Debug)]
pub struct Memory {
    published: Arc<Published>,
}

/// State that all handles share.
#[derive(Debug)]
pub(crate) struct Published {
    /// Grows with each publication. Written only under the lock.
    generation: AtomicU64,
    current: Mutex<Arc<Snapshot>>,
    /// Reader slots of all handles.
    readers: ReaderSlots,
    /// Number of live loans ([`Memory::lend`]). Read and written only under the lock.
    lent: AtomicU64,
}

/// Reference of one handle to a snapshot.
///
/// It exists so that mappings count on the handle's own reference: the snapshot's count is written
/// only when a pin is made or dropped.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct SnapshotPin {
    pub(crate) snapshot: Arc<Snapshot>,
    pub(crate) generation: u64,
    pub(crate) reader: Arc<ReaderSlot>,
    pub(crate) published: Arc<Published>,
}

impl Published {
    fn lock(&self) -> MutexGuard<'_, Arc<Snapshot>> {
        // Code under the lock cannot panic half-way, so a poisoned value is valid.
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Current generation, for comparison.
    #[inline(always)]
    pub(crate) fn generation(&self) -> u64 {
        // Relaxed: a number that differs only leads to the lock, which pairs with the publisher's
        // and brings the map; a stale one is noticed at the next batch. A publication that happened
        // before this call, or whose `synchronize` did not wait for this holder, is not missed: see
        // `ReaderSlot::enter`.
        self.generation.load(Ordering::Relaxed)
    }

    pub(crate) fn current(&self) -> Arc<Snapshot> {
        Arc::clone(&self.lock())
    }

    /// Pins the current snapshot.
    #[cold]
    pub(crate) fn pin(self: &Arc<Self>, reader: &Arc<ReaderSlot>) -> Arc<SnapshotPin> {
        let current = self.lock();
        // Relaxed: generations are written under the lock that is held here.
        let generation = self.generation.load(Ordering::Relaxed);
        let snapshot = Arc::clone(&current);
        drop(current);
        Arc::new(SnapshotPin {
            snapshot,
            generation,
            reader: Arc::clone(reader),
            published: Arc::clone(self),
        })
    }

    /// Publishes what `make` makes of the current snapshot, and returns it.
    fn publish<E>(&self, make: impl FnOnce(&Snapshot) -> Result<Snapshot, E>) -> Result<Arc<Snapshot>, E> {
        let mut current = self.lock();
        let new = Arc::new(make(&current)?);
        let old = std::mem::replace(&mut *current, new);
        // Relaxed: the lock orders. Under it, so that the number and the snapshot that `pin` finds
        // belong together.
        self.generation.fetch_add(1, Ordering::Relaxed);
        Ok(old)
    }
}

impl Memory {
    /// Publishes the first map, which may be empty.
    ///
    /// # Errors
    /// Two regions overlap.
    pub fn new(regions: Vec<Arc<Region>>) -> Result<Self, MemoryError> {
        let current = Mutex::new(Arc::new(Snapshot::new(regions)?));
        let published = Published {
            generation: AtomicU64::new(0),
            current,
            readers: ReaderSlots::new(),
            lent: AtomicU64::new(0),
        };
        Ok(Self { published: Arc::new(published) })
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
        self.published.readers.synchronize(timeout, None)
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
        self.published.publish(|old| match self.published.lent.load(Ordering::Relaxed) {
            0 => old.logged(Some(log)),
            lent => Err(LogError::Lent(lent)),
        })?;
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
        self.published.lock().log().cloned()
    }

    /// Regions of the current map, by address.
    #[must_use]
    pub fn regions(&self) -> Vec<Arc<Region>> {
        self.published.lock().regions().to_vec()
    }

    /// End of the last region; 0 without regions.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.published.lock().last().map_or(0, |last| last.saturating_add(1))
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
        let current = self.published.lock();
        if current.log().is_some() {
            return Err(LogError::On);
        }
        // Relaxed: under the lock.
        self.published.lent.fetch_add(1, Ordering::Relaxed);
        Ok(Lent { snapshot: Arc::clone(&current), published: Arc::clone(&self.published) })
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
        let _current = self.published.lock();
        // Relaxed: under the lock.
        self.published.lent.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Published {
    pub(crate) fn readers(&self) -> &ReaderSlots {
        &self.readers
    }
}
