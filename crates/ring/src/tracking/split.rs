//! The region of a split queue.
//!
//! Recovery rests on one question, whether the ring's index has moved since the region's did:
//!
//! ```text
//!   next, last_batch_head ... | used.idx moves | marks cleared ... | region's used_idx follows
//!   <------ equal: all marks stand -->|<-- unequal: the list's marks are cleared -->|<-- equal
//! ```
use super::again::{in_order_of_taking, pop_again};
use super::region::{Region, corrupt};
use crate::batch::Batch;
use crate::device_ring::DeviceRing;
use crate::split::device::Ring;
use crate::state::StateError;
use crate::translation::TranslationCheck;
use crate::{Order, QueueError};
use alloc::collections::VecDeque;
use alloc::vec;
use alloc::vec::Vec;
use paravane_spec::inflight::split::{
    DESC, DESC_COUNTER, DESC_INFLIGHT, DESC_NEXT, DESC_SIZE, LAST_BATCH_HEAD, USED_IDX,
};

/// Bytes of the region of a queue of `size` descriptors.
pub(super) fn bytes(size: u16) -> usize {
    DESC + DESC_SIZE * usize::from(size)
}

fn desc(head: u16) -> usize {
    DESC + usize::from(head) * DESC_SIZE
}

/// Heads are below the size.
///
/// The ring has checked them, or [`Tracker::recover`].
#[derive(Debug)]
pub(crate) struct Tracker {
    region: Region,
    /// The number of the next chain that is taken.
    counter: u64,
    /// The newest of the list.
    last_batch_head: u16,
    /// Completed since the last publication.
    batch: Vec<u16>,
    /// In flight when a process died, and not popped again yet.
    again: VecDeque<u16>,
}

impl Tracker {
    /// For `ring`, which is moved to where the region says, unless that is new.
    pub(super) fn new<O: Order>(region: Region, ring: &mut Ring<O>, new: bool) -> Result<Self, StateError> {
        let batch = Vec::with_capacity(region.size.into());
        let mut tracker = Self { region, counter: 0, last_batch_head: 0, batch, again: VecDeque::new() };
        if new {
            tracker.start(ring.used_idx());
        } else {
            tracker.recover(ring.used_idx())?;
            // No more than the size.
            let in_flight = tracker.again.len() as u16;
            ring.move_to(ring.used_idx().wrapping_add(in_flight), in_flight)?;
        }
        Ok(tracker)
    }

    fn start(&mut self, used_idx: u16) {
        for head in 0..self.region.size {
            self.region.set_u16(desc(head) + DESC_INFLIGHT, 0);
        }
        self.region.set_u16(LAST_BATCH_HEAD, 0);
        self.region.set_u16(USED_IDX, used_idx);
        self.region.started();
    }

    /// Takes up the region of another process, and finds chains in flight.
    ///
    /// Finishes its last publication. A crash in the middle changes nothing: the next one does the
    /// same again.
    fn recover(&mut self, ring_used_idx: u16) -> Result<(), StateError> {
        let region = &self.region;
        let mut finished = vec![false; region.size.into()];
        let behind = ring_used_idx.wrapping_sub(region.u16(USED_IDX));
        if behind > region.size {
            return corrupt("the used index", region.u16(USED_IDX));
        }
        let mut head = region.u16(LAST_BATCH_HEAD);
        self.last_batch_head = head;
        if head >= region.size {
            return corrupt("the head of the last batch", head);
        }
        for left in (0..behind).rev() {
            match finished.get_mut(usize::from(head)) {
                Some(finished) if !*finished => *finished = true,
                _ => return corrupt("a link of the last batch", head),
            }
            if left > 0 {
                head = region.u16(desc(head) + DESC_NEXT);
            }
        }
        let mut again = Vec::new();
        for (head, finished) in (0..region.size).zip(&finished) {
            if region.mark(desc(head) + DESC_INFLIGHT)? && !finished {
                again.push((region.u64(desc(head) + DESC_COUNTER), head));
            }
        }
        self.counter = in_order_of_taking(&mut again)?;
        // All is checked: now, and only now, it is changed.
        for (head, _) in (0..region.size).zip(&finished).filter(|(_, finished)| **finished) {
            region.set_u16(desc(head) + DESC_INFLIGHT, 0);
        }
        region.set_u16(USED_IDX, ring_used_idx);
        self.again = again.into_iter().map(|(_, head)| head).collect();
        Ok(())
    }

    /// See [`crate::device::Queue::pop`].
    pub(super) fn pop<O: Order>(
        &mut self,
        ring: &mut Ring<O>,
        batch: &mut Batch,
        check: &mut impl TranslationCheck,
    ) -> Result<usize, QueueError> {
        if self.again.is_empty() {
            ring.pop_translated(batch, check)?;
            for chain in batch.chains() {
                self.region.set_u64(desc(chain.head) + DESC_COUNTER, self.counter);
                self.region.set_u16(desc(chain.head) + DESC_INFLIGHT, 1);
                self.counter += 1;
            }
            return Ok(batch.count());
        }
        pop_again(&mut self.again, batch, |&head, batch| ring.pop_again(head, batch, check))
    }

    /// After [`crate::device::Queue::complete`].
    pub(super) fn completed(&mut self, head: u16) {
        self.region.set_u16(desc(head) + DESC_NEXT, self.last_batch_head);
        self.region.set_u16(LAST_BATCH_HEAD, head);
        self.last_batch_head = head;
        self.batch.push(head);
    }

    /// See [`crate::device::Queue::publish`].
    pub(super) fn publish<O: Order>(&mut self, ring: &mut Ring<O>) -> Result<bool, QueueError> {
        let interrupt = ring.publish()?;
        while let Some(head) = self.batch.pop() {
            self.region.set_u16(desc(head) + DESC_INFLIGHT, 0);
        }
        self.region.set_u16(USED_IDX, ring.published());
        Ok(interrupt)
    }
}
