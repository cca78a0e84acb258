//! Memory that a driver shares with devices, handed out once and never taken back.
use crate::DriverError;
use paravane_ring::DmaArea;

/// A bump allocator over shared memory.
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
    /// Too little is left.
    pub fn take(&mut self, size: usize, align: usize) -> Result<DmaArea, DriverError> {
        let _ = (&self.memory, &self.used, size, align);
        todo!()
    }

    /// Bytes left.
    #[must_use]
    pub fn free(&self) -> usize {
        todo!()
    }
}
