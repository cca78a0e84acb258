//! Walks a chain of several descriptors, in the ring or in an indirect table.
//!
//! ```text
//!   ring, from the head on:  desc (NEXT) | desc (NEXT) | ... | last    its identifier is the chain's
//!                                                              \--> INDIRECT: entry 0, 1, ... to the end
//! ```
//!
//! A chain is a run of neighbours (section 2.8.6), around the end of the ring too. Only its first
//! descriptor's flags say that it is available; the driver writes them last. A table is used from
//! front to back; identifiers and the NEXT flag mean nothing in it (section 2.8.7). Everything is
//! bounded: the part in the ring by the ring's room, the indirect part by its table, both together
//! by `MAX_CHAIN`. There can be no loops.
use super::Descriptor;
use crate::QueueError;
use crate::Segment;
use crate::area::Cells;
use crate::batch::MAX_CHAIN;
use crate::batch::{Batch, Kind};
use crate::chain::{ChainBuilder, Descriptor as _, Table};
use crate::table_memory::TableMemory;
use crate::walk::{Walk, walk_linked, walk_table as walk_in_place};
use paravane_spec::packed::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_SIZE};

/// A chain that was walked and added to the batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Walked {
    pub(crate) id: u16,
    /// Descriptors that it takes in the ring.
    pub(crate) descriptors: u16,
    pub(crate) kind: Kind,
}

/// The descriptor ring and its indirect tables, for walks.
#[derive(Debug)]
pub(crate) struct Tables {
    desc: Cells,
    size: u16,
    indirect: Table,
}

impl Tables {
    /// # Safety
    /// `desc` has `size` descriptors.
    pub(crate) unsafe fn new(desc: Cells, size: u16, indirect: bool) -> Self {
        Self { desc, size, indirect: Table::new(indirect) }
    }

    /// Fetches the one descriptor of the indirect table that `first` points to.
    ///
    /// `None` for any other chain. What the descriptor says is not looked at.
    #[inline(always)]
    pub(crate) fn fetch_alone(&self, first: Descriptor, memory: &mut impl TableMemory) -> Option<Descriptor> {
        let table = self.indirect.in_place_alone(first, memory)?;
        // SAFETY: the table has one entry.
        Some(unsafe { Descriptor { addr: table.load_u64(0), meta: table.load_u64(8) } })
    }

    /// Walks the chain that begins with `first`: its indirect table, or in the ring.
    ///
    /// The descriptor lies `at` bytes from `ring_end`, where `ring_bytes` of ring end. `None` for a chain of the other kind, or of
    /// both, and what is malformed; see [`walk_in_place`]. The last descriptor is that of the ring.
    ///
    /// # Safety
    /// As [`walk_linked`].
    #[inline(always)]
    pub(crate) unsafe fn walk_usual<const TABLE: bool>(
        &self,
        first: Descriptor,
        (mut at, ring_end, ring_bytes): (isize, Cells, usize),
        out: *mut Segment,
        end: *mut Segment,
        memory: &mut impl TableMemory,
    ) -> Option<(Walk, Descriptor)> {
        if first.has(DESC_F_INDIRECT) != TABLE {
            return None;
        }
        if TABLE {
            let (table, size) = self.indirect.in_place(first, memory)?;
            // SAFETY: the table has one entry at least, and `next` stays below its size.
            let load =
                |at: usize| unsafe { Descriptor { addr: table.load_u64(at), meta: table.load_u64(at + 8) } };
            let mut at = 0;
            let next = || {
                at += DESC_SIZE;
                (at != size).then(|| load(at))
            };
            // SAFETY: the caller vouches for the segments.
            return Some((unsafe { walk_in_place(load(0), out, end, next) }?, first));
        }
        let next = |_| {
            at += DESC_SIZE as isize;
            if at == 0 {
                at = -(ring_bytes as isize);
            }
            // Relaxed: the acquire load of the head's flags has ordered them after their writing.
            // SAFETY: the place lies in the ring.
            let desc = unsafe { ring_end.back(at) };
            // SAFETY: as above.
            Some(unsafe { Descriptor { addr: desc.load_u64(0), meta: desc.load_u64(8) } })
        };
        // A whole ring of NEXT flags ends where the segments do.
        let end = end.min(out.wrapping_byte_add(ring_bytes.min(MAX_CHAIN * DESC_SIZE)));
        // SAFETY: the caller vouches for the segments.
        unsafe { walk_linked(first, out, end, next) }
    }

    /// Walks the chain from index `head` through at most `room` descriptors.
    ///
    /// The descriptor `first` is fetched already. The chain is added to `batch`, which has a free
    /// slot, if `accept` takes its identifier. `None`: its segments do not fit; nothing was added.
    #[inline(always)]
    pub(crate) fn walk(
        &mut self,
        head: u16,
        first: Descriptor,
        room: u16,
        batch: &mut Batch,
        fetch: &mut impl FnMut(u64, &mut [u8]) -> bool,
        accept: impl FnOnce(u16) -> Result<(), QueueError>,
    ) -> Result<Option<Walked>, QueueError> {
        let Self { desc: cells, size, indirect } = self;
        let mut chain = ChainBuilder::new(head, batch.room());
        let next = |index, _| {
            let index = if index + 1 == *size { 0 } else { index + 1 };
            let at = usize::from(index) * DESC_SIZE;
            // Relaxed: the acquire load of the head's flags has ordered them after their writing.
            // SAFETY: `index` is less than the size.
            Ok((index, unsafe { Descriptor { addr: cells.load_u64(at), meta: cells.load_u64(at + 8) } }))
        };
        let end = chain.follow(head, first, room.into(), next, |chain, index, desc| {
            walk_table(indirect.fetch(index, desc, fetch)?, chain)
        })?;
        let Some((last, descriptors)) = end else { return Ok(None) };
        let id = last.id();
        accept(id)?;
        let (counts, lens) = chain.parts();
        batch.add(id, counts, lens);
        let kind = match descriptors {
            _ if last.has(DESC_F_INDIRECT) => Kind::Table,
            1 => Kind::Simple,
            _ => Kind::Linked,
        };
        Ok(Some(Walked { id, descriptors, kind }))
    }

    /// As [`Tables::walk`], for a chain that was saved when it was taken.
    ///
    /// What is saved is as hostile as the ring.
    pub(crate) fn walk_saved(
        &mut self,
        id: u16,
        saved: &[Descriptor],
        batch: &mut Batch,
        fetch: &mut impl FnMut(u64, &mut [u8]) -> bool,
    ) -> Result<bool, QueueError> {
        let mut chain = ChainBuilder::new(id, batch.room());
        for (index, desc) in (0_u16..).zip(saved) {
            let fits = if desc.has(DESC_F_INDIRECT) {
                // It may only be the last one.
                let next = Descriptor { meta: desc.meta | u64::from(DESC_F_NEXT) << 48, ..*desc };
                let desc = if usize::from(index) + 1 == saved.len() { *desc } else { next };
                walk_table(self.indirect.fetch(index, desc, fetch)?, &mut chain)?
            } else {
                chain.take(index, *desc)?
            };
            if !fits {
                return Ok(false);
            }
        }
        let (counts, lens) = chain.parts();
        batch.add(id, counts, lens);
        Ok(true)
    }
}

/// Walks an indirect table from front to back; `false` if its segments do not fit.
///
/// The WRITE flag of the descriptor that points to the table means nothing.
#[inline(always)]
fn walk_table(table: &[[u8; 8]], chain: &mut ChainBuilder<'_>) -> Result<bool, QueueError> {
    for (index, [addr, meta]) in (0u16..).zip(table.as_chunks::<2>().0) {
        let desc = Descriptor { addr: u64::from_le_bytes(*addr), meta: u64::from_le_bytes(*meta) };
        if desc.has(DESC_F_INDIRECT) {
            return Err(QueueError::IndirectNested { index });
        }
        if !chain.take(index, desc)? {
            return Ok(false);
        }
    }
    Ok(true)
}
