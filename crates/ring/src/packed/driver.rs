//! Driver side of a packed queue.
//!
//! ```text
//!   add ---> next_avail ---- publish ---> flags of the first descriptor (ours)
//!                              ^ published
//!   pop_used <--- next_used <------------ flags of the next used descriptor (device)
//! ```
//!
//! The positions count descriptors in 64 bits, from the moment on when the wrap counter was 1: the
//! low bits are the slot, the bit above them says which lap it is. What was added is withheld from
//! the device by one descriptor alone, the first since the last publication: its flags are written
//! last (section 2.8.6), and the device sees all of it, or nothing.
//!
//! Buffers have identifiers of their own here, from a free list in the private shadow. Used
//! descriptors come in the order of the ring, whichever buffer they name, so the free slots are
//! always those between `next_avail` and `next_used`, a whole ring further on:
//!
//! ```text
//!   next_used     next_avail      limit     next_used + size
//!       | in flight  | free to fill |  taken back  |
//!                                   ^ `reclaim`, which stores the count of `driver::poll`
//! ```
//!
//! Slots that were taken back are filled again only after [`Ring::reclaim`] has moved `limit` over
//! them, when those before it run out. So pollers are told once for many buffers, and taking
//! them back costs nothing for that.
//!
//! # In order
//! With IN_ORDER (section 2.8.9) identifiers are given out round and round and come back in that
//! order. The device may tell of several buffers with one used descriptor, with the identifier of
//! the last, in the slot of the first; the others were used completely then.
use super::{Descriptor, Event, Position, SWAP, available_flags, flags, matches, meta, used_flags};
use crate::area::Cells;
use crate::chain::Descriptor as _;
use crate::driver::memory::{Memory, Tables};
use crate::driver::poll::{Counting, RingView};
use crate::driver::shadow::{Pending, write_all};
use crate::driver::state::{DriverState, take_each};
use crate::driver::{BufferId, Full, Used};
use crate::order::Order;
use crate::{QueueError, Segment};
use core::marker::PhantomData;
use core::sync::atomic::Ordering::Release;
use paravane_spec::packed::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, DESC_LEN, DESC_SIZE, EVENT_WRAP};

/// The driver's side, and its private shadow.
///
/// Invariant, made by [`Ring::new`] and relied on by every access to the cells and the shadow:
/// those of [`DriverState`] and of [`Memory`], which are of one layout; and `free_id` is below the
/// size.
#[derive(Debug)]
pub(crate) struct Ring<O, C> {
    desc: Cells,
    driver_event: Cells,
    device_event: Cells,
    pub(crate) tables: Tables,
    /// `published` is 0 in a latched queue.
    pub(crate) state: DriverState<C>,
    /// Identifier of the next buffer, if a descriptor is free.
    ///
    /// There are never more buffers than descriptors.
    free_id: u16,
    /// Buffers added and not yet returned.
    in_flight: u16,
    /// Second word of the first descriptor that the device does not know of.
    ///
    /// All but this is written.
    withheld: u64,
    /// Position of the next used descriptor.
    next_used: u64,
    /// Positions before it may be filled. 0 in a latched queue.
    limit: u64,
    order: PhantomData<O>,
}

impl<O: Order, C: Counting> Ring<O, C> {
    /// See [`crate::driver::Queue::new`].
    pub(crate) fn new(state: DriverState<C>, memory: Memory) -> Self {
        let Memory { desc, driver, device, tables, .. } = memory;
        let (start, size) = (state.start(), u64::from(state.size()));
        let ring = Self {
            desc,
            driver_event: driver,
            device_event: device,
            tables,
            state,
            free_id: 0,
            in_flight: 0,
            withheld: 0,
            next_used: start,
            limit: start + size,
            order: PhantomData,
        };
        if start != 0 {
            ring.mark_used(start);
        }
        ring
    }

    /// Puts the ring into the state of one in which everything before `start` was used.
    fn mark_used(&self, start: u64) {
        for position in start..start + u64::from(self.state.size()) {
            // In the lap before that of `position`.
            let flags = used_flags(self.wrap(position)) ^ SWAP;
            // Relaxed: the device learns of the queue later, through the transport.
            // SAFETY: the slot is below the size; see the invariant of `Ring`.
            unsafe { self.desc.store_u64(self.at(position) + DESC_LEN, meta(0, 0, flags)) };
        }
    }

    /// The wrap counter at a position.
    #[inline(always)]
    fn wrap(&self, position: u64) -> bool {
        position & u64::from(self.state.size()) == 0
    }

    /// Offset of the descriptor at a position.
    #[inline(always)]
    fn at(&self, position: u64) -> usize {
        usize::from(position as u16 & self.state.mask) * DESC_SIZE
    }

    /// A position as the notification rules have it.
    #[inline(always)]
    fn position(&self, position: u64) -> Position {
        Position::new(position as u16 & self.state.mask, self.wrap(position), self.state.size())
    }

    /// See [`crate::driver::Queue::add`].
    #[inline]
    pub(crate) fn add(&mut self, readable: &[Segment], writable: &[Segment]) -> Result<BufferId, Full> {
        let count = readable.len() + writable.len();
        let in_table = self.tables.fit(count);
        let needed = if in_table { 1 } else { count };
        let end = self.state.next_avail + needed as u64;
        if end > self.limit && !self.reclaim(end) {
            return Err(Full { needed, free: self.free() });
        }
        let id = self.free_id;
        let (writable, first) = if in_table {
            self.fill_table(id, readable, writable)
        } else {
            self.fill_descriptors(id, readable, writable, count)
        };
        // Nothing can fail from here on: update the private state.
        if self.state.next_avail == self.state.published {
            self.withheld = first;
        }
        // SAFETY: `free_id` is below the size; see the invariant of `Ring`.
        let pending = unsafe { self.state.shadow.get_mut(id) };
        self.free_id = pending.link;
        *pending = Pending {
            descriptors: needed as u16,
            link: pending.link,
            writable,
            position: self.state.next_avail,
        };
        self.in_flight += 1;
        self.state.next_avail = end;
        Ok(BufferId(id))
    }

    /// Lets slots that were taken back be filled again.
    ///
    /// Returns whether they reach up to `end`.
    #[inline(always)]
    fn reclaim(&mut self, end: u64) -> bool {
        if self.state.error().is_some() {
            return false;
        }
        // Before the first of them is filled: see `driver::poll`.
        self.tell();
        self.limit = self.next_used + u64::from(self.state.size());
        end <= self.limit
    }

    /// Tells pollers how far the queue was taken back.
    ///
    /// A queue that has latched has told them all.
    #[inline(always)]
    fn tell(&mut self) {
        if self.state.error().is_none() {
            // In order, all of the batch that we take back was used.
            self.state.count.seen(self.state.batch.end.max(self.next_used));
        }
    }

    /// Free descriptors.
    pub(crate) fn free(&self) -> usize {
        match self.state.error() {
            // No more than the size, so it fits.
            None => (self.next_used + u64::from(self.state.size()) - self.state.next_avail) as usize,
            Some(_) => 0,
        }
    }

    /// Writes a descriptor at `position`, and returns its second word.
    ///
    /// The second word is not written if it is to be withheld.
    ///
    /// # Safety
    /// The slot is free.
    #[inline(always)]
    unsafe fn fill(&self, position: u64, id: u16, segment: &Segment, flags: u16) -> u64 {
        let flags = flags | available_flags(self.wrap(position));
        let Descriptor { addr, meta } = Descriptor::new(segment.addr, segment.len, id, flags);
        let at = self.at(position);
        // Relaxed for the device, which the release store of the withheld descriptor keeps away.
        // Release where a poller counts on it: a thread that sees the slot filled again sees that
        // it was taken back (`driver::poll`). SAFETY: the slot is below the size; see the invariant
        // of `Ring`.
        unsafe {
            self.desc.store_u64(at, addr);
            if position != self.state.published {
                if C::REFILL == Release {
                    self.desc.store_u64_release(at + DESC_LEN, meta);
                } else {
                    self.desc.store_u64(at + DESC_LEN, meta);
                }
            }
        }
        meta
    }

    /// Writes the segments to the next `count` slots, which are free.
    ///
    /// Returns the number of writable bytes, and the second word of the first descriptor.
    #[inline(always)]
    fn fill_descriptors(
        &self,
        id: u16,
        readable: &[Segment],
        writable: &[Segment],
        count: usize,
    ) -> (u32, u64) {
        let (mut position, mut left, mut first) = (self.state.next_avail, count, 0);
        let writable = write_all(readable, writable, DESC_F_WRITE, |segment, flag| {
            left -= 1;
            let flags = if left == 0 { flag } else { flag | DESC_F_NEXT };
            // The identifier of a buffer belongs into its last descriptor (section 2.8.6); it does
            // no harm in the others. SAFETY: `count` slots are free.
            let meta = unsafe { self.fill(position, id, segment, flags) };
            if position == self.state.next_avail {
                first = meta;
            }
            position += 1;
        });
        (writable, first)
    }

    /// Writes the segments to the table of `id`, and a descriptor that points to it.
    ///
    /// They fit. Returns the number of writable bytes, and the second word of that descriptor.
    fn fill_table(&self, id: u16, readable: &[Segment], writable: &[Segment]) -> (u32, u64) {
        // SAFETY: `id` is below the size, see the invariant of `Ring`, and the caller has asked
        // whether they fit.
        let (table, whole) = unsafe { self.tables.of(id, readable.len() + writable.len()) };
        let mut at = 0;
        let writable = write_all(readable, writable, DESC_F_WRITE, |segment, flag| {
            // In a table the order is that of the table, and only WRITE means something (section
            // 2.8.7).
            let Descriptor { addr, meta } = Descriptor::new(segment.addr, segment.len, 0, flag);
            // SAFETY: the table holds `count` descriptors.
            unsafe {
                table.store_u64(at, addr);
                table.store_u64(at + DESC_LEN, meta);
            }
            at += DESC_SIZE;
        });
        // SAFETY: the next slot is free, as one was asked for.
        (writable, unsafe { self.fill(self.state.next_avail, id, &whole, DESC_F_INDIRECT) })
    }

    /// Publishes, and returns the first position that was published.
    ///
    /// `None` without anything new, or in a latched queue.
    #[inline(always)]
    pub(crate) fn publish(&mut self) -> Option<u64> {
        let (old, new) = (self.state.published, self.state.next_avail);
        if old == new || self.state.error().is_some() {
            return None;
        }
        O::before_release();
        // Release: pairs with the device's acquire load of the flags, after which it reads this
        // descriptor and those after it, and tables. (And with a poller's, which then sees the
        // count; see `driver::poll`.) SAFETY: the slot is below the size; see the invariant of
        // `Ring`.
        unsafe { self.desc.store_u64_release(self.at(old) + DESC_LEN, self.withheld) };
        self.state.published = new;
        Some(old)
    }

    /// Whether the device wants a kick for what was published from `old` on.
    #[inline(always)]
    pub(crate) fn wants_kick(&self, old: u64) -> bool {
        // Pairs with the device's fence between its store of its event suppression and its last
        // look at the flags: either we see its wish for a kick, or it sees ours.
        O::full();
        // SAFETY: see the invariant of `Ring`.
        let event = unsafe { self.device_event.load_u32(0) };
        let event = Event::decode(event, self.state.event_idx, self.state.size());
        event.wants(self.position(self.state.published), self.position(old), self.state.size())
    }

    /// See [`crate::driver::Queue::kick_data`].
    pub(crate) fn kick_data(&self) -> u16 {
        let wrap = if self.wrap(self.state.published) { EVENT_WRAP } else { 0 };
        self.state.published as u16 & self.state.mask | wrap
    }

    /// See [`crate::driver::Queue::pop_used`].
    #[inline]
    pub(crate) fn pop_used(&mut self) -> Result<Option<Used>, QueueError> {
        if self.state.in_order {
            return self.pop_in_order();
        }
        self.pop_any()
    }

    /// See [`crate::driver::Queue::take_used`].
    #[inline]
    pub(crate) fn take_used(&mut self, out: &mut [Used]) -> Result<usize, QueueError> {
        if !self.state.in_order {
            return self.take_any(out);
        }
        take_each(out, || self.pop_in_order())
    }

    /// Takes back what was used, as far as `out` goes.
    ///
    /// As [`Ring::pop_any`], with the positions in locals: every store to shared memory could be
    /// one to `self`, for all the compiler knows.
    #[inline(always)]
    fn take_any(&mut self, out: &mut [Used]) -> Result<usize, QueueError> {
        let (desc, mask, published, lap) =
            (self.desc, self.state.mask, self.state.published, u64::from(self.state.size()));
        let (mut next, mut free_id) = (self.next_used, self.free_id);
        let mut expected = used_flags(next & lap == 0);
        let (mut taken, mut wrong) = (0, None);
        for place in out {
            let at = usize::from(next as u16 & mask) * DESC_SIZE + DESC_LEN;
            // Acquire: as in `used`.
            // SAFETY: as there.
            let used = Descriptor { addr: 0, meta: unsafe { desc.load_u64_acquire(at) } };
            if !matches(used.flags(), expected) {
                break;
            }
            O::after_acquire();
            let id = used.id();
            if id > mask {
                wrong = Some(id.into());
                break;
            }
            // SAFETY: it was just checked.
            let pending = unsafe { self.state.shadow.get_mut(id) };
            if pending.position >= published {
                wrong = Some(id.into());
                break;
            }
            pending.position = Pending::NOWHERE;
            pending.link = free_id;
            free_id = id;
            let len = if used.has(DESC_F_WRITE) { used.len() } else { 0 };
            *place = Used { id: BufferId(id), len: len.min(pending.writable) };
            let before = next;
            next = after(next, pending.descriptors);
            taken += 1;
            if (before ^ next) & lap != 0 {
                expected ^= SWAP;
            }
            self.state.count.taken(|| (before ^ next) & lap != 0);
        }
        (self.next_used, self.free_id) = (next, free_id);
        self.in_flight -= taken as u16;
        match (taken, wrong.map(|id| self.unknown(id)).or(self.state.error())) {
            (0, Some(error)) => Err(error),
            // What has latched comes again.
            _ => Ok(taken),
        }
    }

    /// Latches that the device has used a buffer that is not in flight.
    #[cold]
    fn unknown(&mut self, id: u32) -> QueueError {
        self.latch(self.state.unknown(id))
    }

    /// The next used descriptor's second word, if there is one.
    #[inline(always)]
    fn used(&self) -> Result<Option<u64>, QueueError> {
        // Acquire: pairs with the device's release store of the flags, before which it wrote the
        // data and the rest of the descriptor. SAFETY: the slot is below the size; see the
        // invariant of `Ring`.
        let meta = unsafe { self.desc.load_u64_acquire(self.at(self.next_used) + DESC_LEN) };
        if !matches(flags(meta), used_flags(self.wrap(self.next_used))) {
            return self.state.error().map_or(Ok(None), Err);
        }
        O::after_acquire();
        Ok(Some(meta))
    }

    /// Takes the next used buffer back.
    #[inline(always)]
    fn pop_any(&mut self) -> Result<Option<Used>, QueueError> {
        let Some(used) = self.used()? else { return Ok(None) };
        let (id, len) = self.check(used)?;
        // SAFETY: `check` has checked it.
        let pending = unsafe { self.state.shadow.get_mut(id) };
        let Pending { descriptors, writable, .. } = *pending;
        pending.position = Pending::NOWHERE;
        pending.link = self.free_id;
        self.free_id = id;
        self.give_back(descriptors);
        Ok(Some(Used { id: BufferId(id), len: len.min(writable) }))
    }

    /// Takes the oldest buffer back, if it was used.
    fn pop_in_order(&mut self) -> Result<Option<Used>, QueueError> {
        if self.state.batch.end == self.next_used {
            let Some(used) = self.used()? else { return Ok(None) };
            let (id, len) = self.check(used)?;
            // SAFETY: `check` has checked it. It is in flight, so it is not before our position.
            let last = unsafe { self.state.shadow.get(id) };
            self.state.batch.end = last.position + u64::from(last.descriptors);
            self.state.batch.len = len;
        }
        let id = self.state.batch.oldest;
        self.state.batch.oldest = id.wrapping_add(1) & self.state.mask;
        // SAFETY: it is masked wherever it is set.
        let pending = unsafe { self.state.shadow.get_mut(id) };
        let Pending { descriptors, writable, .. } = *pending;
        pending.position = Pending::NOWHERE;
        self.give_back(descriptors);
        let len = self.state.batch.written(self.next_used, writable);
        Ok(Some(Used { id: BufferId(id), len }))
    }

    /// Identifier and length in a used descriptor, if such a buffer is in flight.
    #[inline(always)]
    fn check(&mut self, used: u64) -> Result<(u16, u32), QueueError> {
        let used = Descriptor { addr: 0, meta: used };
        let id = used.id();
        if id > self.state.mask {
            return Err(self.unknown(id.into()));
        }
        // A buffer that was added and not published is unknown to an honest device. (And in a
        // latched queue none is published.) SAFETY: it was just checked.
        if unsafe { self.state.shadow.get(id) }.position >= self.state.published {
            return Err(self.unknown(id.into()));
        }
        // Without the WRITE flag nothing was written, and the length means nothing (section 2.8.5).
        Ok((id, if used.has(DESC_F_WRITE) { used.len() } else { 0 }))
    }

    /// Moves past the used buffer at our position, of `descriptors`.
    #[inline(always)]
    fn give_back(&mut self, descriptors: u16) {
        let before = self.next_used;
        self.next_used = after(self.next_used, descriptors);
        self.in_flight -= 1;
        let (next, size) = (self.next_used, u64::from(self.state.size()));
        self.state.count.taken(|| (before ^ next) & size != 0);
    }

    /// See [`crate::driver::Queue::enable_interrupts`].
    #[inline]
    pub(crate) fn enable_interrupts(&mut self) -> C::Token {
        let event =
            if self.state.event_idx { Event::At(self.position(self.next_used)) } else { Event::Enable };
        // Relaxed: the fence below orders it before the look at the flags.
        // SAFETY: see the invariant of `Ring`.
        unsafe { self.driver_event.store_u32(0, event.encode(self.state.size())) };
        self.state.interrupts_off = false;
        // Pairs with the device's fence between its store of a used descriptor's flags and its load
        // of our event suppression: either it sees our wish for an interrupt, or the `poll` that
        // follows sees its flags.
        O::full();
        // In the middle of a batch in order the ring cannot show what has been used after the
        // token.
        self.tell();
        self.state.count.raw(self.next_used, self.view()).into()
    }

    /// See [`crate::driver::Queue::disable_interrupts`].
    #[inline]
    pub(crate) fn disable_interrupts(&mut self) {
        if self.state.interrupts_off {
            return;
        }
        // Relaxed: a hint, with nothing to order.
        // SAFETY: see the invariant of `Ring`.
        unsafe { self.driver_event.store_u32(0, Event::Disable.encode(self.state.size())) };
        self.state.interrupts_off = true;
    }

    /// See [`crate::driver::Queue::poll`].
    #[inline]
    pub(crate) fn poll(&self, token: C::Token) -> bool {
        // In the middle of a batch the ring shows nothing at our position.
        self.state.batch.end > self.next_used || self.state.count.news::<O>(token.into(), self.view())
    }

    /// For pollers.
    pub(crate) fn view(&self) -> RingView {
        RingView::packed(self.desc, self.state.size())
    }

    /// Latches the first error, and returns it.
    ///
    /// From now on nothing fits, and nothing counts as published.
    #[cold]
    fn latch(&mut self, error: QueueError) -> QueueError {
        self.limit = 0;
        self.state.published = 0;
        self.state.latch(error)
    }

    /// Buffers added and not yet returned.
    pub(crate) fn in_flight(&self) -> u16 {
        self.in_flight
    }
}

/// The position after a buffer of `descriptors` from `position` on.
///
/// Nearly always that is one, and the processor guesses it: the address of the next used descriptor
/// would otherwise wait for the shadow's load, which waits for this one.
#[inline(always)]
fn after(position: u64, descriptors: u16) -> u64 {
    if descriptors == 1 { position + 1 } else { far_after(position, descriptors) }
}

/// A call: the compiler would merge two branches that add into one addition.
#[cold]
#[inline(never)]
fn far_after(position: u64, descriptors: u16) -> u64 {
    position + u64::from(descriptors)
}
