//! A file that is copied to and from guest memory without a system call: mapped, and guarded.
use crate::fault_guard::is_lost;
use crate::ram::Ram;
use crate::{Alarm, HostSlice, MemoryError, copy};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use thiserror::Error;

/// From this length on a piece is not expected to be read again soon: it goes past the caches, and takes nothing else out of them.
/// 128 KiB take 5.5 µs so, and 8 otherwise.
const FAR: usize = 64 << 10;

/// Why a piece was not written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum NotWritten {
    /// The piece ends past the end of the mapping.
    #[error("the range is outside the mapped file")]
    Outside,
    /// The file was truncated while it was mapped.
    #[error("the mapped file was truncated")]
    Lost,
}

/// A file, mapped from its beginning. Others may write to it at any time, and make it shorter: then it is
/// [`lost`](FileView::lost), and what is done with it is to be done anew by other means.
#[derive(Debug)]
pub struct FileView {
    ram: Ram,
    len: usize,
}

impl FileView {
    /// Maps `len` bytes of a regular file, to be written as well if it is `writable`. `alarm` rings when it is lost.
    ///
    /// # Errors
    /// As [`Region::guarded`](crate::Region::guarded).
    pub fn new(file: OwnedFd, len: u64, writable: bool, alarm: &Arc<Alarm>) -> Result<Self, MemoryError> {
        let ram = Ram::guarded(file, (0, len), writable, false, alarm, None)?;
        // It has been mapped.
        Ok(Self { ram, len: len as usize })
    }

    /// Whether some of it was not there when it was accessed, and private zeroes are in the place of all of it. Who has found
    /// this `false` after a copy has copied what the file has.
    #[must_use]
    pub fn lost(&self) -> bool {
        self.ram.lost()
    }

    /// Whether it has `len` bytes from `offset` on.
    fn has(&self, offset: u64, len: usize) -> bool {
        usize::try_from(offset).is_ok_and(|offset| offset <= self.len && len <= self.len - offset)
    }

    /// Copies what is there from `offset` on to `piece`, as much as that has. `false`, and nothing was done: there is not so much.
    ///
    /// # Safety
    /// What the piece came with ([`MappingGuard`](crate::MappingGuard), [`Mapping`](crate::Mapping)) lives, and it was mapped for writing.
    #[must_use]
    pub unsafe fn read(&self, offset: u64, piece: &HostSlice) -> bool {
        if !self.has(offset, piece.len) {
            return false;
        }
        // SAFETY: inside the mapping, which is ours while this lives; the piece is mapped, as the caller promises.
        unsafe { copy::between(self.ram.host().as_ptr().add(offset as usize), piece.ptr, piece.len) };
        true
    }

    /// Copies `piece` to `offset`, a page at a time, which is looked at in between: none of it is written if its owner has taken it
    /// away, so that it may be zeroes.
    ///
    /// # Errors
    /// There is not so much room, and nothing was done; or the piece is gone, and a part of it may have been written.
    ///
    /// # Safety
    /// As [`FileView::read`], but the piece is only read; and this was made to be written.
    pub unsafe fn write(&self, offset: u64, piece: &HostSlice) -> Result<(), NotWritten> {
        if !self.has(offset, piece.len) {
            return Err(NotWritten::Outside);
        }
        let far = piece.len >= FAR;
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
            // Whoever is told of this write, by a store behind it, sees it.
            copy::synchronize();
        }
        Ok(())
    }
}
