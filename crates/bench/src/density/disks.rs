//! The images of the devices, and the limit of open descriptors that they need.
use crate::BenchError;
use crate::disk_connection::BLOCK;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::statfs::{TMPFS_MAGIC, statfs};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Bytes of a small disk.
pub(super) const SMALL: u64 = 1 << 20;
/// Blocks at its start that have data and are read. The rest is a hole.
pub(super) const BLOCKS: u64 = 16;
/// Bytes of the disk that a hog reads.
pub(super) const LARGE: u64 = 64 << 20;
/// Most descriptors per device, of the client or of a server.
const DESCRIPTORS: usize = 18;
/// Descriptors of a process without devices.
const FEW: usize = 256;

/// A temporary folder with images and sockets, removed when dropped.
pub(super) struct Disks {
    folder: TempDir,
}

impl Disks {
    /// Makes `count` small images, and the large one if wanted.
    ///
    /// # Errors
    /// /dev/shm is no tmpfs or is full.
    pub(super) fn new(count: usize, large: bool) -> Result<Self, BenchError> {
        Self::make(count, large).map_err(|source| BenchError::Os { what: "make disk images", source })
    }

    fn make(count: usize, large: bool) -> io::Result<Self> {
        let place = PathBuf::from("/dev/shm");
        if statfs(&place)?.filesystem_type() != TMPFS_MAGIC {
            return Err(io::Error::other("/dev/shm is not a tmpfs"));
        }
        let disks = Self { folder: tempfile::Builder::new().prefix("paravane-bench-").tempdir_in(place)? };
        for disk in 0..count {
            write(&disks.image(disk), disk, BLOCKS, SMALL)?;
        }
        if large {
            write(&disks.large(), 0, LARGE / BLOCK, LARGE)?;
        }
        Ok(disks)
    }

    pub(super) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Path of the image of a disk.
    pub(super) fn image(&self, disk: usize) -> PathBuf {
        self.folder().join(format!("disk{disk}.img"))
    }

    /// Path of the image that a hog reads.
    pub(super) fn large(&self) -> PathBuf {
        self.folder().join("large.img")
    }

    /// Path of the socket of a disk.
    pub(super) fn socket(&self, disk: usize) -> PathBuf {
        self.folder().join(format!("disk{disk}.sock"))
    }
}

/// The number at the start of a block.
pub(super) fn stamp(disk: usize, block: u64) -> u64 {
    (disk as u64) << 32 | block
}

fn write(path: &Path, disk: usize, blocks: u64, bytes: u64) -> io::Result<()> {
    let file = File::create(path)?;
    file.set_len(bytes)?;
    let mut data = [0x5a; BLOCK as usize];
    for block in 0..blocks {
        data[..8].copy_from_slice(&stamp(disk, block).to_le_bytes());
        file.write_all_at(&data, block * BLOCK)?;
    }
    Ok(())
}

/// Raises RLIMIT_NOFILE, which servers inherit, for `count` devices.
///
/// # Errors
/// The limit is too low, and the system refuses to raise it.
pub(super) fn raise_limit(count: usize) -> Result<(), BenchError> {
    let needed = (count * DESCRIPTORS + FEW) as u64;
    let limit = |error: nix::Error| BenchError::Os { what: "read RLIMIT_NOFILE", source: error.into() };
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).map_err(limit)?;
    if soft >= needed || setrlimit(Resource::RLIMIT_NOFILE, needed, hard.max(needed)).is_ok() {
        return Ok(());
    }
    Err(BenchError::Descriptors { count, needed, hard })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_has_stamps_and_a_hole() {
        let disks = Disks::new(2, false).unwrap();
        let image = std::fs::read(disks.image(1)).unwrap();
        let number =
            |block: u64| u64::from_le_bytes(image[(block * BLOCK) as usize..][..8].try_into().unwrap());
        assert_eq!(image.len() as u64, SMALL);
        assert_eq!((number(3), number(BLOCKS)), (stamp(1, 3), 0));
        assert!(!disks.large().exists());
    }

    #[test]
    fn a_limit_that_cannot_be_raised_is_named() {
        let error = raise_limit(1 << 40).unwrap_err().to_string();
        assert!(error.contains("RLIMIT_NOFILE") && error.contains("ulimit"), "{error}");
    }
}
