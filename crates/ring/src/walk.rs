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
use crate::packed;
use paravane_spec::split::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE};

/// A chain that was walked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Walk {
    /// Bytes.
    pub(crate) readable: u32,
    pub(crate) writable: u32,
    /// The place behind its last readable segment.
    pub(crate) middle: *mut Segment,
    /// The place behind its last segment.
    pub(crate) end: *mut Segment,
}

impl Walk {
    /// The chain, in a batch whose segments begin at `base`.
    #[inline(always)]
    pub(crate) fn chain(&self, head: u16, base: *mut Segment) -> Chain {
        // A batch has less than 4 GiB of segments.
        let bytes_to = |place: *mut Segment| (place.addr() - base.addr()) as u32;
        Chain::parts(head, bytes_to(self.middle), bytes_to(self.end), self.readable, self.writable)
    }

    /// Its readable and its writable bytes.
    #[inline(always)]
    pub(crate) fn lens(&self) -> [u32; 2] {
        [self.readable, self.writable]
    }
}

/// Writes the segments of a chain from `out` on, up to `end`, and adds them up.
///
/// NEXT says whether another descriptor follows; none has INDIRECT.
///
/// `next` fetches it; `None`: there is no such descriptor. The last one is returned, too.
///
/// # Safety
/// The places from `out` to `end` are one piece of memory for segments.
#[inline(always)]
pub(crate) unsafe fn walk_linked<D: Descriptor>(
    first: D,
    out: *mut Segment,
    end: *mut Segment,
    mut next: impl FnMut(D) -> Option<D>,
) -> Option<(Walk, D)> {
    // One comparison says what a descriptor is.
    const KINDS: u32 = (DESC_F_NEXT | DESC_F_WRITE | DESC_F_INDIRECT) as u32;
    const NEXT: u32 = DESC_F_NEXT as u32;
    const WRITE: u32 = DESC_F_WRITE as u32;
    let kind = |desc: D| u32::from(desc.flags()) & KINDS;
    let (mut at, mut desc, mut bytes) = (out, first, 0);
    let mut take = |desc: D| {
        // SAFETY: the caller vouches for the places.
        let (after, len) = unsafe { put(at, end, desc) }?;
        (at, bytes) = (after, bytes + len);
        Some((at, bytes))
    };
    let (mut middle, mut readable, mut what) = (out, 0, kind(desc));
    while what == NEXT {
        (middle, readable) = take(desc)?;
        desc = next(desc)?;
        what = kind(desc);
    }
    if what == 0 {
        let (end, bytes) = take(desc)?;
        return Some((found(end, end, bytes, bytes)?, desc));
    }
    while what == NEXT | WRITE {
        take(desc)?;
        desc = next(desc)?;
        what = kind(desc);
    }
    if what != WRITE {
        return None;
    }
    let (end, bytes) = take(desc)?;
    Some((found(middle, end, readable, bytes)?, desc))
}

/// A chain with the ends of its parts, and the bytes before them.
#[inline(always)]
fn found(middle: *mut Segment, end: *mut Segment, readable: u64, bytes: u64) -> Option<Walk> {
    // More than 32 bits are the slow path's error. It cannot have overflowed, with `MAX_CHAIN`
    // segments.
    let total = u32::try_from(bytes).ok()?;
    let readable = readable as u32;
    Some(Walk { readable, writable: total - readable, middle, end })
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

/// Writes the segments of a packed queue's table from `out` on, up to `end`, and adds them up.
///
/// `next` says what follows; `None`: nothing. NEXT means nothing. The result is `None` if the walk gave up.
///
/// # Safety
/// As [`walk_linked`].
#[inline(always)]
pub(crate) unsafe fn walk_table(
    first: packed::Descriptor,
    out: *mut Segment,
    end: *mut Segment,
    mut next: impl FnMut() -> Option<packed::Descriptor>,
) -> Option<Walk> {
    let (mut at, mut desc, mut bytes, mut words) = (out, first, 0, 0);
    // INDIRECT in any of them.
    let is_table = |words: u64| packed::flags(words) & DESC_F_INDIRECT != 0;
    // Two loops, so that neither keeps an account of directions.
    while !desc.has(DESC_F_WRITE) {
        // SAFETY: the caller vouches for the places.
        let (after, len) = unsafe { put(at, end, desc) }?;
        (at, bytes, words) = (after, bytes + len, words | desc.meta);
        match next() {
            Some(following) => desc = following,
            None if is_table(words) => return None,
            None => return found(at, at, bytes, bytes),
        }
    }
    let (middle, readable) = (at, bytes);
    loop {
        // SAFETY: as above.
        let (after, len) = unsafe { put(at, end, desc) }?;
        (at, bytes, words) = (after, bytes + len, words | desc.meta);
        match next() {
            Some(following) if following.has(DESC_F_WRITE) => desc = following,
            Some(_) => return None,
            None if is_table(words) => return None,
            None => return found(middle, at, readable, bytes),
        }
    }
}
