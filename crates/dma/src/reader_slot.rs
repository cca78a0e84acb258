//! Reader slots: which holders are in a batch, and how publishers wait for them.
//!
//! ```text
//!  outside (seq even) --enter: seq + 1, full fence--> inside (seq odd)
//!                    <--leave: seq + 1, release------
//!
//!  synchronize:  publish the change | full fence | for each slot: even? done.
//!                                                                 odd? wait until seq changes.
//! ```
//! A holder reads what is published after its fence; the publisher reads the slots after its own.
//! In each such pair at least one side sees the other's store (the store-buffering shape): either
//! the publisher finds the holder inside and waits, or the holder has seen the change.
//!
//! Only the holder writes its `seq`, which has a cache line to itself, so that no other thread's
//! work makes it miss. A batch enters once, so an ordinary full fence (5 ns) is good enough:
//! membarrier(2) on the publisher's side would save it, but cost a system call that interrupts
//! every processor, and a second scheme for hosts that lack it.
use crate::pin_table::PinTable;
use crate::sync::{AtomicU64, Deadline, Mutex, MutexGuard, fence};
use crate::{Busy, BusyWith};
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, PoisonError};
use std::time::Duration;

/// Slot of one holder.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct ReaderSlot {
    seq: AtomicU64,
    shared: Shared,
}

/// Fields kept off the cache line of `seq`.
///
/// Other threads read them, or they are rarely used.
#[derive(Debug)]
#[repr(align(64))]
struct Shared {
    name: OnceLock<String>,
    pins: PinTable,
}

impl ReaderSlot {
    pub(crate) fn new() -> Arc<Self> {
        let shared = Shared { name: OnceLock::new(), pins: PinTable::new() };
        Arc::new(Self { seq: AtomicU64::new(0), shared })
    }

    /// Names the holder, once.
    pub(crate) fn set_name(&self, name: String) {
        let _ = self.shared.name.set(name);
    }

    fn name(&self) -> String {
        self.shared.name.get().map_or_else(|| "a holder without a name".to_owned(), Clone::clone)
    }

    /// The holder's mappings.
    pub(crate) fn pins(&self) -> &PinTable {
        &self.shared.pins
    }

    /// Enters a batch; returns the number to pass to [`ReaderSlot::leave`].
    ///
    /// Later loads of the holder are at least as new as what was published before a
    /// [`ReaderSlots::synchronize`] that did not wait for it.
    #[inline(always)]
    pub(crate) fn enter(&self) -> u64 {
        // Relaxed: only the holder writes it. If a guard was leaked, the number is odd and stays
        // odd: no thread ever saw it leave.
        let inside = (self.seq.load(Ordering::Relaxed) + 1) | 1;
        // Release: a thread that reads this number, and not the even one before it, must still see
        // what was done in the batch before. Pairs with the Acquire loads of `synchronize`.
        self.seq.store(inside, Ordering::Release);
        // Pairs with the fence of `synchronize`, see the head of the module.
        fence(Ordering::SeqCst);
        inside
    }

    /// Leaves a batch.
    #[inline(always)]
    pub(crate) fn leave(&self, inside: u64) {
        // Release: what was done inside happened before; pairs with the Acquire loads of
        // `synchronize`.
        self.seq.store(inside + 1, Ordering::Release);
    }
}

/// Reader slots that one publisher has to wait for.
///
/// A slot is taken off the list under the lock: by the holder when it goes, or, if it leaves
/// mappings behind, by the thread that finds them released. So what was done from a slot that is no
/// longer listed happened before.
#[derive(Debug)]
pub(crate) struct ReaderSlots {
    readers: Mutex<Vec<Listed>>,
}

#[derive(Debug)]
struct Listed {
    reader: Arc<ReaderSlot>,
    /// The holder is gone and will not enter again; its mappings may remain.
    gone: bool,
}

impl Listed {
    /// Whether a publisher may still have to wait for it.
    fn is_needed(&self) -> bool {
        !self.gone || self.reader.pins().is_any_pinned()
    }
}

impl ReaderSlots {
    pub(crate) fn new() -> Self {
        Self { readers: Mutex::new(Vec::new()) }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Listed>> {
        // No code under the lock can panic half-way.
        self.readers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add(&self, reader: &Arc<ReaderSlot>) {
        let mut readers = self.lock();
        readers.retain(Listed::is_needed);
        readers.push(Listed { reader: Arc::clone(reader), gone: false });
    }

    /// Removes a holder that has no live access guard.
    pub(crate) fn remove(&self, reader: &Arc<ReaderSlot>) {
        let mut readers = self.lock();
        for listed in readers.iter_mut().filter(|listed| Arc::ptr_eq(&listed.reader, reader)) {
            listed.gone = true;
        }
        readers.retain(Listed::is_needed);
    }

    /// Waits until no batch runs that began before the published change.
    ///
    /// Also waits until no mapping remains that overlaps `mapped` and was made before the domain's
    /// change number in it.
    ///
    /// Call it after publishing the change. No holder waits for the caller: a slot that is listed
    /// after this function read the list also enters after it.
    ///
    /// # Errors
    /// A batch or a mapping lasts longer than `timeout`.
    pub(crate) fn synchronize(
        &self,
        timeout: Duration,
        mapped: Option<(Range<u128>, u64)>,
    ) -> Result<(), Busy> {
        // Pairs with the fence of `enter`: the change was stored before this, the slots are read
        // after it.
        fence(Ordering::SeqCst);
        let readers: Vec<Arc<ReaderSlot>> =
            self.lock().iter().map(|listed| Arc::clone(&listed.reader)).collect();
        let mut deadline = Deadline::new(timeout);
        for reader in &readers {
            // Acquire, here and below: pairs with the Release stores of `enter` and `leave`: what
            // the holder did in the batch that ended happened before what the caller does next.
            let found = reader.seq.load(Ordering::Acquire);
            if found % 2 == 0 {
                continue;
            }
            while reader.seq.load(Ordering::Acquire) == found {
                if !deadline.wait() {
                    return Err(Busy { holder: reader.name(), with: BusyWith::Batch, timeout });
                }
            }
        }
        // Only now: a batch may have made a mapping at its end.
        let Some((addrs, change)) = mapped else { return Ok(()) };
        for reader in &readers {
            while let Some((addr, len)) = reader.pins().overlapping(&addrs, change) {
                if !deadline.wait() {
                    return Err(Busy {
                        holder: reader.name(),
                        with: BusyWith::Mapping { addr, len },
                        timeout,
                    });
                }
            }
        }
        Ok(())
    }
}
