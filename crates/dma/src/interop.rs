//! vm-memory adapter: guest memory for crates that take vm-memory's traits.
//!
//! Such crates are linux-loader, vhost and vfio-ioctls.
//!
//! ```text
//! Memory --View::new--> View            --iter, find_region--> ViewRegion
//!                       (GuestMemoryBackend)                   (GuestMemoryRegion)
//!                                              writes --Marks--> the active dirty log
//! ```
//! Only this module names vm-memory, whose interface changes with almost every release. A view
//! belongs to the VMM, not to a device: it may write where devices may not, uses no domain and no
//! access guard, and is not optimized.
use crate::published::Published;
use crate::sync::fence;
use crate::{Lent, Memory, Region};
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use vm_memory::bitmap::{Bitmap, BitmapSlice, WithBitmapSlice};
use vm_memory::guest_memory::Error as AccessError;
use vm_memory::{
    FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryRegion, GuestMemoryRegionBytes, GuestUsize,
    MemoryRegionAddress, VolatileSlice,
};

/// Regions of one map, as they were when the view was made. Keeps them mapped.
#[derive(Debug)]
pub struct View {
    regions: Vec<ViewRegion>,
}

/// One region of a [`View`].
#[derive(Debug)]
pub struct ViewRegion {
    region: Arc<Region>,
    file: Option<FileOffset>,
    marks: Marks,
}

/// Bitmap of a region: marks writes in the dirty log that is active at the time.
#[derive(Clone, Debug)]
pub struct Marks {
    published: Arc<Published>,
    /// Guest-physical address of offset 0.
    gpa: u64,
}

impl View {
    /// Makes a view of the current map of `memory`.
    ///
    /// # Errors
    /// The process has no file descriptors left: a view holds the regions' files.
    pub fn new(memory: &Memory) -> std::io::Result<Self> {
        Self::over(&memory.regions(), memory.published())
    }

    /// Makes a view of lent memory.
    ///
    /// # Errors
    /// As [`View::new`].
    pub fn lent(lent: &Lent) -> std::io::Result<Self> {
        Self::over(lent.regions(), lent.published())
    }

    fn over(regions: &[Arc<Region>], published: &Arc<Published>) -> std::io::Result<Self> {
        let regions = regions.iter().map(|region| {
            let file = region.fd().map(|file| file.try_clone_to_owned()).transpose()?;
            let file = file.map(|file| FileOffset::new(File::from(file), region.offset()));
            let marks = Marks { published: Arc::clone(published), gpa: region.gpa() };
            Ok(ViewRegion { region: Arc::clone(region), file, marks })
        });
        Ok(Self { regions: regions.collect::<std::io::Result<_>>()? })
    }
}

impl GuestMemoryBackend for View {
    type R = ViewRegion;

    fn num_regions(&self) -> usize {
        self.regions.len()
    }

    fn find_region(&self, addr: GuestAddress) -> Option<&ViewRegion> {
        let above = self.regions.partition_point(|region| region.region.gpa() <= addr.0);
        let region = self.regions.get(above.checked_sub(1)?)?;
        (addr.0 - region.region.gpa() < region.region.size()).then_some(region)
    }

    fn iter(&self) -> impl Iterator<Item = &ViewRegion> {
        self.regions.iter()
    }
}

impl ViewRegion {
    /// Host memory of `count` bytes from `offset` on.
    fn host(&self, offset: MemoryRegionAddress, count: usize) -> Result<*mut u8, AccessError> {
        let end = offset.0.checked_add(count as u64);
        if end.is_none_or(|end| end > self.region.size()) {
            return Err(AccessError::InvalidBackendAddress);
        }
        // Inside one mapping, or at its end with no byte; the wrapping form needs no unsafe to
        // express that.
        Ok(self.region.host().as_ptr().wrapping_add(offset.0 as usize))
    }
}

impl GuestMemoryRegion for ViewRegion {
    type B = Marks;

    fn len(&self) -> GuestUsize {
        self.region.size()
    }

    fn start_addr(&self) -> GuestAddress {
        GuestAddress(self.region.gpa())
    }

    fn bitmap(&self) -> Marks {
        self.marks.clone()
    }

    fn get_host_address(&self, addr: MemoryRegionAddress) -> Result<*mut u8, AccessError> {
        self.host(addr, 1)
    }

    fn file_offset(&self) -> Option<&FileOffset> {
        self.file.as_ref()
    }

    fn get_slice(
        &self,
        offset: MemoryRegionAddress,
        count: usize,
    ) -> Result<VolatileSlice<'_, Marks>, AccessError> {
        let host = self.host(offset, count)?;
        let marks = self.marks.slice_at(offset.0 as usize);
        // SAFETY: `host` has checked that the bytes are inside the region, which stays mapped as
        // long as `self`, from which the slice borrows, holds its Arc. There are no references to
        // guest memory, and all accesses are atomic or volatile.
        Ok(unsafe { VolatileSlice::with_bitmap(host, count, marks, None) })
    }
}

impl GuestMemoryRegionBytes for ViewRegion {}

impl WithBitmapSlice<'_> for Marks {
    type S = Self;
}

impl BitmapSlice for Marks {}

impl Bitmap for Marks {
    fn mark_dirty(&self, offset: usize, len: usize) {
        // Pairs with the fence in `ReaderSlots::synchronize`, like that of a `MappingGuard` that
        // ends: either the log that is found is the one that was turned on, or what was written is
        // seen by the thread that copies the memory after that. And with the one in
        // `DirtyLog::harvest`, for the mark.
        fence(Ordering::SeqCst);
        if let Some(log) = self.published.current().log() {
            log.mark(self.gpa + offset as u64, len as u64);
        }
    }

    fn dirty_at(&self, offset: usize) -> bool {
        self.published.current().log().is_some_and(|log| log.is_marked(self.gpa + offset as u64))
    }

    fn slice_at(&self, offset: usize) -> Self {
        Self { published: Arc::clone(&self.published), gpa: self.gpa + offset as u64 }
    }
}
