//! What a block device says of itself.
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileTypeExt;

/// BLKROGET of linux/fs.h: whether writes are refused.
const BLKROGET: libc::Ioctl = 0x125e;

/// Whether the file is a block device that refuses writes.
///
/// Its descriptor may be open for writing all the same.
///
/// # Errors
/// The kernel does not tell.
pub(super) fn is_read_only(file: &File) -> io::Result<bool> {
    if !file.metadata()?.file_type().is_block_device() {
        return Ok(false);
    }
    let mut flag: libc::c_int = 0;
    // SAFETY: the descriptor is open, and the kernel writes one int, which outlives the call.
    match unsafe { libc::ioctl(file.as_raw_fd(), BLKROGET, &raw mut flag) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(flag != 0),
    }
}
