//! The regions and mappings of an address space.
use super::ops::PAGE;

/// Bytes of guest memory: more than a cache holds, so that accesses at random miss it.
pub(super) const SIZE: u64 = 64 << 20;
/// An odd number far from 1: pages that are neighbours for the device are not in memory.
const STRIDE: u64 = 9973;
/// Where device addresses start: not where guest-physical ones do.
pub(super) const IOVA: u64 = 1 << 32;
/// What a fixture is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Shape {
    /// Adjoining regions of the same size.
    pub(super) regions: u64,
    /// Mappings: one of everything, or so many of a page each, scattered.
    pub(super) mappings: u64,
}

impl Shape {
    /// Bytes of device addresses.
    pub(super) fn span(self) -> u64 {
        if self.mappings == 1 { SIZE } else { self.mappings * PAGE }
    }

    /// Every mapping: device address, guest-physical address, bytes. With more than memory has pages, several
    /// mean the same one.
    pub(super) fn map(self) -> impl Iterator<Item = (u64, u64, u64)> {
        let size = if self.mappings == 1 { SIZE } else { PAGE };
        (0..self.mappings).map(move |n| (IOVA + n * size, n * STRIDE % (SIZE / PAGE) * PAGE, size))
    }
}
