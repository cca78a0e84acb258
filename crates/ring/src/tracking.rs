//! In-flight tracking: records chains in flight in memory that outlives us.
//!
//! The vhost-user specification, "Inflight I/O tracking".
//!
//! ```text
//!   pop       --> saved: contents and order, then the mark    a crash in between: not taken, comes again
//!   complete  --> nothing that counts                         a crash: in flight, is served once more
//!   publish   --> intent | the ring's store | follow it       a crash around it: recovery asks the ring
//! ```
//! Opt-in, and for queues that complete out of order: with IN_ORDER the ring itself tells what is
//! in flight. After a crash, [`crate::device::QueueConfig::resume_tracked`] reads the region; the
//! queue's first chains are then those that were in flight, in the order in which they were taken.
//!
//! # Order
//! Against the crash of a process, stores need not be ordered between CPUs: what the process has
//! stored before it dies is seen by its successor. Only the compiler must not exchange them;
//! each store that others must precede is a release store, which the compiler moves nothing behind.
//!
//! The region is in the byte order of the ring, little endian.
mod packed;
mod split;
#[cfg(all(test, not(loom)))]
mod test;

use crate::area::Cells;
use crate::batch::Batch;
use crate::device::layout::Layout;
use crate::state::StateError;
use crate::translation::TranslationCheck;
use crate::{Area, Order, QueueError};
use alloc::collections::VecDeque;
use core::sync::atomic::Ordering::{Relaxed, Release};
use paravane_spec::inflight::{DESC_NUM, FEATURES, VERSION, VERSION_1, VERSION_NONE};

/// The tracking of one queue, of its layout.
#[derive(Debug)]
pub(crate) enum Tracking {
    Split(split::Tracker),
    Packed(packed::Tracker),
}

/// Bytes of the tracking region of a queue of `size` descriptors.
#[must_use]
pub fn tracking_bytes(size: u16, packed: bool) -> usize {
    if packed { packed::bytes(size) } else { split::bytes(size) }
}

impl Tracking {
    /// For a queue whose ring is `layout`; see the trackers.
    pub(crate) fn new<O: Order>(
        region: Region,
        layout: &mut Layout<O>,
        new: bool,
    ) -> Result<Self, StateError> {
        Ok(match layout {
            Layout::Split(ring) => Self::Split(split::Tracker::new(region, ring, new)?),
            Layout::Packed(ring) => Self::Packed(packed::Tracker::new(region, ring, new)?),
        })
    }

    /// See [`crate::device::Queue::pop_translated`].
    pub(crate) fn pop<O: Order>(
        &mut self,
        layout: &mut Layout<O>,
        batch: &mut Batch,
        check: &mut impl TranslationCheck,
    ) -> Result<usize, QueueError> {
        match (self, layout) {
            (Self::Split(tracker), Layout::Split(ring)) => tracker.pop(ring, batch, check),
            (Self::Packed(tracker), Layout::Packed(ring)) => tracker.pop(ring, batch, check),
            // Tracking is made for the queue's layout.
            _ => Ok(0),
        }
    }

    /// See [`crate::device::Queue::publish`].
    pub(crate) fn publish<O: Order>(&mut self, layout: &mut Layout<O>) -> Result<bool, QueueError> {
        match (self, layout) {
            (Self::Split(tracker), Layout::Split(ring)) => tracker.publish(ring),
            (Self::Packed(tracker), Layout::Packed(ring)) => tracker.publish(ring),
            // As above.
            _ => Ok(false),
        }
    }

    /// After [`crate::device::Queue::complete`].
    #[cold]
    pub(crate) fn completed(&mut self, id: u16) {
        match self {
            Self::Split(tracker) => tracker.completed(id),
            Self::Packed(tracker) => tracker.completed(id),
        }
    }
}

/// The region's memory.
///
/// Invariant, made by [`crate::device::QueueConfig::resume_tracked`]: it is as long as the layout's
/// `bytes` of `size` says, it lies on a multiple of 8, and it stays mapped. Offsets are those of
/// `paravane_spec::inflight`, of entries below `size`.
#[derive(Debug)]
pub(crate) struct Region {
    cells: Cells,
    size: u16,
}

impl Region {
    /// The region at `area` of a queue of `size`.
    ///
    /// # Safety
    /// `area` is as long as [`tracking_bytes`] of `size` says, aligned to 8, and stays mapped.
    pub(crate) unsafe fn new(area: Area, size: u16) -> Self {
        Self { cells: area.cells(), size }
    }

    fn u16(&self, offset: usize) -> u16 {
        // Relaxed: it was written by a dead process or by this one.
        // SAFETY: see the invariant of `Region`.
        unsafe { self.cells.load_u16(offset, Relaxed) }
    }

    fn u32(&self, offset: usize) -> u32 {
        // SAFETY: as above.
        unsafe { self.cells.load_u32(offset) }
    }

    fn u64(&self, offset: usize) -> u64 {
        // SAFETY: as above.
        unsafe { self.cells.load_u64(offset) }
    }

    /// A store that stays behind all stores before it.
    fn set_u16(&self, offset: usize, value: u16) {
        // Release: towards the compiler only, see the module's text.
        // SAFETY: see the invariant of `Region`.
        unsafe { self.cells.store_u16(offset, value, Release) };
    }

    /// A store that the next [`Region::set_u16`] or [`Region::commit_u64`] follows.
    fn set_u64(&self, offset: usize, value: u64) {
        // SAFETY: see the invariant of `Region`.
        unsafe { self.cells.store_u64(offset, value) };
    }

    /// A store that stays behind all stores before it.
    fn commit_u64(&self, offset: usize, value: u64) {
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
    fn started(&self) {
        self.set_u64(FEATURES, 0);
        self.set_u16(DESC_NUM, self.size);
        self.set_u16(VERSION, VERSION_1);
    }

    /// An in-flight mark; the byte beside it is padding.
    fn mark(&self, offset: usize) -> Result<bool, StateError> {
        match self.u16(offset) & 0xff {
            mark @ (0 | 1) => Ok(mark == 1),
            mark => corrupt("an in-flight mark", mark),
        }
    }
}

/// What is wrong with the region.
fn corrupt<T>(what: &'static str, value: impl Into<u64>) -> Result<T, StateError> {
    Err(StateError::Region { what, value: value.into() })
}

/// Brings back the chains in flight when a process died, in that order.
///
/// As far as `batch` goes. `pop` returns whether a chain fitted in.
fn pop_again<T>(
    again: &mut VecDeque<T>,
    batch: &mut Batch,
    mut pop: impl FnMut(&T, &mut Batch) -> Result<bool, QueueError>,
) -> Result<usize, QueueError> {
    batch.clear();
    while let Some(chain) = again.front().filter(|_| batch.count() < batch.slots()) {
        if !pop(chain, batch)? {
            break;
        }
        again.pop_front();
    }
    Ok(batch.count())
}

/// Sorts by counter, and returns the counter to go on with.
fn in_order_of_taking<T>(again: &mut [(u64, T)]) -> Result<u64, StateError> {
    again.sort_unstable_by_key(|(counter, _)| *counter);
    if let Some(twice) = again.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        return corrupt("the counter of two chains", twice[0].0);
    }
    match again.last() {
        None => Ok(0),
        Some((u64::MAX, _)) => corrupt("a counter", u64::MAX),
        Some((newest, _)) => Ok(newest + 1),
    }
}
