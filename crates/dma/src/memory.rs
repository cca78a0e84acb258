//! The memory map: a published snapshot that holders pin and that can be swapped under them.
//!
//! ```text
//! publish:  [lock] current = new snapshot, generation += 1 [unlock]      old snapshot let go
//! open:     generation as pinned? ---- yes ---> nothing to do            one load, no write
//!                |
//!                no --> [lock] pin = a new SnapshotPin(current) [unlock]         old pin let go
//!
//! region <-- snapshot <-- pin <-- handle           the handle's own pin: no other handle counts on it
//!                          ^----- MappingGuard, Mapping    so a mapping writes no cache line that handles share
//! ```
//! A region is unmapped when no snapshot names it any more, and a snapshot goes when it is not the current one and
//! no pin is left. A slow holder therefore delays the unmapping, and nothing else. Who must know that nobody goes by
//! an old snapshot any more waits for it: [`Memory::synchronize`].
use crate::reader_slot::{ReaderSlot, ReaderSlots};
use crate::snapshot::Snapshot;
use crate::sync::{AtomicU64, Mutex, MutexGuard};
use crate::{Busy, DirtyLog, Handle, LogError, MemoryError, Region};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

/// A machine's memory as its devices see it. Cheap to clone; clones are the same memory.
#[derive(Clone, Debug)]
pub struct Memory {
    published: Arc<Published>,
}

/// What all handles look at.
#[derive(Debug)]
pub(crate) struct Published {
    /// Grows with each publication. PendingMarks only under the lock.
    generation: AtomicU64,
    current: Mutex<Arc<Snapshot>>,
    /// Everyone who has a handle.
    readers: ReaderSlots,
    /// How many borrow the memory ([`Memory::lend`]). Read and written only under the lock.
    lent: AtomicU64,
}

/// One handle's reference to a snapshot. It exists so that the counts which mappings write are the handle's
/// own: the snapshot's count is written only when a pin is made or goes.
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
        // Nothing under the lock can panic half-way, so a poisoned value is as good as any.
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The present generation, for comparing.
    #[inline(always)]
    pub(crate) fn generation(&self) -> u64 {
        // Relaxed: a number that differs only leads to the lock, which pairs with the publisher's and brings the
        // map; one that is stale is noticed at the next batch. A publication that happened before this call, or
        // that has settled without waiting for this holder, is not missed: see `ReaderSlot::enter`.
        self.generation.load(Ordering::Relaxed)
    }

    pub(crate) fn current(&self) -> Arc<Snapshot> {
        Arc::clone(&self.lock())
    }

    /// A new pin of the present snapshot.
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

    /// Publishes what `make` makes of the present snapshot, and returns that.
    fn publish<E>(&self, make: impl FnOnce(&Snapshot) -> Result<Snapshot, E>) -> Result<Arc<Snapshot>, E> {
        let mut current = self.lock();
        let new = Arc::new(make(&current)?);
        let old = std::mem::replace(&mut *current, new);
        // Relaxed: the lock orders. Under it, so that the number and the snapshot that `pin` finds belong
        // together.
        self.generation.fetch_add(1, Ordering::Relaxed);
        Ok(old)
    }
}

impl Memory {
    /// Publishes the first map. No region at all is a map, too.
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

    /// Publishes a new map. Handles notice when they next open their guard; a region that is no longer
    /// named stays mapped until the last holder of an old snapshot has let go.
    ///
    /// # Errors
    /// As [`Memory::new`], or a dirty log is on that does not reach so far; the old map then stays.
    pub fn replace(&self, regions: Vec<Arc<Region>>) -> Result<(), MemoryError> {
        let new = Snapshot::new(regions)?;
        // Perhaps the last reference to the old one is dropped behind the lock: unmapping takes long.
        self.published.publish(|old| {
            new.logged(old.log().cloned()).map_err(|error| match error {
                LogError::TooShort { memory, log } => MemoryError::BeyondLog { end: memory, log },
                other => unreachable!("a log that is there has no other fault: {other}"),
            })
        })?;
        Ok(())
    }

    /// Waits until every handle has either noticed all that was published before the call, or has its guard shut and
    /// will notice when it opens it. [`Mapping`](crate::Mapping)s and [`MappingGuard`](crate::MappingGuard)s are not waited for: they keep
    /// their regions by themselves.
    ///
    /// # Errors
    /// A batch lasts longer than `timeout`; the error names its holder.
    pub fn synchronize(&self, timeout: Duration) -> Result<(), Busy> {
        self.published.readers.synchronize(timeout, None)
    }

    /// Turns a dirty log on, in place of another if one is on. When it returns, every write that a device makes from
    /// then on is marked in `log` by the time that its guard is closed (its [`MappingGuard`](crate::MappingGuard) dropped), and every
    /// write that is not marked was made before the return: memory copied after the return has it.
    ///
    /// # Errors
    /// The log does not cover all regions, or memory is lent ([`Memory::lend`]): nothing was changed. Or a batch lasts longer than `timeout`: the log is on,
    /// and only when [`Memory::synchronize`] has succeeded does it hold what is said above.
    pub fn start_log(&self, log: Arc<DirtyLog>, timeout: Duration) -> Result<(), LogError> {
        self.published.publish(|old| match self.published.lent.load(Ordering::Relaxed) {
            0 => old.logged(Some(log)),
            lent => Err(LogError::Lent(lent)),
        })?;
        Ok(self.synchronize(timeout)?)
    }

    /// Turns the log off and returns it. When it returns without an error nobody marks in it any more but those who
    /// still hold mappings.
    ///
    /// # Errors
    /// A batch lasts longer than `timeout`; the log is off for all who come.
    pub fn stop_log(&self, timeout: Duration) -> Result<Option<Arc<DirtyLog>>, LogError> {
        let old = self.published.publish(|old| old.logged(None))?;
        self.synchronize(timeout)?;
        Ok(old.log().cloned())
    }

    /// The log that is on.
    #[must_use]
    pub fn log(&self) -> Option<Arc<DirtyLog>> {
        self.published.lock().log().cloned()
    }

    /// The regions of the present map, by address.
    #[must_use]
    pub fn regions(&self) -> Vec<Arc<Region>> {
        self.published.lock().regions().to_vec()
    }

    /// Where the last region ends; 0 without regions.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.published.lock().last().map_or(0, |last| last.saturating_add(1))
    }

    /// A guard for one holder, with the present map pinned: the device's addresses are guest-physical.
    #[must_use]
    pub fn handle(&self) -> Handle {
        Handle::new(&self.published, None)
    }

    /// Lends the memory to somebody who accesses it by host addresses and marks nothing: the kernel, another process.
    /// Until the result is dropped no dirty log can be turned on, for it would not tell the truth.
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

/// Memory that is lent ([`Memory::lend`]). Keeps the regions of the map of that moment mapped.
#[derive(Debug)]
pub struct Lent {
    snapshot: Arc<Snapshot>,
    published: Arc<Published>,
}

impl Lent {
    /// The regions that are lent, by address.
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
