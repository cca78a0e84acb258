//! A queue's door to guest memory.
use crate::{Access, DmaError, Segment};
use std::ptr::NonNull;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Access to guest memory for one holder. It pins one snapshot of the map; [`Handle::refresh`], called at
/// batch boundaries, pins the newest. No access takes a lock.
#[derive(Debug)]
pub struct Handle {}

/// A contiguous piece of guest memory in this process. Plain data: it is valid only while the [`Hold`] or
/// [`Mapping`] that it came with lives. Guest and devices change the bytes at any time.
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
/// a release of what was written.
#[derive(Debug)]
pub struct Hold {}

/// One contiguous piece of guest memory, mapped for as long as the guard lives.
#[derive(Debug)]
pub struct Mapping {}

impl Mapping {
    /// First byte in this process.
    #[must_use]
    pub fn host(&self) -> NonNull<u8> {
        todo!()
    }

    /// Bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        todo!()
    }

    /// Whether it is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Handle {
    /// Pins the newest map, if it has changed. `true` if it had.
    pub fn refresh(&mut self) -> bool {
        todo!()
    }

    /// Copies guest memory at `addr` into `out`.
    ///
    /// # Errors
    /// Part of it is not there; `done` bytes of `out` have been filled.
    pub fn read(&self, addr: u64, out: &mut [u8], access: Access) -> Result<(), DmaError> {
        let _ = (addr, out, access);
        todo!()
    }

    /// Copies `data` into guest memory at `addr`.
    ///
    /// # Errors
    /// Part of it is not there or not writable; `done` bytes have been written.
    pub fn write(&self, addr: u64, data: &[u8], access: Access) -> Result<(), DmaError> {
        let _ = (addr, data, access);
        todo!()
    }

    /// Reads a value. Aligned values of 1, 2, 4 or 8 bytes are read in one access.
    ///
    /// # Errors
    /// As [`Handle::read`].
    pub fn read_obj<T: FromBytes + IntoBytes>(&self, addr: u64, access: Access) -> Result<T, DmaError> {
        let _ = (addr, access);
        todo!()
    }

    /// Writes a value. Aligned values of 1, 2, 4 or 8 bytes are written in one access.
    ///
    /// # Errors
    /// As [`Handle::write`].
    pub fn write_obj<T: IntoBytes + Immutable>(&self, addr: u64, value: &T, access: Access) -> Result<(), DmaError> {
        let _ = (addr, value, access);
        todo!()
    }

    /// Writes `len` bytes of `byte`.
    ///
    /// # Errors
    /// As [`Handle::write`].
    pub fn fill(&self, addr: u64, byte: u8, len: usize, access: Access) -> Result<(), DmaError> {
        let _ = (addr, byte, len, access);
        todo!()
    }

    /// Reads `out.len()` bytes, starting `skip` bytes into the buffer that `segments` make up.
    ///
    /// # Errors
    /// As [`Handle::read`]; a buffer that is too short is [`DmaError::Unmapped`] at its end.
    pub fn read_segments(&self, segments: &[Segment], skip: u64, out: &mut [u8], access: Access) -> Result<(), DmaError> {
        let _ = (segments, skip, out, access);
        todo!()
    }

    /// Writes `data`, starting `skip` bytes into the buffer that `segments` make up.
    ///
    /// # Errors
    /// As [`Handle::write`]; a buffer that is too short is [`DmaError::Unmapped`] at its end.
    pub fn write_segments(&self, segments: &[Segment], skip: u64, data: &[u8], access: Access) -> Result<(), DmaError> {
        let _ = (segments, skip, data, access);
        todo!()
    }

    /// Maps one piece that is contiguous in host memory.
    ///
    /// # Errors
    /// As [`Handle::read`], and [`DmaError::NotContiguous`].
    pub fn map(&self, addr: u64, len: usize, access: Access) -> Result<Mapping, DmaError> {
        let _ = (addr, len, access);
        todo!()
    }

    /// Appends to `out` the host memory behind bytes `skip .. skip + len` of the buffer that `segments` make
    /// up, and returns what keeps it mapped. Nothing is appended on an error.
    ///
    /// # Errors
    /// As [`Handle::read`].
    pub fn map_segments(
        &self,
        segments: &[Segment],
        skip: u64,
        len: u64,
        access: Access,
        out: &mut Vec<HostSlice>,
    ) -> Result<Hold, DmaError> {
        let _ = (segments, skip, len, access, out);
        todo!()
    }
}
