//! One piece of guest RAM: a memfd, or a client's file, mapped.
use crate::MemoryError;
use crate::ram::Ram;
#[cfg(not(miri))]
use crate::{Alarm, MappingQuota};
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

/// What kind of pages a region has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backing {
    /// Ordinary pages.
    #[default]
    Pages,
    /// 2 MiB pages from the host's pool (`vm.nr_hugepages`).
    HugePages,
}

impl Backing {
    /// Bytes of a page; a region's address and size are multiples of it.
    #[must_use]
    pub const fn page_size(self) -> u64 {
        match self {
            Self::Pages => 4096,
            Self::HugePages => 2 << 20,
        }
    }
}

/// A region to be made.
#[derive(Clone, Copy, Debug)]
pub struct RegionConfig {
    /// Guest-physical address of the first byte.
    pub gpa: u64,
    /// Bytes, a multiple of 4096 (of 2 MiB with huge pages).
    pub size: u64,
    /// Kind of pages.
    pub backing: Backing,
    /// Whether devices may write to it.
    pub writable: bool,
}

/// A part of a client's file that is to be a region ([`Region::guarded`]).
#[derive(Clone, Copy, Debug)]
pub struct FileRange {
    /// Guest-physical address of the first byte, a multiple of 4096.
    pub gpa: u64,
    /// Bytes, a multiple of 4096.
    pub size: u64,
    /// Where in the file it begins, in bytes; a multiple of 4096.
    pub offset: u64,
    /// Whether devices may write to it.
    pub writable: bool,
}

/// Mapped guest RAM. Unmapped when the last holder lets go.
///
/// The host maps it readable and writable in any case; `writable` is what devices are held to.
#[derive(Debug)]
pub struct Region {
    gpa: u64,
    size: u64,
    writable: bool,
    ram: Ram,
}

impl Region {
    /// Makes a memfd and maps it shared. The file can neither shrink nor grow, where the host can forbid it.
    ///
    /// # Errors
    /// Misaligned, or the host has no such memory (the error says what to do about huge pages).
    pub fn new(config: RegionConfig) -> Result<Arc<Self>, MemoryError> {
        let RegionConfig { gpa, size, backing, writable } = config;
        check(gpa, size, backing)?;
        Ok(Arc::new(Self { gpa, size, writable, ram: Ram::new(size, backing)? }))
    }

    /// Maps what another process has made by [`Region::new`], from its descriptor ([`Region::fd`]).
    ///
    /// # Errors
    /// As [`Region::new`]; or the file may shrink, and our accesses with it into nothing.
    #[cfg(not(miri))]
    pub fn open(config: RegionConfig, file: std::os::fd::OwnedFd) -> Result<Arc<Self>, MemoryError> {
        let RegionConfig { gpa, size, backing, writable } = config;
        check(gpa, size, backing)?;
        Ok(Arc::new(Self { gpa, size, writable, ram: Ram::of(file, size)? }))
    }

    /// Maps a part of the file of another process, which may do to it what it likes. If the file gets shorter, an access of
    /// ours finds that out and is not the end of this process: private zeroes take the region's place, all of it, the region is
    /// [`lost`](Region::lost), and `alarm` rings. System calls that use what is gone fail with EFAULT instead, and nothing else
    /// happens.
    ///
    /// Files of hugetlbfs are mapped in their pages; a range may begin and end inside one. For others huge pages are asked for. What
    /// devices may not write, this process cannot either.
    ///
    /// What is mapped is counted in `quota` until it is unmapped.
    ///
    /// # Errors
    /// Misaligned, or the file has no such bytes; it is no regular file, or one of FUSE, where accesses may hang; the host
    /// refuses the mapping; the quota is used up, or the process has no room for one more guarded mapping.
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

    /// Bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Where the region is mapped in this process.
    #[must_use]
    pub fn host(&self) -> NonNull<u8> {
        self.ram.host()
    }

    /// Whether devices may write to it.
    #[must_use]
    pub fn writable(&self) -> bool {
        self.writable
    }

    /// The memfd, or the client's file; the region is at [`Region::offset`].
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.ram.fd()
    }

    /// Where in the file the region begins, in bytes. 0 but for a client's file.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.ram.offset()
    }

    /// Whether its file has been taken away, and private zeroes are in its place, or are about to be. Only regions that are guarded
    /// ([`Region::guarded`]) can be lost.
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
