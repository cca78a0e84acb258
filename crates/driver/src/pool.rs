//! Memory that a driver shares with devices, handed out once and never taken back.
use crate::DriverError;
use paravane_ring::DmaArea;

/// A bump allocator over shared memory. It takes nothing back: a device that was told of a piece may write
/// to it at any later time, so no piece ever serves a second purpose.
#[derive(Debug)]
pub struct Pool {
    memory: DmaArea,
    used: usize,
}

impl Pool {
    /// Hands out `memory`.
    #[must_use]
    pub fn new(memory: DmaArea) -> Self {
        Self { memory, used: 0 }
    }

    /// `size` bytes whose device address is a multiple of `align` (a power of two).
    ///
    /// # Errors
    /// Too little is left; nothing was taken.
    pub fn take(&mut self, size: usize, align: usize) -> Result<DmaArea, DriverError> {
        let short = DriverError::Memory { needed: size, free: self.free() };
        let align = align.max(1) as u64;
        let next = self.memory.addr.checked_add(self.used as u64).ok_or(short)?;
        let start = next.checked_next_multiple_of(align).ok_or(short)?;
        let offset = usize::try_from(start - self.memory.addr).map_err(|_| short)?;
        let end = offset.checked_add(size).ok_or(short)?;
        let piece = self.memory.slice(offset, size).ok_or(short)?;
        self.used = end;
        Ok(piece)
    }

    /// Bytes left.
    #[must_use]
    pub fn free(&self) -> usize {
        self.memory.area.len().saturating_sub(self.used)
    }
}
