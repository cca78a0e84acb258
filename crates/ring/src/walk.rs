//! Walks a chain with which nothing is wrong, and gives up on any other.
//!
//! ```text
//!   first --next--> desc --next--> ... --> Last: the chain's ends and lengths
//!                     \--> malformed, or no room: None, and nothing of it counts
//! ```
//! This is the fast path of both layouts: one pass, one exit for all that is unusual. The caller
//! then forgets what it saw and walks again with [`crate::chain::ChainBuilder`], which fetches anew
//! and names the error. So nothing is decided by a value that is fetched twice.
use crate::Segment;
use crate::batch::Chain;
use crate::chain::Descriptor;
use paravane_spec::split::DESC_F_WRITE;

/// What follows a descriptor.
pub(crate) enum Next<D> {
    /// Another one.
    Desc(D),
    /// The chain ends here.
    Last,
    /// Nothing: the descriptor is malformed.
    Wrong,
}

/// A chain that was walked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Walk<D> {
    /// Bytes: readable ones, writable ones.
    pub(crate) lens: [u32; 2],
    /// The places behind its last readable and its last writable segment.
    pub(crate) ends: [*mut Segment; 2],
    /// The last descriptor.
    pub(crate) last: D,
    /// The bitwise or of the second words of all descriptors.
    pub(crate) metas: u64,
}

impl<D: Descriptor> Walk<D> {
    /// The chain, in a batch whose segments begin at `base`.
    #[inline(always)]
    pub(crate) fn chain(&self, head: u16, base: *mut Segment) -> Chain {
        // A batch has less than 4 GiB of segments.
        Chain::parts(head, self.ends.map(|end| (end.addr() - base.addr()) as u32), self.lens)
    }

    /// Whether one of the descriptors has `flag`.
    #[inline(always)]
    pub(crate) fn any_has(&self, flag: u16) -> bool {
        self.metas & u64::from(flag) << D::FLAGS != 0
    }
}

/// Writes the segments of a chain from `out` on, up to `end`, and adds them up.
///
/// `next` says what follows a descriptor. `None`: the walk gave up.
///
/// # Safety
/// The places from `out` to `end` are one piece of memory for segments.
#[inline(always)]
pub(crate) unsafe fn walk<D: Descriptor>(
    first: D,
    out: *mut Segment,
    end: *mut Segment,
    mut next: impl FnMut(D) -> Next<D>,
) -> Option<Walk<D>> {
    let take = |at: *mut Segment, desc: D| {
        let (addr, len) = (desc.addr(), desc.len());
        // Not less: it has no bytes, or wraps around the address space.
        if at == end || addr >= addr.wrapping_add(len.into()) {
            return None;
        }
        // SAFETY: `at` is before `end`.
        unsafe { at.write(Segment { addr, len }) };
        // SAFETY: as above.
        Some((unsafe { at.add(1) }, u64::from(len)))
    };
    let (mut at, mut desc, mut bytes, mut metas) = (out, first, 0, 0);
    let found = |middle: *mut Segment, end: *mut Segment, readable: u64, bytes: u64, last, metas| {
        // More than 32 bits are the slow path's error. It cannot have overflowed, with `MAX_CHAIN`
        // segments.
        let total = u32::try_from(bytes).ok()?;
        let readable = readable as u32;
        Some(Walk { ends: [middle, end], lens: [readable, total - readable], last, metas })
    };
    // Two loops, so that neither keeps an account of directions.
    while !desc.has(DESC_F_WRITE) {
        let (after, len) = take(at, desc)?;
        (at, bytes, metas) = (after, bytes + len, metas | desc.meta());
        match next(desc) {
            Next::Desc(following) => desc = following,
            Next::Last => return found(at, at, bytes, bytes, desc, metas),
            Next::Wrong => return None,
        }
    }
    let (middle, readable) = (at, bytes);
    loop {
        let (after, len) = take(at, desc)?;
        (at, bytes, metas) = (after, bytes + len, metas | desc.meta());
        match next(desc) {
            Next::Desc(following) if following.has(DESC_F_WRITE) => desc = following,
            Next::Last => return found(middle, at, readable, bytes, desc, metas),
            _ => return None,
        }
    }
}
