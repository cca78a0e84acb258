//! Walks a chain with which nothing is wrong, and gives up on any other.
//!
//! ```text
//!   first --next--> desc --next--> ... --> last: the chain's ends and lengths
//!                     \--> malformed, or no room: None, and nothing of it counts
//! ```
//! This is the fast path of both layouts: one pass, one exit for all that is unusual. The caller
//! then forgets what it saw and walks again with [`crate::chain::ChainBuilder`], which fetches anew
//! and names the error. So nothing is decided by a value that is fetched twice.
use crate::Segment;
use crate::batch::Chain;
use crate::chain::Descriptor;
use paravane_spec::split::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE};

/// A chain that was walked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Walk<D> {
    /// Bytes: readable ones, writable ones.
    pub(crate) lens: [u32; 2],
    /// The places behind its last readable and its last writable segment.
    pub(crate) ends: [*mut Segment; 2],
    /// The last descriptor.
    pub(crate) last: D,
}

impl<D: Descriptor> Walk<D> {
    /// The chain, in a batch whose segments begin at `base`.
    #[inline(always)]
    pub(crate) fn chain(&self, head: u16, base: *mut Segment) -> Chain {
        // A batch has less than 4 GiB of segments.
        Chain::parts(head, self.ends.map(|end| (end.addr() - base.addr()) as u32), self.lens)
    }
}

/// As [`walk`], for descriptors that say by NEXT whether another one follows, and none by INDIRECT.
///
/// `next` fetches it; `None`: there is no such descriptor.
///
/// # Safety
/// As [`walk`].
#[inline(always)]
pub(crate) unsafe fn walk_linked<D: Descriptor>(
    first: D,
    out: *mut Segment,
    end: *mut Segment,
    mut next: impl FnMut(D) -> Option<D>,
) -> Option<Walk<D>> {
    // One comparison says what a descriptor is.
    const KINDS: u16 = DESC_F_NEXT | DESC_F_WRITE | DESC_F_INDIRECT;
    let kind = |desc: D| desc.flags() & KINDS;
    let (mut at, mut desc, mut bytes) = (out, first, 0);
    let mut take = |desc: D| {
        // SAFETY: the caller vouches for the places.
        let (after, len) = unsafe { put(at, end, desc) }?;
        (at, bytes) = (after, bytes + len);
        Some((at, bytes))
    };
    let (mut middle, mut readable) = (out, 0);
    while kind(desc) == DESC_F_NEXT {
        (middle, readable) = take(desc)?;
        desc = next(desc)?;
    }
    if kind(desc) == 0 {
        let (end, bytes) = take(desc)?;
        return found([end, end], [bytes, bytes], desc);
    }
    while kind(desc) == DESC_F_NEXT | DESC_F_WRITE {
        take(desc)?;
        desc = next(desc)?;
    }
    if kind(desc) != DESC_F_WRITE {
        return None;
    }
    let (end, bytes) = take(desc)?;
    found([middle, end], [readable, bytes], desc)
}

/// A chain with the ends of its parts, and the bytes before them.
#[inline(always)]
fn found<D>(ends: [*mut Segment; 2], [readable, bytes]: [u64; 2], last: D) -> Option<Walk<D>> {
    // More than 32 bits are the slow path's error. It cannot have overflowed, with `MAX_CHAIN`
    // segments.
    let total = u32::try_from(bytes).ok()?;
    let readable = readable as u32;
    Some(Walk { ends, lens: [readable, total - readable], last })
}

/// Writes the segment of `desc` to `at`; returns the place behind it, and its bytes.
///
/// # Safety
/// `at` is a place for a segment, unless it is `end`.
#[inline(always)]
unsafe fn put<D: Descriptor>(at: *mut Segment, end: *mut Segment, desc: D) -> Option<(*mut Segment, u64)> {
    let (addr, len) = (desc.addr(), desc.len());
    // Not less: it has no bytes, or wraps around the address space.
    if at == end || addr >= addr.wrapping_add(len.into()) {
        return None;
    }
    // SAFETY: `at` is before the end.
    unsafe { at.write(Segment { addr, len }) };
    // SAFETY: as above.
    Some((unsafe { at.add(1) }, u64::from(len)))
}

/// Writes the segments of a chain from `out` on, up to `end`, and adds them up.
///
/// `next` says what follows a descriptor; `None`: nothing. NEXT means nothing. The result is `None` if the
/// walk gave up.
///
/// # Safety
/// The places from `out` to `end` are one piece of memory for segments.
#[inline(always)]
pub(crate) unsafe fn walk<D: Descriptor>(
    first: D,
    out: *mut Segment,
    end: *mut Segment,
    mut next: impl FnMut(D) -> Option<D>,
) -> Option<Walk<D>> {
    let (mut at, mut desc, mut bytes, mut flags) = (out, first, 0, 0);
    // Two loops, so that neither keeps an account of directions.
    while !desc.has(DESC_F_WRITE) {
        // SAFETY: the caller vouches for the places.
        let (after, len) = unsafe { put(at, end, desc) }?;
        (at, bytes, flags) = (after, bytes + len, flags | desc.meta());
        match next(desc) {
            Some(following) => desc = following,
            None if is_table::<D>(flags) => return None,
            None => return found([at, at], [bytes, bytes], desc),
        }
    }
    let (middle, readable) = (at, bytes);
    loop {
        // SAFETY: as above.
        let (after, len) = unsafe { put(at, end, desc) }?;
        (at, bytes, flags) = (after, bytes + len, flags | desc.meta());
        match next(desc) {
            Some(following) if following.has(DESC_F_WRITE) => desc = following,
            Some(_) => return None,
            None if is_table::<D>(flags) => return None,
            None => return found([middle, at], [readable, bytes], desc),
        }
    }
}

/// Whether one of the second words that were combined has INDIRECT.
#[inline(always)]
fn is_table<D: Descriptor>(words: u64) -> bool {
    words & u64::from(DESC_F_INDIRECT) << D::FLAGS != 0
}
