//! A file or block device as a store.
use super::{Uring, perform, size};
use crate::{Job, Store, StoreExtent, StoreLimits, StoreQueue};
use rustix::fs::SeekFrom;
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::sync::Arc;

/// An open file or block device. Its queues are rings of io_uring.
#[derive(Debug)]
pub struct FileStore(File);

impl FileStore {
    /// The store that a file is.
    #[must_use]
    pub fn of(file: File) -> Arc<dyn Store> {
        Arc::new(Self(file))
    }
}

impl Store for FileStore {
    fn queue(&self, jobs: u16) -> io::Result<Box<dyn StoreQueue>> {
        Ok(Box::new(Uring::new(&self.0, false, jobs)?))
    }

    unsafe fn perform(&self, job: Job) -> i32 {
        // SAFETY: the caller's promise.
        unsafe { perform(&self.0, job) }
    }

    fn size(&self) -> u64 {
        self.try_size().unwrap_or(0)
    }

    fn try_size(&self) -> io::Result<u64> {
        size(&self.0)
    }

    /// A file becomes longer by writes.
    fn end(&self) -> u64 {
        let is_device = self.0.metadata().is_ok_and(|file| file.file_type().is_block_device());
        if is_device { self.try_size().unwrap_or(u64::MAX) } else { u64::MAX }
    }

    fn file(&self) -> Option<&File> {
        Some(&self.0)
    }

    fn set_size(&self, size: u64) -> io::Result<()> {
        self.0.set_len(size)
    }

    /// Data or a hole, as far as the file system says. Parts end where it says so, however far that is:
    /// on tmpfs, a seek looks at each page up to the next hole.
    fn extents(&self, offset: u64, len: u64) -> io::Result<Vec<StoreExtent>> {
        let data = match rustix::fs::seek(&self.0, SeekFrom::Data(offset)) {
            Ok(data) => data,
            // There is no data any more.
            Err(Errno::NXIO) => u64::MAX,
            // A block device, or a file system that does not tell.
            Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok(vec![StoreExtent::data(offset, len)]),
            Err(error) => return Err(error.into()),
        };
        if data > offset {
            return Ok(vec![StoreExtent::hole(offset, data - offset)]);
        }
        let hole = rustix::fs::seek(&self.0, SeekFrom::Hole(offset))?;
        // The file may change meanwhile: at least a byte, so that callers come to an end.
        Ok(vec![StoreExtent::data(offset, hole.saturating_sub(offset).max(1))])
    }

    fn limits(&self) -> StoreLimits {
        StoreLimits::FILE
    }
}
