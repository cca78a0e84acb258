//! The device side of a ring: what is the same in both layouts.
//!
//! The fast paths are each layout's own. Here is what runs for one chain at a time, and when a
//! queue completes in order.
use crate::QueueError;
use crate::batch::Batch;
use crate::in_order::{Held, InOrder, Ordered, Slot};
use crate::table_memory::TableMemory;
use crate::translation::{TranslationCheck, Unchecked, walk_translated};
use core::hint::{black_box, cold_path};

/// The device side of a ring of one layout.
pub(crate) trait DeviceRing {
    /// A chain that was walked and added to a batch.
    type Walked;

    /// [`crate::device::Queue::pop`] of a queue that has not latched.
    fn pop_any(&mut self, batch: &mut Batch, memory: &mut impl TableMemory) -> Result<(), QueueError>;

    /// See [`crate::device::Queue::pop`].
    fn pop(&mut self, batch: &mut Batch, memory: &mut impl TableMemory) -> Result<usize, QueueError> {
        if let Some(error) = self.error() {
            batch.clear();
            return Err(error);
        }
        self.pop_any(batch, memory)?;
        Ok(batch.count())
    }

    /// Upper limit of the chains that a pop may find now.
    fn limit(&mut self) -> Result<usize, QueueError>;

    /// Walks the next chain into the batch.
    ///
    /// `None`: there is none, or the batch has no room for it.
    fn walk_next(
        &mut self,
        batch: &mut Batch,
        fetch: &mut impl FnMut(u64, &mut [u8]) -> bool,
    ) -> Result<Option<Self::Walked>, QueueError>;

    /// Moves past a chain of `lens` bytes that was walked; it is in flight now.
    fn taken(&mut self, walked: Self::Walked, lens: [u32; 2]);

    /// The order of completions, with IN_ORDER.
    fn in_order(&mut self) -> Option<&mut InOrder>;

    /// Places of the next completion, and of the first that is not published.
    fn used_places(&self) -> [u64; 2];

    /// Where a chain lies, in one number that is never 0: its place, and how many it takes.
    fn note(place: u64, places: u16) -> u64;

    /// A run that begins with the next completion.
    type InOrderRun: InOrderRun;

    /// See [`DeviceRing::InOrderRun`].
    fn run_in_order(&self) -> Self::InOrderRun;

    /// The index in the ring of a chain's place; less than the size.
    fn index_of(note: u64, size: u16) -> usize;

    /// The chains in flight, with IN_ORDER.
    #[inline(always)]
    fn ordered(&mut self) -> Option<Ordered> {
        self.in_order().map(InOrder::flight)
    }

    /// Number of descriptors.
    fn size(&self) -> u16;

    /// Writes the used entry of a run that starts at `start`, to be published.
    fn write_used(&mut self, start: u64, id: u16, written: u32);

    /// Moves the place of the next completion to `next`, past chains of `more` places beyond one each.
    fn used_up_to(&mut self, next: u64, more: u16);

    /// The latched error.
    fn error(&self) -> Option<QueueError>;

    /// The paths that serve the queue.
    fn paths(&self) -> Paths;

    /// Latches the first error, and returns it.
    fn latch(&mut self, error: QueueError) -> QueueError;

    /// See [`crate::device::Queue::pop_translated`].
    fn pop_translated<C: TranslationCheck>(
        &mut self,
        batch: &mut Batch,
        check: &mut C,
    ) -> Result<usize, QueueError> {
        if !C::CHECKS {
            return self.pop(batch, &mut Unchecked(check));
        }
        batch.clear();
        if let Some(error) = self.error() {
            return Err(error);
        }
        let limit = self.limit()?.min(batch.slots());
        while batch.count() < limit {
            let walked = walk_translated(batch, check, |batch, mut fetch| self.walk_next(batch, &mut fetch));
            if !self.take(batch, walked, Self::taken)? {
                break;
            }
        }
        Ok(batch.count())
    }

    /// Takes one chain of any kind; `false` if none is left, or the batch has no room for it.
    #[inline(never)]
    fn pop_one(&mut self, batch: &mut Batch, memory: &mut impl TableMemory) -> Result<bool, QueueError> {
        let walked = self.walk_next(batch, &mut |addr, table: &mut [u8]| memory.copy(addr, table));
        self.take(batch, walked, Self::taken)
    }

    /// Marks a walked chain as taken, with `mark`; `false` if there is none.
    ///
    /// An error latches.
    #[inline(always)]
    fn take<W>(
        &mut self,
        batch: &mut Batch,
        walked: Result<Option<W>, QueueError>,
        mark: impl FnOnce(&mut Self, W, [u32; 2]),
    ) -> Result<bool, QueueError> {
        match walked {
            Ok(Some(walked)) => {
                mark(self, walked, batch.lens_of_last());
                Ok(true)
            }
            Ok(None) => Ok(false),
            Err(error) => {
                batch.clear();
                Err(self.latch(error))
            }
        }
    }

    /// Completes chains of a queue with IN_ORDER.
    #[inline(always)]
    fn complete_in_order(&mut self, chains: impl IntoIterator<Item = (u16, u32)>) -> Result<(), QueueError> {
        let (end, [first, published]) = (Slot::of(self.size()), self.used_places());
        let mut run = self.run_in_order();
        let Some(order) = self.in_order() else { return Ok(()) };
        let (mut start, flight) = (order.start(published), order.flight());
        // The last one, which was filled, unless the run starts behind it.
        let mut last = Slot::default();
        let mut result = Ok(());
        // Nothing is called in this loop: registers hold all of it. What is unusual starts again with the
        // slot, so that the usual has nothing to keep for it.
        for (id, written) in chains {
            let slot = Slot::of(id);
            if slot >= end {
                result = Err(black_box(slot).id());
                break;
            }
            // SAFETY: the identifier is below the size, and nothing else looks there meanwhile.
            let chain = unsafe { flight.chain(slot) };
            let is_filled = if !chain.is_filled_by(written) {
                false
            } else if run.take(chain.note()) {
                chain.remove();
                last = slot;
                continue;
            } else {
                true
            };
            cold_path();
            let slot = black_box(slot);
            // SAFETY: as above.
            let note = unsafe { flight.chain(slot) }.remove();
            if !is_filled && run.take(note) {
                // The last of its run.
                self.write_used(start, slot.id(), written);
                start = run.end().0;
            } else if !self.hold_back(note, slot.id(), written, is_filled) {
                result = Err(slot.id());
                break;
            }
        }
        let (next, more) = run.end();
        if next != first {
            if start != next {
                // SAFETY: as above.
                let filled = unsafe { flight.chain(last) }.writable();
                self.write_used(start, last.id(), filled);
            }
            self.used_up_to(next, more);
            if let Some(order) = self.in_order() {
                order.set_start(start);
                if order.held() > 0 {
                    self.release_held();
                }
            }
        }
        // A latched queue has nothing in flight.
        result.map_err(|id| self.latch(QueueError::NotInFlight { id: id.into() }))
    }

    /// As [`DeviceRing::complete_in_order`], of one chain.
    #[inline(always)]
    fn complete_one_in_order(&mut self, id: u16, written: u32) -> Result<(), QueueError> {
        let [_, published] = self.used_places();
        let mut run = self.run_in_order();
        let Some(order) = self.in_order() else { return Ok(()) };
        let (note, is_filled) = order.remove(id, written);
        if !run.take(note) {
            cold_path();
            let is_held = self.hold_back(note, id, written, is_filled);
            return if is_held { Ok(()) } else { Err(self.latch(QueueError::NotInFlight { id: id.into() })) };
        }
        let (start, (next, more)) = (order.start(published), run.end());
        if !is_filled {
            // The next run starts behind it.
            order.set_start(next);
        }
        let are_held = order.held() > 0;
        self.write_used(start, id, written);
        self.used_up_to(next, more);
        if are_held {
            self.release_held();
        }
        Ok(())
    }

    /// Holds back a chain with this note, which is not the next one; `false` if it was not in flight.
    #[inline(always)]
    fn hold_back(&mut self, note: u64, id: u16, written: u32, is_filled: bool) -> bool {
        let size = self.size();
        let Some(order) = self.in_order().filter(|_| note != 0) else { return false };
        order.hold(Self::index_of(note, size), Held { note, id, written, is_filled });
        true
    }

    /// Completes the chains that were held and are next now.
    #[inline(never)]
    fn release_held(&mut self) {
        let (size, [_, published]) = (self.size(), self.used_places());
        let mut run = self.run_in_order();
        while let Some(order) = self.in_order().filter(|order| order.held() > 0) {
            let start = order.start(published);
            let Some(chain) = order.release(Self::index_of(Self::note(run.end().0, 1), size)) else { break };
            // It lies there.
            run.take(chain.note);
            if !chain.is_filled {
                order.set_start(run.end().0);
            }
            self.write_used(start, chain.id, chain.written);
        }
        let (next, more) = run.end();
        self.used_up_to(next, more);
    }
}

/// The paths that serve a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Paths {
    /// The fast ones.
    Fast,
    /// The fast ones, but completions come in order.
    InOrder,
    /// None of them: the queue is tracked, or latched.
    Slow,
}

/// Chains that are completed in order, for a loop that does not look at the ring meanwhile.
pub(crate) trait InOrderRun: Copy {
    /// Moves on past the chain with this note; `false`, and nothing has changed: it is not the next one.
    fn take(&mut self, note: u64) -> bool;

    /// The place behind those that were taken, and their places beyond one each.
    fn end(self) -> (u64, u16);
}
