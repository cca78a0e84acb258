//! Builds a chain of several descriptors, in either layout, and checks segments.
//!
//! ```text
//!   head --NEXT--> desc --NEXT--> ... --> last
//!                                    \--> INDIRECT: its table, in place or copied
//! ```
//! [`ChainBuilder::follow`] is the only loop over NEXT flags: the layouts say where the next
//! descriptor is and how many there may be, so a loop in the ring ends at that limit.
use crate::area::Cells;
use crate::batch::{Chain, MAX_CHAIN};
use crate::table_memory::TableMemory;
use crate::{QueueError, Segment};
use alloc::boxed::Box;
use alloc::vec;
use core::slice::IterMut;
use paravane_spec::split::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE};
use paravane_spec::{packed, split};

/// Bytes of a descriptor. Size and flags are the same in both layouts.
const DESC_SIZE: usize = split::DESC_SIZE;
const _: () = {
    assert!(packed::DESC_SIZE == DESC_SIZE);
    assert!(packed::DESC_F_NEXT == DESC_F_NEXT && packed::DESC_F_WRITE == DESC_F_WRITE);
    assert!(packed::DESC_F_INDIRECT == DESC_F_INDIRECT);
};

/// Bytes of the longest indirect table.
const MAX_TABLE: usize = MAX_CHAIN * DESC_SIZE;

/// A descriptor of either layout.
pub(crate) trait Descriptor: Copy {
    /// Address of the first byte.
    fn addr(self) -> u64;

    /// Length in bytes.
    fn len(self) -> u32;

    /// Flags.
    fn flags(self) -> u16;

    /// Whether all of `flags` are set.
    fn has(self, flags: u16) -> bool;
}

/// A chain of one segment; see [`Chain::single`].
#[inline(always)]
pub(crate) fn single<D: Descriptor>(head: u16, end: u32, desc: D) -> Chain {
    const { assert!(DESC_F_WRITE == 1 << 1) };
    // The flag moves to the bit for 32.
    Chain::single(head, end, desc.len(), u32::from(desc.flags()) << 4 & 32)
}

/// Reads indirect tables: in place, or a private copy.
///
/// Each descriptor is read once, so the driver cannot change it between a check and a use.
#[derive(Debug)]
pub(crate) struct Table {
    /// Empty if INDIRECT_DESC was not negotiated.
    scratch: Box<[u8]>,
}

impl Table {
    /// Room for the longest table, if INDIRECT_DESC was negotiated.
    pub(crate) fn new(negotiated: bool) -> Self {
        Self { scratch: vec![0; if negotiated { MAX_TABLE } else { 0 }].into_boxed_slice() }
    }

    /// The table that `desc` points to, in place, and its length in bytes.
    ///
    /// The length is that of one descriptor at least. `None`: it is malformed, or does not lie in
    /// one piece on a multiple of 8 bytes.
    #[inline(always)]
    pub(crate) fn in_place(
        &self,
        desc: impl Descriptor,
        memory: &mut impl TableMemory,
    ) -> Option<(Cells, usize)> {
        let bytes = desc.len() as usize;
        // The lengths of 1 to MAX_CHAIN descriptors, in one comparison.
        let valid = bytes.wrapping_sub(1) < self.scratch.len() && bytes.is_multiple_of(DESC_SIZE);
        if !valid || desc.has(DESC_F_NEXT) {
            return None;
        }
        let table = memory.in_place(desc.addr(), desc.len())?;
        (table.len() >= bytes && table.is_aligned(8)).then(|| (table.cells(), bytes))
    }

    /// The table that `desc` points to, in place, if it has one descriptor.
    ///
    /// As [`Table::in_place`] for any other.
    #[inline(always)]
    pub(crate) fn in_place_alone<D: Descriptor>(
        &self,
        desc: D,
        memory: &mut impl TableMemory,
    ) -> Option<Cells> {
        // The queue has been told of tables before it guesses that there are more.
        let is_table = desc.flags() & (DESC_F_INDIRECT | DESC_F_NEXT) == DESC_F_INDIRECT;
        if !is_table || desc.len() != DESC_SIZE as u32 {
            return None;
        }
        let table = memory.in_place(desc.addr(), DESC_SIZE as u32)?;
        (table.len() >= DESC_SIZE && table.is_aligned(8)).then(|| table.cells())
    }

    /// Copies the table that `desc` points to.
    ///
    /// Returns two words for each descriptor in it.
    #[inline(always)]
    pub(crate) fn fetch(
        &mut self,
        index: u16,
        desc: impl Descriptor,
        fetch: &mut impl FnMut(u64, &mut [u8]) -> bool,
    ) -> Result<&[[u8; 8]], QueueError> {
        let (addr, len) = (desc.addr(), desc.len());
        if self.scratch.is_empty() {
            return Err(QueueError::IndirectNotNegotiated { index });
        }
        if desc.has(DESC_F_NEXT) {
            return Err(QueueError::IndirectNested { index });
        }
        let bytes = len as usize;
        if bytes == 0 || bytes > MAX_TABLE || !bytes.is_multiple_of(DESC_SIZE) {
            return Err(QueueError::IndirectLength { index, len, max: MAX_CHAIN as u32 });
        }
        if addr.checked_add(len.into()).is_none() {
            return Err(QueueError::AddressWraps { index, addr, len });
        }
        let table = &mut self.scratch[..bytes];
        if !fetch(addr, table) {
            return Err(QueueError::Address { addr, len });
        }
        Ok(table.as_chunks().0)
    }
}

/// One chain, as far as it was walked.
pub(crate) struct ChainBuilder<'a> {
    /// Head of the chain, for errors.
    ///
    /// In a packed queue its identifier is known only at the end.
    head: u16,
    /// Segments that it may take: [`MAX_CHAIN`] at most.
    room: usize,
    /// Those that are left.
    free: IterMut<'a, Segment>,
    /// Bytes.
    len: u32,
    /// Whether the last segment is writable.
    write: bool,
    /// Segments left, and bytes before the first writable segment.
    readable: (usize, u32),
}

impl<'a> ChainBuilder<'a> {
    /// A chain without segments yet; they go to `out`.
    #[inline(always)]
    pub(crate) fn new(head: u16, out: &'a mut [Segment]) -> Self {
        let room = out.len().min(MAX_CHAIN);
        Self { head, room, free: out[..room].iter_mut(), len: 0, write: false, readable: (0, 0) }
    }

    /// Follows the NEXT flags through at most `limit` descriptors.
    ///
    /// Starts with `first`, which is descriptor `index`.
    ///
    /// `next` fetches the descriptor after one; `indirect` takes one with INDIRECT, which ends the
    /// chain. Returns the last descriptor and the number of descriptors, or `None` if the segments
    /// do not fit.
    #[inline(always)]
    pub(crate) fn follow<D: Descriptor>(
        &mut self,
        index: u16,
        first: D,
        limit: usize,
        mut next: impl FnMut(u16, D) -> Result<(u16, D), QueueError>,
        indirect: impl FnOnce(&mut Self, u16, D) -> Result<bool, QueueError>,
    ) -> Result<Option<(D, u16)>, QueueError> {
        let (mut index, mut desc, mut count) = (index, first, 1);
        loop {
            if desc.has(DESC_F_INDIRECT) {
                return Ok(indirect(self, index, desc)?.then_some((desc, count)));
            }
            if !self.take(index, desc)? {
                return Ok(None);
            }
            if !desc.has(DESC_F_NEXT) {
                return Ok(Some((desc, count)));
            }
            if usize::from(count) == limit {
                return Err(QueueError::ChainTooLong { head: self.head, limit: limit as u32 });
            }
            count += 1;
            (index, desc) = next(index, desc)?;
        }
    }

    /// Adds the segment of a direct descriptor; `false` if there is no room for it.
    #[inline(always)]
    pub(crate) fn take(&mut self, index: u16, desc: impl Descriptor) -> Result<bool, QueueError> {
        let (addr, len, write) = (desc.addr(), desc.len(), desc.has(DESC_F_WRITE));
        // Not less: it has no bytes, or wraps around the address space.
        if addr >= addr.wrapping_add(len.into()) {
            return self.refused(addr, len, write).error(index);
        }
        if write != self.write {
            if self.write {
                return self.refused(addr, len, write).error(index);
            }
            self.write = true;
            self.readable = (self.free.len(), self.len);
        }
        // Section 2.7.5.2 allows 2^32 bytes in all; lengths are u32 everywhere, so one less here.
        let Some(total) = self.len.checked_add(len) else {
            return self.refused(addr, len, write).error(index);
        };
        let Some(out) = self.free.next() else {
            return self.refused(addr, len, write).error(index);
        };
        *out = Segment { addr, len };
        self.len = total;
        Ok(true)
    }

    /// A segment that was not added.
    #[inline(always)]
    fn refused(&self, addr: u64, len: u32, write: bool) -> Refused {
        Refused {
            head: self.head,
            full: self.room == MAX_CHAIN && self.free.len() == 0,
            chain_len: self.len,
            chain_write: self.write,
            addr,
            len,
            write,
        }
    }

    /// Segments and bytes of the finished chain's parts.
    #[inline(always)]
    pub(crate) fn parts(&self) -> ([usize; 2], [u32; 2]) {
        let end = (self.free.len(), self.len);
        let (left, len) = if self.write { self.readable } else { end };
        ([self.room - left, left - end.0], [len, end.1 - len])
    }
}

/// A segment that was not added.
///
/// By value: the chain stays in registers.
struct Refused {
    head: u16,
    /// Whether the chain has [`MAX_CHAIN`] segments.
    full: bool,
    chain_len: u32,
    chain_write: bool,
    addr: u64,
    len: u32,
    write: bool,
}

impl Refused {
    /// Why descriptor `index` is malformed; `false` if only room is missing.
    #[cold]
    #[inline(never)]
    fn error(self, index: u16) -> Result<bool, QueueError> {
        let Self { head, addr, len, .. } = self;
        if self.full {
            return Err(QueueError::ChainTooLong { head, limit: MAX_CHAIN as u32 });
        }
        if len == 0 {
            return Err(QueueError::ZeroLength { index });
        }
        if addr.checked_add(len.into()).is_none() {
            return Err(QueueError::AddressWraps { index, addr, len });
        }
        if self.chain_write && !self.write {
            return Err(QueueError::ReadableAfterWritable { head });
        }
        if self.chain_len.checked_add(len).is_none() {
            return Err(QueueError::ChainTooBig { head });
        }
        Ok(false)
    }
}
