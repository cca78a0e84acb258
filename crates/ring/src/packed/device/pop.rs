//! How chains are taken from a packed queue: many of one kind in a loop.
use super::{Descriptor, Ring, Taken, desc_bytes, matches, note};
use crate::area::Cells;
use crate::batch::{Batch, Chain, Free, Kind, MAX_CHAIN};
use crate::chain::{Descriptor as _, single};
use crate::device_ring::DeviceRing;
use crate::in_flight::Flight;
use crate::packed::SWAP;
use crate::packed::chain::Tables;
use crate::table_memory::{NoTables, TableMemory};
use crate::{Order, QueueError, Segment};
use core::hint::cold_path;
use core::sync::atomic::Ordering::Relaxed;
use paravane_spec::packed::{DESC_ADDR, DESC_F_INDIRECT, DESC_F_WRITE, DESC_FLAGS, DESC_LEN, DESC_SIZE};

/// Where a loop stopped.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stop {
    /// The next descriptor is not available, or the batch is full.
    Empty,
    /// It is of another kind, or something is wrong with it.
    ///
    /// What was seen of it is forgotten.
    Special,
}

impl<O: Order> Ring<O> {
    /// Takes chains into the batch until it is full, or none is available.
    ///
    /// What was in the batch before is forgotten.
    #[inline(always)]
    pub(super) fn pop_some(
        &mut self,
        batch: &mut Batch,
        memory: &mut impl TableMemory,
    ) -> Result<(), QueueError> {
        let stop = if !self.only_one(batch) {
            self.pop_many(batch, memory)
        } else if self.kind == Kind::Simple {
            let flight = self.flight();
            match self.ordered() {
                None => self.take_one::<false>(batch, &mut NoTables, flight),
                Some(flight) => self.take_one::<false>(batch, &mut NoTables, flight),
            }
        } else {
            self.pop_next(batch, memory)
        };
        if stop == Stop::Empty {
            return Ok(());
        }
        cold_path();
        self.pop_mixed(batch, memory)
    }

    /// Whether no chain behind the next one can be taken.
    ///
    /// `false` as well where that is not known at once.
    #[inline(always)]
    fn only_one(&self, batch: &Batch) -> bool {
        let next = self.next_avail;
        batch.slots() == 1
            || next.to_end() > 1 && {
                // SAFETY: the place lies in the ring; see the invariant of `Ring`.
                let second = unsafe { self.end.back(next.at() + DESC_SIZE as isize) };
                // Relaxed: only compared. SAFETY: as above.
                !matches(unsafe { second.load_u16(DESC_FLAGS, Relaxed) }, next.available())
            }
    }

    /// Takes chains of the kind of the last one until the batch is full.
    ///
    /// What was in the batch before is forgotten.
    #[inline(never)]
    fn pop_many<M: TableMemory>(&mut self, batch: &mut Batch, memory: &mut M) -> Stop {
        match self.kind {
            Kind::Simple => self.pop_single::<false, _>(batch, &mut NoTables),
            Kind::ShortTable => self.pop_single::<true, _>(batch, memory),
            Kind::Linked => {
                batch.clear();
                self.pop_walked::<false, _>(batch, &mut NoTables)
            }
            Kind::Table => {
                batch.clear();
                self.pop_walked::<true, _>(batch, memory)
            }
        }
    }

    /// As [`Ring::pop_many`] of one chain.
    #[inline(never)]
    fn pop_next<M: TableMemory>(&mut self, batch: &mut Batch, memory: &mut M) -> Stop {
        let flight = self.flight();
        match self.ordered() {
            None => self.pop_one_of_kind(batch, memory, flight),
            Some(flight) => self.pop_one_of_kind(batch, memory, flight),
        }
    }

    /// See [`Ring::pop_next`].
    #[inline(always)]
    fn pop_one_of_kind<M: TableMemory>(
        &mut self,
        batch: &mut Batch,
        memory: &mut M,
        flight: impl Flight,
    ) -> Stop {
        match self.kind {
            Kind::Simple => self.take_one::<false>(batch, &mut NoTables, flight),
            Kind::ShortTable => self.take_one::<true>(batch, memory, flight),
            Kind::Table => self.walk_one::<true>(batch, memory, flight),
            Kind::Linked => self.walk_one::<false>(batch, &mut NoTables, flight),
        }
    }

    /// The chains in flight, without IN_ORDER.
    #[inline(always)]
    fn flight(&mut self) -> Taken {
        Taken(self.taken.as_mut_ptr())
    }

    /// Takes the next chain. As [`Ring::pop_walked`] of one.
    #[inline(always)]
    fn walk_one<const TABLE: bool>(
        &mut self,
        batch: &mut Batch,
        memory: &mut impl TableMemory,
        flight: impl Flight,
    ) -> Stop {
        batch.clear();
        let (next, size, (chain, segments)) = (self.next_avail, self.size, batch.front());
        // SAFETY: the place lies in the ring; see the invariant of `Ring`.
        let first = unsafe { fetch::<O>(self.end, next.at()) };
        if !matches(first.flags(), next.available()) {
            return Stop::Empty;
        }
        let (ring, end) = ((next.at(), self.end, desc_bytes(size)), segments.wrapping_add(MAX_CHAIN));
        // SAFETY: an empty batch has room for any chain.
        let walked = unsafe { self.tables.walk_usual::<TABLE>(first, ring, segments, end, memory) };
        let Some((walk, last)) = walked else { return Stop::Special };
        let id = last.id();
        let places = if TABLE { 1 } else { ((walk.end.addr() - segments.addr()) / DESC_SIZE) as u16 };
        // SAFETY: the identifier is below the size, which is checked first.
        if id >= size || places > self.room || unsafe { flight.contains(id) } {
            return Stop::Special;
        }
        // SAFETY: the identifier was checked, and a batch has a slot.
        unsafe {
            flight.insert(id, places, note(next.at(), places), walk.lens());
            chain.write(walk.chain(id, segments));
        }
        self.kind = Kind::of_walked::<TABLE>(walk.end == segments.wrapping_add(1));
        batch.set_one(walk.end);
        self.more += places - 1;
        self.room -= places;
        self.next_avail = next.advance(places, size);
        Stop::Empty
    }

    /// Takes the next chain, if it has one descriptor.
    ///
    /// As [`Ring::pop_single`] of one.
    #[inline(always)]
    fn take_one<const TABLE: bool>(
        &mut self,
        batch: &mut Batch,
        memory: &mut impl TableMemory,
        flight: impl Flight,
    ) -> Stop {
        let (next, (chain, segment)) = (self.next_avail, batch.front());
        let indirect = if TABLE { u32::from(DESC_F_INDIRECT) << 16 } else { 0 };
        let expected = u32::from(next.available()) << 16 | indirect;
        let stop = if self.room == 0 {
            Some(Stop::Special)
        } else {
            // SAFETY: the place lies in the ring; see the invariant of `Ring`. A batch has a slot,
            // and a segment for it.
            let taken = unsafe {
                self.source(flight).take::<O, TABLE>(next.at(), expected, SEGMENT, chain, segment, memory)
            };
            taken.err()
        };
        batch.set_single(usize::from(stop.is_none()));
        if let Some(stop) = stop {
            return stop;
        }
        self.room -= 1;
        self.next_avail = next.advance(1, self.size);
        Stop::Empty
    }

    /// What chains are taken from.
    #[inline(always)]
    fn source<F: Flight>(&self, flight: F) -> Source<'_, F> {
        Source { tables: &self.tables, end: self.end, size: self.size.into(), flight }
    }

    /// Takes chains of one descriptor until the batch is full.
    ///
    /// The descriptor is direct, or alone in an indirect table. What was in the batch before is
    /// forgotten. Stops at any other chain. Nothing is checked twice and nothing can fail here.
    #[inline(never)]
    fn pop_single<const TABLE: bool, M: TableMemory>(&mut self, batch: &mut Batch, memory: &mut M) -> Stop {
        let flight = self.flight();
        match self.ordered() {
            None => self.take_single::<TABLE>(batch, memory, flight),
            Some(flight) => self.take_single::<TABLE>(batch, memory, flight),
        }
    }

    /// The loop of [`Ring::pop_single`].
    #[inline(always)]
    fn take_single<const TABLE: bool>(
        &mut self,
        batch: &mut Batch,
        memory: &mut impl TableMemory,
        flight: impl Flight,
    ) -> Stop {
        let (mut chain, mut segment) = batch.front();
        let (size, slots, room) = (self.size, batch.slots(), usize::from(self.room));
        let wanted = slots.min(room);
        let indirect = if TABLE { u32::from(DESC_F_INDIRECT) << 16 } else { 0 };
        let mut lap = self.next_avail;
        let (mut at, mut left, mut end) = (lap.at(), wanted, SEGMENT);
        let mut expected = u32::from(lap.available()) << 16 | indirect;
        let source = self.source(flight);
        let stop = loop {
            if left == 0 {
                // Nothing can be available beyond the room. What is so all the same is refused.
                break if wanted == slots { Stop::Empty } else { Stop::Special };
            }
            // SAFETY: the place lies in the ring; see the invariant of `Ring`. The batch has `slots`
            // slots at least, and a segment for each of them (its invariant); fewer were taken.
            let taken = unsafe { source.take::<O, TABLE>(at, expected, end, chain, segment, memory) };
            if let Err(stop) = taken {
                break stop;
            }
            (chain, segment) = (chain.wrapping_add(1), segment.wrapping_add(1));
            end += SEGMENT;
            at += DESC_SIZE as isize;
            if at == 0 {
                cold_path();
                lap = lap.next_lap(size);
                at = lap.at();
                expected ^= u32::from(SWAP) << 16;
            }
            left -= 1;
        };
        batch.set_single(wanted - left);
        self.room = (room - (wanted - left)) as u16;
        self.next_avail = lap.in_lap(at);
        stop
    }

    /// Takes chains of several descriptors until the batch is full.
    ///
    /// All in indirect tables or all in the ring. [`Stop::Special`]: the next one is of another
    /// kind, unusual, or wrong, or the batch has no room for its segments.
    #[inline(never)]
    fn pop_walked<const TABLE: bool, M: TableMemory>(&mut self, batch: &mut Batch, memory: &mut M) -> Stop {
        let flight = self.flight();
        match self.ordered() {
            None => self.take_walked::<TABLE>(batch, memory, flight),
            Some(flight) => self.take_walked::<TABLE>(batch, memory, flight),
        }
    }

    /// The loop of [`Ring::pop_walked`].
    #[inline(always)]
    fn take_walked<const TABLE: bool>(
        &mut self,
        batch: &mut Batch,
        memory: &mut impl TableMemory,
        flight: impl Flight,
    ) -> Stop {
        let (size, end, mut next) = (self.size, self.end, self.next_avail);
        let ring_bytes = desc_bytes(size);
        let Free { mut chains, base, mut segments, mut room_end } = batch.free();
        let last = chains.wrapping_add(batch.slots() - batch.count());
        let (first_free, first_segment) = (chains, segments);
        // Bytes, of descriptors as of segments.
        let mut room = usize::from(self.room) * DESC_SIZE;
        let mut available = next.available();
        let stop = loop {
            if chains == last {
                break Stop::Empty;
            }
            // SAFETY: the place lies in the ring; see the invariant of `Ring`.
            let first = unsafe { fetch::<O>(end, next.at()) };
            if !matches(first.flags(), available) {
                break Stop::Empty;
            }
            let ring = (next.at(), end, ring_bytes);
            // SAFETY: the segments from the first free one on, as far as the next chain may take
            // them; see `Free`.
            let walked = unsafe { self.tables.walk_usual::<TABLE>(first, ring, segments, room_end, memory) };
            let Some((walk, last)) = walked else { break Stop::Special };
            let bytes = if TABLE { DESC_SIZE } else { walk.end.addr() - segments.addr() };
            let id = last.id();
            // SAFETY: the identifier is below the size, which is checked first.
            if id >= size || bytes > room || unsafe { flight.contains(id) } {
                break Stop::Special;
            }
            // SAFETY: the batch has `limit - count` free slots at least; fewer were taken. The
            // segments were taken from its room, and one more is free for each slot after this one.
            unsafe {
                let places = (bytes / DESC_SIZE) as u16;
                flight.insert(id, places, note(next.at(), places), walk.lens());
                chains.write(walk.chain(id, base));
                (chains, room_end) = (chains.add(1), room_end.wrapping_add(1));
            }
            segments = walk.end;
            room -= bytes;
            if next.move_on(bytes, size) {
                available = next.available();
            }
        };
        // SAFETY: both point into the slots of the batch.
        let taken = unsafe { chains.offset_from_unsigned(first_free) };
        let left = (room / DESC_SIZE) as u16;
        self.more += self.room - left - taken as u16;
        self.room = left;
        self.next_avail = next;
        if taken > 0 {
            let short = segments.addr() - first_segment.addr() == taken * size_of::<Segment>();
            self.kind = Kind::of_walked::<TABLE>(short);
        }
        batch.add_written(taken, segments);
        stop
    }

    /// Takes chains of all kinds until the batch is full, or has no room for the next one.
    #[inline(never)]
    fn pop_mixed<M: TableMemory>(&mut self, batch: &mut Batch, memory: &mut M) -> Result<(), QueueError> {
        loop {
            let before = batch.count();
            let first = self.kind.is_table();
            for table in [first, !first] {
                let stop = if table {
                    self.pop_walked::<true, _>(batch, memory)
                } else {
                    self.pop_walked::<false, _>(batch, &mut NoTables)
                };
                if stop == Stop::Empty {
                    return Ok(());
                }
            }
            if batch.count() == before && !self.pop_one(batch, memory)? {
                return Ok(());
            }
        }
    }
}

/// Bytes of a segment.
const SEGMENT: u32 = size_of::<Segment>() as u32;

/// Fetches the first descriptor of a chain, which lies `at` from the ring's end.
///
/// It is available if its flags say so.
///
/// # Safety
/// The place lies in the ring.
#[inline(always)]
unsafe fn fetch<O: Order>(ring_end: Cells, at: isize) -> Descriptor {
    // SAFETY: the caller vouches for the place.
    let desc = unsafe { ring_end.back(at) };
    // Acquire: pairs with the driver's release store of the flags, before which it wrote the rest,
    // and the rest of the chain. SAFETY: as above.
    let meta = unsafe { desc.load_u64_acquire(DESC_LEN) };
    O::after_acquire();
    // SAFETY: as above.
    Descriptor { addr: unsafe { desc.load_u64(DESC_ADDR) }, meta }
}

/// What chains are taken from.
struct Source<'a, F> {
    tables: &'a Tables,
    /// The descriptor ring's end.
    end: Cells,
    size: usize,
    flight: F,
}

impl<F: Flight> Source<'_, F> {
    /// Takes the chain that lies `at` from the ring's end, if it has one descriptor.
    ///
    /// `expected` is the upper half of its second word, without WRITE and identifier. `Err`: nothing
    /// has changed.
    ///
    /// # Safety
    /// `chain` and `segment` are places of a batch, whose segment ends after `end` bytes.
    #[inline(always)]
    unsafe fn take<O: Order, const TABLE: bool>(
        &self,
        at: isize,
        expected: u32,
        end: u32,
        chain: *mut Chain,
        segment: *mut Segment,
        memory: &mut impl TableMemory,
    ) -> Result<(), Stop> {
        // SAFETY: the place lies in the ring; see the invariant of `Ring`.
        let mut desc = unsafe { fetch::<O>(self.end, at) };
        // What is left is the identifier, or more than any: one comparison for all of it.
        let id = (((desc.meta >> 32) as u32 ^ expected) & !(u32::from(DESC_F_WRITE) << 16)) as usize;
        // SAFETY: the identifier is below the size, which is checked first.
        if id >= self.size || unsafe { self.flight.contains(id as u16) } {
            let available = matches(desc.flags(), (expected >> 16) as u16 & SWAP);
            return Err(if available { Stop::Special } else { Stop::Empty });
        }
        if TABLE {
            desc = self.tables.fetch_alone(desc, memory).ok_or(Stop::Special)?;
        }
        if TABLE && desc.has(DESC_F_INDIRECT)
            // Not less: it has no bytes, or wraps around the address space.
            || desc.addr >= desc.addr.wrapping_add(desc.len().into())
        {
            return Err(Stop::Special);
        }
        let taken = single(id as u16, end, desc);
        // SAFETY: the identifier was checked; the caller vouches for the places.
        unsafe {
            self.flight.insert(id as u16, 1, note(at, 1), taken.lens());
            segment.write(Segment { addr: desc.addr, len: desc.len() });
            chain.write(taken);
        }
        Ok(())
    }
}
