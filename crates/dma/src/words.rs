//! Words of a dirty log, which may be shared with another process.
use crate::sync::AtomicU64;

#[cfg(not(any(loom, miri)))]
pub(crate) use mapped::Words;
#[cfg(any(loom, miri))]
pub(crate) use owned::Words;

#[cfg(not(any(loom, miri)))]
mod mapped {
    use super::AtomicU64;
    use crate::quota::MappingQuota;
    use crate::ram::Ram;
    use crate::sigbus::Alarm;
    use crate::{Backing, LogError};
    use rustix::fs::{SealFlags, fcntl_get_seals, fstat};
    use std::os::fd::{BorrowedFd, OwnedFd};
    use std::ptr::NonNull;
    use std::sync::Arc;

    /// Mapped piece of a memfd. Untouched pages take no memory.
    #[derive(Debug)]
    pub(crate) struct Words {
        /// First word, in the mapping.
        first: NonNull<AtomicU64>,
        count: usize,
        ram: Ram,
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
            Ok(Self::of(Ram::new(bytes(count).max(8), Backing::Pages)?, count))
        }

        /// Maps `count` words of another process's file, from `offset` bytes on.
        ///
        /// The file must be sealed against shrinking, or its owner could make every mark a fault.
        pub(crate) fn attach(file: OwnedFd, offset: u64, count: usize) -> Result<Self, LogError> {
            let seals = fcntl_get_seals(&file).map_err(refused("read the seals of"))?;
            if !seals.contains(SealFlags::SHRINK) {
                return Err(LogError::MayShrink);
            }
            check(&file, offset, count)?;
            Ok(Self::of(Ram::part(file, offset, bytes(count).max(1))?, count))
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
            check(&file, offset, count)?;
            let range = (offset, bytes(count).max(1));
            Ok(Self::of(Ram::guarded(file, range, true, false, alarm, Some(quota))?, count))
        }

        /// The words at the start of memory that has so many, at a multiple of 8.
        fn of(ram: Ram, count: usize) -> Self {
            Self { first: ram.host().cast(), count, ram }
        }

        #[inline(always)]
        pub(crate) fn words(&self) -> &[AtomicU64] {
            // SAFETY: `count` words from `first` on are mapped as long as `self` lives, and
            // aligned, since the offset is a multiple of 8. They are atomics, which other processes
            // may change as well.
            unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.count) }
        }

        pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
            self.ram.fd()
        }

        pub(crate) fn lost(&self) -> bool {
            self.ram.lost()
        }
    }

    /// Size of `count` words, which no file has if they are too many.
    fn bytes(count: usize) -> u64 {
        (count as u64).saturating_mul(8)
    }

    fn check(file: &OwnedFd, offset: u64, count: usize) -> Result<(), LogError> {
        let size = fstat(file).map_err(refused("examine"))?.st_size.cast_unsigned();
        let end = bytes(count).checked_add(offset);
        if !offset.is_multiple_of(8) || end.is_none_or(|end| end > size) {
            return Err(LogError::Extent { offset, words: count as u64, size });
        }
        Ok(())
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

        pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
            Some(self.file.as_fd())
        }

        pub(crate) fn lost(&self) -> bool {
            false
        }
    }
}
