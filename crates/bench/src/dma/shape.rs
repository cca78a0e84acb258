//! The regions and mappings of an address space.
use super::ops::PAGE;

/// Bytes of guest memory: more than a cache holds, so that random accesses miss it.
pub(super) const SIZE: u64 = 64 << 20;
/// Distance in guest memory of pages that are adjacent for the device; odd.
const STRIDE: u64 = 9973;
/// The first device address, different from the first guest-physical address.
pub(super) const IOVA: u64 = 1 << 32;
/// Regions and mappings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Shape {
    /// Number of adjoining regions of the same size.
    pub(super) regions: u64,
    /// Number of mappings: 1 of all memory, or scattered mappings of a page each.
    pub(super) mappings: u64,
}

impl Shape {
    /// Bytes of device addresses.
    pub(super) fn span(self) -> u64 {
        if self.mappings == 1 { SIZE } else { self.mappings * PAGE }
    }

    /// Every mapping: device address, guest-physical address, bytes.
    ///
    /// With more mappings than pages, several map the same page.
    pub(super) fn map(self) -> impl Iterator<Item = (u64, u64, u64)> {
        let size = if self.mappings == 1 { SIZE } else { PAGE };
        (0..self.mappings).map(move |n| (IOVA + n * size, n * STRIDE % (SIZE / PAGE) * PAGE, size))
    }
}
