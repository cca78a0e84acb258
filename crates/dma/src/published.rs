//! Published snapshot: how holders find the current map, and pin it.
//!
//! ```text
//! publish:  [lock] current = new snapshot, generation += 1 [unlock]      drop the old snapshot
//! enter:    generation as pinned? ---- yes ---> nothing to do            one load, no write
//!                |
//!                no --> [lock] pin = a new SnapshotPin(current) [unlock]    drop the old pin
//!
//! region <-- snapshot <-- pin <-- handle                   no other handle counts on this pin:
//!                          ^----- MappingGuard, Mapping    a mapping writes no shared cache line
//! ```
use crate::reader_slot::{ReaderSlot, ReaderSlots};
use crate::snapshot::Snapshot;
use crate::sync::{AtomicU64, Mutex, MutexGuard};
use crate::{DirtyLog, LogError};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

/// Published snapshot of a memory: state that all of its handles share.
#[derive(Debug)]
pub(crate) struct Published {
    /// Grows with each publication. Written only under the lock.
    generation: AtomicU64,
    current: Mutex<Arc<Snapshot>>,
    /// Reader slots of all handles.
    readers: ReaderSlots,
    /// Number of live loans. Read and written only under the lock.
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
    /// Publishes the first snapshot.
    pub(crate) fn new(first: Snapshot) -> Arc<Self> {
        Arc::new(Self {
            generation: AtomicU64::new(0),
            current: Mutex::new(Arc::new(first)),
            readers: ReaderSlots::new(),
            lent: AtomicU64::new(0),
        })
    }

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

    /// Current snapshot.
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

    /// Publishes the result of `make` for the current snapshot. Returns the old one.
    ///
    /// The caller may drop the last reference to it, after the lock: unmapping is slow.
    pub(crate) fn publish<E>(
        &self,
        make: impl FnOnce(&Snapshot) -> Result<Snapshot, E>,
    ) -> Result<Arc<Snapshot>, E> {
        let mut current = self.lock();
        let new = Arc::new(make(&current)?);
        let old = std::mem::replace(&mut *current, new);
        // Relaxed: the lock orders. Under it, so that the number and the snapshot that `pin` finds
        // belong together.
        self.generation.fetch_add(1, Ordering::Relaxed);
        Ok(old)
    }

    /// Publishes the current regions with this log, unless they are lent.
    pub(crate) fn start_log(&self, log: Arc<DirtyLog>) -> Result<(), LogError> {
        // Relaxed: under the lock.
        self.publish(|old| match self.lent.load(Ordering::Relaxed) {
            0 => old.logged(Some(log)),
            lent => Err(LogError::Lent(lent)),
        })?;
        Ok(())
    }

    /// Begins a loan, unless a log is on. Returns the lent snapshot.
    pub(crate) fn begin_loan(&self) -> Result<Arc<Snapshot>, LogError> {
        let current = self.lock();
        if current.log().is_some() {
            return Err(LogError::On);
        }
        // Relaxed: under the lock.
        self.lent.fetch_add(1, Ordering::Relaxed);
        Ok(Arc::clone(&current))
    }

    /// Ends a loan.
    pub(crate) fn end_loan(&self) {
        let _current = self.lock();
        // Relaxed: under the lock.
        self.lent.fetch_sub(1, Ordering::Relaxed);
    }

    /// Reader slots of all handles.
    pub(crate) fn readers(&self) -> &ReaderSlots {
        &self.readers
    }
}
