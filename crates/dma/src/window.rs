//! Window: a run of device addresses in one piece of host memory.
use crate::bitmap::LOG_PAGE;
use crate::{Access, Region};

/// Run of device addresses in one piece of host memory.
///
/// It has everything that an access needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    /// First device address.
    start: u64,
    size: u64,
    host: *mut u8,
    /// Guest-physical address of `start`.
    gpa: u64,
    /// Allowed directions.
    allows: Access,
    /// Index of its region.
    region: u32,
}

// SAFETY: plain data; the memory behind the pointer is touched only by the raw accesses of this
// crate, by holders of the snapshot that the window came from.
unsafe impl Send for Window {}
// SAFETY: as above.
unsafe impl Sync for Window {}

impl Window {
    /// Window that holds no address.
    pub(crate) const EMPTY: Self =
        Self { start: 0, size: 0, host: std::ptr::null_mut(), gpa: 0, allows: Access::empty(), region: 0 };

    /// Window of a whole region, whose index is `number`.
    pub(crate) fn of(region: &Region, number: u32) -> Self {
        Self {
            start: region.gpa(),
            size: region.size(),
            host: region.host().as_ptr(),
            gpa: region.gpa(),
            allows: if region.writable() { Access::READ | Access::WRITE } else { Access::READ },
            region: number,
        }
    }

    /// Part of this region's window that a block of a domain translates.
    ///
    /// The block has `size` bytes of device addresses from `start` on, the first of which is at
    /// guest-physical `gpa`. The two must overlap.
    #[inline(always)]
    pub(crate) fn behind(&self, start: u64, size: u64, gpa: u64, allows: Access) -> Self {
        if let Some(whole) = self.behind_whole(start, size, gpa, allows) {
            return whole;
        }
        // How far the block begins before the region, or inside it. Blocks and regions are below
        // 2^64 bytes and overlap, so the sums below do not overflow.
        let before = self.gpa.saturating_sub(gpa);
        let inside = gpa.saturating_sub(self.gpa);
        Self {
            start: start + before,
            size: (size - before).min(self.size - inside),
            host: self.host(inside),
            gpa: gpa.max(self.gpa),
            allows: self.allows & allows,
            region: self.region,
        }
    }

    /// [`Window::behind`], if the region has all of the block.
    #[inline(always)]
    pub(crate) fn behind_whole(&self, start: u64, size: u64, gpa: u64, allows: Access) -> Option<Self> {
        let inside = gpa.wrapping_sub(self.gpa);
        (inside < self.size && size <= self.size - inside).then(|| Self {
            start,
            size,
            host: self.host(inside),
            gpa,
            allows: self.allows & allows,
            region: self.region,
        })
    }

    /// Whether it holds no address.
    #[inline(always)]
    pub(crate) fn is_empty(&self) -> bool {
        self.size == 0
    }

    /// First device address.
    #[inline(always)]
    pub(crate) fn start(&self) -> u64 {
        self.start
    }

    /// Size in bytes.
    #[inline(always)]
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// Offset of `addr` in the window, if it is inside.
    #[inline(always)]
    pub(crate) fn offset(&self, addr: u64) -> Option<u64> {
        // One comparison covers both ends: an address below wraps to a large number.
        let offset = addr.wrapping_sub(self.start);
        (offset < self.size).then_some(offset)
    }

    /// Number of bytes from `offset` to the end; `offset` must be inside.
    #[inline(always)]
    pub(crate) fn left(&self, offset: u64) -> u64 {
        self.size - offset
    }

    /// Host address of `offset`, which must be inside.
    #[inline(always)]
    pub(crate) fn host(&self, offset: u64) -> *mut u8 {
        // `offset < size`, and `size` bytes are mapped at `host` (the size fitted a usize then), so
        // the result is inside one mapping; the wrapping form needs no unsafe to express that.
        self.host.wrapping_add(offset as usize)
    }

    /// Whether it is at most the smallest page, and so in one page of any log.
    ///
    /// Blocks of translations and regions are whole pages.
    #[inline(always)]
    pub(crate) fn is_in_one_page(&self) -> bool {
        self.size <= LOG_PAGE
    }

    /// Guest-physical address of `offset`, which must be inside.
    #[inline(always)]
    pub(crate) fn gpa(&self, offset: u64) -> u64 {
        self.gpa + offset
    }

    /// Directions in `access` that are forbidden.
    #[inline(always)]
    pub(crate) fn forbidden(&self, access: Access) -> Access {
        (access & (Access::READ | Access::WRITE)) - self.allows
    }

    /// Index of the region.
    pub(crate) fn region(&self) -> u32 {
        self.region
    }
}
