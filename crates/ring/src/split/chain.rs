//! Walks a chain of several descriptors, in the table or in an indirect table.
//!
//! ```text
//!   head --NEXT--> desc --NEXT--> ... --> last
//!                                    \--> INDIRECT: entry 0 --NEXT--> ... --> last    (section 2.7.5.3)
//! ```
//!
//! Everything is bounded: the part in the descriptor table by the queue's size, the indirect part
//! by its table, both together by [`MAX_CHAIN`]. A loop runs into one of the bounds.
use super::{Descriptor, Entry};
use crate::QueueError;
use crate::Segment;
use crate::area::Cells;
use crate::batch::{Batch, MAX_CHAIN};
use crate::chain::{ChainBuilder, Descriptor as _, Table};
use crate::table_memory::TableMemory;
use crate::walk::{Walk, walk_linked};
use paravane_spec::split::{DESC_ADDR, DESC_F_INDIRECT, DESC_FLAGS, DESC_LEN, DESC_SIZE};

/// The tables of a queue, for walks.
#[derive(Debug)]
pub(crate) struct Tables {
    desc: Cells,
    size: u16,
    /// Most descriptors of a chain outside an indirect table.
    limit: u16,
    indirect: Table,
}

impl Tables {
    /// # Safety
    /// `desc` has `size` descriptors.
    pub(crate) unsafe fn new(desc: Cells, size: u16, indirect: bool) -> Self {
        Self { desc, size, limit: size.min(MAX_CHAIN as u16), indirect: Table::new(indirect) }
    }

    /// Fetches a descriptor, once.
    ///
    /// # Safety
    /// `index` is less than the queue's size.
    #[inline(always)]
    pub(crate) unsafe fn fetch(&self, index: u16) -> Descriptor {
        // SAFETY: the caller says that the descriptor exists; `activate` checked the table's length
        // and alignment.
        unsafe { load(self.desc, index) }
    }

    /// Fetches the one descriptor of the indirect table that `first` points to.
    ///
    /// `None` for any other chain. What the descriptor says is not looked at.
    #[inline(always)]
    pub(crate) fn fetch_alone(&self, first: Descriptor, memory: &mut impl TableMemory) -> Option<Descriptor> {
        let table = self.indirect.in_place_alone(first, memory)?;
        // SAFETY: the table has one entry.
        Some(unsafe { load(table, 0) })
    }

    /// Walks the chain at `head`: its indirect table, or in the ring.
    ///
    /// `None` for a chain of the other kind, or of both, and what is malformed; see [`walk_linked`].
    ///
    /// # Safety
    /// As [`walk_linked`], and `head` is less than the queue's size.
    #[inline(always)]
    pub(crate) unsafe fn walk_usual<const TABLE: bool>(
        &self,
        head: u16,
        out: *mut Segment,
        end: *mut Segment,
        memory: &mut impl TableMemory,
    ) -> Option<Walk> {
        // SAFETY: the caller says that the descriptor exists; else as in `fetch`.
        let mut first = unsafe { load_entry(self.desc, head) };
        if first.has(DESC_F_INDIRECT) != TABLE {
            return None;
        }
        // Bytes of descriptors, as of segments.
        let (mut table, mut size) = (self.desc, usize::from(self.size) * DESC_SIZE);
        let mut limit = usize::from(self.limit) * DESC_SIZE;
        if TABLE {
            (table, size) = self.indirect.in_place(first, memory)?;
            limit = size;
            // SAFETY: the table has one entry at least.
            first = unsafe { load_entry(table, 0) };
        }
        let next = |desc: Entry| {
            let index = desc.next();
            // SAFETY: the index is checked before.
            (usize::from(index) * DESC_SIZE < size).then(|| unsafe { load_entry(table, index) })
        };
        // A loop ends where the segments do: there are no more than descriptors.
        let end = end.min(out.wrapping_byte_add(limit));
        // SAFETY: the caller vouches for the segments.
        Some(unsafe { walk_linked(first, out, end, next) }?.0)
    }

    /// Walks the chain at `head` and adds it to `batch`, which has a free slot.
    ///
    /// The first descriptor was fetched already. `false`: its segments do not fit; nothing was
    /// added.
    #[inline(always)]
    pub(crate) fn walk(
        &mut self,
        head: u16,
        first: Descriptor,
        batch: &mut Batch,
        fetch: &mut impl FnMut(u64, &mut [u8]) -> bool,
    ) -> Result<bool, QueueError> {
        let Self { desc: cells, size, limit, indirect } = self;
        let mut chain = ChainBuilder::new(head, batch.room());
        let next = |_, desc: Descriptor| {
            let index = checked(desc.next(), (*size).into())?;
            // SAFETY: `index` was just checked; else as in `fetch`.
            Ok((index, unsafe { load(*cells, index) }))
        };
        let end = chain.follow(head, first, (*limit).into(), next, |chain, index, desc| {
            walk_table(indirect.fetch(index, desc, fetch)?, chain)
        })?;
        let (counts, lens) = chain.parts();
        if end.is_some() {
            batch.add(head, counts, lens);
        }
        Ok(end.is_some())
    }
}

/// Walks an indirect table; `false` if its segments do not fit.
///
/// The WRITE flag of the descriptor that points to the table means nothing (section 2.7.5.3.2).
#[inline(always)]
fn walk_table(table: &[[u8; 8]], chain: &mut ChainBuilder<'_>) -> Result<bool, QueueError> {
    let entries = table.len() / 2;
    let load = |entry: u16| {
        let at = usize::from(entry) * 2;
        Entry { addr: u64::from_le_bytes(table[at]), meta: u64::from_le_bytes(table[at + 1]) }
    };
    let next = |_, desc: Entry| {
        let entry = checked(desc.next(), entries as u32)?;
        Ok((entry, load(entry)))
    };
    let nested = |_: &mut ChainBuilder<'_>, index, _| Err(QueueError::IndirectNested { index });
    Ok(chain.follow(0, load(0), entries, next, nested)?.is_some())
}

/// The index, if it is inside a table of `size` entries.
#[inline(always)]
fn checked(index: u16, size: u32) -> Result<u16, QueueError> {
    let index = u32::from(index);
    if index < size { Ok(index as u16) } else { Err(QueueError::DescIndex { index, size }) }
}

/// Loads a descriptor (relaxed: the acquire load of avail.idx has ordered it).
///
/// # Safety
/// The descriptor lies in `cells`, on a multiple of 8 bytes.
#[inline(always)]
unsafe fn load(cells: Cells, index: u16) -> Descriptor {
    let at = usize::from(index) * DESC_SIZE;
    // SAFETY: the caller vouches for the descriptor.
    unsafe {
        Descriptor {
            addr: cells.load_u64(at + DESC_ADDR),
            len: cells.load_u32(at + DESC_LEN),
            rest: cells.load_u32(at + DESC_FLAGS),
        }
    }
}

/// Loads a descriptor of an indirect table; else as [`load`].
///
/// # Safety
/// As [`load`].
#[inline(always)]
unsafe fn load_entry(cells: Cells, index: u16) -> Entry {
    let at = usize::from(index) * DESC_SIZE;
    // SAFETY: the caller vouches for the descriptor.
    unsafe { Entry { addr: cells.load_u64(at + DESC_ADDR), meta: cells.load_u64(at + DESC_LEN) } }
}
