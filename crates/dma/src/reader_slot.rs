//! Who is inside, and how somebody else waits until they have left.
//!
//! ```text
//!  outside (seq even) --enter: seq + 1, full fence--> inside (seq odd) --leave: seq + 1, release--> outside
//!
//!  synchronize:  publish the change | full fence | for each reader: even? done. odd? wait until it is another number.
//! ```
//! A holder looks at what is published after its fence, the waiter looks at the readers after its own. Of two such
//! pairs at least one sees the other's store (the store-buffering shape), so that either the waiter finds the holder
//! inside and waits, or the holder has found the change.
//!
//! The word is written by its holder only and has a cache line to itself; nobody else's work makes it miss. It is
//! announced once a batch, which is why an ordinary full fence does (5 ns): membarrier(2) on the waiter's side would
//! save that, and cost a system call that interrupts every processor, and a second scheme for hosts without it.
use crate::pin_table::PinTable;
use crate::sync::{AtomicU64, Mutex, MutexGuard, Patience, fence};
use crate::{Busy, BusyWith};
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, PoisonError};
use std::time::Duration;

/// One holder's place.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct ReaderSlot {
    seq: AtomicU64,
    rest: Rest,
}

/// What is read by others, or rarely: kept off the line of `seq`.
#[derive(Debug)]
#[repr(align(64))]
struct Rest {
    name: OnceLock<String>,
    pins: PinTable,
}

impl ReaderSlot {
    pub(crate) fn new() -> Arc<Self> {
        let rest = Rest { name: OnceLock::new(), pins: PinTable::new() };
        Arc::new(Self { seq: AtomicU64::new(0), rest })
    }

    /// Names the holder, once.
    pub(crate) fn call(&self, name: String) {
        let _ = self.rest.name.set(name);
    }

    fn name(&self) -> String {
        self.rest.name.get().map_or_else(|| "a holder without a name".to_owned(), Clone::clone)
    }

    /// What the holder has mapped.
    pub(crate) fn pins(&self) -> &PinTable {
        &self.rest.pins
    }

    /// The holder comes in. What it loads from here on is at least as new as what was published before a
    /// [`ReaderSlots::synchronize`] that did not wait for it. Returns what [`ReaderSlot::leave`] wants to know.
    #[inline(always)]
    pub(crate) fn enter(&self) -> u64 {
        // Relaxed: only the holder writes it. Odd again if a guard was forgotten: then nobody ever saw it leave.
        let inside = (self.seq.load(Ordering::Relaxed) + 1) | 1;
        // Release: whoever reads this number and not the even one before it must still see what was done in the
        // batch before. Pairs with the Acquire loads of `synchronize`.
        self.seq.store(inside, Ordering::Release);
        // Pairs with the fence of `synchronize`, see above.
        fence(Ordering::SeqCst);
        inside
    }

    /// The holder goes out.
    #[inline(always)]
    pub(crate) fn leave(&self, inside: u64) {
        // Release: what was done inside happened before; pairs with the Acquire loads of `synchronize`.
        self.seq.store(inside + 1, Ordering::Release);
    }
}

/// The readers that one publisher has to wait for.
///
/// A reader is list off the list under the lock, by the holder when it goes, or, if it leaves mappings behind, by whoever
/// finds them given back. So what was done from a reader that is not on the list any more happened before.
#[derive(Debug)]
pub(crate) struct ReaderSlots {
    readers: Mutex<Vec<Listed>>,
}

#[derive(Debug)]
struct Listed {
    reader: Arc<ReaderSlot>,
    /// The holder has gone and will not come in again; its mappings may be left.
    gone: bool,
}

impl Listed {
    /// Whether somebody may still have to wait for it.
    fn is_needed(&self) -> bool {
        !self.gone || self.reader.pins().is_any_taken()
    }
}

impl ReaderSlots {
    pub(crate) fn new() -> Self {
        Self { readers: Mutex::new(Vec::new()) }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Listed>> {
        // Nothing under the lock can panic half-way.
        self.readers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add(&self, reader: &Arc<ReaderSlot>) {
        let mut readers = self.lock();
        readers.retain(Listed::is_needed);
        readers.push(Listed { reader: Arc::clone(reader), gone: false });
    }

    /// The holder goes, with its guard shut.
    pub(crate) fn remove(&self, reader: &Arc<ReaderSlot>) {
        let mut readers = self.lock();
        for listed in readers.iter_mut().filter(|listed| Arc::ptr_eq(&listed.reader, reader)) {
            listed.gone = true;
        }
        readers.retain(Listed::is_needed);
    }

    /// Waits until nobody is inside who came in before the change that the caller has just published, and no
    /// mapping is left that overlaps `addrs` and was made before the domain's change number `change`.
    ///
    /// Nobody waits for the caller: a reader list after the look at the list enters after it, too.
    ///
    /// # Errors
    /// Somebody stays for longer than `timeout`.
    pub(crate) fn synchronize(
        &self,
        timeout: Duration,
        mapped: Option<(Range<u128>, u64)>,
    ) -> Result<(), Busy> {
        // Pairs with the fence of `enter`: the change was stored before this, the readers are read after it.
        fence(Ordering::SeqCst);
        let readers: Vec<Arc<ReaderSlot>> =
            self.lock().iter().map(|listed| Arc::clone(&listed.reader)).collect();
        let mut patience = Patience::new(timeout);
        for reader in &readers {
            // Acquire, here and below: pairs with the Release stores of `enter` and `leave`: what the holder did in
            // the batch that ended happened before what the caller does next.
            let found = reader.seq.load(Ordering::Acquire);
            if found % 2 == 0 {
                continue;
            }
            while reader.seq.load(Ordering::Acquire) == found {
                if !patience.wait() {
                    return Err(Busy { holder: reader.name(), with: BusyWith::Batch, timeout });
                }
            }
        }
        // Only now: whoever was inside may have made a mapping last.
        let Some((addrs, change)) = mapped else { return Ok(()) };
        for reader in &readers {
            while let Some((addr, len)) = reader.pins().overlapping(&addrs, change) {
                if !patience.wait() {
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
