//! Memory in which is written down what is in flight, kept by the client while we may die.
//!
//! ```text
//!   GET_INFLIGHT_FD: a file of zeroes is made and given away ----> the client keeps it
//!   SET_INFLIGHT_FD: it comes back, after a crash as it was -----> a region for each queue, for the ring to track in
//! ```
//! What is in it is as hostile as everything else of the client's; the ring checks it (`paravane_ring`'s tracking).
use crate::memory::ClientMemory;
use crate::session::SessionError;
use paravane_dma::{Access, Backing, FileRange, Mapping, Memory, Region, RegionConfig};
use paravane_ring::device::tracking_bytes;
use paravane_spec::queue::MAX_SIZE;
use paravane_spec::vhost_user::Inflight;
use std::os::fd::OwnedFd;

/// The region of each queue is on a multiple of this.
const ALIGN: u64 = 64;
const PAGE: u64 = 4096;

/// The client's memory for all queues.
#[derive(Debug)]
pub(crate) struct InflightMemory {
    said: Inflight,
    /// The region is at its address 0.
    memory: Memory,
}

/// Bytes from one queue's region to the next one's: all queues have as much of the memory.
fn stride(said: Inflight) -> u64 {
    let share = said.size / u64::from(said.queues.max(1));
    share - share % ALIGN
}

/// New memory for `wanted` queues, to be given to the client. There is room for queues of `most` descriptors in it: a driver may
/// make its queues larger than the client has said here (the firmware of QEMU 10 does).
pub(crate) fn make(
    wanted: Inflight,
    most: u16,
    is_packed: bool,
) -> Result<(Inflight, OwnedFd), SessionError> {
    let Inflight { queues, queue_size, .. } = wanted;
    if !(1..=256).contains(&queues) || !(1..=MAX_SIZE).contains(&queue_size) {
        return Err(SessionError::Inflight("there are no such queues"));
    }
    let each = (tracking_bytes(queue_size.max(most), is_packed) as u64).next_multiple_of(ALIGN);
    let size = (each * u64::from(queues)).next_multiple_of(PAGE);
    let config = RegionConfig { gpa: 0, size, backing: Backing::Pages, writable: true };
    let region = Region::new(config).map_err(crate::memory::TableError::Memory)?;
    let file = region
        .fd()
        .try_clone_to_owned()
        .map_err(|source| SessionError::Fd { request: "GET_INFLIGHT_FD", source })?;
    Ok((Inflight { size, offset: 0, queues, queue_size, padding: 0 }, file))
}

impl InflightMemory {
    /// The client gives memory back.
    pub(crate) fn new(said: Inflight, file: OwnedFd, client: &ClientMemory) -> Result<Self, SessionError> {
        let size = said.size.checked_next_multiple_of(PAGE).unwrap_or(0);
        let range = FileRange { gpa: 0, size, offset: said.offset, writable: true };
        let refused = crate::memory::TableError::Memory;
        let region = Region::guarded(range, file, client.alarm(), client.quota()).map_err(refused)?;
        Ok(Self { said, memory: Memory::new(vec![region]).map_err(refused)? })
    }

    /// Whether it is gone.
    pub(crate) fn lost(&self) -> bool {
        self.memory.regions().iter().any(|region| region.lost())
    }

    /// The region of a queue with `size` descriptors.
    pub(crate) fn region(&self, queue: u16, size: u16, is_packed: bool) -> Result<Mapping, SessionError> {
        let (stride, needed) = (stride(self.said), tracking_bytes(size, is_packed) as u64);
        if queue >= self.said.queues || needed > stride {
            return Err(SessionError::Inflight("it has no room for this queue"));
        }
        // Less than the size of all.
        let at = stride * u64::from(queue);
        let mut handle = self.memory.handle();
        let guard = handle.enter();
        guard
            .map(at, needed as usize, Access::READ | Access::WRITE | Access::RELAXED)
            .map_err(|_| SessionError::Inflight("it is too small"))
    }
}
