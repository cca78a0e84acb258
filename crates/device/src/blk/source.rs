//! Where the bytes of an image lie: in a file, or in another store.
//!
//! A file has engines of its own (`engine/`). Every other store brings its queues. Both do the same
//! jobs; a format is over either.
use paravane_dma::HostSlice;
use paravane_store::{Job, Pieces, Store, file};
use std::fs::File;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

/// The bytes of an image.
#[derive(Debug)]
pub(super) enum Source {
    /// A file or block device, which holds the image's lock.
    File(File),
    Store(Arc<dyn Store>),
}

impl Source {
    /// The file, if it is one.
    pub(super) fn file(&self) -> Option<&File> {
        match self {
            Self::File(file) => Some(file),
            Self::Store(_) => None,
        }
    }

    /// The store, if it is no file.
    pub(super) fn store(&self) -> Option<&Arc<dyn Store>> {
        match self {
            Self::File(_) => None,
            Self::Store(store) => Some(store),
        }
    }

    /// Another handle of the same bytes.
    pub(super) fn try_clone(&self) -> io::Result<Self> {
        Ok(match self {
            Self::File(file) => Self::File(file.try_clone()?),
            Self::Store(store) => Self::Store(store.clone()),
        })
    }

    /// Size in bytes. A store says what it knows, without asking its server.
    pub(super) fn size(&self) -> io::Result<u64> {
        match self {
            Self::File(file) => file::size(file),
            Self::Store(store) => Ok(store.size()),
        }
    }

    /// Sets the size in bytes.
    pub(super) fn set_size(&self, size: u64) -> io::Result<()> {
        match self {
            Self::File(file) => file.set_len(size),
            Self::Store(store) => store.set_size(size),
        }
    }

    /// Does a job and waits for it. Returns its result as io_uring would.
    ///
    /// # Safety
    /// The pieces of the job, the array that lists them, and the memory that they name stay valid
    /// during the call.
    pub(super) unsafe fn perform(&self, job: Job) -> i32 {
        match self {
            // SAFETY: the caller promises what is asked for.
            Self::File(file) => unsafe { file::perform(file, job) },
            // SAFETY: the same.
            Self::Store(store) => unsafe { store.perform(job) },
        }
    }

    /// Reads some bytes; 0 at the end.
    pub(super) fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        let piece = HostSlice { ptr: into.as_mut_ptr(), len: into.len() };
        let pieces = Pieces { first: NonNull::from(&piece), count: 1 };
        // SAFETY: the piece is `into`, which is borrowed for the call.
        moved(unsafe { self.perform(Job::Read { pieces, offset }) })
    }

    /// Writes all bytes.
    pub(super) fn write_all_at(&self, mut data: &[u8], mut offset: u64) -> io::Result<()> {
        while !data.is_empty() {
            let piece = HostSlice { ptr: data.as_ptr().cast_mut(), len: data.len() };
            let pieces = Pieces { first: NonNull::from(&piece), count: 1 };
            // SAFETY: the piece is `data`, which is borrowed for the call and only read.
            match moved(unsafe { self.perform(Job::Write { pieces, offset, durable: false }) }) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(done) => {
                    data = &data[done.min(data.len())..];
                    offset += done as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Makes a range read as zeroes. `unmap`: frees it where that can be.
    ///
    /// # Errors
    /// EOPNOTSUPP: only writes can.
    pub(super) fn zero(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        // SAFETY: the job has no memory.
        moved(unsafe { self.perform(Job::Zeroes { offset, len, unmap }) }).map(drop)
    }

    /// Frees a range, whose content is undefined afterwards.
    ///
    /// # Errors
    /// EOPNOTSUPP: it cannot be freed.
    pub(super) fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        // SAFETY: the job has no memory.
        moved(unsafe { self.perform(Job::Discard { offset, len }) }).map(drop)
    }

    /// Makes all writes durable.
    pub(super) fn sync(&self) -> io::Result<()> {
        // SAFETY: the job has no memory.
        moved(unsafe { self.perform(Job::Flush) }).map(drop)
    }
}

/// A result as system calls have it.
fn moved(result: i32) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result))
}
