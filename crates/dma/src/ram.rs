//! Host memory: a mapped memfd or client's file, shared by descriptor, or private memory.
#[cfg(miri)]
pub(crate) use interpreted::Ram;
#[cfg(not(miri))]
pub(crate) use mapped::Ram;

#[cfg(not(miri))]
mod mapped {
    use crate::quota::{HEADROOM, MappingLease, MappingQuota, headroom};
    use crate::sigbus::{Alarm, Protection};
    use crate::{Backing, MemoryError};
    use rustix::fs::{
        FileType, MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, fstatfs, ftruncate,
        memfd_create,
    };
    use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
    use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
    use std::ptr::NonNull;
    use std::sync::Arc;

    // linux/magic.h
    const HUGETLBFS: rustix::fs::FsWord = 0x9584_58f6;
    const FUSE: rustix::fs::FsWord = 0x6573_5546;
    // asm-generic/mman-common.h; not every C library has it.
    const MADV_COLLAPSE: libc::c_int = 25;

    /// Mapping of a file, of a part of it, or of private memory. Unmapped on drop.
    #[derive(Debug)]
    pub(crate) struct Ram {
        host: NonNull<u8>,
        mapping: Mapped,
        /// `None`: private memory.
        file: Option<OwnedFd>,
        /// Offset of `host` in the file, in bytes.
        offset: u64,
        protection: Option<Protection>,
        /// Ends after the mapping, whose field stands before it.
        _lease: Option<MappingLease>,
    }

    /// Mapped whole pages.
    #[derive(Debug)]
    struct Mapped {
        start: NonNull<u8>,
        len: usize,
    }

    // SAFETY: the mapping belongs to the process, not to a thread; this type never reads or writes
    // it.
    unsafe impl Send for Ram {}
    // SAFETY: as above.
    unsafe impl Sync for Ram {}

    /// Alignment for transparent huge pages. The host may refuse them.
    const HUGE: u64 = Backing::HugePages.page_size();

    impl Ram {
        /// Makes `size` bytes of zeroes.
        ///
        /// `size` is a multiple of the page size of `backing` and not 0.
        pub(crate) fn new(size: u64, backing: Backing) -> Result<Self, MemoryError> {
            let huge = backing == Backing::HugePages;
            let refused = |what, source: std::io::Error| {
                if huge { huge_refused(size, source) } else { MemoryError::Os { what, size, source } }
            };
            let len = usize::try_from(size)
                .map_err(|_| refused("address", std::io::ErrorKind::InvalidInput.into()))?;
            if backing == Backing::Private {
                return Self::whole(None, len, refused);
            }
            let mut flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            if huge {
                flags |= MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
            }
            let file = memfd_create(c"paravane-guest-ram", flags).map_err(|e| refused("create", e.into()))?;
            ftruncate(&file, size).map_err(|e| refused("size", e.into()))?;
            // Other processes get this descriptor. One that shrinks the file would make our
            // accesses fault, so that is forbidden where the host supports seals; without them the
            // file works all the same.
            let _ = fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL);
            Self::whole(Some(file), len, refused)
        }

        /// Maps the file of another process.
        ///
        /// It must be sealed as [`Ram::new`] seals its own, and have `size` bytes.
        pub(crate) fn of(file: OwnedFd, size: u64) -> Result<Self, MemoryError> {
            let refused = |what, source: std::io::Error| MemoryError::Os { what, size, source };
            let len = usize::try_from(size).map_err(|_| refused("address", invalid("too large")))?;
            let seals = fcntl_get_seals(&file).map_err(|e| refused("examine", e.into()))?;
            let found = fstat(&file).map_err(|e| refused("examine", e.into()))?;
            if !seals.contains(SealFlags::SHRINK)
                || u64::try_from(found.st_size).is_ok_and(|found| found < size)
            {
                return Err(refused(
                    "map",
                    invalid("its file is not sealed against shrinking, or is too small"),
                ));
            }
            Self::whole(Some(file), len, refused)
        }

        /// Maps `size` bytes of a file that cannot shrink, from `offset` on.
        #[cfg(not(loom))]
        pub(crate) fn part(file: OwnedFd, offset: u64, size: u64) -> Result<Self, MemoryError> {
            let refused = |what, source: std::io::Error| MemoryError::Os { what, size, source };
            let len = usize::try_from(size).map_err(|_| refused("address", invalid("too large")))?;
            let skip = offset % rustix::param::page_size() as u64;
            let mapping = Mapped::new(&file, offset - skip, len + skip as usize, true)
                .map_err(|error| refused("map", error))?;
            // SAFETY: the mapping has `len` bytes more.
            let host = unsafe { mapping.start.add(skip as usize) };
            Ok(Self { host, mapping, file: Some(file), offset, protection: None, _lease: None })
        }

        fn whole(
            file: Option<OwnedFd>,
            len: usize,
            refused: impl Fn(&'static str, std::io::Error) -> MemoryError,
        ) -> Result<Self, MemoryError> {
            let mapping = match &file {
                // Too small for a huge page.
                Some(file) if len < HUGE as usize => Mapped::new(file, 0, len, true),
                file => Mapped::aligned(file.as_ref(), len),
            };
            let mapping = mapping.map_err(|error| refused("map", error))?;
            mapping.advise(Advice::LinuxHugepage);
            if file.is_none() {
                // A child would share it until one of the two writes, page by page.
                mapping.advise(Advice::LinuxDontFork);
            }
            Ok(Self { host: mapping.start, mapping, file, offset: 0, protection: None, _lease: None })
        }

        /// Allocates all pages now, and makes them huge pages where the host can.
        pub(crate) fn populate(&self) -> std::io::Result<()> {
            let Mapped { start, len } = self.mapping;
            // SAFETY: the mapping that `new` made. No byte of it changes.
            unsafe { madvise(start.as_ptr().cast(), len, Advice::LinuxPopulateWrite) }?;
            // A memfd's pages are small if the host's setting says so. This exchanges them all the same
            // (Linux 6.1). Where it fails, memory is slower and as good.
            // SAFETY: as above.
            let _ = unsafe { libc::madvise(start.as_ptr().cast(), len, MADV_COLLAPSE) };
            Ok(())
        }

        /// Maps `size` bytes of the file of another process from `offset` on.
        ///
        /// Both are whole pages of 4096 bytes.
        ///
        /// The file may shrink; the alarm is raised when that is noticed. Asks for huge pages where
        /// they are wanted. The mapping counts in the quota, if there is one, and must then leave
        /// [`HEADROOM`].
        pub(crate) fn guarded(
            file: OwnedFd,
            (offset, size): (u64, u64),
            writable: bool,
            wants_huge: bool,
            alarm: &Arc<Alarm>,
            quota: Option<&MappingQuota>,
        ) -> Result<Self, MemoryError> {
            let refused = |what, source: std::io::Error| MemoryError::Os { what, size, source };
            if let Some(quota) = quota {
                in_memory(&file, quota).map_err(|error| refused("map", error))?;
            }
            let found = fstat(&file).map_err(|e| refused("examine", e.into()))?;
            let system = fstatfs(&file).map_err(|e| refused("examine the file system of", e.into()))?;
            // Another process serves the pages of such a file, and may never do so.
            if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile || system.f_type == FUSE {
                return Err(refused("map", invalid("its file must be a regular file, and not on FUSE")));
            }
            // Pages of hugetlbfs are mapped whole, and a client's region may begin in the middle of
            // one.
            let page = match system.f_type {
                HUGETLBFS => u64::try_from(system.f_bsize).unwrap_or(HUGE),
                _ => rustix::param::page_size() as u64,
            };
            let skip = offset % page;
            let end = offset.checked_add(size).and_then(|end| end.checked_next_multiple_of(page));
            // A file that ends in the middle of a page has all of it.
            let had = found.st_size.cast_unsigned().checked_next_multiple_of(page);
            let Some(end) = end.filter(|end| had.is_some_and(|had| *end <= had)) else {
                let end = found.st_size;
                let why = format!("its file has {end} bytes, too few for offset {offset}");
                return Err(refused("map", invalid(&why)));
            };
            let (Ok(len), Ok(skipped), Ok(page_len)) =
                (usize::try_from(end - (offset - skip)), usize::try_from(skip), usize::try_from(page))
            else {
                return Err(refused("address", invalid("too large")));
            };
            let lease = quota.map(|quota| quota.lease(len as u64)).transpose()?;
            let mapping = Mapped::new(&file, offset - skip, len, writable).map_err(|e| refused("map", e))?;
            if quota.is_some() {
                headroom(HEADROOM).map_err(|error| refused("map", error))?;
            }
            if wants_huge && page < HUGE && size >= HUGE {
                mapping.advise(Advice::LinuxHugepage);
            }
            let protection = Protection::new(mapping.start, len, page_len, alarm)
                .map_err(|error| refused("guard", error))?;
            // SAFETY: `size` bytes, not none, are mapped from there on.
            let host = unsafe { mapping.start.add(skipped) };
            let file = Some(file);
            Ok(Self { host, mapping, file, offset, protection: Some(protection), _lease: lease })
        }

        pub(crate) fn host(&self) -> NonNull<u8> {
            self.host
        }

        pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
            self.file.as_ref().map(OwnedFd::as_fd)
        }

        pub(crate) fn offset(&self) -> u64 {
            self.offset
        }

        pub(crate) fn lost(&self) -> bool {
            self.protection.as_ref().is_some_and(Protection::lost)
        }
    }

    impl Mapped {
        fn new(file: &OwnedFd, offset: u64, len: usize, writable: bool) -> std::io::Result<Self> {
            let mut protection = ProtFlags::READ;
            protection.set(ProtFlags::WRITE, writable);
            // Reserves huge pages, so that a pool that is too small shows now and not as a fault in
            // a request. SAFETY: a new mapping at an address of the kernel's choice replaces
            // nothing.
            let start =
                unsafe { mmap(std::ptr::null_mut(), len, protection, MapFlags::SHARED, file, offset) }?;
            let start = NonNull::new(start.cast()).ok_or(std::io::ErrorKind::AddrNotAvailable)?;
            Ok(Self { start, len })
        }

        /// Maps `len` bytes of `file`, or of private memory, at a multiple of [`HUGE`].
        fn aligned(file: Option<&OwnedFd>, len: usize) -> std::io::Result<Self> {
            const ALIGN: usize = HUGE as usize;
            let all = len.checked_add(ALIGN).ok_or(std::io::ErrorKind::InvalidInput)?;
            let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
            // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
            let found = unsafe { mmap_anonymous(std::ptr::null_mut(), all, ProtFlags::empty(), flags) }?;
            let found = NonNull::new(found.cast::<u8>()).ok_or(std::io::ErrorKind::AddrNotAvailable)?;
            // Unmapped whole if an error follows.
            let reserved = Self { start: found, len: all };
            let before = found.as_ptr().align_offset(ALIGN);
            // SAFETY: `before` is less than ALIGN, so `len` bytes of the reserved range follow.
            let start = unsafe { found.add(before) };
            let (at, access) = (start.as_ptr().cast(), ProtFlags::READ | ProtFlags::WRITE);
            // SAFETY: these replace a part of the reserved range, which nobody has used.
            unsafe {
                match file {
                    Some(file) => mmap(at, len, access, MapFlags::SHARED | MapFlags::FIXED, file, 0),
                    None => mmap_anonymous(at, len, access, MapFlags::PRIVATE | MapFlags::FIXED),
                }
            }?;
            std::mem::forget(reserved);
            let after = ALIGN - before;
            // SAFETY: the rest of the reserved range, around what was mapped. Nobody has used it.
            unsafe {
                if before > 0 {
                    let _ = munmap(found.as_ptr().cast(), before);
                }
                let _ = munmap(start.add(len).as_ptr().cast(), after);
            }
            Ok(Self { start, len })
        }

        /// Gives advice to the host, which may ignore it.
        fn advise(&self, advice: Advice) {
            // SAFETY: none of the advice given here changes a byte of the mapping.
            let _ = unsafe { madvise(self.start.as_ptr().cast(), self.len, advice) };
        }
    }

    impl Drop for Ram {
        fn drop(&mut self) {
            // Before the mapping goes: its addresses may be reused at once. The mapping is dropped
            // after this.
            self.protection = None;
        }
    }

    impl Drop for Mapped {
        fn drop(&mut self) {
            // SAFETY: `start` and `len` are those of the mapping that `new` made. All users hold
            // the region (by way of a snapshot), so none is left.
            let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
        }
    }

    /// Checks that a client's file is in memory: a memfd, or on tmpfs or hugetlbfs.
    ///
    /// Pages of other files come from a disk, a server or another process (FUSE, also below
    /// overlayfs), which may never answer. Seals exist in those file systems only, and no file system
    /// is asked for them; fstat(2) would ask.
    fn in_memory(file: &OwnedFd, quota: &MappingQuota) -> std::io::Result<()> {
        if quota.limits().any_file || fcntl_get_seals(file).is_ok() {
            return Ok(());
        }
        Err(invalid(
            "its file must be in memory: a memfd, or on tmpfs or hugetlbfs (or use --any-memory-file)",
        ))
    }

    fn invalid(what: &str) -> std::io::Error {
        std::io::Error::new(std::io::ErrorKind::InvalidInput, what.to_owned())
    }

    /// Error that says how large the pool of huge pages must be.
    fn huge_refused(size: u64, source: std::io::Error) -> MemoryError {
        let wanted = size.div_ceil(Backing::HugePages.page_size());
        let count = |name: &str| -> Option<u64> {
            let path = format!("/sys/kernel/mm/hugepages/hugepages-2048kB/{name}");
            std::fs::read_to_string(path).ok()?.trim().parse().ok()
        };
        let taken = || {
            let free = count("free_hugepages")?.saturating_sub(count("resv_hugepages")?);
            Some(count("nr_hugepages")?.saturating_sub(free))
        };
        MemoryError::HugePages { size, pages: wanted.saturating_add(taken().unwrap_or(0)), source }
    }
}

#[cfg(miri)]
mod interpreted {
    //! Miri maps no files; an allocation replaces the mapping.
    use crate::{Backing, MemoryError};
    use std::alloc::{Layout, alloc_zeroed, dealloc};
    use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
    use std::ptr::NonNull;

    #[derive(Debug)]
    pub(crate) struct Ram {
        host: NonNull<u8>,
        layout: Layout,
        file: OwnedFd,
    }

    // SAFETY: a heap allocation belongs to no thread, and this type never reads or writes it.
    unsafe impl Send for Ram {}
    // SAFETY: as above.
    unsafe impl Sync for Ram {}

    impl Ram {
        pub(crate) fn new(size: u64, _backing: Backing) -> Result<Self, MemoryError> {
            let refused =
                |what| MemoryError::Os { what, size, source: std::io::ErrorKind::OutOfMemory.into() };
            let len = usize::try_from(size).map_err(|_| refused("address"))?;
            let layout = Layout::from_size_align(len, 4096).map_err(|_| refused("address"))?;
            // SAFETY: the caller has checked that the size is not 0.
            let host = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(|| refused("map"))?;
            // Nothing maps the descriptor under Miri; any descriptor will do.
            let (file, _) =
                std::io::pipe().map_err(|source| MemoryError::Os { what: "create", size, source })?;
            Ok(Self { host, layout, file: file.into() })
        }

        pub(crate) fn host(&self) -> NonNull<u8> {
            self.host
        }

        pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
            Some(self.file.as_fd())
        }

        pub(crate) fn populate(&self) -> std::io::Result<()> {
            Ok(())
        }

        pub(crate) fn offset(&self) -> u64 {
            0
        }

        pub(crate) fn lost(&self) -> bool {
            false
        }
    }

    impl Drop for Ram {
        fn drop(&mut self) {
            // SAFETY: allocated by `new` with this layout; no holder is left.
            unsafe { dealloc(self.host.as_ptr(), self.layout) };
        }
    }
}
