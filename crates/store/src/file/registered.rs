//! Guest memory registered with a ring, whose pages the kernel looks up only once.
//!
//! ```text
//!   map of guest memory --follow--> areas of up to 1 GiB --index--> a transfer with all pieces in one area
//!                                                       '-- none: an unregistered transfer
//! ```
//! Registration pins the pages that are present. If pages are returned to the host and replaced
//! later (a balloon, virtio-mem, postcopy), transfers go to the old pages, and the guest does not
//! see them. The operator has to rule that out, so registration is opt-in.
//!
//! The regions are kept while they are registered, so no address in an area can change its meaning.
use io_uring::IoUring;
use paravane_dma::{HostSlice, Region};
use std::sync::Arc;

/// Longest buffer that the kernel registers, in bytes.
const LONGEST: usize = 1 << 30;

/// One registered buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Area {
    start: usize,
    len: usize,
}

/// The memory that is registered with one ring.
#[derive(Debug, Default)]
pub(super) struct Registered {
    /// Generation of the map that was followed last.
    generation: Option<u64>,
    regions: Vec<Arc<Region>>,
    /// Sorted by address; the index is the number of the registered buffer.
    areas: Vec<Area>,
    refused: bool,
}

impl Registered {
    /// Registers the memory of the map, unless it is registered already.
    pub(super) fn follow(&mut self, ring: &IoUring, generation: u64, regions: &[Arc<Region>]) {
        if self.generation.replace(generation) == Some(generation) {
            return;
        }
        // The kernel accepts only writable pages.
        let regions = regions.iter().filter(|region| region.writable());
        if !self.regions.iter().map(Arc::as_ptr).eq(regions.clone().map(Arc::as_ptr)) {
            self.let_go(ring);
            self.register(ring, regions.cloned().collect());
        }
    }

    #[cold]
    fn register(&mut self, ring: &IoUring, regions: Vec<Arc<Region>>) {
        let areas =
            areas(regions.iter().map(|region| (region.host().as_ptr() as usize, region.size() as usize)));
        if areas.is_empty() {
            return;
        }
        let iovec = |area: &Area| libc::iovec {
            iov_base: std::ptr::with_exposed_provenance_mut(area.start),
            iov_len: area.len,
        };
        let buffers: Vec<_> = areas.iter().map(iovec).collect();
        // SAFETY: mapped guest memory, to which there are no Rust references. The regions are kept
        // until it is unregistered (`let_go`), or the ring is gone.
        match unsafe { ring.submitter().register_buffers(&buffers) } {
            Ok(()) => {
                let bytes: usize = areas.iter().map(|area| area.len).sum();
                tracing::debug!(buffers = areas.len(), bytes, "guest memory is registered");
                (self.regions, self.areas, self.refused) = (regions, areas, false);
            }
            Err(error) if self.refused => {
                tracing::debug!(%error, "cannot register guest memory with io_uring yet")
            }
            Err(error) => {
                self.refused = true;
                tracing::warn!(
                    %error,
                    "cannot register guest memory with io_uring; requests go unregistered, which is a little slower \
                     (\"Cannot allocate memory\": raise RLIMIT_MEMLOCK)"
                );
            }
        }
    }

    /// Unregisters all memory. Requests in flight go on.
    pub(super) fn let_go(&mut self, ring: &IoUring) {
        if self.areas.is_empty() {
            return;
        }
        if let Err(error) = ring.submitter().unregister_buffers() {
            // The pages stay pinned while the ring exists. No transfer names them.
            tracing::warn!(%error, "cannot unregister guest memory; it stays pinned until the queue stops");
        }
        self.areas.clear();
        self.regions.clear();
    }

    /// Number of the registered buffer that contains all pieces.
    pub(super) fn index(&self, pieces: &[HostSlice]) -> Option<u16> {
        let (first, rest) = pieces.split_first()?;
        let index = self.areas.partition_point(|area| area.start <= first.ptr as usize).checked_sub(1)?;
        let area = self.areas[index];
        (area.has(first) && rest.iter().all(|piece| area.has(piece))).then_some(index as u16)
    }
}

impl Area {
    fn has(&self, piece: &HostSlice) -> bool {
        let offset = (piece.ptr as usize).wrapping_sub(self.start);
        offset < self.len && piece.len <= self.len - offset
    }
}

/// Splits regions (address, length) into buffers that the kernel registers.
fn areas(regions: impl Iterator<Item = (usize, usize)>) -> Vec<Area> {
    let mut areas: Vec<_> = regions
        .flat_map(|(start, len)| {
            (0..len)
                .step_by(LONGEST)
                .map(move |offset| Area { start: start + offset, len: LONGEST.min(len - offset) })
        })
        .collect();
    areas.sort_unstable_by_key(|area| area.start);
    areas
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transfer_has_the_buffer_that_all_of_it_is_in() {
        let registered = Registered {
            areas: areas([(0x9000_0000, LONGEST + 4096), (0x1000, 0x2000)].into_iter()),
            ..Registered::default()
        };
        assert_eq!(registered.areas.len(), 3);
        let index = |pieces: &[(usize, usize)]| {
            let piece = |&(ptr, len)| HostSlice { ptr: std::ptr::without_provenance_mut(ptr), len };
            registered.index(&pieces.iter().map(piece).collect::<Vec<_>>())
        };
        let seam = 0x9000_0000 + LONGEST;
        assert_eq!(index(&[(0x1000, 0x2000)]), Some(0));
        assert_eq!(index(&[(0x1000, 0x2001)]), None);
        assert_eq!(index(&[(0xfff, 1)]), None);
        assert_eq!(index(&[(0x3000, 1)]), None);
        assert_eq!(index(&[(0x9000_0000, LONGEST)]), Some(1));
        assert_eq!(index(&[(seam - 1, 1), (0x9000_0000, 512)]), Some(1));
        assert_eq!(index(&[(seam - 1, 2)]), None, "it is in two");
        assert_eq!(index(&[(seam, 4096)]), Some(2));
        assert_eq!(index(&[(seam, 4096), (0x1000, 1)]), None);
        assert_eq!(index(&[(seam + 4095, 2)]), None);
        assert_eq!(index(&[(usize::MAX, 1)]), None);
        assert_eq!(index(&[]), None);
    }
}
