//! The file of an image, as imago sees it, with its first cluster protected.
//!
//! A crafted image may count its own header as free while it is open, for example by compressed
//! data in cluster 0 that a write frees. imago 0.2.6 would allocate the cluster next, for a guest's
//! data, or for a refcount block with the effect that [`refcounts`](super::refcounts) explains.
//! Here such a write fails before the block is entered anywhere, and so does its request.
use super::bytes::Bytes;
use imago::io_buffers::{IoVector, IoVectorMut};
use imago::storage::drivers::CommonStorageHelper;
use imago::storage::{self, PreallocateMode};
use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Size of a header write in an open image: the fields of version 2.
///
/// They include size and tables.
const HEADER: u64 = 72;

/// See the module.
#[derive(Debug)]
pub(super) struct Storage {
    file: Bytes,
    /// Bytes of the first cluster.
    first: u64,
    sealed: Arc<AtomicBool>,
}

impl Storage {
    /// Protects the first `first` bytes of the file once `sealed` is set.
    ///
    /// Updates of the header's fixed fields pass.
    ///
    /// Opening an image may write the whole header, to clear features; hence `sealed`.
    pub(super) fn new(file: Bytes, first: u64, sealed: Arc<AtomicBool>) -> Self {
        Self { file, first, sealed }
    }

    fn check(&self, offset: u64, len: u64) -> io::Result<()> {
        // Relaxed: set before other threads get the image.
        if offset >= self.first || (offset, len) == (0, HEADER) || !self.sealed.load(Ordering::Relaxed) {
            return Ok(());
        }
        Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "the image is corrupt: its header is free for allocation; run `qemu-img check`",
        ))
    }
}

impl fmt::Display for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.file.fmt(f)
    }
}

impl storage::Storage for Storage {
    fn mem_align(&self) -> usize {
        self.file.mem_align()
    }

    fn req_align(&self) -> usize {
        self.file.req_align()
    }

    fn zero_align(&self) -> usize {
        self.file.zero_align()
    }

    fn discard_align(&self) -> usize {
        self.file.discard_align()
    }

    fn size(&self) -> io::Result<u64> {
        self.file.size()
    }

    unsafe fn pure_readv(&self, bufv: IoVectorMut<'_>, offset: u64) -> io::Result<()> {
        // SAFETY: the caller's promise is the one that the file asks for; so below.
        unsafe { self.file.pure_readv(bufv, offset) }
    }

    unsafe fn pure_writev(&self, bufv: IoVector<'_>, offset: u64) -> io::Result<()> {
        self.check(offset, bufv.len())?;
        // SAFETY: as above.
        unsafe { self.file.pure_writev(bufv, offset) }
    }

    unsafe fn pure_write_zeroes(&self, offset: u64, length: u64) -> io::Result<()> {
        self.check(offset, length)?;
        // SAFETY: as above.
        unsafe { self.file.pure_write_zeroes(offset, length) }
    }

    unsafe fn pure_write_allocated_zeroes(&self, offset: u64, length: u64) -> io::Result<()> {
        self.check(offset, length)?;
        // SAFETY: as above.
        unsafe { self.file.pure_write_allocated_zeroes(offset, length) }
    }

    unsafe fn pure_discard(&self, offset: u64, length: u64) -> io::Result<()> {
        self.check(offset, length)?;
        // SAFETY: as above.
        unsafe { self.file.pure_discard(offset, length) }
    }

    fn flush(&self) -> io::Result<()> {
        // There is no buffer, and flushing a file would wait for all reads and writes in progress.
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync()
    }

    fn settle_writes(&self) -> io::Result<()> {
        self.file.settle_writes()
    }

    unsafe fn invalidate_cache(&self) -> io::Result<()> {
        // SAFETY: as above.
        unsafe { self.file.invalidate_cache() }
    }

    fn get_storage_helper(&self) -> &CommonStorageHelper {
        self.file.get_storage_helper()
    }

    fn resize(&self, new_size: u64, prealloc_mode: PreallocateMode) -> io::Result<()> {
        self.file.resize(new_size, prealloc_mode)
    }
}
