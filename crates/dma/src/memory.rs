//! The memory map: a published snapshot that holders pin and that can be swapped under them.
//!
//! ```text
//! replace:  [lock] current = new snapshot, generation += 1 [unlock]      old snapshot let go
//! refresh:  generation as pinned? ---- yes ---> nothing to do            one load, no write
//!                |
//!                no --> [lock] pin = a new Pin(current) [unlock]         old pin let go
//!
//! region <-- snapshot <-- pin <-- handle           the handle's own pin: no other handle counts on it
//!                          ^----- Hold, Mapping    so a mapping writes no cache line that handles share
//! ```
//! A region is unmapped when no snapshot names it any more, and a snapshot goes when it is not the current one and
//! no pin is left. A slow holder therefore delays the unmapping, and nothing else.
use crate::snapshot::Snapshot;
use crate::sync::{AtomicU64, Mutex, MutexGuard};
use crate::{Handle, MemoryError, Region};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

/// A machine's memory as its devices see it. Cheap to clone; clones are the same memory.
#[derive(Clone, Debug)]
pub struct Memory {
    published: Arc<Published>,
}

/// What all handles look at.
#[derive(Debug)]
pub(crate) struct Published {
    /// Grows with each [`Memory::replace`]. Written only under the lock.
    generation: AtomicU64,
    current: Mutex<Arc<Snapshot>>,
}

/// One handle's reference to a snapshot. It exists so that the counts which mappings write are the handle's
/// own: the snapshot's count is written only when a pin is made or goes.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Pin {
    pub(crate) snapshot: Arc<Snapshot>,
}

impl Published {
    fn lock(&self) -> MutexGuard<'_, Arc<Snapshot>> {
        // Nothing under the lock can panic half-way, so a poisoned value is as good as any.
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The present generation, for comparing.
    #[inline(always)]
    pub(crate) fn generation(&self) -> u64 {
        // Relaxed: a number that differs only leads to the lock, which pairs with the replacer's and brings the
        // map; one that is stale is noticed at the next batch. A replacement that happened before this call is
        // not missed: a load never returns less than what happened before it has stored.
        self.generation.load(Ordering::Relaxed)
    }

    /// A new pin of the present snapshot, and its generation.
    #[cold]
    pub(crate) fn pin(&self) -> (Arc<Pin>, u64) {
        let current = self.lock();
        // Relaxed: generations are written under the lock that is held here.
        let generation = self.generation.load(Ordering::Relaxed);
        (Arc::new(Pin { snapshot: Arc::clone(&current) }), generation)
    }
}

impl Memory {
    /// Publishes the first map. No region at all is a map, too.
    ///
    /// # Errors
    /// Two regions overlap.
    pub fn new(regions: Vec<Arc<Region>>) -> Result<Self, MemoryError> {
        let current = Mutex::new(Arc::new(Snapshot::new(regions)?));
        Ok(Self { published: Arc::new(Published { generation: AtomicU64::new(0), current }) })
    }

    /// Publishes a new map. Handles notice at their next [`Handle::refresh`]; a region that is no longer
    /// named stays mapped until the last holder of an old snapshot has let go.
    ///
    /// # Errors
    /// As [`Memory::new`]; the old map then stays.
    pub fn replace(&self, regions: Vec<Arc<Region>>) -> Result<(), MemoryError> {
        let new = Arc::new(Snapshot::new(regions)?);
        let old = {
            let mut current = self.published.lock();
            let old = std::mem::replace(&mut *current, new);
            // Relaxed: the lock orders. Under it, so that the number and the snapshot that `pin` finds belong
            // together.
            self.published.generation.fetch_add(1, Ordering::Relaxed);
            old
        };
        // Perhaps the last reference: unmapping takes long, and nobody should wait for it at the lock.
        drop(old);
        Ok(())
    }

    /// The regions of the present map, by address.
    #[must_use]
    pub fn regions(&self) -> Vec<Arc<Region>> {
        self.published.lock().regions().to_vec()
    }

    /// A door for one holder, with the present map pinned.
    #[must_use]
    pub fn handle(&self) -> Handle {
        Handle::new(Arc::clone(&self.published))
    }
}
