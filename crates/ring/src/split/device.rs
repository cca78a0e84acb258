//! Device side of a split queue.
//!
//! ```text
//!   avail.idx (driver) ------------- pop ---------> next_avail
//!                                                       |  in flight: a bit for each head
//!   used.idx (ours) <--- publish --- next_used <---- complete
//!                        ^ published
//! ```
//!
//! All three positions count modulo 2^16; each popped chain is completed once, so the number in
//! flight is the distance from `next_used` to `next_avail`.
use super::chain::Tables;
use super::{avail_event, used_event};
use crate::area::{Area, Cells};
use crate::batch::{Batch, Chain, Free, Kind};
use crate::chain::Descriptor as _;
use crate::device_ring::DeviceRing;
use crate::event::need_event;
use crate::in_flight::InFlight;
use crate::in_order::{Entry, InOrder};
use crate::state::StateError;
use crate::table_memory::TableMemory;
use crate::translation::{TranslationCheck, walk_translated};
use crate::{Order, QueueError, Segment};
use alloc::boxed::Box;
use core::marker::PhantomData;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use paravane_spec::split::{
    AVAIL_ENTRY, AVAIL_F_NO_INTERRUPT, AVAIL_FLAGS, AVAIL_IDX, AVAIL_RING, DESC_F_INDIRECT, DESC_F_NEXT,
    DESC_F_WRITE, USED_ENTRY, USED_F_NO_NOTIFY, USED_FLAGS, USED_IDX, USED_RING,
};

/// The ring addresses, resolved once, and our positions.
///
/// Invariant, made by [`Ring::new`] and relied on by every access to the cells: the three areas are
/// as long and as aligned as a queue of `size` descriptors needs, `size` is a power of two and
/// `mask` is one less.
#[derive(Debug)]
pub(crate) struct Ring<O> {
    tables: Tables,
    avail: Cells,
    used: Cells,
    size: u16,
    mask: usize,
    event_idx: bool,
    /// Whether USED_F_NO_NOTIFY stands in the used ring (never with EVENT_IDX).
    kicks_off: bool,
    /// See [`DeviceRing::detour`].
    detour: bool,
    kind: Kind,
    /// The next entry of the available ring.
    next_avail: u16,
    /// The next entry of the used ring.
    next_used: u16,
    /// What used.idx says.
    published: u16,
    in_flight: InFlight,
    in_order: Option<Box<InOrder>>,
    error: Option<QueueError>,
    order: PhantomData<O>,
}

/// A chain that was walked and added to the batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Walked {
    head: u16,
    kind: Kind,
}

impl<O: Order> Ring<O> {
    /// Takes the queue into use, at position `start` of both rings.
    ///
    /// # Safety
    /// The areas stay mapped until the ring has been dropped. They are at least as long as
    /// `desc_bytes`, `avail_bytes` and `used_bytes` of `size` say, and aligned to 8, 2 and 4 bytes.
    /// `size` is a power of two, 32768 at most.
    pub(crate) unsafe fn new(
        [desc, avail, used]: [Area; 3],
        size: u16,
        indirect: bool,
        event_idx: bool,
        in_order: bool,
        start: u16,
    ) -> Self {
        Self {
            // SAFETY: the caller vouches for the table's length.
            tables: unsafe { Tables::new(desc.cells(), size, indirect) },
            avail: avail.cells(),
            used: used.cells(),
            size,
            mask: usize::from(size) - 1,
            event_idx,
            kicks_off: false,
            detour: in_order,
            kind: Kind::Simple,
            next_avail: start,
            next_used: start,
            published: start,
            in_flight: InFlight::new(size),
            in_order: in_order.then(|| Box::new(InOrder::new(size))),
            error: None,
            order: PhantomData,
        }
    }

    /// How many entries the available ring has for us.
    ///
    /// With [`Acquire`] they may be read: it pairs with the driver's release store of avail.idx.
    #[inline(always)]
    fn available(&mut self, order: core::sync::atomic::Ordering) -> Result<u16, QueueError> {
        // SAFETY: see the invariant of `Ring`.
        let new = unsafe { self.avail.load_u16(AVAIL_IDX, order) };
        O::after_acquire();
        let available = new.wrapping_sub(self.next_avail);
        // What was popped and not published is still ours. It is no more than the size, so nothing
        // wraps.
        let ours = self.next_avail.wrapping_sub(self.published);
        if available > self.size - ours {
            return Err(self.latch(QueueError::AvailIndex { old: self.next_avail, new, size: self.size }));
        }
        Ok(available)
    }

    /// Takes chains of one direct descriptor until the batch has `limit`.
    ///
    /// `false`: the next one is something else, or wrong. It is not taken, and what was seen of it
    /// is forgotten. Nothing is checked twice and nothing can fail here.
    #[inline(always)]
    fn pop_simple(&mut self, batch: &mut Batch, limit: usize) -> bool {
        let (avail, mask) = (self.avail, self.mask);
        let in_flight = self.in_flight.as_mut_ptr();
        let Free { mut chains, base, mut segments, .. } = batch.free();
        let start = usize::from(self.next_avail);
        let end = start + limit - batch.count();
        let mut next = start;
        while next != end {
            // Relaxed: the acquire load of avail.idx has ordered it, and the descriptors, after
            // their writing. SAFETY: the entry is less than the size; see the invariant of `Ring`.
            let head = unsafe { avail.load_u16(AVAIL_RING + (next & mask) * AVAIL_ENTRY, Relaxed) };
            let index = usize::from(head);
            if index > mask {
                break;
            }
            // SAFETY: `head` was just checked.
            let first = unsafe { self.tables.fetch(head) };
            // SAFETY: `InFlight` has a place for each head below the size.
            let mark = unsafe { &mut *in_flight.add(index) };
            if first.flags() & (DESC_F_NEXT | DESC_F_INDIRECT) != 0
                // Not less: it has no bytes, or wraps around the address space.
                || first.addr >= first.addr.wrapping_add(first.len().into())
                || *mark
            {
                break;
            }
            *mark = true;
            // SAFETY: the batch has `limit - count` free slots at least, and a free segment for
            // each of them (its invariant); fewer were taken.
            unsafe {
                segments.write(Segment { addr: first.addr, len: first.len() });
                segments = segments.add(1);
                // A batch has less than 4 GiB of segments.
                let end = (segments.addr() - base.addr()) as u32;
                chains.write(Chain::single(head, end, first.len(), first.has(DESC_F_WRITE)));
                chains = chains.add(1);
            }
            next += 1;
        }
        batch.add_written(next - start, segments);
        self.next_avail = next as u16;
        next == end
    }

    /// Takes chains of several descriptors until the batch has `limit`.
    ///
    /// All in indirect tables or all in the ring. `false`: the next one is of another kind, unusual,
    /// or wrong, or the batch has no room for its segments. It is not taken, and what was seen of it
    /// is forgotten.
    #[inline(never)]
    fn pop_walked<const TABLE: bool>(
        &mut self,
        batch: &mut Batch,
        limit: usize,
        memory: &mut impl TableMemory,
    ) -> bool {
        let (avail, mask) = (self.avail, self.mask);
        let in_flight = self.in_flight.as_mut_ptr();
        let Free { mut chains, base, mut segments, mut room_end } = batch.free();
        let start = usize::from(self.next_avail);
        let end = start + limit - batch.count();
        let mut next = start;
        while next != end {
            // Relaxed: as in `pop_simple`. SAFETY: as there.
            let head = unsafe { avail.load_u16(AVAIL_RING + (next & mask) * AVAIL_ENTRY, Relaxed) };
            let head = usize::from(head);
            // SAFETY: `InFlight` has a place for each head below the size, which is checked first.
            if head > mask || unsafe { *in_flight.add(head) } {
                break;
            }
            // SAFETY: `head` was just checked.
            let first = unsafe { self.tables.fetch(head as u16) };
            // SAFETY: the segments from the first free one on, as far as the next chain may take
            // them; see `Free`.
            let walked = unsafe { self.tables.walk_usual::<TABLE>(first, segments, room_end, memory) };
            let Some(walk) = walked else { break };
            // SAFETY: the batch has `limit - count` free slots at least; fewer were taken. The
            // segments were taken from its room, and one more is free for each slot after this one.
            unsafe {
                *in_flight.add(head) = true;
                chains.write(walk.chain(head as u16, base));
                (chains, room_end) = (chains.add(1), room_end.add(1));
            }
            segments = walk.ends[1];
            next += 1;
        }
        batch.add_written(next - start, segments);
        if next != start {
            self.kind = batch.kind_of_last::<TABLE>();
        }
        self.next_avail = next as u16;
        next == end
    }

    /// Takes chains of all kinds until the batch has `limit`, or no room for the next one.
    #[inline(never)]
    fn pop_mixed(
        &mut self,
        batch: &mut Batch,
        limit: usize,
        memory: &mut impl TableMemory,
    ) -> Result<(), QueueError> {
        loop {
            let before = batch.count();
            if self.kind != Kind::Table && self.pop_walked::<false>(batch, limit, memory)
                || self.pop_walked::<true>(batch, limit, memory)
                || self.kind == Kind::Table && self.pop_walked::<false>(batch, limit, memory)
            {
                return Ok(());
            }
            if batch.count() == before && !self.pop_one(batch, memory)? {
                return Ok(());
            }
        }
    }

    /// See [`crate::device::Queue::complete`].
    #[inline]
    pub(crate) fn complete(&mut self, head: u16, written: u32) -> Result<(), QueueError> {
        self.complete_all([(head, written)])
    }

    /// See [`crate::device::Queue::complete_all`].
    #[inline(always)]
    pub(crate) fn complete_all(
        &mut self,
        chains: impl IntoIterator<Item = (u16, u32)>,
    ) -> Result<(), QueueError> {
        // All in locals: every store to shared memory could be one to `self`, for all the compiler
        // knows.
        let (used, mask) = (self.used, self.mask);
        let in_flight = self.in_flight.as_mut_ptr();
        let mut next = usize::from(self.next_used);
        let mut result = Ok(());
        for (head, written) in chains {
            // SAFETY: `InFlight` has a mark for each head below the size, which is looked at first.
            if usize::from(head) > mask || !unsafe { in_flight.add(head.into()).replace(false) } {
                result = Err(head);
                break;
            }
            // SAFETY: the entry is less than the size; see the invariant of `Ring`.
            unsafe { store(used, next & mask, head, written) };
            next += 1;
        }
        self.next_used = next as u16;
        // A latched queue has nothing in flight.
        result.map_err(|head| self.latch(QueueError::NotInFlight { id: head.into() }))
    }

    /// See [`crate::device::Queue::expect_completions`].
    #[inline]
    pub(crate) fn expect_completions(&self, chains: usize) {
        // Not around the ring's end: what lies behind it is fetched by waiting.
        let start = usize::from(self.next_used) & self.mask;
        let entries = chains.min(self.mask + 1 - start);
        self.used.expect_write((USED_RING + start * USED_ENTRY) as isize, entries * USED_ENTRY);
    }

    /// See [`crate::device::Queue::publish`].
    #[inline(always)]
    pub(crate) fn publish(&mut self) -> Result<bool, QueueError> {
        if self.detour {
            self.before_publish()?;
        }
        let (old, new) = (self.published, self.next_used);
        if new == old {
            return Ok(false);
        }
        O::before_release();
        // Release: pairs with the driver's acquire load of used.idx, after which it reads the
        // entries. SAFETY: see the invariant of `Ring`.
        unsafe { self.used.store_u16(USED_IDX, new, Release) };
        self.published = new;
        // Pairs with the driver's fence between its store of used_event (or flags) and its load of
        // used.idx: either we see its wish for an interrupt, or it sees our index.
        O::full();
        // SAFETY: see the invariant of `Ring`.
        Ok(unsafe {
            if self.event_idx {
                need_event(self.avail.load_u16(used_event(self.size), Relaxed), new, old)
            } else {
                self.avail.load_u16(AVAIL_FLAGS, Relaxed) & AVAIL_F_NO_INTERRUPT == 0
            }
        })
    }

    /// See [`crate::device::Queue::disable_kicks`].
    #[inline]
    pub(crate) fn disable_kicks(&mut self) {
        // With EVENT_IDX there is nothing to do: avail_event is left behind, and what is behind
        // brings no kick.
        if !self.event_idx && !self.kicks_off {
            // Relaxed: a hint, with nothing to order.
            // SAFETY: see the invariant of `Ring`.
            unsafe { self.used.store_u16(USED_FLAGS, USED_F_NO_NOTIFY, Relaxed) };
            self.kicks_off = true;
        }
    }

    /// See [`crate::device::Queue::arm_kicks`].
    #[inline]
    pub(crate) fn arm_kicks(&mut self) -> Result<bool, QueueError> {
        if let Some(error) = self.error {
            return Err(error);
        }
        // Relaxed: the fence below orders them before the load.
        // SAFETY: see the invariant of `Ring`.
        unsafe {
            if self.event_idx {
                self.used.store_u16(avail_event(self.size), self.next_avail, Relaxed);
            } else {
                self.used.store_u16(USED_FLAGS, 0, Relaxed);
                self.kicks_off = false;
            }
        }
        // Pairs with the driver's fence between its store of avail.idx and its load of avail_event
        // (or flags): either it sees our wish for a kick, or we see its index.
        O::full();
        // Relaxed: only compared; `pop` reads it again before it follows it.
        Ok(self.available(Relaxed)? != 0)
    }

    /// See [`crate::device::Queue::has_available`].
    #[inline]
    pub(crate) fn has_available(&self) -> bool {
        // Relaxed: only compared; `pop` reads it again before it follows it.
        // SAFETY: see the invariant of `Ring`.
        self.error.is_none() && unsafe { self.avail.load_u16(AVAIL_IDX, Relaxed) } != self.next_avail
    }

    /// Closes the fast paths; see [`DeviceRing::detour`].
    pub(crate) fn close_fast_paths(&mut self) {
        self.detour = true;
    }

    /// Number of descriptors.
    pub(crate) fn size(&self) -> u16 {
        self.size
    }

    /// Chains popped and not yet completed.
    pub(crate) fn in_flight(&self) -> u16 {
        match &self.in_order {
            Some(order) => order.in_flight(),
            None => self.next_avail.wrapping_sub(self.next_used),
        }
    }
}

impl<O: Order> DeviceRing for Ring<O> {
    type Walked = Walked;

    #[inline(always)]
    fn pop_any(&mut self, batch: &mut Batch, memory: &mut impl TableMemory) -> Result<(), QueueError> {
        let limit = usize::from(self.available(Acquire)?).min(batch.slots());
        if self.kind == Kind::Simple && self.pop_simple(batch, limit) || limit == 0 {
            return Ok(());
        }
        self.pop_mixed(batch, limit, memory)
    }

    fn limit(&mut self) -> Result<usize, QueueError> {
        Ok(self.available(Acquire)?.into())
    }

    #[inline(always)]
    fn walk_next(
        &mut self,
        batch: &mut Batch,
        fetch: &mut impl FnMut(u64, &mut [u8]) -> bool,
    ) -> Result<Option<Walked>, QueueError> {
        let entry = usize::from(self.next_avail) & self.mask;
        // Relaxed: as in the fast path.
        // SAFETY: the entry is less than the size; see the invariant of `Ring`.
        let head = unsafe { self.avail.load_u16(AVAIL_RING + entry * AVAIL_ENTRY, Relaxed) };
        if head >= self.size {
            return Err(QueueError::DescIndex { index: head.into(), size: self.size.into() });
        }
        if self.in_flight.contains(head) {
            return Err(QueueError::HeadInFlight { head });
        }
        // SAFETY: `head` was just checked.
        let first = unsafe { self.tables.fetch(head) };
        let walked = self.tables.walk(head, first, batch, fetch)?;
        let kind = match first.flags() & (DESC_F_NEXT | DESC_F_INDIRECT) {
            0 => Kind::Simple,
            DESC_F_NEXT => Kind::Linked,
            _ => Kind::Table,
        };
        Ok(walked.then_some(Walked { head, kind }))
    }

    #[inline(always)]
    fn taken(&mut self, walked: Walked) {
        self.in_flight.insert(walked.head);
        self.kind = walked.kind;
        self.next_avail = self.next_avail.wrapping_add(1);
    }

    fn remove(&mut self, head: u16) -> bool {
        self.in_flight.remove(head)
    }

    fn stage(&mut self, entry: Entry) {
        // SAFETY: the entry is less than the size; see the invariant of `Ring`.
        unsafe { store(self.used, usize::from(self.next_used) & self.mask, entry.id, entry.written) };
        self.next_used = self.next_used.wrapping_add(entry.places);
    }

    #[inline(always)]
    fn in_order(&mut self) -> Option<&mut InOrder> {
        self.in_order.as_deref_mut()
    }

    #[inline(always)]
    fn in_order_and_places(&mut self) -> Option<(&mut InOrder, impl Fn(u16) -> u16)> {
        Some((self.in_order.as_deref_mut()?, |_| 1))
    }

    #[inline(always)]
    fn in_order_and_flight(&mut self) -> Option<(&mut InOrder, impl FnMut(u16) -> bool)> {
        let in_flight = self.in_flight.as_mut_ptr();
        // SAFETY: `InFlight` has a mark for each head below the size, and lives as long as the ring.
        Some((self.in_order.as_deref_mut()?, move |head: u16| unsafe {
            in_flight.add(head.into()).replace(false)
        }))
    }

    fn error(&self) -> Option<QueueError> {
        self.error
    }

    #[inline(always)]
    fn detour(&self) -> bool {
        self.detour
    }

    #[cold]
    #[inline(never)]
    fn latch(&mut self, error: QueueError) -> QueueError {
        self.detour = true;
        self.in_flight.clear();
        *self.error.get_or_insert(error)
    }
}

/// For another process to take over.
impl<O: Order> Ring<O> {
    /// What used.idx says in the ring.
    pub(crate) fn used_idx(&self) -> u16 {
        // Acquire: the entries were written before the index was published.
        // SAFETY: see the invariant of `Ring`.
        unsafe { self.used.load_u16(USED_IDX, Acquire) }
    }

    /// What used.idx says, as we know it.
    pub(crate) fn published(&self) -> u16 {
        self.published
    }

    /// The next entry of the available ring.
    pub(crate) fn next_avail(&self) -> u16 {
        self.next_avail
    }

    /// Goes to position `avail` and to used.idx, with `in_flight` chains between.
    ///
    /// [`Ring::pop_again`] brings those back.
    pub(crate) fn move_to(&mut self, avail: u16, in_flight: u16) -> Result<(), StateError> {
        let (used, size) = (self.used_idx(), self.size);
        if in_flight > size || avail.wrapping_sub(used) != in_flight {
            return Err(StateError::Distance { used, avail, in_flight });
        }
        // SAFETY: see the invariant of `Ring`.
        let idx = unsafe { self.avail.load_u16(AVAIL_IDX, Relaxed) };
        if idx.wrapping_sub(avail) > size - in_flight {
            return Err(StateError::Available { idx, avail, size });
        }
        (self.next_avail, self.next_used, self.published) = (avail, used, used);
        Ok(())
    }

    /// Takes the chain at `head` into the batch, at the same position.
    ///
    /// The head is below the size, and a slot is free. `false`: its segments do not fit, or cannot
    /// be reached.
    pub(crate) fn pop_again(
        &mut self,
        head: u16,
        batch: &mut Batch,
        check: &mut impl TranslationCheck,
    ) -> Result<bool, QueueError> {
        if let Some(error) = self.error {
            batch.clear();
            return Err(error);
        }
        let tables = &mut self.tables;
        let walked = walk_translated(batch, check, |batch, mut fetch| {
            // SAFETY: the caller has checked the head.
            let first = unsafe { tables.fetch(head) };
            Ok(tables.walk(head, first, batch, &mut fetch)?.then_some(()))
        });
        self.take(batch, walked, |ring, ()| {
            ring.in_flight.insert(head);
        })
    }
}

/// Writes entry `slot` of the used ring.
///
/// Relaxed: the release store of used.idx orders it. Two stores, since an entry lies on a multiple
/// of 4 only.
///
/// # Safety
/// The used ring has that many entries.
#[inline(always)]
unsafe fn store(used: Cells, slot: usize, head: u16, written: u32) {
    let at = USED_RING + slot * USED_ENTRY;
    // SAFETY: the caller vouches for the entry.
    unsafe {
        used.store_u32(at, head.into());
        used.store_u32(at + 4, written);
    }
}
