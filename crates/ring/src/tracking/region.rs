//! The memory in which a queue's requests in flight are recorded.
use crate::Area;
use crate::area::Cells;
use crate::state::StateError;
use core::sync::atomic::Ordering::{Relaxed, Release};
use paravane_spec::inflight::{DESC_NUM, FEATURES, VERSION, VERSION_1, VERSION_NONE};

/// The region's memory.
///
/// Invariant, made by [`crate::device::QueueConfig::resume_tracked`]: it is as long as the layout's
/// `bytes` of `size` says, it lies on a multiple of 8, and it stays mapped. Offsets are those of
/// `paravane_spec::inflight`, of entries below `size`.
#[derive(Debug)]
pub(crate) struct Region {
    cells: Cells,
    pub(super) size: u16,
}

impl Region {
    /// The region at `area` of a queue of `size`.
    ///
    /// # Safety
    /// `area` is as long as [`tracking_bytes`](super::tracking_bytes) of `size` says, aligned to 8, and stays mapped.
    pub(crate) unsafe fn new(area: Area, size: u16) -> Self {
        Self { cells: area.cells(), size }
    }

    pub(super) fn u16(&self, offset: usize) -> u16 {
        // Relaxed: it was written by a dead process or by this one.
        // SAFETY: see the invariant of `Region`.
        unsafe { self.cells.load_u16(offset, Relaxed) }
    }

    pub(super) fn u32(&self, offset: usize) -> u32 {
        // SAFETY: as above.
        unsafe { self.cells.load_u32(offset) }
    }

    pub(super) fn u64(&self, offset: usize) -> u64 {
        // SAFETY: as above.
        unsafe { self.cells.load_u64(offset) }
    }

    /// A store that stays behind all stores before it.
    pub(super) fn set_u16(&self, offset: usize, value: u16) {
        // Release: towards the compiler only, see the module's text.
        // SAFETY: see the invariant of `Region`.
        unsafe { self.cells.store_u16(offset, value, Release) };
    }

    /// A store that the next [`Region::set_u16`] or [`Region::commit_u64`] follows.
    pub(super) fn set_u64(&self, offset: usize, value: u64) {
        // SAFETY: see the invariant of `Region`.
        unsafe { self.cells.store_u64(offset, value) };
    }

    /// A store that stays behind all stores before it.
    pub(super) fn commit_u64(&self, offset: usize, value: u64) {
        // Release: towards the compiler only, see the module's text.
        // SAFETY: see the invariant of `Region`.
        unsafe { self.cells.store_u64_release(offset, value) };
    }

    /// Whether the region is unused. An error if its header is not that of this queue.
    pub(crate) fn is_new(&self) -> Result<bool, StateError> {
        match (self.u16(VERSION), self.u64(FEATURES), self.u16(DESC_NUM)) {
            (VERSION_NONE, ..) => Ok(true),
            (VERSION_1, 0, size) if size == self.size => Ok(false),
            (VERSION_1, 0, size) => corrupt("the number of descriptors", size),
            (VERSION_1, features, _) => corrupt("the feature word", features),
            (version, ..) => corrupt("the version", version),
        }
    }

    /// The region is new until this.
    pub(super) fn started(&self) {
        self.set_u64(FEATURES, 0);
        self.set_u16(DESC_NUM, self.size);
        self.set_u16(VERSION, VERSION_1);
    }

    /// An in-flight mark; the byte beside it is padding.
    pub(super) fn mark(&self, offset: usize) -> Result<bool, StateError> {
        match self.u16(offset) & 0xff {
            mark @ (0 | 1) => Ok(mark == 1),
            mark => corrupt("an in-flight mark", mark),
        }
    }
}

/// What is wrong with the region.
pub(super) fn corrupt<T>(what: &'static str, value: impl Into<u64>) -> Result<T, StateError> {
    Err(StateError::Region { what, value: value.into() })
}
