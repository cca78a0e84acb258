//! Memory that records the requests in flight of a device's queues, for a later process.
//!
//! ```text
//!   region:  queue 0 | queue 1 | ...      equal shares, each a multiple of 64 bytes
//! ```
//! It may be another process's, and its contents are as hostile as all such memory: the ring checks
//! them (tracking in `paravane_ring`).
use paravane_device::tracking_bytes;
use paravane_dma::{Access, Backing, Mapping, Memory, MemoryError, Region, RegionConfig};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use thiserror::Error;

/// Alignment of each queue's share in bytes.
const ALIGN: u64 = 64;
const PAGE: u64 = 4096;

/// Why [`InFlightMemory::mapping`] finds no room for a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum InFlightError {
    /// The queue has no share, or needs more.
    #[error("too small for this queue")]
    TooSmall,
    /// The file is shorter than it was said to be.
    #[error("smaller than its size field")]
    Missing,
}

/// Memory that records requests in flight. See [`QueueStart::tracked`](crate::QueueStart::tracked).
#[derive(Debug)]
pub struct InFlightMemory {
    /// The region is at address 0.
    memory: Memory,
    region: Arc<Region>,
    stride: u64,
    queues: u16,
}

/// Bytes of one queue of at most `size` descriptors.
fn share(size: u16) -> u64 {
    (tracking_bytes(size, false).max(tracking_bytes(size, true)) as u64).next_multiple_of(ALIGN)
}

/// A region for queues of these sizes.
fn config(sizes: &[u16]) -> (RegionConfig, u64) {
    let bytes = share(sizes.iter().copied().max().unwrap_or(1)) * sizes.len().max(1) as u64;
    let size = bytes.next_multiple_of(PAGE);
    (RegionConfig { gpa: 0, size, backing: Backing::Pages, writable: true }, bytes)
}

impl InFlightMemory {
    /// Makes memory for queues of these sizes, of either layout.
    ///
    /// # Errors
    /// The host refuses.
    pub fn new(sizes: &[u16]) -> Result<Self, MemoryError> {
        let (config, bytes) = config(sizes);
        Self::of(Region::new(config)?, bytes, sizes.len())
    }

    /// Maps memory that another process has made by [`InFlightMemory::new`], for the same sizes.
    ///
    /// # Errors
    /// The file is another one, or the host refuses.
    pub fn open(sizes: &[u16], file: OwnedFd) -> Result<Self, MemoryError> {
        let (config, bytes) = config(sizes);
        Self::of(Region::open(config, file)?, bytes, sizes.len())
    }

    /// Divides `bytes` bytes of a region, which is at address 0, among `queues` queues.
    ///
    /// # Errors
    /// The host refuses.
    pub fn of(region: Arc<Region>, bytes: u64, queues: usize) -> Result<Self, MemoryError> {
        let queues = u16::try_from(queues).unwrap_or(u16::MAX).max(1);
        let share = bytes / u64::from(queues);
        let memory = Memory::new(vec![Arc::clone(&region)])?;
        Ok(Self { memory, region, stride: share - share % ALIGN, queues })
    }

    /// The file of the memory, for the later process; `None` if [`InFlightMemory::of`] took private memory.
    #[must_use]
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        self.region.fd()
    }

    /// Whether another process has truncated the file.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.region.lost()
    }

    /// Forgets what is recorded of a queue.
    ///
    /// # Errors
    /// The host refuses.
    pub fn clear(&self, queue: u16) -> io::Result<()> {
        let at = self.region.offset() + self.stride * u64::from(queue);
        let file = self.file().ok_or(io::ErrorKind::Unsupported)?;
        let zeroes = vec![0; self.stride as usize];
        let mut written = 0;
        while written < zeroes.len() {
            written += rustix::io::pwrite(file, &zeroes[written..], at + written as u64)?;
        }
        Ok(())
    }

    /// Maps the share of a queue with `size` descriptors.
    ///
    /// # Errors
    /// It does not suffice, or the file is too short.
    pub fn mapping(&self, queue: u16, size: u16, is_packed: bool) -> Result<Mapping, InFlightError> {
        let needed = tracking_bytes(size, is_packed);
        if queue >= self.queues || needed as u64 > self.stride {
            return Err(InFlightError::TooSmall);
        }
        // Less than the size of the whole region, so it cannot overflow.
        let at = self.stride * u64::from(queue);
        let mut handle = self.memory.handle();
        let mapped = handle.enter().map(at, needed, Access::READ | Access::WRITE | Access::RELAXED);
        mapped.map_err(|_| InFlightError::Missing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_queue_has_its_own_share() {
        let memory = InFlightMemory::new(&[16, 256]).unwrap();
        let again = memory.file().unwrap().try_clone_to_owned().unwrap();
        let again = InFlightMemory::open(&[16, 256], again).unwrap();
        let [first, second] = [0, 1].map(|queue| memory.mapping(queue, 256, true).unwrap());
        assert!(second.host().as_ptr().addr() >= first.host().as_ptr().addr() + first.len());
        assert!(again.mapping(1, 256, false).is_ok());
        assert_eq!(memory.mapping(2, 16, false).unwrap_err(), InFlightError::TooSmall);
        assert_eq!(memory.mapping(0, 1024, false).unwrap_err(), InFlightError::TooSmall);
        memory.clear(1).unwrap();
        assert!(
            InFlightMemory::open(&[1024; 40], again.file().unwrap().try_clone_to_owned().unwrap()).is_err()
        );
    }
}
