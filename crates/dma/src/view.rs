//! File view: a mapped, protected file.
//!
//! It is copied to and from guest memory without a system call.
use crate::ram::Ram;
use crate::sigbus::is_lost;
use crate::{Alarm, HostSlice, MemoryError, ReadSpan, WriteSpan, copy};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use thiserror::Error;

/// Length in bytes from which a piece bypasses the caches.
///
/// Such a piece is not expected to be read again soon.
///
/// A copy of 128 KiB takes 5.5 µs this way, and 8 µs otherwise.
const FAR_MIN: usize = 64 << 10;

/// Why a piece was not written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum NotWritten {
    /// The piece ends past the end of the mapping.
    #[error("the range is outside the mapped file")]
    Outside,
    /// The file is mapped for reading only.
    #[error("the file is mapped for reading only")]
    ReadOnly,
    /// The file was truncated while it was mapped.
    #[error("the mapped file was truncated")]
    Lost,
}

/// File that is mapped from its beginning.
///
/// Other processes may write to it at any time, and truncate it: then it is
/// [`lost`](FileView::lost), and the operation must be repeated by other means.
#[derive(Debug)]
pub struct FileView {
    ram: Ram,
    len: usize,
    writable: bool,
}

impl FileView {
    /// Maps `len` bytes of a regular file, for writing too if `writable`.
    ///
    /// `alarm` is raised when it is lost.
    ///
    /// # Errors
    /// As [`Region::guarded`](crate::Region::guarded).
    pub fn new(file: OwnedFd, len: u64, writable: bool, alarm: &Arc<Alarm>) -> Result<Self, MemoryError> {
        let ram = Ram::guarded(file, (0, len), writable, false, alarm, None)?;
        // It has been mapped, so its length fits.
        Ok(Self { ram, len: len as usize, writable })
    }

    /// Whether an access hit a missing part.
    ///
    /// Private zeroes have then replaced all of it.
    ///
    /// If this returns `false` after a copy, the copy has the contents of the file.
    #[must_use]
    pub fn lost(&self) -> bool {
        self.ram.lost()
    }

    /// Whether it has `len` bytes from `offset` on.
    fn has(&self, offset: u64, len: usize) -> bool {
        usize::try_from(offset).is_ok_and(|offset| offset <= self.len && len <= self.len - offset)
    }

    /// Prefetches the first `BYTES` of `len` bytes from `offset` on, which will be read or written soon.
    ///
    /// Never waits.
    #[inline]
    pub fn expect_first<const WRITE: bool, const BYTES: usize>(&self, offset: u64, len: usize) {
        if self.has(offset, len) {
            // Inside the mapping.
            let at = self.ram.host().as_ptr().wrapping_add(offset as usize);
            copy::expect_first::<WRITE, BYTES>(at, len);
        }
    }

    /// Copies from `offset` on to `piece`, all of its length.
    ///
    /// Returns `false`, and does nothing, if the view is too short.
    ///
    /// # Safety
    /// The guard that the piece came with ([`MappingGuard`](crate::MappingGuard),
    /// [`Mapping`](crate::Mapping)) lives, and it was mapped for writing.
    #[must_use]
    pub unsafe fn read(&self, offset: u64, piece: &HostSlice) -> bool {
        if !self.has(offset, piece.len) {
            return false;
        }
        // SAFETY: inside the mapping, which is ours while this lives; the piece is mapped, as the
        // caller promises.
        unsafe { copy::between(self.ram.host().as_ptr().add(offset as usize), piece.ptr, piece.len) };
        true
    }

    /// Copies `piece` to `offset`, page by page.
    ///
    /// Checks each page before it is written: if the piece is lost, so that it may be zeroes, the
    /// page is not written.
    ///
    /// # Errors
    /// The view is too short, or is only for reading, and nothing was done ([`NotWritten::Outside`],
    /// [`NotWritten::ReadOnly`]); or the piece is lost, and a part of it may have been written
    /// ([`NotWritten::Lost`]).
    ///
    /// # Safety
    /// As [`FileView::read`], except that the piece is only read.
    pub unsafe fn write(&self, offset: u64, piece: &HostSlice) -> Result<(), NotWritten> {
        if !self.has(offset, piece.len) {
            return Err(NotWritten::Outside);
        }
        if !self.writable {
            return Err(NotWritten::ReadOnly);
        }
        let far = piece.len >= FAR_MIN;
        let mut page = MaybeUninit::<[u8; 4096]>::uninit();
        let own = page.as_mut_ptr().cast::<u8>();
        for done in (0..piece.len).step_by(size_of_val(&page)) {
            let now = size_of_val(&page).min(piece.len - done);
            // SAFETY: as in `read`; no more than is left, and no more than a page, which is ours.
            unsafe { copy::load(piece.ptr.add(done), own, now) };
            if is_lost(std::slice::from_ref(piece)) {
                return Err(NotWritten::Lost);
            }
            // SAFETY: as above; `load` has filled it.
            unsafe {
                let to = self.ram.host().as_ptr().add(offset as usize + done);
                if far { copy::store_far(to, own, now) } else { copy::store(to, own, now) }
            }
        }
        if far {
            // A thread that learns of this write by a later store sees the write.
            copy::flush_far();
        }
        Ok(())
    }

    /// Copies from `offset` on to `span`, all of its length.
    ///
    /// Returns `false`, and does nothing, if the view is too short.
    #[must_use]
    #[inline]
    pub fn read_span(&self, offset: u64, span: &WriteSpan<'_>) -> bool {
        // SAFETY: the span borrows the guard that keeps it mapped, and was found for writing.
        let done = unsafe { self.read(offset, &span.piece()) };
        if done {
            span.wrote();
        }
        done
    }

    /// Copies `span` to `offset`, as [`FileView::write`] does.
    ///
    /// # Errors
    /// As [`FileView::write`].
    #[inline]
    pub fn write_span(&self, offset: u64, span: &ReadSpan<'_>) -> Result<(), NotWritten> {
        // SAFETY: as in `read_span`, for reading.
        unsafe { self.write(offset, &span.piece()) }
    }
}
