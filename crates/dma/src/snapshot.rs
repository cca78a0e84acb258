//! One state of the memory map, which never changes once it is made.
use crate::{MemoryError, Region};
use std::sync::Arc;

/// What an access needs to know of a region, without a step through its `Arc`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    gpa: u64,
    size: u64,
    host: *mut u8,
    writable: bool,
}

// SAFETY: plain data; what the pointer names is touched only through the raw accesses of this crate, by those
// who hold the snapshot that the span came from.
unsafe impl Send for Span {}
// SAFETY: as above.
unsafe impl Sync for Span {}

impl Span {
    /// A span that holds no address.
    pub(crate) const EMPTY: Self = Self { gpa: 0, size: 0, host: std::ptr::null_mut(), writable: false };

    fn of(region: &Region) -> Self {
        Self {
            gpa: region.gpa(),
            size: region.size(),
            host: region.host().as_ptr(),
            writable: region.writable(),
        }
    }

    /// How far into the span `addr` is, if it is inside.
    #[inline(always)]
    pub(crate) fn offset(&self, addr: u64) -> Option<u64> {
        // One compare does for both ends: an address below wraps to a large number.
        let offset = addr.wrapping_sub(self.gpa);
        (offset < self.size).then_some(offset)
    }

    /// Bytes from `offset` (which is inside) to the end.
    #[inline(always)]
    pub(crate) fn left(&self, offset: u64) -> u64 {
        self.size - offset
    }

    /// Where `offset` (which is inside) is mapped.
    #[inline(always)]
    pub(crate) fn host(&self, offset: u64) -> *mut u8 {
        // `offset < size`, and the region of `size` bytes is mapped at `host` (its size fitted a usize then), so
        // the result is inside one mapping; the wrapping form needs no unsafe to say so.
        self.host.wrapping_add(offset as usize)
    }

    /// Whether devices may write there.
    #[inline(always)]
    pub(crate) fn writable(&self) -> bool {
        self.writable
    }
}

/// Regions by address, none overlapping. Whoever holds it keeps them mapped.
#[derive(Debug)]
pub(crate) struct Snapshot {
    spans: Box<[Span]>,
    regions: Vec<Arc<Region>>,
}

impl Snapshot {
    /// Up to this many spans, comparing with each is quicker than halving.
    const FEW: usize = 4;

    pub(crate) fn new(mut regions: Vec<Arc<Region>>) -> Result<Self, MemoryError> {
        regions.sort_by_key(|region| region.gpa());
        for pair in regions.windows(2) {
            let (first, second) = (pair[0].gpa(), pair[1].gpa());
            // Written so that nothing overflows when a region ends at the end of the address space.
            if second - first < pair[0].size() {
                return Err(MemoryError::Overlap { first, second });
            }
        }
        let spans = regions.iter().map(|region| Span::of(region)).collect();
        Ok(Self { spans, regions })
    }

    pub(crate) fn regions(&self) -> &[Arc<Region>] {
        &self.regions
    }

    /// The lowest span, or one that holds nothing.
    pub(crate) fn first(&self) -> Span {
        self.spans.first().copied().unwrap_or(Span::EMPTY)
    }

    /// The span that holds `addr`.
    #[inline]
    pub(crate) fn find(&self, addr: u64) -> Option<&Span> {
        if self.spans.len() <= Self::FEW {
            return self.spans.iter().find(|span| span.offset(addr).is_some());
        }
        let above = self.spans.partition_point(|span| span.gpa <= addr);
        let span = self.spans.get(above.checked_sub(1)?)?;
        span.offset(addr).is_some().then_some(span)
    }
}
