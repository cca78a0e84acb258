//! Device side of a packed queue.
//!
//! ```text
//!   descriptor ring:   ... used | published    next_used      next_avail | available ...
//!                                   |-- staged --|-- in flight --|
//!                                   ^ publish    ^ complete      ^ pop
//! ```
//!
//! The three positions chase each other around the ring, with no more than its size between the
//! first and the last. A chain takes as many descriptors as the driver made of it, and its used
//! descriptor stands for all of them: `next_used` moves on by that many.
mod pop;

use super::chain::{Tables, Walked};
use super::cursor::Cursor;
use super::{Descriptor, Event, Position, desc_bytes, flags, matches, meta};
use crate::area::{Area, Cells};
use crate::batch::{Batch, Kind};
use crate::device_ring::{DeviceRing, InOrderRun, Paths};
use crate::in_flight::Flight;
use crate::in_order::InOrder;
use crate::state::StateError;
use crate::table_memory::TableMemory;
use crate::translation::{TranslationCheck, walk_translated};
use crate::{Order, QueueError};
use alloc::boxed::Box;
use alloc::vec;
use core::hint::cold_path;
use core::marker::PhantomData;
use core::sync::atomic::Ordering::Relaxed;
use paravane_spec::packed::{DESC_ADDR, DESC_F_WRITE, DESC_FLAGS, DESC_LEN, DESC_SIZE};

/// The ring addresses, resolved once, and our positions.
///
/// Invariant, made by [`Ring::new`] and relied on by every access to the cells: the three areas are
/// as long and as aligned as a queue of `size` descriptors needs.
#[derive(Debug)]
pub(crate) struct Ring<O> {
    tables: Tables,
    /// The descriptor ring's end; see [`Cursor`].
    end: Cells,
    /// The driver's event suppression.
    driver: Cells,
    /// Ours.
    device: Cells,
    size: u16,
    event_idx: bool,
    /// Whether our event suppression disables kicks.
    kicks_off: bool,
    /// See [`DeviceRing::paths`].
    paths: Paths,
    kind: Kind,
    /// The next descriptor to be made available.
    next_avail: Cursor,
    /// Where the next used descriptor goes.
    next_used: Cursor,
    /// Up to here the driver sees what was used.
    published: Cursor,
    /// Descriptors that an honest driver may have made available after `next_avail`.
    ///
    /// Those that are neither in flight nor staged.
    room: u16,
    /// Descriptors staged: from `published` to `next_used`.
    staged: u16,
    /// Descriptors that the chains in flight take beyond one each.
    more: u16,
    /// The second word of the used descriptor at `published`, if something is staged.
    ///
    /// The driver sees the others only after it, so they lie in the ring already.
    held: u64,
    /// Descriptors of each identifier's chain; 0 if it is not in flight.
    taken: Box<[u16]>,
    in_order: Option<Box<InOrder>>,
    error: Option<QueueError>,
    order: PhantomData<O>,
}

/// Used descriptors of one lap, in a row.
///
/// All that the loop needs, since every store to shared memory could be one to the [`Ring`], for
/// all the compiler knows.
#[derive(Clone, Copy)]
struct Run {
    /// Bytes from the ring's end to the next used descriptor: below 0.
    at: isize,
    /// The flags that make them used, where the second word has them.
    used: u64,
    /// The ring's `taken`, and how many there are.
    taken: *mut u16,
    ids: usize,
    /// Descriptors of the chains beyond one each.
    more: u16,
}

impl Run {
    /// Place and second word of the used descriptor of chain `id`.
    ///
    /// The place is in bytes from the ring's end. `None`, and nothing has changed: the chain is not
    /// in flight, or reaches the ring's end.
    #[inline(always)]
    fn next(&mut self, id: u16, written: u32) -> Option<(isize, u64)> {
        if usize::from(id) >= self.ids {
            return None;
        }
        // SAFETY: `taken` has a place for each identifier below the size, and nothing else looks
        // there meanwhile.
        let taken = unsafe { &mut *self.taken.add(id.into()) };
        let (at, mut after) = (self.at, self.at + DESC_SIZE as isize);
        if *taken == 1 {
            if after == 0 {
                return None;
            }
        } else {
            after = at + (usize::from(*taken) * DESC_SIZE) as isize;
            if after >= 0 || *taken == 0 {
                return None;
            }
            self.more += *taken - 1;
        }
        *taken = 0;
        self.at = after;
        Some((at, used_meta(id, written, self.used)))
    }
}

/// The second word of a used descriptor; `used` is that word with its flags alone.
///
/// Without WRITE the length does not count (section 2.8.5).
#[inline(always)]
fn used_meta(id: u16, written: u32, used: u64) -> u64 {
    meta(written, id, 0) | if written == 0 { used } else { used | meta(0, 0, DESC_F_WRITE) }
}

impl<O: Order> Ring<O> {
    /// Takes the queue into use, both sides at position `start`.
    ///
    /// # Safety
    /// The areas stay mapped until the ring has been dropped. They are at least as long as
    /// `desc_bytes` of `size` says, and 4 bytes each, and aligned to 8, 4 and 4 bytes. `size` is
    /// 32768 at most, and not 0.
    pub(crate) unsafe fn new(
        [desc, driver, device]: [Area; 3],
        size: u16,
        indirect: bool,
        event_idx: bool,
        in_order: bool,
        start: Position,
    ) -> Self {
        debug_assert!(desc.len() >= desc_bytes(size));
        let start = Cursor::new(start, size);
        Self {
            // SAFETY: the caller vouches for the ring's length.
            tables: unsafe { Tables::new(desc.cells(), size, indirect) },
            // SAFETY: the ring is that long.
            end: unsafe { desc.cells().offset(desc_bytes(size)) },
            driver: driver.cells(),
            device: device.cells(),
            size,
            event_idx,
            kicks_off: false,
            paths: if in_order { Paths::InOrder } else { Paths::Fast },
            kind: Kind::Simple,
            next_avail: start,
            next_used: start,
            published: start,
            room: size,
            staged: 0,
            more: 0,
            held: 0,
            taken: vec![0; size.into()].into_boxed_slice(),
            in_order: in_order.then(|| Box::new(InOrder::new(size))),
            error: None,
            order: PhantomData,
        }
    }

    /// See [`crate::device::Queue::complete`].
    #[inline(always)]
    pub(crate) fn complete(&mut self, id: u16, written: u32) -> Result<(), QueueError> {
        self.complete_all([(id, written)])
    }

    /// See [`crate::device::Queue::complete_all`].
    #[inline(always)]
    pub(crate) fn complete_all(
        &mut self,
        chains: impl IntoIterator<Item = (u16, u32)>,
    ) -> Result<(), QueueError> {
        let (end, mut run, mut chains) = (self.end, self.run(), chains.into_iter());
        if self.next_used == self.published {
            // The first since the last publication, which is kept back.
            let Some((id, written)) = chains.next() else { return Ok(()) };
            if let Some((_, word)) = run.next(id, written) {
                self.held = word;
            } else {
                cold_path();
                self.complete_one(id, written)?;
                run = self.run();
            }
        }
        for (id, written) in chains {
            let Some((at, word)) = run.next(id, written) else {
                cold_path();
                self.run_ends(run);
                self.complete_one(id, written)?;
                run = self.run();
                continue;
            };
            // Relaxed: the release store of the first one's flags orders them.
            // SAFETY: the place lies in the ring; see the invariant of `Ring`.
            unsafe { end.back(at).store_u64(DESC_LEN, word) };
        }
        self.run_ends(run);
        Ok(())
    }

    /// The used descriptors up to the ring's end, written without a look at `self`.
    #[inline(always)]
    fn run(&mut self) -> Run {
        let (next, size) = (self.next_used, self.size);
        Run {
            at: next.at(),
            used: meta(0, 0, next.used()),
            taken: self.taken.as_mut_ptr(),
            ids: size.into(),
            more: 0,
        }
    }

    /// Moves `next_used` past the used descriptors of `run`.
    #[inline(always)]
    fn run_ends(&mut self, run: Run) {
        // No more than the ring has.
        self.more -= run.more;
        self.staged += ((run.at - self.next_used.at()).unsigned_abs() / DESC_SIZE) as u16;
        self.next_used = self.next_used.advance_to(run.at, self.size);
    }

    /// See [`crate::device::Queue::expect_completions`].
    #[inline]
    pub(crate) fn expect_completions(&self, chains: usize) {
        // Not around the ring's end: what lies behind it is fetched by waiting.
        let next = self.next_used;
        self.end.expect_write(next.at(), chains.min(next.to_end()) * DESC_SIZE);
    }

    /// Completes a chain of any length.
    #[inline(never)]
    fn complete_one(&mut self, id: u16, written: u32) -> Result<(), QueueError> {
        match self.remove_places(id) {
            0 => Err(self.latch(QueueError::NotInFlight { id: id.into() })),
            places => {
                self.write_at(self.next_used, id, written);
                self.staged += places;
                self.next_used = self.next_used.advance(places, self.size);
                Ok(())
            }
        }
    }

    /// Removes a chain from those in flight, and returns its descriptors.
    ///
    /// 0 if it is not one of them.
    #[inline(always)]
    fn remove_places(&mut self, id: u16) -> u16 {
        let places = self.taken.get_mut(usize::from(id)).map_or(0, core::mem::take);
        self.more -= places.saturating_sub(1);
        places
    }

    /// Writes a used descriptor at `place`; keeps back the first since a publication.
    #[inline(always)]
    fn write_at(&mut self, place: Cursor, id: u16, written: u32) {
        let word = used_meta(id, written, meta(0, 0, place.used()));
        if place == self.published {
            self.held = word;
        } else {
            // Relaxed: the release store of the first one's flags orders them.
            // SAFETY: the place lies in the ring; see the invariant of `Ring`.
            unsafe { self.end.back(place.at()).store_u64(DESC_LEN, word) };
        }
    }

    /// See [`crate::device::Queue::publish`].
    #[inline(always)]
    pub(crate) fn publish(&mut self) -> Result<bool, QueueError> {
        let (old, new, size) = (self.published, self.next_used, self.size);
        if old == new {
            return Ok(false);
        }
        O::before_release();
        // Release: pairs with the driver's acquire load of the flags, after which it reads the
        // rest, and the used descriptors that follow. SAFETY: the place lies in the ring; see the
        // invariant of `Ring`.
        unsafe { self.end.back(old.at()).store_u64_release(DESC_LEN, self.held) };
        self.published = new;
        self.room += core::mem::take(&mut self.staged);
        // Pairs with the driver's fence between its store of its event suppression and its last
        // look at the flags: either we see its wish for an interrupt, or it sees our descriptor.
        O::full();
        // SAFETY: see the invariant of `Ring`.
        let event = unsafe { self.driver.load_u32(0) };
        Ok(Event::decode(event, self.event_idx, size).wants(new.position(size), old.position(size), size))
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
        let event = if self.event_idx { Event::At(next.position(size)) } else { Event::Enable };
        // Relaxed: the fence below orders it before the load.
        // SAFETY: see the invariant of `Ring`.
        unsafe { self.device.store_u32(0, event.encode(size)) };
        self.kicks_off = false;
        // Pairs with the driver's fence between its store of the flags and its load of our event
        // suppression: either it sees our wish for a kick, or we see its descriptor.
        O::full();
        Ok(self.is_available())
    }

    /// Whether the next descriptor is available.
    #[inline]
    fn is_available(&self) -> bool {
        let next = self.next_avail;
        // Relaxed: only compared; `pop` reads them again before it follows them.
        // SAFETY: the place lies in the ring; see the invariant of `Ring`.
        let flags = unsafe { self.end.back(next.at()).load_u16(DESC_FLAGS, Relaxed) };
        matches(flags, next.available())
    }

    /// See [`crate::device::Queue::has_available`].
    #[inline]
    pub(crate) fn has_available(&self) -> bool {
        self.error.is_none() && self.is_available()
    }

    /// Closes the fast paths; see [`DeviceRing::paths`].
    pub(crate) fn close_fast_paths(&mut self) {
        self.paths = Paths::Slow;
    }

    /// Chains popped and not yet completed.
    pub(crate) fn in_flight(&self) -> u16 {
        if self.error.is_some() {
            return 0;
        }
        let held = self.in_order.as_ref().map_or(0, |order| order.held());
        // No more than the size.
        self.next_used.distance(self.next_avail, self.size) as u16 - self.more - held
    }
}

impl<O: Order> DeviceRing for Ring<O> {
    type Walked = Walked;

    #[inline(always)]
    fn pop_any(&mut self, batch: &mut Batch, memory: &mut impl TableMemory) -> Result<(), QueueError> {
        self.pop_some(batch, memory)
    }

    fn limit(&mut self) -> Result<usize, QueueError> {
        // Each descriptor says itself whether it is available.
        Ok(usize::MAX)
    }

    #[inline(always)]
    fn walk_next(
        &mut self,
        batch: &mut Batch,
        fetch: &mut impl FnMut(u64, &mut [u8]) -> bool,
    ) -> Result<Option<Walked>, QueueError> {
        let (size, room, next) = (self.size, self.room, self.next_avail);
        let index = next.position(size).index(size);
        // SAFETY: the place lies in the ring; see the invariant of `Ring`.
        let desc = unsafe { self.end.back(next.at()) };
        // Acquire: as in the fast path.
        // SAFETY: as above.
        let meta = unsafe { desc.load_u64_acquire(DESC_LEN) };
        O::after_acquire();
        if !matches(flags(meta), next.available()) {
            return Ok(None);
        }
        // SAFETY: as above.
        let first = Descriptor { addr: unsafe { desc.load_u64(DESC_ADDR) }, meta };
        if room == 0 {
            return Err(QueueError::Overrun { index, size });
        }
        let (taken, order) = (&self.taken, &self.in_order);
        self.tables.walk(index, first, room, batch, fetch, |id| match taken.get(usize::from(id)) {
            None => Err(QueueError::BufferId { id, size }),
            Some(0) if order.as_ref().is_none_or(|order| !order.contains(id)) => Ok(()),
            Some(_) => Err(QueueError::IdInFlight { id }),
        })
    }

    fn taken(&mut self, walked: Walked, lens: [u32; 2]) {
        self.kind = walked.kind;
        match &mut self.in_order {
            None => self.taken[usize::from(walked.id)] = walked.descriptors,
            Some(order) => {
                let note = note(self.next_avail.at(), walked.descriptors);
                // SAFETY: `walk_next` has checked the identifier.
                unsafe { order.flight().insert(walked.id, walked.descriptors, note, lens) };
            }
        }
        self.more += walked.descriptors - 1;
        self.room -= walked.descriptors;
        self.next_avail = self.next_avail.advance(walked.descriptors, self.size);
    }

    #[inline(always)]
    fn in_order(&mut self) -> Option<&mut InOrder> {
        self.in_order.as_deref_mut()
    }

    #[inline(always)]
    fn used_places(&self) -> [u64; 2] {
        [self.next_used.word(), self.published.word()]
    }

    #[inline(always)]
    fn note(place: u64, places: u16) -> u64 {
        note(Cursor::from_word(place).at(), places)
    }

    type InOrderRun = LapRun;

    #[inline(always)]
    fn run_in_order(&self) -> LapRun {
        LapRun { at: self.next_used.at(), lap: self.next_used, size: self.size, more: 0 }
    }

    #[inline(always)]
    fn index_of(note: u64, size: u16) -> usize {
        usize::from(size) - (note as i32).unsigned_abs() as usize / DESC_SIZE
    }

    #[inline(always)]
    fn size(&self) -> u16 {
        self.size
    }

    #[inline(always)]
    fn write_used(&mut self, start: u64, id: u16, written: u32) {
        self.write_at(Cursor::from_word(start), id, written);
    }

    #[inline(always)]
    fn used_up_to(&mut self, next: u64, more: u16) {
        let next = Cursor::from_word(next);
        // No more than the ring has.
        let places = self.next_used.distance(next, self.size) as u16;
        self.staged += places;
        self.more -= more;
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
    fn latch(&mut self, error: QueueError) -> QueueError {
        self.paths = Paths::Slow;
        self.taken.fill(0);
        if let Some(order) = &mut self.in_order {
            order.clear();
        }
        *self.error.get_or_insert(error)
    }
}

/// Chains that are completed in order.
#[derive(Clone, Copy)]
pub(crate) struct LapRun {
    /// Bytes from the ring's end to the next chain: below 0.
    at: isize,
    /// A place in this lap.
    lap: Cursor,
    size: u16,
    /// Descriptors of the chains beyond one each.
    more: u16,
}

impl LapRun {
    /// Moves on to a place of any lap.
    #[inline(always)]
    fn go_to(&mut self, next: Cursor) {
        (self.lap, self.at) = (next, next.at());
    }
}

impl InOrderRun for LapRun {
    #[inline(always)]
    fn take(&mut self, taken: u64) -> bool {
        if taken == note(self.at, 1) {
            self.at += DESC_SIZE as isize;
            if self.at == 0 {
                cold_path();
                self.go_to(self.lap.next_lap(self.size));
            }
            return true;
        }
        let is_next = taken as u32 == self.at as u32;
        if is_next {
            let more = !(taken >> 32) as u16;
            self.more += more;
            self.go_to(self.lap.in_lap(self.at).advance(more + 1, self.size));
        }
        is_next
    }

    #[inline(always)]
    fn end(self) -> (u64, u16) {
        (self.lap.in_lap(self.at).word(), self.more)
    }
}

/// For another process to take over.
impl<O: Order> Ring<O> {
    /// The next descriptor to be made available.
    pub(crate) fn next_avail(&self) -> Position {
        self.next_avail.position(self.size)
    }

    /// Where the next used descriptor goes.
    pub(crate) fn next_used(&self) -> Position {
        self.next_used.position(self.size)
    }

    /// Up to here the driver sees what was used.
    pub(crate) fn published(&self) -> Position {
        self.published.position(self.size)
    }

    /// Descriptors that the chain `id`, which is below the size, takes.
    pub(crate) fn places(&self, id: u16) -> u16 {
        self.taken[usize::from(id)]
    }

    /// What stands at a position now.
    pub(crate) fn descriptor(&self, at: Position) -> Descriptor {
        // SAFETY: the place lies in the ring; see the invariant of `Ring`.
        let desc = unsafe { self.end.back(Cursor::new(at, self.size).at()) };
        // SAFETY: as above.
        unsafe { Descriptor { addr: desc.load_u64(DESC_ADDR), meta: desc.load_u64(DESC_LEN) } }
    }

    /// Goes to `used` and `avail`, with `in_flight` chains between them.
    ///
    /// [`Ring::pop_again`] brings those back.
    pub(crate) fn move_to(
        &mut self,
        used: Position,
        avail: Position,
        in_flight: u16,
    ) -> Result<(), StateError> {
        let (places, size) = (used.distance(avail, self.size), self.size);
        if places > size.into() || u32::from(in_flight) > places || (places == 0) != (in_flight == 0) {
            let (used, avail) = (used.to_off_wrap(size), avail.to_off_wrap(size));
            return Err(StateError::Distance { used, avail, in_flight });
        }
        self.next_used = Cursor::new(used, size);
        self.published = self.next_used;
        self.next_avail = self.next_used.advance(places as u16, size);
        (self.room, self.staged, self.more) = (size - places as u16, 0, places as u16 - in_flight);
        Ok(())
    }

    /// Makes nothing look used that was taken.
    ///
    /// A completion that was staged and is forgotten now would come true when the driver gets
    /// there.
    pub(crate) fn disown(&mut self) {
        let (mut at, size) = (self.published, self.size);
        while at != self.next_avail {
            // SAFETY: the place lies in the ring; see the invariant of `Ring`.
            let desc = unsafe { self.end.back(at.at()) };
            // Relaxed: the driver does not look there until something before it is used.
            // SAFETY: as above.
            unsafe {
                if matches(desc.load_u16(DESC_FLAGS, Relaxed), at.used()) {
                    desc.store_u16(DESC_FLAGS, at.available(), Relaxed);
                }
            }
            at = at.advance(1, size);
        }
    }

    /// Takes chain `id` into the batch from saved descriptors.
    ///
    /// A slot is free. It does not move on in the ring. `false`: the segments do not fit, or cannot
    /// be reached.
    pub(crate) fn pop_again(
        &mut self,
        id: u16,
        descriptors: &[Descriptor],
        batch: &mut Batch,
        check: &mut impl TranslationCheck,
    ) -> Result<bool, QueueError> {
        if let Some(error) = self.error {
            batch.clear();
            return Err(error);
        }
        let tables = &mut self.tables;
        let walked = walk_translated(batch, check, |batch, mut fetch| {
            Ok(tables.walk_saved(id, descriptors, batch, &mut fetch)?.then_some(()))
        });
        self.take(batch, walked, |ring, (), _| {
            ring.taken[usize::from(id)] = descriptors.len() as u16;
        })
    }
}

/// The descriptors that each chain in flight takes.
#[derive(Clone, Copy)]
pub(crate) struct Taken(*mut u16);

impl Flight for Taken {
    #[inline(always)]
    unsafe fn contains(self, id: u16) -> bool {
        // SAFETY: there is a number for each identifier below the size.
        unsafe { *self.0.add(id.into()) != 0 }
    }

    #[inline(always)]
    unsafe fn insert(self, id: u16, places: u16, _note: u64, _lens: [u32; 2]) {
        // SAFETY: as above.
        unsafe { *self.0.add(id.into()) = places };
    }
}

/// The note of a chain of so many descriptors, the first of which lies `at` from the ring's end.
///
/// The low half is the place, which no other chain in flight has; the high half counts the descriptors
/// down from -1 for one of them, which is what a number below 0 has there.
#[inline(always)]
fn note(at: isize, places: u16) -> u64 {
    (at as u64).wrapping_sub(u64::from(places - 1) << 32)
}
