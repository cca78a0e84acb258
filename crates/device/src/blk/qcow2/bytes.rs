//! The bytes of a qcow2 image or backing file, as imago sees them: those of a file, or of a store.
use imago::file::File;
use imago::io_buffers::{IoVector, IoVectorMut};
use imago::storage::drivers::CommonStorageHelper;
use imago::storage::{PreallocateMode, Storage};
use paravane_dma::HostSlice;
use paravane_store::{Job, Pieces, Store};
use std::fmt;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

/// See the module.
#[derive(Debug)]
pub(super) enum Bytes {
    File(File),
    Store(StoreBytes),
}

/// A store other than a file.
#[derive(Debug)]
pub(super) struct StoreBytes {
    store: Arc<dyn Store>,
    helper: CommonStorageHelper,
}

impl From<Arc<dyn Store>> for StoreBytes {
    fn from(store: Arc<dyn Store>) -> Self {
        Self { store, helper: CommonStorageHelper::default() }
    }
}

impl StoreBytes {
    /// Reads or writes all bytes of the pieces. Returns how many were moved before the end.
    ///
    /// # Safety
    /// The pieces name memory that is valid during the call; to be written, if it is a read.
    unsafe fn transfer(&self, mut pieces: &mut [HostSlice], offset: u64, write: bool) -> io::Result<u64> {
        let mut done = 0;
        while !pieces.is_empty() {
            let list =
                Pieces { first: NonNull::from(&mut *pieces).cast(), count: pieces.len().min(MOST) as u32 };
            let offset = offset + done;
            let job = match write {
                true => Job::Write { pieces: list, offset, durable: false },
                false => Job::Read { pieces: list, offset },
            };
            // SAFETY: the caller's promise; the list is borrowed.
            let mut moved = match checked(unsafe { self.store.perform(job) }) {
                Ok(0) => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                moved => moved? as usize,
            };
            done += moved as u64;
            while let Some(first) = pieces.first_mut() {
                let now = moved.min(first.len);
                // Inside the piece, or at its end.
                (first.ptr, first.len) = (first.ptr.wrapping_add(now), first.len - now);
                moved -= now;
                if first.len > 0 {
                    break;
                }
                pieces = &mut pieces[1..];
            }
        }
        Ok(done)
    }

    /// Does a job without memory.
    fn run(&self, job: Job) -> io::Result<()> {
        // SAFETY: there is no memory.
        checked(unsafe { self.store.perform(job) }).map(drop)
    }

    /// Makes the store hold `len` bytes at `offset`.
    fn grow(&self, offset: u64, len: u64) -> io::Result<()> {
        let end = offset.checked_add(len).ok_or(io::ErrorKind::InvalidInput)?;
        if end <= self.store.size() {
            return Ok(());
        }
        // A store that cannot grow is full, as a block device would be.
        self.store.set_size(end).map_err(|error| match error.kind() {
            io::ErrorKind::Unsupported => io::Error::from_raw_os_error(libc::ENOSPC),
            _ => error,
        })
    }

    /// Zeroes a range, by writes if the store cannot otherwise.
    fn zero(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        self.grow(offset, len)?;
        match self.run(Job::Zeroes { offset, len, unmap }) {
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {}
            done => return done,
        }
        let zeroes = vec![0; len.min(ZEROES) as usize];
        let mut done = 0;
        while done < len {
            let now = (len - done).min(ZEROES) as usize;
            let mut piece = [HostSlice { ptr: zeroes.as_ptr().cast_mut(), len: now }];
            // SAFETY: the vector lives, and is only read.
            match unsafe { self.transfer(&mut piece, offset + done, true) }? {
                0 => return Err(io::ErrorKind::WriteZero.into()),
                moved => done += moved,
            }
        }
        Ok(())
    }
}

/// Most pieces of a job (IOV_MAX).
const MOST: usize = 1024;
/// Bytes of zeroes that are written at once.
const ZEROES: u64 = 256 << 10;

/// A result as system calls have it.
fn checked(result: i32) -> io::Result<u32> {
    u32::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result))
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(file) => file.fmt(f),
            Self::Store(bytes) => bytes.store.status().location.fmt(f),
        }
    }
}

impl Storage for Bytes {
    fn mem_align(&self) -> usize {
        match self {
            Self::File(file) => file.mem_align(),
            Self::Store(_) => 1,
        }
    }

    fn req_align(&self) -> usize {
        match self {
            Self::File(file) => file.req_align(),
            Self::Store(bytes) => bytes.store.limits().block as usize,
        }
    }

    fn zero_align(&self) -> usize {
        match self {
            Self::File(file) => file.zero_align(),
            Self::Store(_) => self.req_align(),
        }
    }

    fn discard_align(&self) -> usize {
        match self {
            Self::File(file) => file.discard_align(),
            Self::Store(bytes) => bytes.store.limits().physical_block as usize,
        }
    }

    fn size(&self) -> io::Result<u64> {
        match self {
            Self::File(file) => file.size(),
            Self::Store(bytes) => Ok(bytes.store.size()),
        }
    }

    unsafe fn pure_readv(&self, bufv: IoVectorMut<'_>, offset: u64) -> io::Result<()> {
        match self {
            // SAFETY: the caller's promise is the one that the file asks for; so below.
            Self::File(file) => unsafe { file.pure_readv(bufv, offset) },
            Self::Store(bytes) => {
                let mut buffers = bufv.into_inner();
                let piece = |buffer: &mut io::IoSliceMut<'_>| HostSlice {
                    ptr: buffer.as_mut_ptr(),
                    len: buffer.len(),
                };
                let mut pieces: Vec<_> = buffers.iter_mut().map(piece).collect();
                // What lies beyond the end of the store reads as zeroes.
                let known = bytes.store.size().saturating_sub(offset);
                limit(&mut pieces, known);
                // SAFETY: the buffers are borrowed until the end of this function.
                let mut done = unsafe { bytes.transfer(&mut pieces, offset, false) }?;
                for buffer in &mut buffers {
                    let filled = done.min(buffer.len() as u64);
                    buffer[filled as usize..].fill(0);
                    done -= filled;
                }
                Ok(())
            }
        }
    }

    unsafe fn pure_writev(&self, bufv: IoVector<'_>, offset: u64) -> io::Result<()> {
        match self {
            // SAFETY: as above.
            Self::File(file) => unsafe { file.pure_writev(bufv, offset) },
            Self::Store(bytes) => {
                let len = bufv.len();
                bytes.grow(offset, len)?;
                let buffers = bufv.into_inner();
                let piece = |buffer: &io::IoSlice<'_>| HostSlice {
                    ptr: buffer.as_ptr().cast_mut(),
                    len: buffer.len(),
                };
                let mut pieces: Vec<_> = buffers.iter().map(piece).collect();
                // SAFETY: the buffers are borrowed until the end of this function, and only read.
                match unsafe { bytes.transfer(&mut pieces, offset, true) }? {
                    done if done == len => Ok(()),
                    _ => Err(io::ErrorKind::WriteZero.into()),
                }
            }
        }
    }

    unsafe fn pure_write_zeroes(&self, offset: u64, length: u64) -> io::Result<()> {
        match self {
            // SAFETY: as above.
            Self::File(file) => unsafe { file.pure_write_zeroes(offset, length) },
            Self::Store(bytes) => bytes.zero(offset, length, true),
        }
    }

    unsafe fn pure_write_allocated_zeroes(&self, offset: u64, length: u64) -> io::Result<()> {
        match self {
            // SAFETY: as above.
            Self::File(file) => unsafe { file.pure_write_allocated_zeroes(offset, length) },
            Self::Store(bytes) => bytes.zero(offset, length, false),
        }
    }

    unsafe fn pure_discard(&self, offset: u64, length: u64) -> io::Result<()> {
        match self {
            // SAFETY: as above.
            Self::File(file) => unsafe { file.pure_discard(offset, length) },
            Self::Store(bytes) if offset >= bytes.store.size() => Ok(()),
            Self::Store(bytes) => {
                match bytes
                    .run(Job::Discard { offset, len: length.min(bytes.store.size().saturating_sub(offset)) })
                {
                    // A hint.
                    Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(()),
                    done => done,
                }
            }
        }
    }

    fn flush(&self) -> io::Result<()> {
        // Neither has a buffer.
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        match self {
            Self::File(file) => file.sync(),
            Self::Store(bytes) => bytes.run(Job::Flush),
        }
    }

    fn settle_writes(&self) -> io::Result<()> {
        match self {
            Self::File(file) => file.settle_writes(),
            // Each was waited for.
            Self::Store(_) => Ok(()),
        }
    }

    unsafe fn invalidate_cache(&self) -> io::Result<()> {
        match self {
            // SAFETY: as above.
            Self::File(file) => unsafe { file.invalidate_cache() },
            Self::Store(_) => Ok(()),
        }
    }

    fn get_storage_helper(&self) -> &CommonStorageHelper {
        match self {
            Self::File(file) => file.get_storage_helper(),
            Self::Store(bytes) => &bytes.helper,
        }
    }

    fn resize(&self, new_size: u64, prealloc_mode: PreallocateMode) -> io::Result<()> {
        match self {
            Self::File(file) => file.resize(new_size, prealloc_mode),
            Self::Store(bytes) => match bytes.store.set_size(new_size) {
                // A store of a fixed size is used as it is: writes beyond its end fail.
                Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(()),
                done => done,
            },
        }
    }
}

/// Cuts the pieces to `len` bytes.
fn limit(pieces: &mut Vec<HostSlice>, mut len: u64) {
    for piece in &mut *pieces {
        piece.len = piece.len.min(usize::try_from(len).unwrap_or(usize::MAX));
        len -= piece.len as u64;
    }
    pieces.retain(|piece| piece.len > 0);
}
