//! Driver side of a split queue.
//!
//! ```text
//!   add ---> next_avail ---- publish ---> avail.idx (ours)
//!                              ^ published
//!   pop_used <--- consumed <--- seen <--- used.idx (device)
//! ```
//!
//! The positions count in 64 bits; the rings hold their low 16. What a descriptor links to and how
//! much of a buffer is writable is kept in private memory: nothing that the device can write to is
//! trusted.
//!
//! # In order
//! With IN_ORDER (section 2.7.9) descriptors are taken in the order of the table, round and round,
//! and come back in that order, so there is no free list: `free_head` and the oldest buffer run
//! after one another. The device may tell of several buffers with one entry, that of the last one,
//! in the place of the first; the others were used completely then.
use super::{Entry, avail_event, used_event};
use crate::area::Cells;
use crate::driver::memory::{Memory, Tables};
use crate::driver::poll::{Counting, RingView};
use crate::driver::shadow::{Pending, write_all};
use crate::driver::state::{DriverState, take_each};
use crate::driver::{BufferId, Full, Used};
use crate::event::need_event;
use crate::order::Order;
use crate::{QueueError, Segment};
use alloc::boxed::Box;
use core::marker::PhantomData;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use paravane_spec::split::{
    AVAIL_ENTRY, AVAIL_F_NO_INTERRUPT, AVAIL_FLAGS, AVAIL_IDX, AVAIL_RING, DESC_F_INDIRECT, DESC_F_NEXT,
    DESC_F_WRITE, DESC_SIZE, USED_ENTRY, USED_F_NO_NOTIFY, USED_FLAGS, USED_IDX, USED_RING,
};

/// The driver's side, and its private shadow.
///
/// Invariant, made by [`Ring::new`] and relied on by every access to the cells and the shadow:
/// those of [`DriverState`] and of [`Memory`], which are of one layout; `next` has as many entries
/// as the shadow, and every descriptor index in it and in `free_head` is below the size.
#[derive(Debug)]
pub(crate) struct Ring<O, C> {
    desc: Cells,
    avail: Cells,
    used: Cells,
    pub(crate) tables: Tables,
    /// `published` is what avail.idx says.
    pub(crate) state: DriverState<C>,
    free_head: u16,
    /// Free descriptors. None in a latched queue.
    free: u16,
    /// For each descriptor the one after it, in its buffer or in the free list.
    next: Box<[u16]>,
    /// The next entry of the used ring: buffers taken back so far.
    consumed: u64,
    /// used.idx, when we last looked. A latched queue has seen nothing.
    seen: u64,
    order: PhantomData<O>,
}

impl<O: Order, C: Counting> Ring<O, C> {
    /// See [`crate::driver::Queue::new`].
    pub(crate) fn new(state: DriverState<C>, memory: Memory) -> Self {
        let Memory { desc, driver: avail, device: used, tables, .. } = memory;
        let (start, size) = (state.start(), state.size());
        if start != 0 {
            // Relaxed: the device learns of the queue later, through the transport.
            // SAFETY: see the invariant of `Memory`.
            unsafe {
                avail.store_u16(AVAIL_IDX, start as u16, Relaxed);
                used.store_u16(USED_IDX, start as u16, Relaxed);
            }
        }
        Self {
            desc,
            avail,
            used,
            tables,
            state,
            free_head: 0,
            free: size,
            next: (1..=size).map(|next| next & (size - 1)).collect(),
            consumed: start,
            seen: start,
            order: PhantomData,
        }
    }

    /// See [`crate::driver::Queue::add`].
    #[inline]
    pub(crate) fn add(&mut self, readable: &[Segment], writable: &[Segment]) -> Result<BufferId, Full> {
        let count = readable.len() + writable.len();
        let in_table = self.tables.fit(count);
        let needed = if in_table { 1 } else { count };
        if needed > usize::from(self.free) {
            return Err(Full { needed, free: self.free.into() });
        }
        let head = self.free_head;
        let (last, next, writable) = if in_table {
            let writable = self.fill_table(head, readable, writable);
            (head, self.next_of(head), writable)
        } else {
            self.fill_descriptors(head, readable, writable, count)
        };
        // Nothing can fail from here on: update the private state.
        self.free_head = next;
        self.free -= needed as u16;
        let pending =
            Pending { descriptors: needed as u16, link: last, writable, position: self.state.next_avail };
        // SAFETY: `head` is below the size; see the invariant of `Ring`.
        unsafe { *self.state.shadow.get_mut(head) = pending };
        let at = AVAIL_RING + usize::from(self.state.next_avail as u16 & self.state.mask) * AVAIL_ENTRY;
        // Relaxed: the release store of avail.idx orders it.
        // SAFETY: the entry is below the size; see the invariant of `Ring`.
        unsafe { self.avail.store_u16(at, head, Relaxed) };
        self.state.next_avail += 1;
        Ok(BufferId(head))
    }

    /// The descriptor after `index`, which is below the size.
    #[inline(always)]
    fn next_of(&self, index: u16) -> u16 {
        debug_assert!(usize::from(index) < self.next.len());
        // SAFETY: see the invariant of `Ring`; every caller has its index from there.
        unsafe { *self.next.get_unchecked(usize::from(index)) }
    }

    /// Writes the segments to `count` descriptors from `head` on, which are free.
    ///
    /// Returns the last of them, the one after it, and the number of writable bytes.
    #[inline(always)]
    fn fill_descriptors(
        &self,
        head: u16,
        readable: &[Segment],
        writable: &[Segment],
        count: usize,
    ) -> (u16, u16, u32) {
        let (mut last, mut index, mut left) = (head, head, count);
        let writable = write_all(readable, writable, DESC_F_WRITE, |segment, flag| {
            left -= 1;
            let next = self.next_of(index);
            let (link, to) = if left == 0 { (0, 0) } else { (DESC_F_NEXT, next) };
            // SAFETY: `index` is below the size; see the invariant of `Ring`.
            unsafe { store(self.desc, index, Entry::new(segment.addr, segment.len, flag | link, to)) };
            (last, index) = (index, next);
        });
        (last, index, writable)
    }

    /// Writes the segments to the table of `head`, and a descriptor that points to it.
    ///
    /// They fit. Returns the number of writable bytes.
    fn fill_table(&self, head: u16, readable: &[Segment], writable: &[Segment]) -> u32 {
        let count = readable.len() + writable.len();
        // SAFETY: `head` is below the size, see the invariant of `Ring`, and the caller has asked
        // whether they fit.
        let (table, whole) = unsafe { self.tables.of(head, count) };
        let mut i = 0;
        let writable = write_all(readable, writable, DESC_F_WRITE, |segment, flag| {
            let (link, to) = if usize::from(i) + 1 == count { (0, 0) } else { (DESC_F_NEXT, i + 1) };
            // SAFETY: `i` is below `count`, which is at most what the table holds.
            unsafe { store(table, i, Entry::new(segment.addr, segment.len, flag | link, to)) };
            i += 1;
        });
        let desc = Entry::new(whole.addr, whole.len, DESC_F_INDIRECT, 0);
        // SAFETY: `head` is below the size; see the invariant of `Ring`.
        unsafe { store(self.desc, head, desc) };
        writable
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
        // Release: pairs with the device's acquire load of avail.idx, after which it reads the
        // entries, descriptors and tables. (And, by way of the device, with a poller's acquire load
        // of used.idx.) SAFETY: see the invariant of `Ring`.
        unsafe { self.avail.store_u16(AVAIL_IDX, new as u16, Release) };
        self.state.published = new;
        Some(old)
    }

    /// Whether the device wants a kick for what was published from `old` on.
    #[inline(always)]
    pub(crate) fn wants_kick(&self, old: u64) -> bool {
        // Pairs with the device's fence between its store of avail_event (or flags) and its last
        // look at avail.idx: either we see its wish for a kick, or it sees our index.
        O::full();
        // SAFETY: see the invariant of `Ring`.
        unsafe {
            if self.state.event_idx {
                let event = self.used.load_u16(avail_event(self.state.size()), Relaxed);
                need_event(event, self.state.published as u16, old as u16)
            } else {
                self.used.load_u16(USED_FLAGS, Relaxed) & USED_F_NO_NOTIFY == 0
            }
        }
    }

    /// See [`crate::driver::Queue::kick_data`].
    pub(crate) fn kick_data(&self) -> u16 {
        self.state.published as u16
    }

    /// See [`crate::driver::Queue::pop_used`].
    #[inline]
    pub(crate) fn pop_used(&mut self) -> Result<Option<Used>, QueueError> {
        if self.seen == self.consumed && !self.look()? {
            return Ok(None);
        }
        if self.state.in_order { self.pop_in_order().map(Some) } else { self.pop_any().map(Some) }
    }

    /// See [`crate::driver::Queue::take_used`].
    #[inline]
    pub(crate) fn take_used(&mut self, out: &mut [Used]) -> Result<usize, QueueError> {
        if self.seen == self.consumed && !self.look()? {
            return Ok(0);
        }
        if !self.state.in_order {
            return self.take_any(out);
        }
        take_each(out, || if self.seen == self.consumed { Ok(None) } else { self.pop_in_order().map(Some) })
    }

    /// Takes back what was seen, as far as `out` goes.
    ///
    /// As [`Ring::pop_any`], with the positions in locals: every store to shared memory could be
    /// one to `self`, for all the compiler knows.
    #[inline(always)]
    fn take_any(&mut self, out: &mut [Used]) -> Result<usize, QueueError> {
        let (used, mask, published) = (self.used, self.state.mask, self.state.published);
        let (mut consumed, mut free_head, mut free) = (self.consumed, self.free_head, self.free);
        let wanted = ((self.seen - consumed) as usize).min(out.len());
        let (mut taken, mut wrong) = (0, None);
        for place in &mut out[..wanted] {
            let at = USED_RING + usize::from(consumed as u16 & mask) * USED_ENTRY;
            // Relaxed: as in `entry`.
            // SAFETY: as there.
            let (id, len) = unsafe { (used.load_u32(at), used.load_u32(at + 4)) };
            if id > mask.into() {
                wrong = Some(id);
                break;
            }
            let head = id as u16;
            // SAFETY: `head` was just checked.
            let pending = unsafe { self.state.shadow.get_mut(head) };
            if pending.position >= published {
                wrong = Some(id);
                break;
            }
            pending.position = Pending::NOWHERE;
            free += pending.descriptors;
            *place = Used { id: BufferId(head), len: len.min(pending.writable) };
            // SAFETY: the last descriptor of a buffer is below the size; see the invariant of
            // `Ring`.
            unsafe { *self.next.get_unchecked_mut(usize::from(pending.link)) = free_head };
            free_head = head;
            consumed += 1;
            taken += 1;
            self.state.count.taken(|| consumed as u16 == 0);
        }
        (self.consumed, self.free_head, self.free) = (consumed, free_head, free);
        match wrong.map(|id| self.unknown(id)) {
            // It has latched, and comes again.
            Some(error) if taken == 0 => Err(error),
            _ => Ok(taken),
        }
    }

    /// Latches that the device has used a buffer that is not in flight.
    #[cold]
    fn unknown(&mut self, id: u32) -> QueueError {
        self.latch(self.state.unknown(id))
    }

    /// The entry of the used ring at our position, which was seen.
    #[inline(always)]
    fn entry(&self) -> (u32, u32) {
        let at = USED_RING + usize::from(self.consumed as u16 & self.state.mask) * USED_ENTRY;
        // Relaxed: the acquire load of used.idx in `look` has ordered them after the device's
        // writing. SAFETY: the entry is below the size; see the invariant of `Ring`.
        unsafe { (self.used.load_u32(at), self.used.load_u32(at + 4)) }
    }

    /// Takes back the buffer that the next entry names; there is one.
    #[inline(always)]
    fn pop_any(&mut self) -> Result<Used, QueueError> {
        let (id, len) = self.entry();
        if id > self.state.mask.into() {
            return Err(self.unknown(id));
        }
        let head = id as u16;
        // SAFETY: `head` was just checked.
        let pending = unsafe { self.state.shadow.get_mut(head) };
        let Pending { descriptors, link, writable, position } = *pending;
        // A buffer that was added and not published is unknown to an honest device.
        if position >= self.state.published {
            return Err(self.unknown(id));
        }
        pending.position = Pending::NOWHERE;
        // SAFETY: the last descriptor of a buffer is below the size; see the invariant of `Ring`.
        unsafe { *self.next.get_unchecked_mut(usize::from(link)) = self.free_head };
        self.free_head = head;
        self.free += descriptors;
        self.consumed += 1;
        self.state.count.taken(|| self.consumed as u16 == 0);
        Ok(Used { id: BufferId(head), len: len.min(writable) })
    }

    /// Takes back the oldest buffer; it was used.
    fn pop_in_order(&mut self) -> Result<Used, QueueError> {
        if self.state.batch.end == self.consumed {
            let (id, len) = self.entry();
            if id > self.state.mask.into() {
                return Err(self.unknown(id));
            }
            // SAFETY: it was just checked.
            let last = unsafe { self.state.shadow.get(id as u16) };
            // It is in flight, so it is not before our position; and the batch may not end beyond
            // used.idx.
            if last.position >= self.seen {
                return Err(self.unknown(id));
            }
            self.state.batch.end = last.position + 1;
            self.state.batch.len = len;
        }
        let head = self.state.batch.oldest;
        // SAFETY: it is masked wherever it is set.
        let pending = unsafe { self.state.shadow.get_mut(head) };
        let Pending { descriptors, writable, .. } = *pending;
        pending.position = Pending::NOWHERE;
        self.state.batch.oldest = head.wrapping_add(descriptors) & self.state.mask;
        self.free += descriptors;
        self.consumed += 1;
        self.state.count.taken(|| self.consumed as u16 == 0);
        let len = self.state.batch.written(self.consumed, writable);
        Ok(Used { id: BufferId(head), len })
    }

    /// Looks at used.idx and says whether something new is there.
    ///
    /// Nothing was left of what was seen before.
    #[inline(always)]
    fn look(&mut self) -> Result<bool, QueueError> {
        if let Some(error) = self.state.error() {
            return Err(error);
        }
        let old = self.consumed as u16;
        // Acquire: pairs with the device's release store, before which it wrote the entries and the
        // data. SAFETY: see the invariant of `Ring`.
        let new = unsafe { self.used.load_u16(USED_IDX, Acquire) };
        O::after_acquire();
        // No more than the size, so it fits.
        let in_flight = (self.state.published - self.consumed) as u16;
        let came = new.wrapping_sub(old);
        if came > in_flight {
            return Err(self.latch(QueueError::UsedIndex { old, new, in_flight }));
        }
        if came == 0 {
            return Ok(false);
        }
        self.seen = self.consumed + u64::from(came);
        // Once a batch, and before anything of it can be made available again: see `driver::poll`.
        self.state.count.seen(self.seen);
        Ok(true)
    }

    /// See [`crate::driver::Queue::enable_interrupts`].
    #[inline]
    pub(crate) fn enable_interrupts(&mut self) -> C::Token {
        // Relaxed: the fence below orders them before the look at used.idx.
        // SAFETY: see the invariant of `Ring`.
        unsafe {
            if self.state.event_idx {
                self.avail.store_u16(used_event(self.state.size()), self.consumed as u16, Relaxed);
            } else {
                self.avail.store_u16(AVAIL_FLAGS, 0, Relaxed);
            }
        }
        self.state.interrupts_off = false;
        // Pairs with the device's fence between its store of used.idx and its load of used_event
        // (or flags): either it sees our wish for an interrupt, or the `poll` that follows sees its
        // index.
        O::full();
        self.state.count.raw(self.consumed, self.view()).into()
    }

    /// See [`crate::driver::Queue::disable_interrupts`].
    #[inline]
    pub(crate) fn disable_interrupts(&mut self) {
        if self.state.interrupts_off {
            return;
        }
        // Relaxed: a hint, with nothing to order.
        // SAFETY: see the invariant of `Ring`.
        unsafe {
            if self.state.event_idx {
                // Just behind us: passed again only after 2^16 - 1 buffers.
                let behind = (self.consumed as u16).wrapping_sub(1);
                self.avail.store_u16(used_event(self.state.size()), behind, Relaxed);
            } else {
                self.avail.store_u16(AVAIL_FLAGS, AVAIL_F_NO_INTERRUPT, Relaxed);
            }
        }
        self.state.interrupts_off = true;
    }

    /// See [`crate::driver::Queue::poll`].
    #[inline]
    pub(crate) fn poll(&self, token: C::Token) -> bool {
        self.state.count.news::<O>(token.into(), self.view())
    }

    /// For pollers.
    pub(crate) fn view(&self) -> RingView {
        RingView::split(self.used)
    }

    /// Latches the first error, and returns it.
    ///
    /// From now on nothing fits, and nothing was seen.
    #[cold]
    fn latch(&mut self, error: QueueError) -> QueueError {
        self.free = 0;
        self.seen = self.consumed;
        self.state.latch(error)
    }

    /// Buffers added and not yet returned.
    pub(crate) fn in_flight(&self) -> u16 {
        (self.state.next_avail - self.consumed) as u16
    }

    /// Free descriptors.
    pub(crate) fn free(&self) -> usize {
        self.free.into()
    }
}

/// Writes a descriptor (relaxed: the release store of avail.idx orders it).
///
/// # Safety
/// `table` has a descriptor `index`, on a multiple of 8 bytes.
#[inline(always)]
unsafe fn store(table: Cells, index: u16, desc: Entry) {
    let at = usize::from(index) * DESC_SIZE;
    // SAFETY: the caller vouches for the descriptor.
    unsafe {
        table.store_u64(at, desc.addr);
        table.store_u64(at + 8, desc.meta);
    }
}
