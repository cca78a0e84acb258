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
use crate::area::Cells;
use crate::batch::{Batch, Chain};
use crate::device::MAX_CHAIN;
use crate::{QueueError, Segment};
use alloc::boxed::Box;
use alloc::vec;
use paravane_spec::split::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, DESC_SIZE};

/// Length in bytes of the longest indirect table.
const MAX_TABLE: usize = MAX_CHAIN * DESC_SIZE;

/// What walking a chain needs to know of the queue.
#[derive(Debug)]
pub(crate) struct Tables {
    desc: Cells,
    size: u16,
    /// Private copy of an indirect table; empty if indirect descriptors were not negotiated.
    scratch: Box<[u8]>,
}

impl Tables {
    /// # Safety
    /// `desc` has `size` descriptors.
    pub(crate) unsafe fn new(desc: Cells, size: u16, indirect: bool) -> Self {
        Self { desc, size, scratch: vec![0; if indirect { MAX_TABLE } else { 0 }].into_boxed_slice() }
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
            if !pieces.take(index, desc)? {
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
        let chain = pieces.chain();
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
        if self.scratch.is_empty() {
            return Err(QueueError::IndirectNotNegotiated { index });
        }
        if desc.has(DESC_F_NEXT) {
            return Err(QueueError::IndirectNested { index });
        }
        let (addr, len) = (desc.addr, desc.len());
        let bytes = len as usize;
        if bytes == 0 || bytes > MAX_TABLE || !bytes.is_multiple_of(DESC_SIZE) {
            return Err(QueueError::IndirectLength { index, len, max: MAX_CHAIN as u32 });
        }
        if addr.checked_add(len.into()).is_none() {
            return Err(QueueError::AddressWraps { index, addr, len });
        }
        // The whole table is copied once, so that the driver cannot change it between a check and a use.
        let table = &mut self.scratch[..bytes];
        if !fetch(addr, table) {
            return Err(QueueError::Address { addr, len });
        }
        let (table, _) = table.as_chunks::<8>();
        let entries = table.len() / 2;
        let (mut entry, mut visited) = (0, 1);
        loop {
            let at = usize::from(entry) * 2;
            let desc =
                Descriptor { addr: u64::from_le_bytes(table[at]), meta: u64::from_le_bytes(table[at + 1]) };
            if desc.has(DESC_F_INDIRECT) {
                return Err(QueueError::IndirectNested { index: entry });
            }
            if !pieces.take(entry, desc)? {
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

/// The segments of one chain so far.
struct Pieces<'a> {
    head: u16,
    out: &'a mut [Segment],
    readable: usize,
    writable: usize,
    readable_len: u32,
    writable_len: u32,
}

impl<'a> Pieces<'a> {
    fn new(head: u16, out: &'a mut [Segment]) -> Self {
        Self { head, out, readable: 0, writable: 0, readable_len: 0, writable_len: 0 }
    }

    /// Takes in a descriptor that is not indirect; `false` if there is no room for it.
    fn take(&mut self, index: u16, desc: Descriptor) -> Result<bool, QueueError> {
        let (head, addr, len) = (self.head, desc.addr, desc.len());
        let count = self.readable + self.writable;
        if count == MAX_CHAIN {
            return Err(QueueError::ChainTooLong { head, limit: MAX_CHAIN as u32 });
        }
        if len == 0 {
            return Err(QueueError::ZeroLength { index });
        }
        if addr.checked_add(len.into()).is_none() {
            return Err(QueueError::AddressWraps { index, addr, len });
        }
        let write = desc.has(DESC_F_WRITE);
        if !write && self.writable > 0 {
            return Err(QueueError::ReadableAfterWritable { head });
        }
        // Section 2.7.5.2 allows 2^32 bytes in all; lengths are u32 everywhere, so one less here.
        let total = self.readable_len.checked_add(self.writable_len).and_then(|sum| sum.checked_add(len));
        if total.is_none() {
            return Err(QueueError::ChainTooBig { head });
        }
        let Some(out) = self.out.get_mut(count) else { return Ok(false) };
        *out = Segment { addr, len };
        if write {
            self.writable += 1;
            self.writable_len += len;
        } else {
            self.readable += 1;
            self.readable_len += len;
        }
        Ok(true)
    }

    /// The chain, but for the place of its first segment.
    fn chain(&self) -> Chain {
        // The counts are at most MAX_CHAIN.
        Chain::parts(
            self.head,
            (self.readable as u16, self.readable_len),
            (self.writable as u16, self.writable_len),
        )
    }
}
