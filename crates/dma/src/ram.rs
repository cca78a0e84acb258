//! Host memory that can be shared by descriptor: a memfd, mapped shared.
#[cfg(miri)]
pub(crate) use interpreted::Ram;
#[cfg(not(miri))]
pub(crate) use mapped::Ram;

#[cfg(not(miri))]
mod mapped {
    use crate::{Backing, MemoryError};
    use rustix::fs::{
        MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create,
    };
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
    use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
    use std::ptr::NonNull;

    /// The mapping and its file. Unmapped when dropped.
    #[derive(Debug)]
    pub(crate) struct Ram {
        host: NonNull<u8>,
        len: usize,
        file: OwnedFd,
    }

    // SAFETY: the mapping belongs to the process, not to a thread; this type never reads or writes it.
    unsafe impl Send for Ram {}
    // SAFETY: as above.
    unsafe impl Sync for Ram {}

    impl Ram {
        /// `size` bytes of zeroes, a multiple of the page size of `backing` and not 0.
        pub(crate) fn new(size: u64, backing: Backing) -> Result<Self, MemoryError> {
            let huge = backing == Backing::HugePages;
            let refused = |what, source: std::io::Error| {
                if huge { huge_refused(size, source) } else { MemoryError::Os { what, size, source } }
            };
            let len = usize::try_from(size)
                .map_err(|_| refused("address", std::io::ErrorKind::InvalidInput.into()))?;
            let mut flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            if huge {
                flags |= MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
            }
            let file = memfd_create(c"paravane-guest-ram", flags).map_err(|e| refused("create", e.into()))?;
            ftruncate(&file, size).map_err(|e| refused("size", e.into()))?;
            // Other processes get this descriptor. One that shrinks the file would make our accesses fault, so
            // that is forbidden where the host can; where it cannot, the file works all the same.
            let _ = fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL);
            Self::map(file, len, refused)
        }

        /// The file of another process, which must be sealed as [`Ram::new`] seals its own, and have `size` bytes.
        pub(crate) fn of(file: OwnedFd, size: u64) -> Result<Self, MemoryError> {
            let refused = |what, source: std::io::Error| MemoryError::Os { what, size, source };
            let invalid = |what: &str| std::io::Error::new(std::io::ErrorKind::InvalidInput, what.to_owned());
            let len = usize::try_from(size).map_err(|_| refused("address", invalid("too large")))?;
            let seals = fcntl_get_seals(&file).map_err(|e| refused("look at", e.into()))?;
            let found = fstat(&file).map_err(|e| refused("look at", e.into()))?;
            if !seals.contains(SealFlags::SHRINK)
                || u64::try_from(found.st_size).is_ok_and(|found| found < size)
            {
                return Err(refused("map", invalid("its file may shrink, or is too small")));
            }
            Self::map(file, len, refused)
        }

        fn map(
            file: OwnedFd,
            len: usize,
            refused: impl Fn(&'static str, std::io::Error) -> MemoryError,
        ) -> Result<Self, MemoryError> {
            // Huge pages are reserved here, which is why a pool that is too small shows now and not as a fault
            // in the middle of a request.
            // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
            let host = unsafe {
                mmap(
                    std::ptr::null_mut(),
                    len,
                    ProtFlags::READ | ProtFlags::WRITE,
                    MapFlags::SHARED,
                    &file,
                    0,
                )
            }
            .map_err(|e| refused("map", e.into()))?;
            let host = NonNull::new(host.cast())
                .ok_or_else(|| refused("map", std::io::ErrorKind::AddrNotAvailable.into()))?;
            Ok(Self { host, len, file })
        }

        pub(crate) fn host(&self) -> NonNull<u8> {
            self.host
        }

        pub(crate) fn fd(&self) -> BorrowedFd<'_> {
            self.file.as_fd()
        }
    }

    impl Drop for Ram {
        fn drop(&mut self) {
            // SAFETY: `host` and `len` are those of the mapping that `new` made. Whoever uses it holds the
            // region (by way of a snapshot), so nobody does any more.
            let _ = unsafe { munmap(self.host.as_ptr().cast(), self.len) };
        }
    }

    /// The error that says how large the pool would have to be.
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
    //! Miri maps no files, so an allocation stands in.
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
            // Nothing maps the descriptor under miri; any will do.
            let (file, _) =
                std::io::pipe().map_err(|source| MemoryError::Os { what: "create", size, source })?;
            Ok(Self { host, layout, file: file.into() })
        }

        pub(crate) fn host(&self) -> NonNull<u8> {
            self.host
        }

        pub(crate) fn fd(&self) -> BorrowedFd<'_> {
            self.file.as_fd()
        }
    }

    impl Drop for Ram {
        fn drop(&mut self) {
            // SAFETY: allocated by `new` with this layout; no holder is left.
            unsafe { dealloc(self.host.as_ptr(), self.layout) };
        }
    }
}
