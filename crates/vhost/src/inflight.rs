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
use paravane_dma::{Backing, FileRange, Region, RegionConfig};
use paravane_io::InFlightMemory;
use paravane_ring::device::tracking_bytes;
use paravane_spec::queue::MAX_SIZE;
use paravane_spec::vhost_user::Inflight;
use std::os::fd::OwnedFd;

/// Alignment of each queue's region in bytes.
const ALIGN: u64 = 64;
const PAGE: u64 = 4096;

/// In-flight region of all queues, with what the client said about it.
#[derive(Debug)]
pub(crate) struct InflightMemory {
    pub(crate) layout: Inflight,
    pub(crate) memory: InFlightMemory,
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
    let file = region.fd().ok_or_else(|| std::io::ErrorKind::Unsupported.into());
    let file = file.and_then(|file| file.try_clone_to_owned());
    let file = file.map_err(|source| SessionError::Fd { request, source })?;
    Ok((Inflight { size, offset: 0, queues, queue_size, padding: 0 }, file))
}

impl InflightMemory {
    /// Maps the region that the client returns.
    pub(crate) fn new(layout: Inflight, file: OwnedFd, client: &ClientMemory) -> Result<Self, SessionError> {
        let size = layout.size.checked_next_multiple_of(PAGE).unwrap_or(0);
        let range = FileRange { gpa: 0, size, offset: layout.offset, writable: true };
        let refused = crate::memory::TableError::Memory;
        let region = Region::guarded(range, file, client.alarm(), client.quota()).map_err(refused)?;
        let memory = InFlightMemory::of(region, layout.size, layout.queues.into()).map_err(refused)?;
        Ok(Self { layout, memory })
    }
}
