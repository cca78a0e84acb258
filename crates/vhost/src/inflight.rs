//! In-flight tracking: memory that the client keeps if this process dies.
//!
//! ```text
//!   GET_INFLIGHT_FD: a file of zeroes is made and sent ---------> the client keeps it
//!   SET_INFLIGHT_FD: the client returns it, after a crash too --> one region per queue, in which the ring tracks chains
//! ```
//! Where a keeper keeps sessions ([`paravane_export::keeper`]) and the client has no region, the session makes
//! one of its own, in the same format.
//!
//! With GET_VRING_BASE_INFLIGHT the client takes the region along when it migrates, with the
//! requests that a stopped queue has left in it.
//!
//! Its contents are as hostile as all client memory. The ring checks them (tracking in
//! `paravane_ring`).
use crate::memory::ClientMemory;
use crate::session::SessionError;
use paravane_dma::{Access, Backing, FileRange, Mapping, Memory, Region, RegionConfig};
use paravane_ring::device::tracking_bytes;
use paravane_spec::queue::MAX_SIZE;
use paravane_spec::vhost_user::Inflight;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Alignment of each queue's region in bytes.
const ALIGN: u64 = 64;
const PAGE: u64 = 4096;

/// In-flight region of all queues.
#[derive(Debug)]
pub(crate) struct InflightMemory {
    layout: Inflight,
    /// The region is at address 0.
    memory: Memory,
    region: Arc<Region>,
}

/// Distance in bytes between the regions of two queues, which have equal shares.
fn stride(layout: Inflight) -> u64 {
    let share = layout.size / u64::from(layout.queues.max(1));
    share - share % ALIGN
}

/// Makes an in-flight region for `wanted` queues, to be sent to the client.
///
/// Each queue gets room for at least `most` descriptors: a driver may make its queues larger than
/// the client said here (the firmware of QEMU 10 does).
pub(crate) fn make(
    wanted: Inflight,
    most: u16,
    is_packed: bool,
) -> Result<(Inflight, OwnedFd), SessionError> {
    let Inflight { queues, queue_size, .. } = wanted;
    if !(1..=256).contains(&queues) || !(1..=MAX_SIZE).contains(&queue_size) {
        return Err(SessionError::Inflight("invalid number of queues (1 to 256) or queue size"));
    }
    let each = tracking_bytes(queue_size.max(most), is_packed);
    make_file(queues, queue_size, each, "GET_INFLIGHT_FD")
}

/// Makes an in-flight region for a session, for queues of these sizes and of either layout.
pub(crate) fn make_own(sizes: &[u16]) -> Result<(Inflight, OwnedFd), SessionError> {
    let most = sizes.iter().copied().max().unwrap_or(1);
    let each = tracking_bytes(most, false).max(tracking_bytes(most, true));
    // A device has at most 256 queues.
    make_file(sizes.len().max(1) as u16, most, each, "in-flight region")
}

/// Makes a file with `each` bytes for each queue.
fn make_file(
    queues: u16,
    queue_size: u16,
    each: usize,
    request: &'static str,
) -> Result<(Inflight, OwnedFd), SessionError> {
    let each = (each as u64).next_multiple_of(ALIGN);
    let size = (each * u64::from(queues)).next_multiple_of(PAGE);
    let config = RegionConfig { gpa: 0, size, backing: Backing::Pages, writable: true };
    let region = Region::new(config).map_err(crate::memory::TableError::Memory)?;
    let file = region.fd().try_clone_to_owned().map_err(|source| SessionError::Fd { request, source })?;
    Ok((Inflight { size, offset: 0, queues, queue_size, padding: 0 }, file))
}

impl InflightMemory {
    /// Maps the region that the client returns.
    pub(crate) fn new(layout: Inflight, file: OwnedFd, client: &ClientMemory) -> Result<Self, SessionError> {
        let size = layout.size.checked_next_multiple_of(PAGE).unwrap_or(0);
        let range = FileRange { gpa: 0, size, offset: layout.offset, writable: true };
        let refused = crate::memory::TableError::Memory;
        let region = Region::guarded(range, file, client.alarm(), client.quota()).map_err(refused)?;
        Ok(Self { layout, memory: Memory::new(vec![Arc::clone(&region)]).map_err(refused)?, region })
    }

    /// What the client said about the region.
    pub(crate) fn layout(&self) -> Inflight {
        self.layout
    }

    /// The file of the region.
    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.region.fd()
    }

    /// Makes the region of a queue new.
    ///
    /// # Errors
    /// The host refuses.
    pub(crate) fn clear(&self, queue: u16) -> std::io::Result<()> {
        let stride = stride(self.layout);
        let at = self.layout.offset + stride * u64::from(queue);
        let zeroes = vec![0; stride as usize];
        let mut written = 0;
        while written < zeroes.len() {
            written += rustix::io::pwrite(self.file(), &zeroes[written..], at + written as u64)?;
        }
        Ok(())
    }

    /// Whether the client truncated the file.
    pub(crate) fn lost(&self) -> bool {
        self.region.lost()
    }

    /// Maps the region of a queue with `size` descriptors.
    pub(crate) fn region(&self, queue: u16, size: u16, is_packed: bool) -> Result<Mapping, SessionError> {
        let (stride, needed) = (stride(self.layout), tracking_bytes(size, is_packed) as u64);
        if queue >= self.layout.queues || needed > stride {
            return Err(SessionError::Inflight("too small for this queue"));
        }
        // Less than the size of the whole region, so it cannot overflow.
        let at = stride * u64::from(queue);
        let mut handle = self.memory.handle();
        let guard = handle.enter();
        guard
            .map(at, needed as usize, Access::READ | Access::WRITE | Access::RELAXED)
            .map_err(|_| SessionError::Inflight("smaller than its size field"))
    }
}
