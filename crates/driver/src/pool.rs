//! Allocator of the memory that drivers share with devices.
use crate::DriverError;
use paravane_ring::DmaArea;

/// A bump allocator over shared memory.
///
/// It never takes memory back: a device that knows an address may write there at any later time.
/// Device addresses may differ from the machine's, see [`Pool::translate`].
#[derive(Debug)]
pub struct Pool {
    memory: DmaArea,
    used: usize,
    /// Offset from addresses of `memory` to device addresses, modulo 2^64.
    offset: u64,
}

impl Pool {
    /// Hands out `memory`.
    #[must_use]
    pub fn new(memory: DmaArea) -> Self {
        Self { memory, used: 0, offset: 0 }
    }

    /// Sets the offset from machine addresses to device addresses, modulo 2^64.
    ///
    /// It holds for memory taken from now on.
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

    /// `size` bytes for private use; the address is the machine's.
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
