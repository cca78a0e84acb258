//! Walking a chain of more than one descriptor, in the descriptor table and in an indirect table.
//!
//! ```text
//!   head --NEXT--> desc --NEXT--> ... --> last
//!                                    \--> INDIRECT: entry 0 --NEXT--> ... --> last    (section 2.7.5.3)
//! ```
//!
//! Everything is bounded: the descriptor table part by the queue's size, the indirect part by its table,
//! both together by [`MAX_CHAIN`]. A loop runs into one of the bounds.
use super::Descriptor;
use crate::QueueError;
use crate::area::Cells;
use crate::batch::Batch;
use crate::device::MAX_CHAIN;
use crate::pieces::{Pieces, Table};
use paravane_spec::split::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, DESC_SIZE};

/// What walking a chain needs to know of the queue.
#[derive(Debug)]
pub(crate) struct Tables {
    desc: Cells,
    size: u16,
    /// Private copy of an indirect table.
    table: Table,
}

impl Tables {
    /// # Safety
    /// `desc` has `size` descriptors.
    pub(crate) unsafe fn new(desc: Cells, size: u16, indirect: bool) -> Self {
        Self { desc, size, table: Table::new(indirect) }
    }

    /// Fetches a descriptor, once.
    ///
    /// # Safety
    /// `index` is less than the queue's size.
    #[inline(always)]
    pub(crate) unsafe fn fetch(&self, index: u16) -> Descriptor {
        let at = usize::from(index) * DESC_SIZE;
        // SAFETY: the caller says that the descriptor exists; `activate` checked the table's length and alignment.
        unsafe { Descriptor { addr: self.desc.load_u64(at), meta: self.desc.load_u64(at + 8) } }
    }

    /// Walks the chain that starts at `head` with the descriptor `first` (already fetched) and adds it to
    /// `batch`, which has a free slot. `false`: its segments do not fit; nothing was added.
    pub(crate) fn walk(
        &mut self,
        head: u16,
        first: Descriptor,
        batch: &mut Batch,
        fetch: &mut impl FnMut(u64, &mut [u8]) -> bool,
    ) -> Result<bool, QueueError> {
        let limit = usize::from(self.size).min(MAX_CHAIN);
        let mut pieces = Pieces::new(head, batch.room());
        let (mut index, mut desc, mut visited) = (head, first, 1);
        loop {
            if desc.has(DESC_F_INDIRECT) {
                if !self.walk_table(index, desc, &mut pieces, fetch)? {
                    return Ok(false);
                }
                break;
            }
            if !pieces.take(index, desc.addr, desc.len(), desc.has(DESC_F_WRITE))? {
                return Ok(false);
            }
            if !desc.has(DESC_F_NEXT) {
                break;
            }
            if visited == limit {
                return Err(QueueError::ChainTooLong { head, limit: limit as u32 });
            }
            visited += 1;
            index = desc.next();
            if index >= self.size {
                return Err(QueueError::DescIndex { index: index.into(), size: self.size.into() });
            }
            // SAFETY: `index` was just checked.
            desc = unsafe { self.fetch(index) };
        }
        let chain = pieces.chain(head);
        batch.add(chain);
        Ok(true)
    }

    /// Walks the indirect table of descriptor `index`. Its WRITE flag means nothing (section 2.7.5.3.2).
    fn walk_table(
        &mut self,
        index: u16,
        desc: Descriptor,
        pieces: &mut Pieces<'_>,
        fetch: &mut impl FnMut(u64, &mut [u8]) -> bool,
    ) -> Result<bool, QueueError> {
        let table = self.table.fetch(index, desc.addr, desc.len(), desc.has(DESC_F_NEXT), fetch)?;
        let entries = table.len() / 2;
        let (mut entry, mut visited) = (0, 1);
        loop {
            let at = usize::from(entry) * 2;
            let desc =
                Descriptor { addr: u64::from_le_bytes(table[at]), meta: u64::from_le_bytes(table[at + 1]) };
            if desc.has(DESC_F_INDIRECT) {
                return Err(QueueError::IndirectNested { index: entry });
            }
            if !pieces.take(entry, desc.addr, desc.len(), desc.has(DESC_F_WRITE))? {
                return Ok(false);
            }
            if !desc.has(DESC_F_NEXT) {
                return Ok(true);
            }
            if visited == entries {
                return Err(QueueError::ChainTooLong { head: pieces.head, limit: entries as u32 });
            }
            visited += 1;
            entry = desc.next();
            if usize::from(entry) >= entries {
                return Err(QueueError::DescIndex { index: entry.into(), size: entries as u32 });
            }
        }
    }
}
