//! Guest memory that is used in place: what keeps it mapped, and in which order it ends.
use crate::Access;
use crate::memory::Pin;
use std::ptr::NonNull;
use std::sync::Arc;

/// A contiguous piece of guest memory in this process. Plain data: it is valid only while the [`Hold`] or
/// [`Mapping`] that it came with lives. Guest and devices change the bytes at any time.
///
/// It has the layout of `struct iovec` (POSIX: `void *iov_base; size_t iov_len`, in this order on Linux), so that a
/// slice of these can be handed to `preadv` and io_uring as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct HostSlice {
    /// First byte (layout of `struct iovec`).
    pub ptr: *mut u8,
    /// Bytes.
    pub len: usize,
}

// SAFETY: plain data; the memory it names is only touched by system calls and raw accesses.
unsafe impl Send for HostSlice {}
// SAFETY: as above.
unsafe impl Sync for HostSlice {}

/// Keeps the snapshot mapped that some [`HostSlice`]s came from. Dropping it ends the mapping, ordered as
/// a release of what was written (and an acquire of what was read), unless it was made with
/// [`Access::RELAXED`]. It may be dropped by another thread than the one that made it, which then
/// must itself be ordered after whoever used the memory (a completion that was received is).
#[derive(Debug)]
pub struct Hold {
    _pin: Arc<Pin>,
    access: Access,
}

impl Hold {
    pub(crate) fn new(pin: &Arc<Pin>, access: Access) -> Self {
        access.map();
        Self { _pin: Arc::clone(pin), access }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.access.unmap();
    }
}

/// One contiguous piece of guest memory, mapped for as long as the guard lives. Dropping it is ordered as
/// dropping a [`Hold`].
#[derive(Debug)]
pub struct Mapping {
    host: NonNull<u8>,
    len: usize,
    _hold: Hold,
}

// SAFETY: the pointer is to process-wide memory that the hold keeps mapped; this type never accesses it.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// `host .. host + len` is inside a region of the snapshot that `hold` keeps (or `len` is 0).
    pub(crate) fn new(host: NonNull<u8>, len: usize, hold: Hold) -> Self {
        Self { host, len, _hold: hold }
    }

    /// First byte in this process. Only raw atomic or volatile accesses and system calls may touch it.
    #[must_use]
    pub fn host(&self) -> NonNull<u8> {
        self.host
    }

    /// Bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
