//! The device side of a ring: what is the same in both layouts.
//!
//! The fast paths are each layout's own. Here is what runs for one chain at a time, and when a
//! queue completes in order.
use crate::QueueError;
use crate::batch::Batch;
use crate::in_order::{Held, InOrder, Notes};
use crate::table_memory::TableMemory;
use crate::translation::{TranslationCheck, Unchecked, walk_translated};
use core::hint::cold_path;

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

    /// The chains in flight, for a loop.
    type Flight: Flight;

    /// See [`DeviceRing::Flight`].
    fn flight(&mut self) -> Self::Flight;

    /// The order of completions, with IN_ORDER.
    fn in_order(&mut self) -> Option<&mut InOrder>;

    /// Places of the next completion, and of the first that is not published.
    fn used_places(&self) -> [u64; 2];

    /// The place `places` after one.
    fn after(place: u64, places: u16, size: u16) -> u64;

    /// The notes of chains that were popped.
    fn notes(order: &mut InOrder) -> Notes;

    /// Where the note of a place is, in bytes.
    fn note_at(place: u64, size: u16) -> isize;

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
    #[inline]
    fn complete_in_order(&mut self, chains: impl IntoIterator<Item = (u16, u32)>) -> Result<(), QueueError> {
        let (size, flight, [first, published]) = (self.size(), self.flight(), self.used_places());
        let Some(order) = self.in_order() else { return Ok(()) };
        let (notes, mut start) = (Self::notes(order), order.start(published));
        let (mut next, mut more, mut result) = (first, 0, Ok(()));
        // The note of the last one, which was filled, unless the run starts behind it.
        let mut last = 0;
        let mut chains = chains.into_iter();
        loop {
            // Nothing is called in this loop: registers hold all of it.
            let unusual = loop {
                let Some((id, written)) = chains.next() else { break None };
                let at = Self::note_at(next, size);
                // SAFETY: each place of the ring has a note.
                let popped = unsafe { notes.at(at) };
                if popped.id != id.into() || popped.lens[1] != written {
                    break Some((id, written));
                }
                // SAFETY: it was popped, so its identifier is below the size.
                let places = unsafe { flight.remove(id) };
                if places == 0 {
                    break Some((id, written));
                }
                more += places - 1;
                next = Self::after(next, places, size);
                last = at;
            };
            let Some((id, written)) = unusual else { break };
            cold_path();
            // SAFETY: as above.
            let popped = unsafe { notes.at(Self::note_at(next, size)) };
            if popped.id != id.into() {
                result = self.hold_back(id, written);
                if result.is_err() {
                    break;
                }
                continue;
            }
            // It was not filled, so it is the last of its run.
            // SAFETY: as above.
            let places = unsafe { flight.remove(id) };
            if places == 0 {
                result = Err(id);
                break;
            }
            more += places - 1;
            next = Self::after(next, places, size);
            self.write_used(start, id, written);
            start = next;
        }
        if next != first {
            if start != next {
                // SAFETY: a note that was looked at above.
                let last = unsafe { notes.at(last) };
                self.write_used(start, last.id as u16, last.lens[1]);
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
        let (size, flight, [next, published]) = (self.size(), self.flight(), self.used_places());
        let Some(order) = self.in_order() else { return Ok(()) };
        let (notes, start) = (Self::notes(order), order.start(published));
        // SAFETY: each place of the ring has a note.
        let popped = unsafe { notes.at(Self::note_at(next, size)) };
        // SAFETY: if it was popped, its identifier is below the size.
        let places = if popped.id == id.into() { unsafe { flight.remove(id) } } else { 0 };
        if places == 0 {
            cold_path();
            let held = self.hold_back(id, written);
            return held.map_err(|id| self.latch(QueueError::NotInFlight { id: id.into() }));
        }
        let is_filled = popped.lens[1] == written;
        let after = Self::after(next, places, size);
        self.write_used(start, id, written);
        self.used_up_to(after, places - 1);
        if let Some(order) = self.in_order() {
            if !is_filled {
                order.set_start(after);
            }
            if order.held() > 0 {
                self.release_held();
            }
        }
        Ok(())
    }

    /// Holds back a completion that is not the next one. `Err`: the chain is not in flight.
    #[inline(never)]
    fn hold_back(&mut self, id: u16, written: u32) -> Result<(), u16> {
        if id >= self.size() {
            return Err(id);
        }
        // SAFETY: the identifier was checked.
        let places = unsafe { self.flight().remove(id) };
        let is_held =
            places > 0 && self.in_order().is_some_and(|order| order.hold(id, Held { written, places }));
        if is_held { Ok(()) } else { Err(id) }
    }

    /// Completes the chains that were held and are next now.
    #[inline(never)]
    fn release_held(&mut self) {
        let (size, [mut next, published]) = (self.size(), self.used_places());
        let mut more = 0;
        while let Some(order) = self.in_order().filter(|order| order.held() > 0) {
            let mut start = order.start(published);
            let notes = Self::notes(order);
            // SAFETY: each place of the ring has a note.
            let popped = *unsafe { notes.at(Self::note_at(next, size)) };
            let Some(Held { written, places }) = order.release(popped.id) else { break };
            next = Self::after(next, places, size);
            more += places - 1;
            self.write_used(start, popped.id as u16, written);
            if written != popped.lens[1] {
                start = next;
            }
            if let Some(order) = self.in_order() {
                order.set_start(start);
            }
        }
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

/// The chains in flight, for a loop that does not look at the ring meanwhile.
pub(crate) trait Flight: Copy {
    /// Removes a chain, and returns the places that it takes in the ring; 0 if it is not in flight.
    ///
    /// # Safety
    /// `id` is below the size of the queue, which lives, and is not accessed otherwise meanwhile.
    unsafe fn remove(self, id: u16) -> u16;
}
