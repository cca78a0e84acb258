//! Device side of a split queue.
//!
//! ```text
//!   avail.idx (driver) ------------- pop ---------> next_avail
//!                                                       |  in flight: a bit for each head
//!   used.idx (ours) <--- publish --- next_used <---- complete
//!                        ^ published
//! ```
//!
//! The indices of the ring count modulo 2^16; our positions begin one lap later and do not wrap.
//! Each popped chain is completed once, so the number in flight is the distance from `next_used` to
//! `next_avail`.
mod pop;

use super::chain::Tables;
use super::{avail_event, used_event};
use crate::area::{Area, Cells};
use crate::batch::{Batch, Kind};
use crate::chain::Descriptor as _;
use crate::device_ring::{DeviceRing, InOrderRun, Paths};
use crate::event::need_event;
use crate::in_flight::{Flight as _, InFlight};
use crate::in_order::InOrder;
use crate::state::StateError;
use crate::table_memory::TableMemory;
use crate::translation::{TranslationCheck, walk_translated};
use crate::{Order, QueueError};
use alloc::boxed::Box;
use core::marker::PhantomData;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use paravane_spec::split::{
    AVAIL_ENTRY, AVAIL_F_NO_INTERRUPT, AVAIL_FLAGS, AVAIL_IDX, AVAIL_RING, DESC_F_INDIRECT, DESC_F_NEXT,
    USED_ENTRY, USED_F_NO_NOTIFY, USED_FLAGS, USED_IDX, USED_RING,
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
    /// See [`DeviceRing::paths`].
    paths: Paths,
    kind: Kind,
    /// The next entry of the available ring.
    next_avail: u64,
    /// The next entry of the used ring.
    next_used: u64,
    /// What used.idx says.
    published: u64,
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
            paths: if in_order { Paths::InOrder } else { Paths::Fast },
            kind: Kind::Simple,
            next_avail: place(start),
            next_used: place(start),
            published: place(start),
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
        let available = new.wrapping_sub(self.next_avail as u16);
        // What was popped and not published is still ours.
        let ours = self.next_avail - self.published;
        if u64::from(available) + ours > u64::from(self.size) {
            let old = self.next_avail as u16;
            return Err(self.latch(QueueError::AvailIndex { old, new, size: self.size }));
        }
        Ok(available)
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
        let mut next = self.next_used;
        let mut result = Ok(());
        for (head, written) in chains {
            // SAFETY: `InFlight` has a mark for each head below the size, which is looked at first.
            if usize::from(head) > mask || !unsafe { in_flight.add(head.into()).replace(false) } {
                result = Err(head);
                break;
            }
            // SAFETY: the entry is less than the size; see the invariant of `Ring`.
            unsafe { store(used, next as usize & mask, head, written) };
            next += 1;
        }
        self.next_used = next;
        // A latched queue has nothing in flight.
        result.map_err(|head| self.latch(QueueError::NotInFlight { id: head.into() }))
    }

    /// See [`crate::device::Queue::expect_completions`].
    #[inline]
    pub(crate) fn expect_completions(&self, chains: usize) {
        // Not around the ring's end: what lies behind it is fetched by waiting.
        let start = self.next_used as usize & self.mask;
        let entries = chains.min(self.mask + 1 - start);
        self.used.expect_write((USED_RING + start * USED_ENTRY) as isize, entries * USED_ENTRY);
    }

    /// See [`crate::device::Queue::publish`].
    #[inline(always)]
    pub(crate) fn publish(&mut self) -> Result<bool, QueueError> {
        let (old, new) = (self.published, self.next_used);
        if new == old {
            return Ok(false);
        }
        O::before_release();
        // Release: pairs with the driver's acquire load of used.idx, after which it reads the
        // entries. SAFETY: see the invariant of `Ring`.
        unsafe { self.used.store_u16(USED_IDX, new as u16, Release) };
        self.published = new;
        // Pairs with the driver's fence between its store of used_event (or flags) and its load of
        // used.idx: either we see its wish for an interrupt, or it sees our index.
        O::full();
        // SAFETY: see the invariant of `Ring`.
        Ok(unsafe {
            if self.event_idx {
                need_event(self.avail.load_u16(used_event(self.size), Relaxed), new as u16, old as u16)
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
                self.used.store_u16(avail_event(self.size), self.next_avail as u16, Relaxed);
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
        self.error.is_none() && unsafe { self.avail.load_u16(AVAIL_IDX, Relaxed) } != self.next_avail as u16
    }

    /// Closes the fast paths; see [`DeviceRing::paths`].
    pub(crate) fn close_fast_paths(&mut self) {
        self.paths = Paths::Slow;
    }

    /// Chains popped and not yet completed.
    pub(crate) fn in_flight(&self) -> u16 {
        let held = self.in_order.as_ref().map_or(0, |order| order.held());
        // No more than the size.
        (self.next_avail - self.next_used) as u16 - held
    }
}

impl<O: Order> DeviceRing for Ring<O> {
    type Walked = Walked;

    #[inline(always)]
    fn pop_any(&mut self, batch: &mut Batch, memory: &mut impl TableMemory) -> Result<(), QueueError> {
        match self.available(Acquire) {
            Ok(available) => self.pop_some(batch, available.into(), memory),
            Err(error) => {
                batch.clear();
                Err(error)
            }
        }
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
        let entry = self.next_avail as usize & self.mask;
        // Relaxed: as in the fast path.
        // SAFETY: the entry is less than the size; see the invariant of `Ring`.
        let head = unsafe { self.avail.load_u16(AVAIL_RING + entry * AVAIL_ENTRY, Relaxed) };
        if head >= self.size {
            return Err(QueueError::DescIndex { index: head.into(), size: self.size.into() });
        }
        if self.in_flight.contains(head) || self.in_order.as_ref().is_some_and(|order| order.contains(head)) {
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

    fn taken(&mut self, walked: Walked, lens: [u32; 2]) {
        match &mut self.in_order {
            None => _ = self.in_flight.insert(walked.head),
            // SAFETY: `walk_next` has checked the head.
            Some(order) => unsafe { order.flight().insert(walked.head, 1, self.next_avail, lens) },
        }
        self.kind = walked.kind;
        self.next_avail += 1;
    }

    #[inline(always)]
    fn in_order(&mut self) -> Option<&mut InOrder> {
        self.in_order.as_deref_mut()
    }

    #[inline(always)]
    fn used_places(&self) -> [u64; 2] {
        [self.next_used, self.published]
    }

    #[inline(always)]
    fn note(place: u64, _places: u16) -> u64 {
        place
    }

    type InOrderRun = EntryRun;

    #[inline(always)]
    fn run_in_order(&self) -> EntryRun {
        EntryRun(self.next_used)
    }

    #[inline(always)]
    fn index_of(note: u64, size: u16) -> usize {
        note as usize & (usize::from(size) - 1)
    }

    #[inline(always)]
    fn size(&self) -> u16 {
        self.size
    }

    #[inline(always)]
    fn write_used(&mut self, start: u64, id: u16, written: u32) {
        // SAFETY: the entry is less than the size; see the invariant of `Ring`.
        unsafe { store(self.used, start as usize & self.mask, id, written) };
    }

    #[inline(always)]
    fn used_up_to(&mut self, next: u64, _more: u16) {
        self.next_used = next;
    }

    fn error(&self) -> Option<QueueError> {
        self.error
    }

    #[inline(always)]
    fn paths(&self) -> Paths {
        self.paths
    }

    #[cold]
    #[inline(never)]
    fn latch(&mut self, error: QueueError) -> QueueError {
        self.paths = Paths::Slow;
        self.in_flight.clear();
        if let Some(order) = &mut self.in_order {
            order.clear();
        }
        *self.error.get_or_insert(error)
    }
}

/// Chains that are completed in order: the place of the next one.
#[derive(Clone, Copy)]
pub(crate) struct EntryRun(u64);

impl InOrderRun for EntryRun {
    #[inline(always)]
    fn take(&mut self, note: u64) -> bool {
        if note != self.0 {
            return false;
        }
        self.0 += 1;
        true
    }

    #[inline(always)]
    fn end(self) -> (u64, u16) {
        (self.0, 0)
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
        self.published as u16
    }

    /// The next entry of the available ring.
    pub(crate) fn next_avail(&self) -> u16 {
        self.next_avail as u16
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
        (self.next_used, self.published) = (place(used), place(used));
        self.next_avail = self.next_used + u64::from(in_flight);
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
        self.take(batch, walked, |ring, (), _| {
            ring.in_flight.insert(head);
        })
    }
}

/// Our position at index `start` of a ring: in the second lap, so that it is never 0.
fn place(start: u16) -> u64 {
    u64::from(start) + (1 << 16)
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
