//! Collecting the segments of a chain of several descriptors, whatever the layout, with all checks on them.
use crate::batch::Chain;
use crate::device::MAX_CHAIN;
use crate::{QueueError, Segment};
use alloc::boxed::Box;
use alloc::vec;

/// Size of a descriptor of either layout.
const DESC_SIZE: usize = 16;

/// Length in bytes of the longest indirect table.
const MAX_TABLE: usize = MAX_CHAIN * DESC_SIZE;

/// Where an indirect table is copied to, so that the driver cannot change it between a check and a use.
#[derive(Debug)]
pub(crate) struct Table {
    /// Empty if indirect descriptors were not negotiated.
    scratch: Box<[u8]>,
}

impl Table {
    /// Room for the longest table, if INDIRECT_DESC was negotiated.
    pub(crate) fn new(negotiated: bool) -> Self {
        Self { scratch: vec![0; if negotiated { MAX_TABLE } else { 0 }].into_boxed_slice() }
    }

    /// Copies the table that descriptor `index` points to: two words for each of its descriptors. `next` is
    /// the descriptor's NEXT flag.
    pub(crate) fn fetch(
        &mut self,
        index: u16,
        addr: u64,
        len: u32,
        next: bool,
        fetch: &mut impl FnMut(u64, &mut [u8]) -> bool,
    ) -> Result<&[[u8; 8]], QueueError> {
        if self.scratch.is_empty() {
            return Err(QueueError::IndirectNotNegotiated { index });
        }
        if next {
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

/// The segments of one chain so far.
pub(crate) struct Pieces<'a> {
    /// The chain's head, as errors name it; it may become the chain's name only at the end.
    pub(crate) head: u16,
    out: &'a mut [Segment],
    readable: usize,
    writable: usize,
    readable_len: u32,
    writable_len: u32,
}

impl<'a> Pieces<'a> {
    /// None yet, of the chain `head`; `out` is the room for them.
    pub(crate) fn new(head: u16, out: &'a mut [Segment]) -> Self {
        Self { head, out, readable: 0, writable: 0, readable_len: 0, writable_len: 0 }
    }

    /// Takes in a descriptor that is not indirect; `false` if there is no room for it.
    pub(crate) fn take(&mut self, index: u16, addr: u64, len: u32, write: bool) -> Result<bool, QueueError> {
        let head = self.head;
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

    /// The chain, to be completed by `id`, but for the place of its first segment.
    pub(crate) fn chain(&self, id: u16) -> Chain {
        // The counts are at most MAX_CHAIN.
        Chain::parts(id, (self.readable as u16, self.readable_len), (self.writable as u16, self.writable_len))
    }
}
