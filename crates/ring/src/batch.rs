//! Storage, owned by the caller, for popped chains.
use crate::Segment;
use alloc::boxed::Box;
use alloc::vec;
use core::marker::PhantomData;

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
    /// Bytes of the batch's segments before the end of the readable part.
    ///
    /// It begins where the chain before ends.
    middle: u32,
    /// Bytes of the batch's segments before the end of the writable part.
    end: u32,
    /// Readable bytes.
    readable: u32,
    /// Writable bytes.
    writable: u32,
}

/// Kind of the chain that was taken last.
///
/// The next one is expected to be of the same kind: a wrong guess costs time only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// One direct descriptor.
    Simple,
    /// An indirect table of one descriptor.
    ShortTable,
    /// Direct descriptors.
    Linked,
    /// An indirect table.
    Table,
}

impl Kind {
    /// Kind of chains that were walked, in tables or not: one segment each, or some with more.
    #[inline(always)]
    pub(crate) fn of_walked<const TABLE: bool>(short: bool) -> Self {
        match (TABLE, short) {
            (true, true) => Self::ShortTable,
            (true, false) => Self::Table,
            (false, true) => Self::Simple,
            (false, false) => Self::Linked,
        }
    }

    /// Whether it is a table of any length.
    pub(crate) fn is_table(self) -> bool {
        matches!(self, Self::ShortTable | Self::Table)
    }
}

/// Bytes of a segment.
const SEGMENT: u32 = size_of::<Segment>() as u32;

impl Chain {
    /// A chain of one segment of `len` bytes, which ends `end` bytes into those of the batch.
    ///
    /// `write` is 32 if it is writable, or 0.
    #[inline(always)]
    pub(crate) fn single(head: u16, end: u32, len: u32, write: u32) -> Self {
        // No branch: the direction changes from chain to chain.
        const { assert!(SEGMENT == 16) };
        let lens = u64::from(len) << write;
        Self::parts(head, end - write / 2, end, lens as u32, (lens >> 32) as u32)
    }

    /// A chain of any length: the ends of its readable and its writable part, and their bytes.
    #[inline(always)]
    pub(crate) fn parts(head: u16, middle: u32, end: u32, readable: u32, writable: u32) -> Self {
        Self { head, middle, end, readable, writable }
    }

    /// Readable and writable bytes.
    #[inline(always)]
    pub(crate) fn lens(&self) -> [u32; 2] {
        [self.readable, self.writable]
    }

    /// Bytes that the device may read.
    #[must_use]
    #[inline]
    pub fn readable_len(&self) -> u32 {
        self.readable
    }

    /// Bytes that the device may write.
    #[must_use]
    #[inline]
    pub fn writable_len(&self) -> u32 {
        self.writable
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
        // SAFETY: no more slots are taken than there are.
        unsafe { self.chains.get_unchecked(..self.count) }
    }

    /// The chains with their readable and their writable segments, in order.
    #[inline]
    pub fn iter(&self) -> Iter<'_> {
        let segments = self.segments.as_ptr();
        Iter { chains: self.chains().iter(), segments, next: segments, batch: PhantomData }
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

    /// The slots and the segments, all of them free.
    ///
    /// To be filled through raw pointers, then counted by [`Batch::set_single`].
    #[inline(always)]
    pub(crate) fn front(&mut self) -> (*mut Chain, *mut Segment) {
        (self.chains.as_mut_ptr(), self.segments.as_mut_ptr())
    }

    /// The free slots and the free segments.
    ///
    /// To be filled through raw pointers, then counted by [`Batch::add_written`].
    #[inline(always)]
    pub(crate) fn free(&mut self) -> Free {
        debug_assert!(self.count <= self.chains.len() && self.used <= self.segments.len());
        let base = self.segments.as_mut_ptr();
        // SAFETY: no more slots and segments are taken than there are (the checks of `add` and
        // `add_written`), and the room ends inside: each slot that is taken has a segment of its own.
        unsafe {
            Free {
                chains: self.chains.as_mut_ptr().add(self.count),
                base,
                segments: base.add(self.used),
                // Behind the last slot it lies outside, and is not used.
                room_end: base.wrapping_add(self.spare + self.count + 1),
            }
        }
    }

    /// Counts `chains` chains that were written to [`Batch::free`], with segments up to `end`.
    #[inline(always)]
    pub(crate) fn add_written(&mut self, chains: usize, end: *mut Segment) {
        self.count += chains;
        // SAFETY: `end` came from `free`, and was moved inside the segments.
        self.used = unsafe { end.offset_from_unsigned(self.segments.as_ptr()) };
        debug_assert!(self.count <= self.chains.len() && self.used <= self.segments.len());
    }

    /// Sets the content of a batch that was empty: `chains` chains of one segment each.
    ///
    /// They were written to [`Batch::front`].
    #[inline(always)]
    pub(crate) fn set_single(&mut self, chains: usize) {
        (self.count, self.used) = (chains, chains);
        debug_assert!(self.count <= self.chains.len());
    }

    /// Sets the content of a batch that was empty: one chain, whose segments end at `end`.
    ///
    /// They were written to [`Batch::front`], where there is room for [`MAX_CHAIN`].
    #[inline(always)]
    pub(crate) fn set_one(&mut self, end: *mut Segment) {
        self.count = 0;
        self.add_written(1, end);
    }

    /// Readable and writable bytes of the chain that was added last; a chain must be there.
    #[inline(always)]
    pub(crate) fn lens_of_last(&self) -> [u32; 2] {
        self.chains().last().map_or([0; 2], Chain::lens)
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
    /// `counts` are those of its readable and its writable ones. A slot must be free.
    #[inline]
    pub(crate) fn add(&mut self, head: u16, counts: [usize; 2], lens: [u32; 2]) {
        let [readable, writable] = counts;
        let (middle, end) = (self.used + readable, self.used + readable + writable);
        assert!(end <= self.segments.len());
        let [middle, end_bytes] = [middle, end].map(|end| end as u32 * SEGMENT);
        self.chains[self.count] = Chain::parts(head, middle, end_bytes, lens[0], lens[1]);
        self.count += 1;
        self.used = end;
    }

    /// The readable and the writable segments of the chain that was added last.
    pub(crate) fn last(&self) -> (&[Segment], &[Segment]) {
        let Some(chain) = self.chains().last() else { return (&[], &[]) };
        let [middle, end] = [chain.middle, chain.end].map(|end| (end / SEGMENT) as usize);
        (&self.segments[self.end_before_last()..middle], &self.segments[middle..end])
    }

    /// Segments of all chains but the last.
    fn end_before_last(&self) -> usize {
        match self.chains() {
            [.., before, _] => (before.end / SEGMENT) as usize,
            _ => 0,
        }
    }

    /// Takes the chain out that was added last.
    pub(crate) fn remove_last(&mut self) {
        self.used = self.end_before_last();
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
    /// The batch's segments.
    segments: *const Segment,
    /// The first segment of the next chain.
    next: *const Segment,
    batch: PhantomData<&'a Batch>,
}

// SAFETY: it stands for a shared reference to the batch.
unsafe impl Send for Iter<'_> {}
// SAFETY: as above.
unsafe impl Sync for Iter<'_> {}

impl<'a> Iterator for Iter<'a> {
    type Item = (&'a Chain, &'a [Segment], &'a [Segment]);

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        let chain = self.chains.next()?;
        let [readable, writable] = [chain.middle, chain.end].map(|end| {
            // SAFETY: the chains of a batch were added with their segments, one behind the other, all
            // in the memory that the iterator borrows.
            let (from, to) = (self.next, unsafe { self.segments.byte_add(end as usize) });
            self.next = to;
            // SAFETY: as above.
            unsafe { core::slice::from_raw_parts(from, to.offset_from_unsigned(from)) }
        });
        Some((chain, readable, writable))
    }

    #[inline]
    fn size_hint(&self) -> (usize, Option<usize>) {
        self.chains.size_hint()
    }
}

impl ExactSizeIterator for Iter<'_> {}

/// Where the fast paths write; see [`Batch::free`].
pub(crate) struct Free {
    /// The first free chain slot.
    pub(crate) chains: *mut Chain,
    /// The first segment.
    pub(crate) base: *mut Segment,
    /// The first free segment.
    pub(crate) segments: *mut Segment,
    /// Where the segments end that the next chain may take; see [`Batch::room`].
    ///
    /// With each chain that is added it moves on by one.
    pub(crate) room_end: *mut Segment,
}
