//! Region: one mapped piece of guest RAM, a memfd or a client's file.
use crate::ram::Ram;
#[cfg(not(miri))]
use crate::{Alarm, MappingQuota};
use crate::{Backing, MemoryError};
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

/// Configuration of a region to be made.
#[derive(Clone, Copy, Debug)]
pub struct RegionConfig {
    /// Guest-physical address of the first byte.
    pub gpa: u64,
    /// Size in bytes, a multiple of 4096 (of 2 MiB with huge pages).
    pub size: u64,
    /// Kind of pages.
    pub backing: Backing,
    /// Whether devices may write to it.
    pub writable: bool,
}

/// Part of a client's file that becomes a region ([`Region::guarded`]).
#[derive(Clone, Copy, Debug)]
pub struct FileRange {
    /// Guest-physical address of the first byte, a multiple of 4096.
    pub gpa: u64,
    /// Size in bytes, a multiple of 4096.
    pub size: u64,
    /// Offset in the file in bytes, a multiple of 4096.
    pub offset: u64,
    /// Whether devices may write to it.
    pub writable: bool,
}

/// Mapped guest RAM. Unmapped when the last reference is dropped.
///
/// The host maps it readable and writable in any case; `writable` limits devices.
#[derive(Debug)]
pub struct Region {
    gpa: u64,
    size: u64,
    writable: bool,
    ram: Ram,
}

impl Region {
    /// Makes zeroed memory: a memfd that is mapped shared, or private memory ([`Backing`]).
    ///
    /// If it has 2 MiB or more, it begins at a multiple of 2 MiB in this process. The memfd is sealed
    /// against changes of size, where the host supports it. Pages are allocated at their first access,
    /// or by [`Region::populate`].
    ///
    /// # Errors
    /// The configuration is misaligned, or the host lacks the memory (for huge pages the error says
    /// what to do).
    pub fn new(config: RegionConfig) -> Result<Arc<Self>, MemoryError> {
        let RegionConfig { gpa, size, backing, writable } = config;
        check(gpa, size, backing)?;
        Ok(Arc::new(Self { gpa, size, writable, ram: Ram::new(size, backing)? }))
    }

    /// Maps a region that another process made by [`Region::new`].
    ///
    /// `file` is a descriptor from [`Region::fd`].
    ///
    /// # Errors
    /// As [`Region::new`]; or the file is not sealed against shrinking.
    #[cfg(not(miri))]
    pub fn open(config: RegionConfig, file: std::os::fd::OwnedFd) -> Result<Arc<Self>, MemoryError> {
        let RegionConfig { gpa, size, backing, writable } = config;
        check(gpa, size, backing)?;
        Ok(Arc::new(Self { gpa, size, writable, ram: Ram::of(file, size)? }))
    }

    /// Maps a part of the file of another process, protected against truncation.
    ///
    /// If the file shrinks, an access to the missing part does not end this process: private zeroes
    /// replace the whole region, it becomes [`lost`](Region::lost), and `alarm` is raised. A system
    /// call that uses missing memory fails with EFAULT instead, without these effects.
    ///
    /// A SIGBUS handler does this. A thread that blocks SIGBUS is killed by the fault: do not block
    /// it in threads that touch guest memory.
    ///
    /// Files of hugetlbfs are mapped in their pages; a range may begin and end inside one. For
    /// other files huge pages are requested. Memory that devices may not write is mapped read-only.
    ///
    /// The mapping counts in `quota` until it is unmapped.
    ///
    /// # Errors
    /// The range is misaligned or beyond the end of the file; the file is not in memory
    /// (a memfd, or on tmpfs or hugetlbfs), unless [`MappingLimits::any_file`](crate::MappingLimits::any_file) allows others; the host refuses the mapping; the quota is used up; the
    /// process has no room for one more protected mapping.
    #[cfg(not(miri))]
    pub fn guarded(
        range: FileRange,
        file: std::os::fd::OwnedFd,
        alarm: &Arc<Alarm>,
        quota: &MappingQuota,
    ) -> Result<Arc<Self>, MemoryError> {
        let FileRange { gpa, size, offset, writable } = range;
        check(gpa, size, Backing::Pages)?;
        if !offset.is_multiple_of(Backing::Pages.page_size()) {
            return Err(MemoryError::Unaligned { gpa: offset, size, align: Backing::Pages.page_size() });
        }
        let ram = Ram::guarded(file, (offset, size), writable, true, alarm, Some(quota))?;
        Ok(Arc::new(Self { gpa, size, writable, ram }))
    }

    /// Guest-physical address of the first byte.
    #[must_use]
    pub fn gpa(&self) -> u64 {
        self.gpa
    }

    /// Size in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Address of the mapping in this process.
    #[must_use]
    pub fn host(&self) -> NonNull<u8> {
        self.ram.host()
    }

    /// Whether devices may write to it.
    #[must_use]
    pub fn writable(&self) -> bool {
        self.writable
    }

    /// The memfd, or the client's file; `None` for private memory.
    ///
    /// The region begins at [`Region::offset`].
    #[must_use]
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.ram.fd()
    }

    /// Offset of the region in its file in bytes; 0 except in a client's file.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.ram.offset()
    }

    /// Allocates all pages now, not at their first access, and in 2 MiB pages where the host can.
    ///
    /// Also pages of a memfd, whatever the host's setting for shared memory says (Linux 6.1). It may
    /// take seconds.
    ///
    /// # Errors
    /// The host lacks memory, or does not know the call (Linux 5.14).
    pub fn populate(&self) -> std::io::Result<()> {
        self.ram.populate()
    }

    /// Whether its file was truncated.
    ///
    /// Private zeroes have then replaced the region, or are about to.
    ///
    /// Only a protected region ([`Region::guarded`]) can be lost.
    #[must_use]
    pub fn lost(&self) -> bool {
        self.ram.lost()
    }
}

fn check(gpa: u64, size: u64, backing: Backing) -> Result<(), MemoryError> {
    let align = backing.page_size();
    if size == 0 || !size.is_multiple_of(align) || !gpa.is_multiple_of(align) {
        return Err(MemoryError::Unaligned { gpa, size, align });
    }
    if gpa.checked_add(size - 1).is_none() {
        return Err(MemoryError::Wraps { gpa, size });
    }
    Ok(())
}
