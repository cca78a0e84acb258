//! Memory that a driver shares with devices, handed out once and never taken back.
use crate::DriverError;
use paravane_ring::DmaArea;

/// A bump allocator over shared memory. Devices may see the memory elsewhere than the driver's machine does, see
/// [`Pool::translate`]. It takes nothing back: a device that was told of a piece may write
/// to it at any later time, so no piece ever serves a second purpose.
#[derive(Debug)]
pub struct Pool {
    memory: DmaArea,
    used: usize,
    /// What device addresses are more than those of `memory`.
    offset: u64,
}

impl Pool {
    /// Hands out `memory`.
    #[must_use]
    pub fn new(memory: DmaArea) -> Self {
        Self { memory, used: 0, offset: 0 }
    }

    /// From here on pieces are for devices that see the memory `offset` bytes further up (modulo 2^64): behind an
    /// IOMMU that translates so. 0 is where it began.
    pub fn translate(&mut self, offset: u64) {
        self.offset = offset;
    }

    /// `size` bytes whose device address is a multiple of `align` (a power of two).
    ///
    /// # Errors
    /// Too little is left; nothing was taken.
    pub fn take(&mut self, size: usize, align: usize) -> Result<DmaArea, DriverError> {
        self.take_at(size, align, self.offset)
    }

    /// `size` bytes that no device is told of; the address is the machine's own.
    ///
    /// # Errors
    /// As [`Pool::take`].
    pub fn take_private(&mut self, size: usize, align: usize) -> Result<DmaArea, DriverError> {
        self.take_at(size, align, 0)
    }

    fn take_at(&mut self, size: usize, align: usize, offset: u64) -> Result<DmaArea, DriverError> {
        let short = DriverError::Memory { needed: size, free: self.free() };
        let align = align.max(1) as u64;
        let base = self.memory.addr.wrapping_add(offset);
        let next = base.checked_add(self.used as u64).ok_or(short)?;
        let addr = next.checked_next_multiple_of(align).ok_or(short)?;
        let at = usize::try_from(addr - base).map_err(|_| short)?;
        let end = at.checked_add(size).ok_or(short)?;
        let piece = self.memory.slice(at, size).ok_or(short)?;
        self.used = end;
        Ok(DmaArea { addr, ..piece })
    }

    /// Bytes left.
    #[must_use]
    pub fn free(&self) -> usize {
        self.memory.area.len().saturating_sub(self.used)
    }
}
