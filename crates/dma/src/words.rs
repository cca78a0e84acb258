//! Words of a dirty log, which may be shared with another process.
use crate::sync::AtomicU64;

#[cfg(not(any(loom, miri)))]
pub(crate) use mapped::Words;
#[cfg(any(loom, miri))]
pub(crate) use owned::Words;

#[cfg(not(any(loom, miri)))]
mod mapped {
    use super::AtomicU64;
    use crate::LogError;
    use crate::quota::{HEADROOM, MappingLease, MappingQuota, headroom};
    use crate::ram::in_memory;
    use crate::sigbus::{Alarm, Protection};
    use rustix::fs::{
        MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create,
    };
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
    use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
    use std::ptr::NonNull;
    use std::sync::Arc;

    /// Mapped piece of a memfd. Untouched pages take no memory.
    #[derive(Debug)]
    pub(crate) struct Words {
        /// First word, in the mapping.
        first: NonNull<AtomicU64>,
        count: usize,
        /// The mapping.
        start: NonNull<u8>,
        len: usize,
        file: OwnedFd,
        protection: Option<Protection>,
        /// Ends after the memory is unmapped, in `drop`.
        _lease: Option<MappingLease>,
    }

    // SAFETY: the mapping belongs to the process, and is used as atomics only.
    unsafe impl Send for Words {}
    // SAFETY: as above.
    unsafe impl Sync for Words {}

    fn refused(what: &'static str) -> impl Fn(rustix::io::Errno) -> LogError {
        move |error| LogError::Os { what, source: error.into() }
    }

    impl Words {
        /// Makes `count` words, all zero.
        pub(crate) fn new(count: usize) -> Result<Self, LogError> {
            let bytes = count
                .checked_mul(8)
                .ok_or(LogError::Os { what: "size", source: std::io::ErrorKind::OutOfMemory.into() })?;
            let file = memfd_create(c"paravane-dirty-log", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
                .map_err(refused("create"))?;
            ftruncate(&file, bytes.max(8) as u64).map_err(refused("size"))?;
            // The seals that `attach` demands of others.
            fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
                .map_err(refused("seal"))?;
            Self::map(file, 0, count)
        }

        /// Maps `count` words of another process's file, from `offset` bytes on.
        ///
        /// The file must be sealed against shrinking, or its owner could make every mark a fault.
        pub(crate) fn attach(file: OwnedFd, offset: u64, count: usize) -> Result<Self, LogError> {
            let seals = fcntl_get_seals(&file).map_err(refused("read the seals of"))?;
            if !seals.contains(SealFlags::SHRINK) {
                return Err(LogError::MayShrink);
            }
            Self::part(file, offset, count)
        }

        /// As [`Words::attach`], for a file that may shrink.
        ///
        /// The alarm is raised when that is noticed.
        pub(crate) fn guarded(
            file: OwnedFd,
            offset: u64,
            count: usize,
            alarm: &Arc<Alarm>,
            quota: &MappingQuota,
        ) -> Result<Self, LogError> {
            in_memory(&file, quota).map_err(|source| LogError::Os { what: "map", source })?;
            let page = rustix::param::page_size();
            let bytes = (count as u64).saturating_mul(8).saturating_add(offset % page as u64);
            let lease = quota.lease(bytes.checked_next_multiple_of(page as u64).unwrap_or(u64::MAX))?;
            let mut words = Self::part(file, offset, count)?;
            words._lease = Some(lease);
            headroom(HEADROOM).map_err(|source| LogError::Os { what: "map", source })?;
            let Self { start, len, .. } = words;
            let protection = Protection::new(start, len.next_multiple_of(page), page, alarm);
            words.protection = Some(protection.map_err(|source| LogError::Os { what: "guard", source })?);
            Ok(words)
        }

        fn part(file: OwnedFd, offset: u64, count: usize) -> Result<Self, LogError> {
            let size = fstat(&file).map_err(refused("examine"))?.st_size;
            let end = (count as u64).checked_mul(8).and_then(|bytes| bytes.checked_add(offset));
            if !offset.is_multiple_of(8) || end.is_none_or(|end| end > size.cast_unsigned()) {
                return Err(LogError::Extent { offset, words: count as u64, size: size.cast_unsigned() });
            }
            Self::map(file, offset, count)
        }

        /// Maps the words; offset and length have been checked.
        fn map(file: OwnedFd, offset: u64, count: usize) -> Result<Self, LogError> {
            let page = rustix::param::page_size() as u64;
            let skip = (offset % page) as usize;
            let len = (skip + count * 8).max(1);
            // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
            let start = unsafe {
                mmap(
                    std::ptr::null_mut(),
                    len,
                    ProtFlags::READ | ProtFlags::WRITE,
                    MapFlags::SHARED | MapFlags::NORESERVE,
                    &file,
                    offset - skip as u64,
                )
            }
            .map_err(refused("map"))?;
            let start = NonNull::new(start.cast::<u8>())
                .ok_or(LogError::Os { what: "map", source: std::io::ErrorKind::AddrNotAvailable.into() })?;
            // SAFETY: `skip` is inside the mapping, or at its end with no words.
            let first = unsafe { start.add(skip) }.cast();
            Ok(Self { first, count, start, len, file, protection: None, _lease: None })
        }

        #[inline(always)]
        pub(crate) fn words(&self) -> &[AtomicU64] {
            // SAFETY: `count` words from `first` on are mapped as long as `self` lives, and
            // aligned, since the offset is a multiple of 8. They are atomics, which other processes
            // may change as well.
            unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.count) }
        }

        pub(crate) fn fd(&self) -> BorrowedFd<'_> {
            self.file.as_fd()
        }

        pub(crate) fn lost(&self) -> bool {
            self.protection.as_ref().is_some_and(Protection::lost)
        }
    }

    impl Drop for Words {
        fn drop(&mut self) {
            self.protection = None;
            let Self { start, len, .. } = *self;
            // SAFETY: made by `map`; the slices handed out were borrowed from `self`.
            let _ = unsafe { munmap(start.as_ptr().cast(), len) };
        }
    }
}

#[cfg(any(loom, miri))]
mod owned {
    //! Neither Miri nor a model maps files.
    use super::AtomicU64;
    use crate::LogError;
    use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

    #[derive(Debug)]
    pub(crate) struct Words {
        words: Vec<AtomicU64>,
        file: OwnedFd,
    }

    impl Words {
        pub(crate) fn new(count: usize) -> Result<Self, LogError> {
            // Any descriptor will do.
            let (file, _) = std::io::pipe().map_err(|source| LogError::Os { what: "create", source })?;
            Self::attach(file.into(), 0, count)
        }

        pub(crate) fn attach(file: OwnedFd, _offset: u64, count: usize) -> Result<Self, LogError> {
            Ok(Self { words: (0..count).map(|_| AtomicU64::new(0)).collect(), file })
        }

        pub(crate) fn words(&self) -> &[AtomicU64] {
            &self.words
        }

        pub(crate) fn fd(&self) -> BorrowedFd<'_> {
            self.file.as_fd()
        }

        pub(crate) fn lost(&self) -> bool {
            false
        }
    }
}
