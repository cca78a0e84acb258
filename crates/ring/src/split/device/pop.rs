//! How chains are taken from a split queue: many of one kind in a loop.
//!
//! ```text
//!   pop_some --kind of the last chain--> pop_single | pop_walked --> all: done
//!                                                               \--> pop_mixed: any kind, one by one
//! ```
use super::Ring;
use crate::area::Cells;
use crate::batch::{Batch, Chain, Free, Kind, MAX_CHAIN};
use crate::chain::{Descriptor as _, single};
use crate::device_ring::DeviceRing;
use crate::in_flight::Flight;
use crate::split::chain::Tables;
use crate::table_memory::{NoTables, TableMemory};
use crate::{Order, QueueError, Segment};
use core::hint::cold_path;
use core::sync::atomic::Ordering::Relaxed;
use paravane_spec::split::{AVAIL_ENTRY, AVAIL_RING, DESC_F_INDIRECT, DESC_F_NEXT};

impl<O: Order> Ring<O> {
    /// Takes chains into the batch until it is full, or has the `available` ones.
    ///
    /// What was in the batch before is forgotten.
    #[inline(always)]
    pub(super) fn pop_some(
        &mut self,
        batch: &mut Batch,
        available: usize,
        memory: &mut impl TableMemory,
    ) -> Result<(), QueueError> {
        let limit = available.min(batch.slots());
        let all = if limit != 1 {
            self.pop_many(batch, limit, memory)
        } else if self.kind == Kind::Simple {
            let flight = self.in_flight.flight();
            match self.ordered() {
                None => self.take_one::<false>(batch, &mut NoTables, flight),
                Some(flight) => self.take_one::<false>(batch, &mut NoTables, flight),
            }
        } else {
            self.pop_next(batch, memory)
        };
        if all {
            return Ok(());
        }
        cold_path();
        self.pop_mixed(batch, limit, memory)
    }

    /// Takes chains of the kind of the last one until the batch has `limit`.
    ///
    /// What was in the batch before is forgotten. `false`: the next one is of another kind, unusual,
    /// or wrong, or the batch has no room for its segments. It is not taken, and what was seen of it
    /// is forgotten.
    #[inline(never)]
    fn pop_many<M: TableMemory>(&mut self, batch: &mut Batch, limit: usize, memory: &mut M) -> bool {
        if limit == 0 {
            batch.clear();
            return true;
        }
        match self.kind {
            Kind::Simple => self.pop_single::<false, _>(batch, limit, &mut NoTables),
            Kind::ShortTable => self.pop_single::<true, _>(batch, limit, memory),
            Kind::Linked => {
                batch.clear();
                self.pop_walked::<false, _>(batch, limit, &mut NoTables)
            }
            Kind::Table => {
                batch.clear();
                self.pop_walked::<true, _>(batch, limit, memory)
            }
        }
    }

    /// As [`Ring::pop_many`] of one chain, which is available.
    #[inline(never)]
    fn pop_next<M: TableMemory>(&mut self, batch: &mut Batch, memory: &mut M) -> bool {
        let flight = self.in_flight.flight();
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
    ) -> bool {
        match self.kind {
            Kind::Simple => self.take_one::<false>(batch, &mut NoTables, flight),
            Kind::ShortTable => self.take_one::<true>(batch, memory, flight),
            Kind::Table => self.walk_one::<true>(batch, memory, flight),
            Kind::Linked => self.walk_one::<false>(batch, &mut NoTables, flight),
        }
    }

    /// Takes the next chain, which is available. As [`Ring::pop_walked`] of one.
    #[inline(always)]
    fn walk_one<const TABLE: bool>(
        &mut self,
        batch: &mut Batch,
        memory: &mut impl TableMemory,
        flight: impl Flight,
    ) -> bool {
        batch.clear();
        let (next, (chain, segments)) = (self.next_avail, batch.front());
        let place = next as usize & self.mask;
        // SAFETY: the entry is less than the size; see the invariant of `Ring`.
        let head = usize::from(unsafe { entry(self.avail, place) });
        if head > self.mask {
            return false;
        }
        let head = head as u16;
        let end = segments.wrapping_add(MAX_CHAIN);
        // SAFETY: `head` was just checked, and an empty batch has room for any chain.
        let walked = unsafe { self.tables.walk_usual::<TABLE>(head, segments, end, memory) };
        // SAFETY: as above.
        let Some(walk) = walked.filter(|_| !unsafe { flight.contains(head) }) else { return false };
        // SAFETY: the head was checked, and a batch has a slot.
        unsafe {
            flight.insert(head, 1, next, walk.lens());
            chain.write(walk.chain(head, segments));
        }
        self.kind = Kind::of_walked::<TABLE>(walk.end == segments.wrapping_add(1));
        batch.set_one(walk.end);
        self.next_avail = next + 1;
        true
    }

    /// Takes the next chain, which is available, if it has one descriptor.
    ///
    /// As [`Ring::pop_single`] of one.
    #[inline(always)]
    fn take_one<const TABLE: bool>(
        &mut self,
        batch: &mut Batch,
        memory: &mut impl TableMemory,
        flight: impl Flight,
    ) -> bool {
        let (next, (chain, segment)) = (self.next_avail, batch.front());
        // SAFETY: a batch has a slot, and a segment for it.
        let taken = unsafe { self.source(flight).take::<TABLE>(next, SEGMENT, chain, segment, memory) };
        batch.set_single(usize::from(taken));
        self.next_avail = next + u64::from(taken);
        taken
    }

    /// Takes chains of one descriptor until the batch has `limit`.
    ///
    /// The descriptor is direct, or alone in an indirect table. See [`Ring::pop_many`]. Nothing is
    /// checked twice and nothing can fail here.
    #[inline(never)]
    fn pop_single<const TABLE: bool, M: TableMemory>(
        &mut self,
        batch: &mut Batch,
        limit: usize,
        memory: &mut M,
    ) -> bool {
        let flight = self.in_flight.flight();
        match self.ordered() {
            None => self.take_single::<TABLE>(batch, limit, memory, flight),
            Some(flight) => self.take_single::<TABLE>(batch, limit, memory, flight),
        }
    }

    /// The loop of [`Ring::pop_single`].
    #[inline(always)]
    fn take_single<const TABLE: bool>(
        &mut self,
        batch: &mut Batch,
        limit: usize,
        memory: &mut impl TableMemory,
        flight: impl Flight,
    ) -> bool {
        let (mut chain, mut segment) = batch.front();
        let (mut next, mut end, mut left) = (self.next_avail, SEGMENT, limit);
        let source = self.source(flight);
        // SAFETY: the batch has `limit` slots at least, and a segment for each of them (its invariant);
        // fewer were taken.
        while left != 0 && unsafe { source.take::<TABLE>(next, end, chain, segment, memory) } {
            (chain, segment) = (chain.wrapping_add(1), segment.wrapping_add(1));
            (next, end, left) = (next + 1, end + SEGMENT, left - 1);
        }
        batch.set_single(limit - left);
        self.next_avail = next;
        left == 0
    }

    /// What chains are taken from.
    #[inline(always)]
    fn source<F: Flight>(&self, flight: F) -> Source<'_, F> {
        Source { tables: &self.tables, avail: self.avail, mask: self.mask, flight }
    }

    /// Takes chains of several descriptors until the batch has `limit`.
    ///
    /// All in indirect tables or all in the ring. `false`: as [`Ring::pop_many`].
    #[inline(never)]
    fn pop_walked<const TABLE: bool, M: TableMemory>(
        &mut self,
        batch: &mut Batch,
        limit: usize,
        memory: &mut M,
    ) -> bool {
        let flight = self.in_flight.flight();
        match self.ordered() {
            None => self.take_walked::<TABLE>(batch, limit, memory, flight),
            Some(flight) => self.take_walked::<TABLE>(batch, limit, memory, flight),
        }
    }

    /// The loop of [`Ring::pop_walked`].
    #[inline(always)]
    fn take_walked<const TABLE: bool>(
        &mut self,
        batch: &mut Batch,
        limit: usize,
        memory: &mut impl TableMemory,
        flight: impl Flight,
    ) -> bool {
        let (avail, mask) = (self.avail, self.mask);
        let Free { mut chains, base, mut segments, mut room_end } = batch.free();
        let (start, first_segment) = (self.next_avail, segments);
        let end = start + (limit - batch.count()) as u64;
        let mut next = start;
        while next != end {
            let place = next as usize & mask;
            // SAFETY: the entry is less than the size; see the invariant of `Ring`.
            let head = usize::from(unsafe { entry(avail, place) });
            // SAFETY: the head is below the size, which is checked first.
            if head > mask || unsafe { flight.contains(head as u16) } {
                break;
            }
            let head = head as u16;
            // SAFETY: `head` was just checked. The segments are those from the first free one on, as far as
            // the next chain may take them; see `Free`.
            let walked = unsafe { self.tables.walk_usual::<TABLE>(head, segments, room_end, memory) };
            let Some(walk) = walked else { break };
            // SAFETY: the head was checked. The batch has `limit - count` free slots at least; fewer
            // were taken. The segments were taken from its room, and one more is free for each slot
            // after this one.
            unsafe {
                flight.insert(head, 1, next, walk.lens());
                chains.write(walk.chain(head, base));
                (chains, room_end) = (chains.add(1), room_end.wrapping_add(1));
            }
            segments = walk.end;
            next += 1;
        }
        let taken = (next - start) as usize;
        if taken > 0 {
            let short = segments.addr() - first_segment.addr() == taken * size_of::<Segment>();
            self.kind = Kind::of_walked::<TABLE>(short);
        }
        batch.add_written(taken, segments);
        self.next_avail = next;
        next == end
    }

    /// Takes chains of all kinds until the batch has `limit`, or no room for the next one.
    #[inline(never)]
    fn pop_mixed<M: TableMemory>(
        &mut self,
        batch: &mut Batch,
        limit: usize,
        memory: &mut M,
    ) -> Result<(), QueueError> {
        loop {
            let before = batch.count();
            let table = self.kind.is_table();
            if !table && self.pop_walked::<false, _>(batch, limit, &mut NoTables)
                || self.pop_walked::<true, _>(batch, limit, memory)
                || table && self.pop_walked::<false, _>(batch, limit, &mut NoTables)
            {
                return Ok(());
            }
            if batch.count() == before && !self.pop_one(batch, memory)? {
                return Ok(());
            }
        }
    }
}

/// Bytes of a segment.
const SEGMENT: u32 = size_of::<Segment>() as u32;

/// What chains are taken from.
struct Source<'a, F> {
    tables: &'a Tables,
    avail: Cells,
    mask: usize,
    flight: F,
}

impl<F: Flight> Source<'_, F> {
    /// Takes the chain at position `next`, if it has one descriptor; `false`: nothing has changed.
    ///
    /// # Safety
    /// `chain` and `segment` are places of a batch, whose segment ends after `end` bytes.
    #[inline(always)]
    unsafe fn take<const TABLE: bool>(
        &self,
        next: u64,
        end: u32,
        chain: *mut Chain,
        segment: *mut Segment,
        memory: &mut impl TableMemory,
    ) -> bool {
        let place = next as usize & self.mask;
        // SAFETY: the entry is less than the size; see the invariant of `Ring`.
        let head = unsafe { entry(self.avail, place) };
        if usize::from(head) > self.mask {
            return false;
        }
        // SAFETY: `head` was just checked.
        let mut desc = unsafe { self.tables.fetch(head) };
        if TABLE {
            let Some(alone) = self.tables.fetch_alone(desc, memory) else { return false };
            desc = alone;
        }
        if desc.flags() & (DESC_F_NEXT | DESC_F_INDIRECT) != 0
            // Not less: it has no bytes, or wraps around the address space.
            || desc.addr >= desc.addr.wrapping_add(desc.len().into())
            // SAFETY: `head` was checked.
            || unsafe { self.flight.contains(head) }
        {
            return false;
        }
        let taken = single(head, end, desc);
        // SAFETY: the head was checked; the caller vouches for the places.
        unsafe {
            self.flight.insert(head, 1, next, taken.lens());
            segment.write(Segment { addr: desc.addr, len: desc.len() });
            chain.write(taken);
        }
        true
    }
}

/// An entry of the available ring.
///
/// Relaxed: the acquire load of avail.idx has ordered it, and the descriptors, after their writing.
///
/// # Safety
/// The ring has that many entries.
#[inline(always)]
unsafe fn entry(avail: Cells, index: usize) -> u16 {
    // SAFETY: the caller vouches for the entry.
    unsafe { avail.load_u16(AVAIL_RING + index * AVAIL_ENTRY, Relaxed) }
}
