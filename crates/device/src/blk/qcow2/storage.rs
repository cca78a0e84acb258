//! The file of an image, as imago sees it: everything, but its first cluster is the header's.
//!
//! An image that is open may come to say that its own header is free: one that somebody has made for that purpose, say with
//! compressed data in cluster 0, which a write gives back. imago 0.2.6 would take it next, for what comes: a guest's data, or a
//! refcount block, with the end that [`refcounts`](super::refcounts) tells of. Here such a write fails, before the block has
//! been entered anywhere, and so does the request behind it.
use imago::file::File;
use imago::io_buffers::{IoVector, IoVectorMut};
use imago::storage::drivers::CommonStorageHelper;
use imago::storage::{self, PreallocateMode};
use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes of what is written to the header of an open image: version 2 of it, which has size and tables.
const HEADER: u64 = 72;

/// The file.
#[derive(Debug)]
pub(super) struct Storage {
    file: File,
    /// Bytes of the first cluster.
    first: u64,
    sealed: Arc<AtomicBool>,
}

impl Storage {
    /// A file whose first cluster has `first` bytes. From the moment on that `sealed` is set nothing goes there but what
    /// changes in the header of an open image. (Opening it may write the whole header, to clear features.)
    pub(super) fn new(file: File, first: u64, sealed: Arc<AtomicBool>) -> Self {
        Self { file, first, sealed }
    }

    fn check(&self, offset: u64, len: u64) -> io::Result<()> {
        // Relaxed: set before the image is anybody's but its maker's.
        if offset >= self.first || (offset, len) == (0, HEADER) || !self.sealed.load(Ordering::Relaxed) {
            return Ok(());
        }
        Err(io::Error::new(io::ErrorKind::InvalidData, "the image says that its header is free"))
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
        // The file has no buffer of its own, and flushing it would wait for all that is being read and written.
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
