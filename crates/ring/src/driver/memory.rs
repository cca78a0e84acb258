//! Layout of a queue's memory: the same areas in both layouts.
//!
//! ```text
//!   | descriptors | driver area | device area | indirect tables, one an identifier |
//!   0             ^             ^             ^ cache lines
//! ```
use super::config::DriverConfig;
use crate::area::Cells;
use crate::split::desc_bytes;
use crate::{ConfigError, DmaArea, QueueAddresses, Segment};
use paravane_spec::split::DESC_SIZE;

/// Alignment of the areas in bytes, so that no cache line is written by both sides.
const CACHE_LINE: usize = 64;

/// Where the areas lie, in bytes from the start.
#[derive(Clone, Copy, Debug)]
struct Offsets {
    driver: usize,
    device: usize,
    tables: usize,
    /// Bytes in all.
    end: usize,
}

impl Offsets {
    fn new(layout: &DriverConfig) -> Self {
        // Descriptors are of one size in both layouts.
        const { assert!(DESC_SIZE == paravane_spec::packed::DESC_SIZE) };
        let [driver_bytes, device_bytes] = layout.area_bytes();
        let driver = desc_bytes(layout.size).next_multiple_of(CACHE_LINE);
        let device = (driver + driver_bytes).next_multiple_of(CACHE_LINE);
        let tables = (device + device_bytes).next_multiple_of(CACHE_LINE);
        let end = tables + usize::from(layout.size) * desc_bytes(layout.indirect);
        Self { driver, device, tables, end }
    }
}

impl DriverConfig {
    /// Shared memory that the queue needs, in bytes. Align it to 4096 or more.
    #[must_use]
    pub fn memory(&self) -> usize {
        Offsets::new(self).end
    }
}

/// A queue's memory, checked and zeroed, in its parts.
///
/// Invariant, made by [`Memory::take`]: each part is as long as the layout says, and lies on a
/// cache line of the area or at its start, which is aligned as descriptors are.
#[derive(Debug)]
pub(crate) struct Memory {
    /// The descriptors.
    pub(crate) desc: Cells,
    /// What the driver writes and the device reads.
    pub(crate) driver: Cells,
    /// What the device writes and the driver reads.
    pub(crate) device: Cells,
    /// The tables.
    pub(crate) tables: Tables,
    /// All of it.
    pub(crate) whole: DmaArea,
}

impl Memory {
    /// Divides `whole` into the areas of a queue.
    ///
    /// Returns them, and their addresses for the transport.
    pub(super) fn take(layout: &DriverConfig, whole: DmaArea) -> Result<(Self, QueueAddresses), ConfigError> {
        let part = "queue";
        let DmaArea { area, addr } = whole;
        let offsets = Offsets::new(layout);
        if area.len() < offsets.end {
            return Err(ConfigError::Short { part, needed: offsets.end, given: area.len() });
        }
        if !area.is_aligned(DESC_SIZE) || !addr.is_multiple_of(DESC_SIZE as u64) {
            return Err(ConfigError::Misaligned { part, addr, align: DESC_SIZE as u64 });
        }
        if addr.checked_add(offsets.end as u64).is_none() {
            return Err(ConfigError::Wraps { part, addr });
        }
        area.zero();
        let desc = area.cells();
        // SAFETY: all three offsets lie inside the area, whose length was checked.
        let (driver, device, tables) = unsafe {
            (desc.offset(offsets.driver), desc.offset(offsets.device), desc.offset(offsets.tables))
        };
        let at = |offset: usize| addr + offset as u64;
        let tables = Tables { cells: tables, addr: at(offsets.tables), segments: layout.indirect };
        let addresses = QueueAddresses {
            size: layout.size,
            desc: addr,
            driver: at(offsets.driver),
            device: at(offsets.device),
        };
        Ok((Self { desc, driver, device, tables, whole }, addresses))
    }
}

/// The indirect tables, one for each identifier below the queue's size.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tables {
    cells: Cells,
    /// Their address for the device.
    addr: u64,
    /// Descriptors in each; 0 without indirect descriptors.
    segments: u16,
}

impl Tables {
    /// Whether a buffer of `count` segments goes into a table.
    #[inline(always)]
    pub(crate) fn fit(&self, count: usize) -> bool {
        count > 1 && count <= usize::from(self.segments)
    }

    /// Longest chain that one descriptor stands for.
    ///
    /// 0 without indirect descriptors.
    pub(crate) fn segments(&self) -> usize {
        self.segments.into()
    }

    /// The table of `id`, and its first `count` descriptors for the device.
    ///
    /// # Safety
    /// `id` is below the queue's size, and `count` descriptors fit.
    #[inline(always)]
    pub(crate) unsafe fn of(&self, id: u16, count: usize) -> (Cells, Segment) {
        debug_assert!(count <= self.segments());
        let offset = usize::from(id) * desc_bytes(self.segments);
        let segment = Segment { addr: self.addr + offset as u64, len: (count * DESC_SIZE) as u32 };
        // SAFETY: there is a table for each identifier below the size.
        (unsafe { self.cells.offset(offset) }, segment)
    }
}
