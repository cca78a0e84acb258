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
mod again;
mod packed;
pub(crate) mod region;
mod split;
#[cfg(all(test, not(loom)))]
mod test;

use crate::batch::Batch;
use crate::device::layout::Layout;
use crate::state::StateError;
use crate::translation::TranslationCheck;
use crate::{Order, QueueError};
use region::Region;

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
