//! Walking a chain of more than one descriptor in the descriptor ring, and in an indirect table.
//!
//! ```text
//!   ring, from the head on:  desc (NEXT) | desc (NEXT) | ... | last    its identifier is the chain's
//!                                                              \--> INDIRECT: entry 0, 1, ... to the end
//! ```
//!
//! A chain is a run of neighbours (section 2.8.6), around the end of the ring too. Only its first descriptor's
//! flags say that it is available; the driver writes them last. A table is used from front to back; identifiers
//! and the NEXT flag mean nothing in it (section 2.8.7). Everything is bounded: the ring part by what the ring has
//! room for, the indirect part by its table, both together by `MAX_CHAIN`. There can be no loops.
use super::Descriptor;
use crate::QueueError;
use crate::area::Cells;
use crate::batch::Batch;
use crate::pieces::{Pieces, Table};
use paravane_spec::packed::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, DESC_SIZE};

/// A chain that was walked and added to the batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Walked {
    pub(crate) id: u16,
    /// Descriptors that it takes in the ring.
    pub(crate) descriptors: u16,
}

/// What walking a chain needs to know of the queue.
#[derive(Debug)]
pub(crate) struct Chains {
    desc: Cells,
    size: u16,
    table: Table,
}

impl Chains {
    /// # Safety
    /// `desc` has `size` descriptors.
    pub(crate) unsafe fn new(desc: Cells, size: u16, indirect: bool) -> Self {
        Self { desc, size, table: Table::new(indirect) }
    }

    /// Walks the chain that starts at index `head` with the descriptor `first` (already fetched) and takes `room`
    /// descriptors at most. It is added to `batch`, which has a free slot, if `accept` takes its identifier.
    /// `None`: its segments do not fit; nothing was added.
    pub(crate) fn walk(
        &mut self,
        head: u16,
        first: Descriptor,
        room: u16,
        batch: &mut Batch,
        fetch: &mut impl FnMut(u64, &mut [u8]) -> bool,
        accept: impl FnOnce(u16) -> Result<(), QueueError>,
    ) -> Result<Option<Walked>, QueueError> {
        let mut pieces = Pieces::new(head, batch.room());
        let (mut index, mut desc, mut descriptors) = (head, first, 1);
        loop {
            if desc.has(DESC_F_INDIRECT) {
                if !self.walk_table(index, desc, &mut pieces, fetch)? {
                    return Ok(None);
                }
                break;
            }
            if !pieces.take(index, desc.addr, desc.len(), desc.has(DESC_F_WRITE))? {
                return Ok(None);
            }
            if !desc.has(DESC_F_NEXT) {
                break;
            }
            if descriptors == room {
                return Err(QueueError::ChainTooLong { head, limit: room.into() });
            }
            descriptors += 1;
            index += 1;
            if index == self.size {
                index = 0;
            }
            let at = usize::from(index) * DESC_SIZE;
            // Relaxed: the acquire load of the head's flags has ordered them after their writing.
            // SAFETY: `index` is less than the size.
            desc = unsafe { Descriptor { addr: self.desc.load_u64(at), meta: self.desc.load_u64(at + 8) } };
        }
        let id = desc.id();
        accept(id)?;
        let chain = pieces.chain(id);
        batch.add(chain);
        Ok(Some(Walked { id, descriptors }))
    }

    /// As [`Chains::walk`], for a chain that was saved when it was taken. What is saved is as hostile as the ring.
    pub(crate) fn walk_saved(
        &mut self,
        id: u16,
        saved: &[Descriptor],
        batch: &mut Batch,
        fetch: &mut impl FnMut(u64, &mut [u8]) -> bool,
    ) -> Result<bool, QueueError> {
        let mut pieces = Pieces::new(id, batch.room());
        for (index, desc) in (0_u16..).zip(saved) {
            let fits = if desc.has(DESC_F_INDIRECT) {
                // It may only be the last one.
                let next = Descriptor { meta: desc.meta | u64::from(DESC_F_NEXT) << 48, ..*desc };
                let desc = if usize::from(index) + 1 == saved.len() { *desc } else { next };
                self.walk_table(index, desc, &mut pieces, fetch)?
            } else {
                pieces.take(index, desc.addr, desc.len(), desc.has(DESC_F_WRITE))?
            };
            if !fits {
                return Ok(false);
            }
        }
        let chain = pieces.chain(id);
        batch.add(chain);
        Ok(true)
    }

    /// Walks the indirect table of descriptor `index`. Its WRITE flag means nothing.
    fn walk_table(
        &mut self,
        index: u16,
        desc: Descriptor,
        pieces: &mut Pieces<'_>,
        fetch: &mut impl FnMut(u64, &mut [u8]) -> bool,
    ) -> Result<bool, QueueError> {
        let table = self.table.fetch(index, desc.addr, desc.len(), desc.has(DESC_F_NEXT), fetch)?;
        for (entry, [addr, meta]) in (0u16..).zip(table.as_chunks::<2>().0) {
            let desc = Descriptor { addr: u64::from_le_bytes(*addr), meta: u64::from_le_bytes(*meta) };
            if desc.has(DESC_F_INDIRECT) {
                return Err(QueueError::IndirectNested { index: entry });
            }
            if !pieces.take(entry, desc.addr, desc.len(), desc.has(DESC_F_WRITE))? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
