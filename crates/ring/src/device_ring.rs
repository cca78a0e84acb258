//! The device side of a ring: what is the same in both layouts.
//!
//! The fast paths are each layout's own. Here is what runs for one chain at a time, and when a
//! queue completes in order.
use crate::QueueError;
use crate::batch::Batch;
use crate::in_order::{Entry, InOrder};
use crate::table_memory::TableMemory;
use crate::translation::{TranslationCheck, Unchecked, walk_translated};

/// The device side of a ring of one layout.
pub(crate) trait DeviceRing {
    /// A chain that was walked and added to a batch.
    type Walked;

    /// [`crate::device::Queue::pop`] of a queue that has not latched, into an empty batch.
    fn pop_any(&mut self, batch: &mut Batch, memory: &mut impl TableMemory) -> Result<(), QueueError>;

    /// See [`crate::device::Queue::pop`].
    fn pop(&mut self, batch: &mut Batch, memory: &mut impl TableMemory) -> Result<usize, QueueError> {
        batch.clear();
        if let Some(error) = self.error() {
            return Err(error);
        }
        self.pop_any(batch, memory)?;
        self.note_order(batch);
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

    /// Moves past a chain that was walked; it is in flight now.
    fn taken(&mut self, walked: Self::Walked);

    /// Writes a used entry, to be published.
    fn stage(&mut self, entry: Entry);

    /// The order of completions, with IN_ORDER.
    fn in_order(&mut self) -> Option<&mut InOrder>;

    /// The same, and the number of places in the ring that a chain in flight takes.
    fn in_order_and_places(&mut self) -> Option<(&mut InOrder, impl Fn(u16) -> u16)>;

    /// Removes a chain from those in flight; `false` if it is not one of them.
    fn remove(&mut self, id: u16) -> bool;

    /// The order of completions, and [`DeviceRing::remove`] for identifiers below the queue's size.
    fn in_order_and_flight(&mut self) -> Option<(&mut InOrder, impl FnMut(u16) -> bool)>;

    /// The latched error.
    fn error(&self) -> Option<QueueError>;

    /// Whether the fast paths are closed: the queue is in order, tracked or latched.
    fn detour(&self) -> bool;

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
        self.note_order(batch);
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
        mark: impl FnOnce(&mut Self, W),
    ) -> Result<bool, QueueError> {
        match walked {
            Ok(Some(walked)) => {
                mark(self, walked);
                Ok(true)
            }
            Ok(None) => Ok(false),
            Err(error) => {
                batch.clear();
                Err(self.latch(error))
            }
        }
    }

    /// With IN_ORDER, remembers the order in which the chains of a batch were taken.
    #[inline(always)]
    fn note_order(&mut self, batch: &Batch) {
        if let Some((order, places)) = self.in_order_and_places() {
            order.popped(batch.chains(), places);
        }
    }

    /// Completes chains of a queue with IN_ORDER.
    #[inline]
    fn complete_in_order(&mut self, chains: impl IntoIterator<Item = (u16, u32)>) -> Result<(), QueueError> {
        let mut chains = chains.into_iter();
        loop {
            let Some((order, remove)) = self.in_order_and_flight() else { return Ok(()) };
            let other = order.complete_run(&mut chains, remove);
            // What lies behind them may have been done before.
            self.stage_done();
            let Some((id, written)) = other else { return Ok(()) };
            self.complete_out_of_order(id, written)?;
        }
    }

    /// Completes a chain that is not the next one, or cannot share a used entry with the last.
    #[inline(never)]
    fn complete_out_of_order(&mut self, id: u16, written: u32) -> Result<(), QueueError> {
        let known = self.remove(id);
        let Some(order) = self.in_order().filter(|_| known) else {
            return Err(self.latch(QueueError::NotInFlight { id: id.into() }));
        };
        order.completed(id, written);
        self.stage_done();
        Ok(())
    }

    /// Writes the used entries of chains that are next in order, but the last one.
    #[inline(always)]
    fn stage_done(&mut self) {
        while let Some(entry) = self.in_order().and_then(InOrder::stage) {
            self.stage(entry);
        }
    }

    /// What precedes a publication off the fast paths: with IN_ORDER, the last used entry is written.
    #[inline(never)]
    fn before_publish(&mut self) -> Result<(), QueueError> {
        if let Some(error) = self.error() {
            return Err(error);
        }
        if let Some(entry) = self.in_order().and_then(InOrder::flush) {
            self.stage(entry);
        }
        Ok(())
    }
}
