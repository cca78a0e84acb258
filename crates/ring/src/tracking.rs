//! In-flight tracking: records the chains in flight in memory that outlives this process
//! (vhost-user specification, "Inflight I/O tracking").
//!
//! ```text
//!   pop       --> saved: contents and order, then the mark    a crash in between: not taken, comes again
//!   complete  --> nothing that counts                         a crash: in flight, is served once more
//!   publish   --> intent | the ring's store | follow it       a crash around it: recovery asks the ring
//! ```
//! Opt-in, and for queues that complete out of order: with IN_ORDER the ring itself tells what is
//! in flight. After a crash, [`QueueConfig::resume_tracked`] reads the region; the queue's first
//! chains are then those that were in flight, in the order in which they were taken.
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
use crate::device::{Batch, Layout, Queue, QueueConfig};
use crate::state::{State, StateError};
use crate::translation::TranslationCheck;
use crate::{Area, ConfigError, Order, QueueError};
use alloc::boxed::Box;
use alloc::collections::VecDeque;
use core::sync::atomic::Ordering::{Relaxed, Release};
pub(crate) use packed::Saved;
use paravane_spec::feature;
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

impl QueueConfig {
    /// Bytes of the region that [`QueueConfig::resume_tracked`] needs, to be aligned to 8.
    #[must_use]
    pub fn tracking_bytes(&self) -> usize {
        tracking_bytes(self.size(), self.packed())
    }

    /// As [`QueueConfig::resume`], with what is in flight tracked in `region`. In a region that is
    /// new (all zero) the tracking starts, at `state`. Else the queue takes up what the region and
    /// the ring tell, and `state` says no more than the layout: [`Queue::pop`] returns first what
    /// was in flight, and [`Queue::in_flight`] counts it from the start.
    ///
    /// # Errors
    /// As [`QueueConfig::resume`]; the region is too short, misaligned, corrupt, or contradicts the
    /// ring; or IN_ORDER is negotiated.
    ///
    /// # Safety
    /// As [`QueueConfig::activate`], and `region` must stay mapped as the areas do.
    pub unsafe fn resume_tracked<O: Order>(
        self,
        desc: Area,
        driver: Area,
        device: Area,
        state: State,
        region: Area,
    ) -> Result<Queue<O>, StateError> {
        let (part, needed, align) = ("tracking region", self.tracking_bytes(), 8);
        if region.len() < needed {
            return Err(ConfigError::Short { part, needed, given: region.len() }.into());
        }
        if !region.is_aligned(align) {
            return Err(ConfigError::Misaligned { part, addr: 0, align: align as u64 }.into());
        }
        if self.has(feature::IN_ORDER) {
            return Err(StateError::InOrder);
        }
        // SAFETY: the caller's promise is the same.
        let mut queue: Queue<O> = unsafe { self.activate_as(desc, driver, device) }?;
        let region = Region { cells: region.cells(), size: queue.size() };
        let new = region.is_new()?;
        if new || state.layout() != queue.layout_name() {
            queue.move_to(state)?;
        }
        // The length was checked for the layout.
        queue.tracking = Some(Box::new(match &mut queue.layout {
            Layout::Split(ring) => Tracking::Split(split::Tracker::new(region, ring, new)?),
            Layout::Packed(ring) => Tracking::Packed(packed::Tracker::new(region, ring, new)?),
        }));
        Ok(queue)
    }
}

impl<O: Order> Queue<O> {
    /// [`Queue::pop`] and [`Queue::pop_translated`] with tracking.
    #[cold]
    pub(crate) fn pop_tracked(
        &mut self,
        batch: &mut Batch,
        check: &mut impl TranslationCheck,
    ) -> Result<usize, QueueError> {
        match (self.tracking.as_deref_mut(), &mut self.layout) {
            (Some(Tracking::Split(tracker)), Layout::Split(ring)) => tracker.pop(ring, batch, check),
            (Some(Tracking::Packed(tracker)), Layout::Packed(ring)) => tracker.pop(ring, batch, check),
            // Tracking is made for the queue's layout.
            _ => Ok(0),
        }
    }

    /// [`Queue::complete_all`] with tracking.
    #[cold]
    pub(crate) fn complete_tracked(
        &mut self,
        chains: impl IntoIterator<Item = (u16, u32)>,
    ) -> Result<(), QueueError> {
        chains.into_iter().try_for_each(|(head, written)| self.complete(head, written))
    }

    /// [`Queue::publish`] with tracking.
    #[cold]
    pub(crate) fn publish_tracked(&mut self) -> Result<bool, QueueError> {
        match (self.tracking.as_deref_mut(), &mut self.layout) {
            (Some(Tracking::Split(tracker)), Layout::Split(ring)) => tracker.publish(ring),
            (Some(Tracking::Packed(tracker)), Layout::Packed(ring)) => tracker.publish(ring),
            // As above.
            _ => Ok(false),
        }
    }
}

impl Tracking {
    /// After [`Queue::complete`].
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
/// Invariant, made by [`QueueConfig::resume_tracked`]: it is as long as the layout's `bytes` of
/// `size` says, it lies on a multiple of 8, and it stays mapped. Offsets are those of
/// `paravane_spec::inflight`, of entries below `size`.
#[derive(Debug)]
struct Region {
    cells: Cells,
    size: u16,
}

impl Region {
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

    /// A store that the next [`Region::set_u16`] or [`Region::commit_u64`] stays behind.
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
    fn is_new(&self) -> Result<bool, StateError> {
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

/// Brings back, in that order, what was in flight when a process died, as far as `batch` goes.
/// `pop` says whether a chain fitted in.
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
