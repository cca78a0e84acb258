//! Device side of a packed queue.
//!
//! ```text
//!   descriptor ring:   ... used | published    next_used      next_avail | available ...
//!                                   |-- staged --|-- in flight --|
//!                                   ^ publish    ^ complete      ^ pop
//! ```
//!
//! The three positions chase each other around the ring, with no more than its size between the first and the
//! last. A chain takes as many descriptors as the driver made of it, and its used descriptor stands for all of
//! them: `next_used` moves on by that many.
use super::chain::Chains;
use super::places::Places;
use super::{Descriptor, Event, Position, available_flags, desc_bytes, flags, matches, used_flags};
use crate::area::{Area, Cells};
use crate::batch::{Batch, Chain};
use crate::in_order::{Entry, InOrder};
use crate::state::StateError;
use crate::tracking::Saved;
use crate::{Order, QueueError, Segment};
use alloc::boxed::Box;
use alloc::vec;
use core::marker::PhantomData;
use core::sync::atomic::Ordering::Relaxed;
use paravane_spec::packed::{DESC_ADDR, DESC_F_WRITE, DESC_FLAGS, DESC_LEN, DESC_SIZE};

/// The ring addresses, resolved once, and our positions.
///
/// Invariant, made by [`Ring::new`] and relied on by every access to the cells: the three areas are as long
/// and as aligned as a queue of `size` descriptors needs.
#[derive(Debug)]
pub(crate) struct Ring<O> {
    chains: Chains,
    desc: Cells,
    /// The driver's event suppression.
    driver: Cells,
    /// Ours.
    device: Cells,
    size: u16,
    event_idx: bool,
    /// Whether our event suppression says so.
    kicks_off: bool,
    /// Chains popped and not completed.
    in_flight: u16,
    /// The next descriptor to be made available.
    next_avail: Position,
    /// Where the next used descriptor goes.
    next_used: Position,
    /// Up to here the driver sees what was used.
    published: Position,
    /// The second word of the used descriptor at `published`, if something is staged. The driver sees the others
    /// only after it, so they lie in the ring already.
    held: u64,
    /// For each identifier the descriptors that its chain takes; 0 if it is not in flight.
    taken: Box<[u16]>,
    in_order: Option<Box<InOrder>>,
    error: Option<QueueError>,
    order: PhantomData<O>,
}

/// Where the fast path stopped.
enum Stop {
    /// The next descriptor is not available, or the batch is full.
    Empty,
    /// The ring ends here, and goes on at its front.
    End,
    /// It is not a simple one, or something is wrong with it. What was seen of it is forgotten.
    Special,
}

impl<O: Order> Ring<O> {
    /// Takes the queue into use, both sides at position `start`.
    ///
    /// # Safety
    /// The areas stay mapped until the ring has been dropped. They are at least as long as `desc_bytes` of `size`
    /// says, and 4 bytes each, and aligned to 8, 4 and 4 bytes. `size` is 32768 at most, and not 0.
    pub(crate) unsafe fn new(
        [desc, driver, device]: [Area; 3],
        size: u16,
        indirect: bool,
        event_idx: bool,
        in_order: bool,
        start: Position,
    ) -> Self {
        debug_assert!(desc.len() >= desc_bytes(size));
        Self {
            // SAFETY: the caller vouches for the ring's length.
            chains: unsafe { Chains::new(desc.cells(), size, indirect) },
            desc: desc.cells(),
            driver: driver.cells(),
            device: device.cells(),
            size,
            event_idx,
            kicks_off: false,
            in_flight: 0,
            next_avail: start,
            next_used: start,
            published: start,
            held: 0,
            taken: vec![0; size.into()].into_boxed_slice(),
            in_order: in_order.then(|| Box::new(InOrder::new(size))),
            error: None,
            order: PhantomData,
        }
    }

    /// See [`crate::device::Queue::pop`].
    #[inline]
    pub(crate) fn pop(
        &mut self,
        batch: &mut Batch,
        mut fetch: impl FnMut(u64, &mut [u8]) -> bool,
    ) -> Result<usize, QueueError> {
        batch.clear();
        if let Some(error) = self.error {
            return Err(error);
        }
        loop {
            match self.pop_simple(batch) {
                Stop::End => {}
                Stop::Special if self.pop_chain(batch, &mut fetch)? => {}
                Stop::Special | Stop::Empty => break,
            }
        }
        if let Some(order) = &mut self.in_order {
            for chain in batch.chains() {
                order.popped(chain.head, self.taken[usize::from(chain.head)], chain.writable_len());
            }
        }
        Ok(batch.count())
    }

    /// Descriptors that an honest driver may have made available: those that are neither in flight nor staged.
    #[inline(always)]
    fn room(&self) -> u16 {
        // At most the size lies between the two.
        self.size - self.published.distance(self.next_avail, self.size) as u16
    }

    /// Takes chains of one direct descriptor until the batch is full, or until something else comes. Nothing is
    /// checked twice and nothing can fail here.
    #[inline(never)]
    fn pop_simple(&mut self, batch: &mut Batch) -> Stop {
        let (desc, size) = (self.desc, self.size);
        let slots = batch.slots() - batch.count();
        let free = batch.free();
        let ids = self.taken.as_mut_ptr();
        let (start, wrap) = (self.next_avail.index(size), self.next_avail.wrap(size));
        let expected = available_flags(wrap);
        let available = u32::from(expected) << 16;
        let room = usize::from(self.room());
        // Not around the ring's end, so that the descriptors are neighbours of one lap.
        let wanted = slots.min(room).min(usize::from(size - start));
        // SAFETY: an index is less than the size; see the invariant of `Ring`.
        let desc = unsafe { desc.offset(usize::from(start) * DESC_SIZE) };
        let mut taken = 0;
        let stop = loop {
            let at = taken * DESC_SIZE;
            if taken == wanted {
                break if taken == slots {
                    Stop::Empty
                } else if taken == room {
                    // Nothing can be available here. What is so all the same is refused.
                    Stop::Special
                } else {
                    Stop::End
                };
            }
            // Acquire: pairs with the driver's release store of the flags, before which it wrote the rest, and the
            // rest of the chain.
            // SAFETY: `start + taken` is less than the size; see the invariant of `Ring`.
            let meta = unsafe { desc.load_u64_acquire(at + DESC_LEN) };
            O::after_acquire();
            // SAFETY: as above.
            let first = Descriptor { addr: unsafe { desc.load_u64(at + DESC_ADDR) }, meta };
            // Of a simple descriptor that is available no flag but WRITE is left, and the identifier below the flags:
            // one comparison for all of them.
            let rest = (meta >> 32) as u32 ^ available;
            let id = (rest & !(u32::from(DESC_F_WRITE) << 16)) as usize;
            if id >= usize::from(size)
                // SAFETY: `taken` has a place for each identifier below the size.
                || unsafe { *ids.add(id) } != 0
                // Not less: it has no bytes, or wraps around the address space.
                || first.addr >= first.addr.wrapping_add(first.len().into())
            {
                break if matches(first.flags(), expected) { Stop::Special } else { Stop::Empty };
            }
            let segment = Segment { addr: first.addr, len: first.len() };
            let chain = Chain::single(id as u16, first.len(), first.has(DESC_F_WRITE));
            // SAFETY: the identifier was checked. The batch has `slots` free slots at least, and a free segment for
            // each of them (its invariant); `taken` is less.
            unsafe {
                *ids.add(id) = 1;
                free.segments.add(taken).write(segment);
                free.chains.add(taken).write(chain);
            }
            taken += 1;
        };
        batch.add_simple(taken);
        self.in_flight += taken as u16;
        self.next_avail = self.next_avail.advance(taken as u32, size);
        stop
    }

    /// Takes the one chain at which the fast path stopped; `false` if there is none, or the batch has no room for it.
    #[inline(never)]
    fn pop_chain(
        &mut self,
        batch: &mut Batch,
        fetch: &mut impl FnMut(u64, &mut [u8]) -> bool,
    ) -> Result<bool, QueueError> {
        let (size, room, next) = (self.size, self.room(), self.next_avail);
        let index = next.index(size);
        let at = usize::from(index) * DESC_SIZE;
        // Acquire: as in the fast path.
        // SAFETY: an index is less than the size; see the invariant of `Ring`.
        let meta = unsafe { self.desc.load_u64_acquire(at + DESC_LEN) };
        O::after_acquire();
        if !matches(flags(meta), available_flags(next.wrap(size))) {
            return Ok(false);
        }
        // SAFETY: as above.
        let first = Descriptor { addr: unsafe { self.desc.load_u64(at + DESC_ADDR) }, meta };
        let taken = &self.taken;
        let walked = if room == 0 {
            Err(QueueError::Overrun { index, size })
        } else {
            self.chains.walk(index, first, room, batch, fetch, |id| match taken.get(usize::from(id)) {
                None => Err(QueueError::BufferId { id, size }),
                Some(0) => Ok(()),
                Some(_) => Err(QueueError::IdInFlight { id }),
            })
        };
        match walked {
            Ok(Some(walked)) => {
                self.taken[usize::from(walked.id)] = walked.descriptors;
                self.in_flight += 1;
                self.next_avail = self.next_avail.advance(walked.descriptors.into(), size);
                Ok(true)
            }
            Ok(None) => Ok(false),
            Err(error) => {
                batch.clear();
                Err(self.latch(error))
            }
        }
    }

    /// See [`crate::device::Queue::complete`].
    #[inline]
    pub(crate) fn complete(&mut self, id: u16, written: u32) -> Result<(), QueueError> {
        self.complete_all([(id, written)])
    }

    /// See [`crate::device::Queue::complete_all`].
    #[inline]
    pub(crate) fn complete_all(
        &mut self,
        chains: impl IntoIterator<Item = (u16, u32)>,
    ) -> Result<(), QueueError> {
        if self.in_order.is_some() {
            return chains.into_iter().try_for_each(|(id, written)| self.complete_in_order(id, written));
        }
        // All in locals: every store to shared memory could be one to `self`, for all the compiler knows.
        let (end, next) = (self.end(), self.next_used);
        let mut places = Places::new(next, self.size);
        let mut chains = chains.into_iter();
        if next == self.published
            && let Some((id, written)) = chains.next()
        {
            let taken = self.taken.get_mut(usize::from(id)).map_or(0, core::mem::take);
            match places.next(id, written, taken) {
                Some((_, word)) => self.held = word,
                None => return Err(self.not_in_flight(id)),
            }
        }
        let ids = &mut *self.taken;
        for (id, written) in chains {
            let taken = ids.get_mut(usize::from(id)).map(core::mem::take);
            let Some((at, word)) = taken.and_then(|taken| places.next(id, written, taken)) else {
                return Err(self.not_in_flight(id));
            };
            // Relaxed: the release store of the first one's flags orders them.
            // SAFETY: the descriptor is one of the ring's; see the invariant of `Ring`.
            unsafe { end.back(at).store_u64(DESC_LEN, word) };
        }
        self.next_used = places.position();
        self.in_flight -= next.distance(self.next_used, self.size) as u16 - places.more();
        Ok(())
    }

    /// The end of the descriptor ring.
    #[inline(always)]
    fn end(&self) -> Cells {
        // SAFETY: the ring is as long; see the invariant of `Ring`.
        unsafe { self.desc.offset(desc_bytes(self.size)) }
    }

    /// Latches that the device completed what it does not have.
    #[cold]
    fn not_in_flight(&mut self, id: u16) -> QueueError {
        self.latch(QueueError::NotInFlight { id: id.into() })
    }

    /// Completes one in a queue with IN_ORDER.
    #[inline(never)]
    fn complete_in_order(&mut self, id: u16, written: u32) -> Result<(), QueueError> {
        let taken = self.taken.get_mut(usize::from(id)).map_or(0, core::mem::take);
        let Some(order) = self.in_order.as_mut().filter(|_| taken != 0) else {
            return Err(self.not_in_flight(id));
        };
        self.in_flight -= 1;
        order.completed(id, written);
        while let Some(entry) = self.in_order.as_mut().and_then(|order| order.stage()) {
            self.write(entry);
        }
        Ok(())
    }

    /// Writes a used descriptor of a batch in order.
    fn write(&mut self, entry: Entry) {
        let mut places = Places::new(self.next_used, self.size);
        let Some((at, word)) = places.next(entry.id, entry.written, entry.places) else { return };
        if self.next_used == self.published {
            self.held = word;
        } else {
            // Relaxed: the release store of the first one's flags orders them.
            // SAFETY: the descriptor is one of the ring's; see the invariant of `Ring`.
            unsafe { self.end().back(at).store_u64(DESC_LEN, word) };
        }
        self.next_used = places.position();
    }

    /// See [`crate::device::Queue::publish`].
    #[inline]
    pub(crate) fn publish(&mut self) -> Result<bool, QueueError> {
        if let Some(error) = self.error {
            return Err(error);
        }
        if let Some(entry) = self.in_order.as_mut().and_then(|order| order.flush()) {
            self.write(entry);
        }
        let (old, new, size) = (self.published, self.next_used, self.size);
        if new == old {
            return Ok(false);
        }
        O::before_release();
        // Release: pairs with the driver's acquire load of the flags, after which it reads the rest, and the
        // used descriptors that follow.
        // SAFETY: an index is less than the size; see the invariant of `Ring`.
        unsafe {
            self.desc.store_u64_release(usize::from(old.index(size)) * DESC_SIZE + DESC_LEN, self.held);
        }
        self.published = new;
        // Pairs with the driver's fence between its store of its event suppression and its last look at the flags:
        // either we see its wish for an interrupt, or it sees our descriptor.
        O::full();
        // SAFETY: see the invariant of `Ring`.
        let event = unsafe { self.driver.load_u32(0) };
        Ok(Event::decode(event, self.event_idx, size).wants(new, old, size))
    }

    /// See [`crate::device::Queue::disable_kicks`].
    #[inline]
    pub(crate) fn disable_kicks(&mut self) {
        if !self.kicks_off {
            // Relaxed: a hint, with nothing to order.
            // SAFETY: see the invariant of `Ring`.
            unsafe { self.device.store_u32(0, Event::Disable.encode(self.size)) };
            self.kicks_off = true;
        }
    }

    /// See [`crate::device::Queue::arm_kicks`].
    #[inline]
    pub(crate) fn arm_kicks(&mut self) -> Result<bool, QueueError> {
        if let Some(error) = self.error {
            return Err(error);
        }
        let (next, size) = (self.next_avail, self.size);
        let event = if self.event_idx { Event::At(next) } else { Event::Enable };
        // Relaxed: the fence below orders it before the load.
        // SAFETY: see the invariant of `Ring`.
        unsafe { self.device.store_u32(0, event.encode(size)) };
        self.kicks_off = false;
        // Pairs with the driver's fence between its store of the flags and its load of our event suppression:
        // either it sees our wish for a kick, or we see its descriptor.
        O::full();
        // Relaxed: only compared; `pop` reads them again before it follows them.
        // SAFETY: an index is less than the size; see the invariant of `Ring`.
        let flags =
            unsafe { self.desc.load_u16(usize::from(next.index(size)) * DESC_SIZE + DESC_FLAGS, Relaxed) };
        Ok(matches(flags, available_flags(next.wrap(size))))
    }

    /// Latches the first error, and returns it.
    #[cold]
    pub(crate) fn latch(&mut self, error: QueueError) -> QueueError {
        self.taken.fill(0);
        self.in_flight = 0;
        *self.error.get_or_insert(error)
    }

    /// The latched error.
    pub(crate) fn error(&self) -> Option<QueueError> {
        self.error
    }

    /// Number of descriptors.
    pub(crate) fn size(&self) -> u16 {
        self.size
    }

    /// Chains popped and not yet completed.
    pub(crate) fn in_flight(&self) -> u16 {
        self.in_flight
    }
}

/// For another process to take over.
impl<O: Order> Ring<O> {
    /// The next descriptor to be made available.
    pub(crate) fn next_avail(&self) -> Position {
        self.next_avail
    }

    /// Where the next used descriptor goes.
    pub(crate) fn next_used(&self) -> Position {
        self.next_used
    }

    /// Up to here the driver sees what was used.
    pub(crate) fn published(&self) -> Position {
        self.published
    }

    /// Descriptors that the chain `id`, which is below the size, takes.
    pub(crate) fn places(&self, id: u16) -> u16 {
        self.taken[usize::from(id)]
    }

    /// What stands at a position now.
    pub(crate) fn descriptor(&self, at: Position) -> Descriptor {
        let at = usize::from(at.index(self.size)) * DESC_SIZE;
        // SAFETY: an index is less than the size; see the invariant of `Ring`.
        unsafe { Descriptor { addr: self.desc.load_u64(at), meta: self.desc.load_u64(at + DESC_LEN) } }
    }

    /// Goes to `used` and `avail`, with `in_flight` chains between them, that [`Ring::pop_again`] brings back.
    pub(crate) fn move_to(
        &mut self,
        used: Position,
        avail: Position,
        in_flight: u16,
    ) -> Result<(), StateError> {
        let (places, size) = (used.distance(avail, self.size), self.size);
        if places > size.into() || (places == 0) != (in_flight == 0) {
            let (used, avail) = (used.to_off_wrap(size), avail.to_off_wrap(size));
            return Err(StateError::Distance { used, avail, in_flight });
        }
        (self.next_avail, self.next_used, self.published) = (avail, used, used);
        self.in_flight = in_flight;
        Ok(())
    }

    /// Makes nothing look used that was taken: a completion that was staged and is forgotten now would come true
    /// when the driver gets there.
    pub(crate) fn disown(&mut self) {
        let mut at = self.published;
        while at != self.next_avail {
            let (flags, wrap) = (self.descriptor(at).flags(), at.wrap(self.size));
            if matches(flags, used_flags(wrap)) {
                let offset = usize::from(at.index(self.size)) * DESC_SIZE + DESC_FLAGS;
                // Relaxed: the driver does not look there until something before it is used.
                // SAFETY: an index is less than the size; see the invariant of `Ring`.
                unsafe { self.desc.store_u16(offset, available_flags(wrap), Relaxed) };
            }
            at = at.advance(1, self.size);
        }
    }

    /// Takes a chain that was saved into the batch, where a slot is free, without moving on in the ring. `false`:
    /// its segments do not fit.
    pub(crate) fn pop_again(
        &mut self,
        saved: &Saved,
        batch: &mut Batch,
        fetch: &mut impl FnMut(u64, &mut [u8]) -> bool,
    ) -> Result<bool, QueueError> {
        if let Some(error) = self.error {
            batch.clear();
            return Err(error);
        }
        match self.chains.walk_saved(saved.id, &saved.descriptors, batch, fetch) {
            Ok(taken) => {
                if taken {
                    self.taken[usize::from(saved.id)] = saved.descriptors.len() as u16;
                }
                Ok(taken)
            }
            Err(error) => {
                batch.clear();
                Err(self.latch(error))
            }
        }
    }
}
