//! Storage, owned by the caller, for popped chains.
use crate::Segment;
use alloc::boxed::Box;
use alloc::vec;

/// Most descriptors in one chain, indirect ones included.
///
/// The specification's limit is the queue size; Linux exceeds it with indirect tables, so this is a
/// fixed bound instead. A chain outside indirect tables is bounded by the queue size too.
pub const MAX_CHAIN: usize = 1024;

/// One descriptor chain, as of the moment it was popped.
///
/// Its segments lie in the [`Batch`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Chain {
    /// Identifies the chain until it is completed.
    pub head: u16,
    /// Number of segments: readable ones, writable ones.
    counts: [u32; 2],
    /// Bytes: readable ones, writable ones.
    lens: [u32; 2],
}

impl Chain {
    /// A chain of one segment.
    #[inline(always)]
    pub(crate) fn single(head: u16, len: u32, write: bool) -> Self {
        // No branch: which it is changes from chain to chain.
        let half = u32::from(write) * 32;
        let parts = |value: u64| [value as u32, (value >> 32) as u32];
        Self { head, counts: parts(1 << half), lens: parts(u64::from(len) << half) }
    }

    /// A chain of any length: segments and bytes of each of its parts.
    ///
    /// The readable part, then the writable one.
    #[inline(always)]
    pub(crate) fn parts(head: u16, counts: [u32; 2], lens: [u32; 2]) -> Self {
        Self { head, counts, lens }
    }

    /// Bytes that the device may read.
    #[must_use]
    #[inline]
    pub fn readable_len(&self) -> u32 {
        self.lens[0]
    }

    /// Bytes that the device may write.
    #[must_use]
    #[inline]
    pub fn writable_len(&self) -> u32 {
        self.lens[1]
    }

    /// Segments that the device reads.
    #[inline]
    fn readable(&self) -> usize {
        self.counts[0] as usize
    }

    /// Segments that the device writes.
    #[inline]
    fn writable(&self) -> usize {
        self.counts[1] as usize
    }
}

/// Reusable storage of the caller that chains are popped into.
///
/// Invariant: as many segments are free as chain slots are, at least. So a chain of one segment
/// always finds room where a slot is left, without a check.
#[derive(Debug)]
pub struct Batch {
    chains: Box<[Chain]>,
    count: usize,
    /// Slots that may be taken, at least one and no more than there are.
    limit: usize,
    segments: Box<[Segment]>,
    used: usize,
    /// Segments beyond one for each slot.
    spare: usize,
}

impl Batch {
    /// Creates room for `chains` chains, at least one.
    ///
    /// It has segments for at least one chain of any length, and 4 a chain.
    #[must_use]
    pub fn new(chains: usize) -> Self {
        let chains = chains.max(1);
        Self {
            chains: vec![Chain::default(); chains].into_boxed_slice(),
            count: 0,
            limit: chains,
            segments: vec![Segment::default(); MAX_CHAIN + 4 * chains].into_boxed_slice(),
            used: 0,
            spare: MAX_CHAIN + 3 * chains,
        }
    }

    /// Limits the next pops to `chains` chains.
    ///
    /// Clamped to 1 and to the room that the batch has.
    pub fn limit(&mut self, chains: usize) {
        self.limit = chains.clamp(1, self.chains.len());
    }

    /// The chains that the last pop found.
    #[must_use]
    #[inline]
    pub fn chains(&self) -> &[Chain] {
        &self.chains[..self.count]
    }

    /// The chains with their readable and their writable segments, in order.
    #[inline]
    pub fn iter(&self) -> Iter<'_> {
        Iter { chains: self.chains().iter(), segments: &self.segments[..self.used] }
    }

    /// The readable and the writable segments of `chain`, each in order.
    ///
    /// Nothing for a chain that is not in this batch. This searches: in a loop over chains,
    /// [`Batch::iter`] has the segments at hand.
    #[must_use]
    pub fn segments(&self, chain: &Chain) -> (&[Segment], &[Segment]) {
        // Of two chains in flight the heads differ.
        self.iter()
            .find(|(one, ..)| *one == chain)
            .map_or((&[], &[]), |(_, readable, writable)| (readable, writable))
    }

    /// The first part of [`Batch::segments`].
    #[must_use]
    #[inline]
    pub fn readable(&self, chain: &Chain) -> &[Segment] {
        self.segments(chain).0
    }

    /// The second part of [`Batch::segments`].
    #[must_use]
    #[inline]
    pub fn writable(&self, chain: &Chain) -> &[Segment] {
        self.segments(chain).1
    }

    /// Removes all chains.
    #[inline]
    pub(crate) fn clear(&mut self) {
        self.count = 0;
        self.used = 0;
    }

    /// Chain slots, taken or not, that a pop may fill.
    #[inline]
    pub(crate) fn slots(&self) -> usize {
        self.limit
    }

    /// Chain slots that are taken.
    #[inline]
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// The free slots and as many free segments.
    ///
    /// To be filled one segment a chain through raw pointers, then counted by
    /// [`Batch::add_simple`].
    #[inline]
    pub(crate) fn free(&mut self) -> Free {
        let (count, used) = (self.count, self.used);
        Free { chains: self.chains[count..].as_mut_ptr(), segments: self.segments[used..].as_mut_ptr() }
    }

    /// Counts `chains` chains of one segment each, written to [`Batch::free`].
    #[inline]
    pub(crate) fn add_simple(&mut self, chains: usize) {
        self.count += chains;
        self.used += chains;
        debug_assert!(self.count <= self.chains.len() && self.used <= self.segments.len());
    }

    /// The segments that the next chain may take.
    ///
    /// All free ones, less one for every slot after it. Never fewer than [`MAX_CHAIN`] in an empty
    /// batch. A slot must be free.
    #[inline]
    pub(crate) fn room(&mut self) -> &mut [Segment] {
        &mut self.segments[self.used..self.spare + self.count + 1]
    }

    /// Adds a chain whose segments were written to [`Batch::room`].
    ///
    /// A slot must be free.
    #[inline]
    pub(crate) fn add(&mut self, chain: Chain) {
        let segments = chain.readable() + chain.writable();
        self.chains[self.count] = chain;
        self.count += 1;
        self.used += segments;
    }

    /// The readable and the writable segments of the chain that was added last.
    pub(crate) fn last(&self) -> (&[Segment], &[Segment]) {
        let Some(chain) = self.chains().last() else { return (&[], &[]) };
        let (readable, writable) = (chain.readable(), chain.writable());
        self.segments[self.used - readable - writable..self.used].split_at(readable)
    }

    /// Takes the chain out that was added last.
    pub(crate) fn remove_last(&mut self) {
        let (readable, writable) = self.last();
        self.used -= readable.len() + writable.len();
        self.count = self.count.saturating_sub(1);
    }
}

impl<'a> IntoIterator for &'a Batch {
    type Item = (&'a Chain, &'a [Segment], &'a [Segment]);
    type IntoIter = Iter<'a>;

    #[inline]
    fn into_iter(self) -> Iter<'a> {
        self.iter()
    }
}

/// See [`Batch::iter`].
#[derive(Clone, Debug)]
pub struct Iter<'a> {
    chains: core::slice::Iter<'a, Chain>,
    /// Those of the chains that are left, which lie one behind the other.
    segments: &'a [Segment],
}

impl<'a> Iterator for Iter<'a> {
    type Item = (&'a Chain, &'a [Segment], &'a [Segment]);

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        let chain = self.chains.next()?;
        // SAFETY: the chains of a batch were added with their segments, which are all below `used`.
        let (readable, rest) = unsafe { self.segments.split_at_unchecked(chain.readable()) };
        // SAFETY: as above.
        let (writable, rest) = unsafe { rest.split_at_unchecked(chain.writable()) };
        self.segments = rest;
        Some((chain, readable, writable))
    }

    #[inline]
    fn size_hint(&self) -> (usize, Option<usize>) {
        self.chains.size_hint()
    }
}

impl ExactSizeIterator for Iter<'_> {}

/// Where the fast path writes; see [`Batch::free`].
pub(crate) struct Free {
    /// The first free chain slot.
    pub(crate) chains: *mut Chain,
    /// The first free segment.
    pub(crate) segments: *mut Segment,
}
