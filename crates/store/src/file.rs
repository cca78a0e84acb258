//! Files and block devices: the system call of each job, and what does the jobs of a queue.
//!
//! ```text
//!   uring            a ring of io_uring
//!   threads          a pool of threads, which do jobs by `Perform`
//!   immediate        the queue's own thread, by `Perform`; `mapped`: it copies
//!   beside           most jobs by one of these or by another store, the rest by threads
//! ```
mod beside;
mod file_store;
mod immediate;
mod mapped;
mod present_pages;
mod registered;
mod threads;
mod uring;

pub use beside::{Beside, Rule};
pub use file_store::FileStore;
pub use immediate::{Immediate, Perform};
pub use mapped::Mapped;
pub use present_pages::PresentPages;
pub use threads::{Pool, Threads};
pub use uring::{Uring, probe};

use crate::Job;
use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::fd::AsRawFd;

/// Size of a file in bytes, found by seeking: the st_size of a block device is 0.
///
/// # Errors
/// The host refuses.
pub fn size(mut file: &File) -> io::Result<u64> {
    file.seek(SeekFrom::End(0))
}

/// The mode of fallocate(2) for a job that frees or zeroes a range.
pub(crate) fn fallocate_mode(unmap: bool) -> i32 {
    // A hole reads as zeroes, and is the only way to unmap; the two modes exclude each other.
    let how = match unmap {
        true => libc::FALLOC_FL_PUNCH_HOLE,
        false => libc::FALLOC_FL_ZERO_RANGE,
    };
    how | libc::FALLOC_FL_KEEP_SIZE
}

/// Makes the system call of a job: preadv(2), pwritev2(2), fdatasync(2) or fallocate(2). Returns its result
/// as io_uring would.
///
/// # Safety
/// The pieces of the job, the array that lists them, and the memory that they name stay valid during the
/// call.
#[must_use]
pub unsafe fn perform(file: &File, job: Job) -> i32 {
    let fd = file.as_raw_fd();
    let allocate = |offset: u64, len: u64, unmap| {
        // SAFETY: no memory is involved, and the descriptor is the image's.
        unsafe { libc::fallocate(fd, fallocate_mode(unmap), offset as i64, len as i64) as isize }
    };
    let result = match job {
        Job::Read { pieces, offset } => {
            // SAFETY: the caller promises that the pieces and their memory are valid.
            unsafe {
                match pieces.single() {
                    Some((start, len)) => libc::pread(fd, start.cast(), len as usize, offset as i64),
                    None => libc::preadv(fd, pieces.iovecs(), pieces.count as libc::c_int, offset as i64),
                }
            }
        }
        Job::Write { pieces, offset, durable } => {
            let flags = if durable { libc::RWF_DSYNC } else { 0 };
            // SAFETY: as for reading.
            unsafe {
                match pieces.single().filter(|_| !durable) {
                    Some((start, len)) => libc::pwrite(fd, start.cast(), len as usize, offset as i64),
                    None => {
                        libc::pwritev2(fd, pieces.iovecs(), pieces.count as libc::c_int, offset as i64, flags)
                    }
                }
            }
        }
        // SAFETY: no memory is involved, and the descriptor is the image's.
        Job::Flush => unsafe { libc::fdatasync(fd) as isize },
        Job::Discard { offset, len } => allocate(offset, len, true),
        Job::Zeroes { offset, len, unmap } => allocate(offset, len, unmap),
    };
    if result < 0 {
        return -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
    }
    // The kernel transfers less than 2 GiB at a time.
    i32::try_from(result).unwrap_or(i32::MAX)
}
