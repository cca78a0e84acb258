//! Mappings: guest memory for use in place, and the guard that keeps it mapped.
use crate::pin_table::PinList;
use crate::published::SnapshotPin;
use crate::sync::fence;
use crate::{Access, copy};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Range of guest-physical memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestRange {
    /// Guest-physical address of the first byte.
    pub gpa: u64,
    /// Length in bytes.
    pub len: usize,
}

/// Mapping guard: keeps the memory of some [`HostSlice`](crate::HostSlice)s mapped.
///
/// Dropping it ends the mapping: a release of what was written and an acquire of what was read,
/// unless it was made with [`Access::RELAXED`]. It may be dropped by another thread than the one
/// that made it, if that thread is itself ordered after all uses of the memory (a received
/// completion is).
///
/// It may outlive the [`AccessGuard`](crate::AccessGuard) that made it. It delays
/// [`Domain::unmap`](crate::Domain::unmap) of the addresses that it covers. All memory mapped for
/// writing counts as written when the guard is dropped, in the dirty log that is active then.
#[derive(Debug)]
pub struct MappingGuard {
    pin: Arc<SnapshotPin>,
    access: Access,
    list: PinList,
}

impl MappingGuard {
    /// Takes over entries of the pin table of `pin`.
    pub(crate) fn new(pin: &Arc<SnapshotPin>, access: Access, list: PinList) -> Self {
        access.map();
        Self { pin: Arc::clone(pin), access, list }
    }

    /// Marks the pages, which were mapped for writing.
    fn mark(&self) {
        let pin = &*self.pin;
        // Pairs with the fence in `ReaderSlots::synchronize`: either the generation below is the
        // one that turned a log on, or what was written is seen by the thread that copies the
        // memory after that. And with the one in `DirtyLog::harvest`, for the marks.
        fence(Ordering::SeqCst);
        let now;
        let snapshot = if pin.published.generation() == pin.generation {
            &pin.snapshot
        } else {
            now = pin.published.current();
            &now
        };
        if let Some(log) = snapshot.log() {
            for run in pin.reader.pins().runs(self.list) {
                log.mark(run.gpa, run.len);
            }
        }
    }
}

impl Drop for MappingGuard {
    fn drop(&mut self) {
        if self.access.contains(Access::WRITE) {
            self.mark();
        }
        self.access.unmap();
        self.pin.reader.pins().release(self.list);
    }
}

/// Contiguous piece of guest memory with its mapping guard.
///
/// Dropping it orders as dropping a [`MappingGuard`].
#[derive(Debug)]
pub struct Mapping {
    host: NonNull<u8>,
    range: GuestRange,
    guard: MappingGuard,
}

// SAFETY: the pointer is to process-wide memory that the guard keeps mapped, and that is accessed
// as shared memory is.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Mapping of `range.len` bytes from `host` on, which may be none.
    ///
    /// The bytes must be inside a region of the snapshot that `guard` keeps.
    pub(crate) fn new(host: NonNull<u8>, range: GuestRange, guard: MappingGuard) -> Self {
        Self { host, range, guard }
    }

    /// First byte in this process.
    ///
    /// Touch it only by raw atomic or volatile accesses and system calls.
    #[must_use]
    pub fn host(&self) -> NonNull<u8> {
        self.host
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.range.len
    }

    /// Copies `data` to its beginning.
    ///
    /// The bytes move in no particular order: dropping the mapping orders them.
    ///
    /// Returns `false`, and copies nothing, if the mapping is shorter or was not mapped for
    /// writing.
    #[must_use]
    pub fn write(&self, data: &[u8]) -> bool {
        if data.len() > self.len() || !self.guard.access.contains(Access::WRITE) {
            return false;
        }
        // SAFETY: the guard keeps that many bytes mapped, and writable, while the mapping lives;
        // `data` does not change while it is borrowed.
        unsafe { copy::store(self.host.as_ptr(), data.as_ptr(), data.len()) };
        true
    }

    /// Guest-physical range.
    ///
    /// For [`AccessGuard::mark`](crate::AccessGuard::mark) after a write to a mapping that stays
    /// alive.
    #[must_use]
    pub fn range(&self) -> GuestRange {
        self.range
    }

    /// Whether it is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
