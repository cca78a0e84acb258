//! Storage of the caller that chains are popped into.
use crate::Segment;
use crate::device::MAX_CHAIN;
use alloc::boxed::Box;
use alloc::vec;

/// One descriptor chain, as it was when it was popped. Its segments lie in the [`Batch`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Chain {
    /// Identifies the chain until it is completed.
    pub head: u16,
    pub(crate) first: u32,
    pub(crate) readable: u16,
    pub(crate) writable: u16,
    pub(crate) readable_len: u32,
    pub(crate) writable_len: u32,
}

impl Chain {
    /// Bytes that the device may read.
    #[must_use]
    #[inline]
    pub fn readable_len(&self) -> u32 {
        self.readable_len
    }

    /// Bytes that the device may write.
    #[must_use]
    #[inline]
    pub fn writable_len(&self) -> u32 {
        self.writable_len
    }
}

/// Caller-owned storage that chains are popped into; made once, used again and again.
///
/// Invariant: as many segments are free as chain slots are, at least. So a chain of one segment always
/// finds room where a slot is left, without a check.
#[derive(Debug)]
pub struct Batch {
    chains: Box<[Chain]>,
    count: usize,
    segments: Box<[Segment]>,
    used: usize,
}

impl Batch {
    /// Room for `chains` chains (at least one); segments for at least one chain of any length, and 4 a chain.
    #[must_use]
    pub fn new(chains: usize) -> Self {
        let chains = chains.max(1);
        Self {
            chains: vec![Chain::default(); chains].into_boxed_slice(),
            count: 0,
            segments: vec![Segment::default(); MAX_CHAIN + 4 * chains].into_boxed_slice(),
            used: 0,
        }
    }

    /// The chains that the last pop found.
    #[must_use]
    #[inline]
    pub fn chains(&self) -> &[Chain] {
        &self.chains[..self.count]
    }

    /// The segments of `chain` that the device reads, in order. Nothing for a chain of another batch that
    /// does not fit in this one.
    #[must_use]
    #[inline]
    pub fn readable(&self, chain: &Chain) -> &[Segment] {
        let first = chain.first as usize;
        self.segments.get(first..first + usize::from(chain.readable)).unwrap_or(&[])
    }

    /// The segments of `chain` that the device writes, in order. Nothing for a chain of another batch that
    /// does not fit in this one.
    #[must_use]
    #[inline]
    pub fn writable(&self, chain: &Chain) -> &[Segment] {
        let first = chain.first as usize + usize::from(chain.readable);
        self.segments.get(first..first + usize::from(chain.writable)).unwrap_or(&[])
    }

    /// Forgets the chains.
    #[inline]
    pub(crate) fn clear(&mut self) {
        self.count = 0;
        self.used = 0;
    }

    /// Chain slots, taken or not.
    #[inline]
    pub(crate) fn slots(&self) -> usize {
        self.chains.len()
    }

    /// Chain slots that are taken.
    #[inline]
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// The free slots and as many free segments, to be filled one segment a chain through raw pointers,
    /// then counted by [`Batch::add_simple`].
    #[inline]
    pub(crate) fn free(&mut self) -> Free {
        let (count, used) = (self.count, self.used);
        Free {
            chains: self.chains[count..].as_mut_ptr(),
            segments: self.segments[used..].as_mut_ptr(),
            first: used as u32,
        }
    }

    /// Counts `chains` chains of one segment each, which were written to [`Batch::free`].
    #[inline]
    pub(crate) fn add_simple(&mut self, chains: usize) {
        self.count += chains;
        self.used += chains;
        debug_assert!(self.count <= self.chains.len() && self.used <= self.segments.len());
    }

    /// The segments that the next chain may take: all that are free, less one for every slot after it.
    /// Never fewer than [`MAX_CHAIN`] in an empty batch. A slot must be free.
    pub(crate) fn room(&mut self) -> &mut [Segment] {
        let later = self.chains.len() - self.count - 1;
        let end = self.segments.len() - later;
        &mut self.segments[self.used..end]
    }

    /// Adds a chain whose segments were written to [`Batch::room`]. A slot must be free.
    pub(crate) fn add(&mut self, chain: Chain) {
        let segments = usize::from(chain.readable) + usize::from(chain.writable);
        self.chains[self.count] = Chain { first: self.used as u32, ..chain };
        self.count += 1;
        self.used += segments;
    }
}

/// Where the fast path writes; see [`Batch::free`].
pub(crate) struct Free {
    /// The first free chain slot.
    pub(crate) chains: *mut Chain,
    /// The first free segment.
    pub(crate) segments: *mut Segment,
    /// Its number.
    pub(crate) first: u32,
}
