//! Host slice: a piece of mapped guest memory, as system calls take it.
use crate::copy;

/// Contiguous piece of guest memory in this process.
///
/// Plain data: valid only while the [`MappingGuard`](crate::MappingGuard),
/// [`Mapping`](crate::Mapping) or [`AccessGuard`](crate::AccessGuard) that it came with lives. The guest and other devices may change the
/// bytes at any time.
///
/// It has the layout of `struct iovec` (POSIX: `void *iov_base; size_t iov_len`, in this order on
/// Linux), so that a slice of these can be passed to `preadv` and io_uring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct HostSlice {
    /// First byte (layout of `struct iovec`).
    pub ptr: *mut u8,
    /// Length in bytes.
    pub len: usize,
}

// SAFETY: plain data; the memory that it names is only touched by system calls and raw accesses.
unsafe impl Send for HostSlice {}
// SAFETY: as above.
unsafe impl Sync for HostSlice {}

impl HostSlice {
    /// Copies its first bytes into `out`.
    ///
    /// The bytes move in no particular order: the mapping orders them.
    ///
    /// # Safety
    /// The [`MappingGuard`](crate::MappingGuard) or [`Mapping`](crate::Mapping) that it came with
    /// lives, and `out` is no longer than it.
    pub unsafe fn read(&self, out: &mut [u8]) {
        debug_assert!(out.len() <= self.len);
        // SAFETY: mapped guest memory, as the caller promises; `out` is ours.
        unsafe { copy::load(self.ptr, out.as_mut_ptr(), out.len()) };
    }

    /// Copies `data` to its beginning, in no particular order: the mapping orders it.
    ///
    /// # Safety
    /// As [`HostSlice::read`]; and it was mapped for writing.
    pub unsafe fn write(&self, data: &[u8]) {
        debug_assert!(data.len() <= self.len);
        // SAFETY: mapped guest memory, as the caller promises; `data` does not change while it is
        // borrowed.
        unsafe { copy::store(self.ptr, data.as_ptr(), data.len()) };
    }
}
