//! Which file an image is, and which image a disk uses: for what is decided now and done later.
use paravane_store::Store;
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;

/// A file or block device, whatever its path is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileId {
    /// Number of the file system, or of the block device.
    pub device: u64,
    /// Number of the file; 0 for a block device.
    pub inode: u64,
}

impl FileId {
    /// The file that a path names, links followed.
    ///
    /// # Errors
    /// There is none, or it cannot be reached.
    pub fn at(path: &Path) -> io::Result<Self> {
        path.metadata().map(|metadata| Self::of(&metadata))
    }

    pub(super) fn of(metadata: &Metadata) -> Self {
        match metadata.file_type().is_block_device() {
            // Its node may be made anew.
            true => Self { device: metadata.rdev(), inode: 0 },
            false => Self { device: metadata.dev(), inode: metadata.ino() },
        }
    }

    pub(super) fn of_file(file: &File) -> io::Result<Self> {
        file.metadata().map(|metadata| Self::of(&metadata))
    }

    /// `None`: a store that is no file.
    pub(super) fn of_source(source: &Arc<dyn Store>) -> Option<Self> {
        source.file().and_then(|file| Self::of_file(file).ok())
    }
}

/// The image that a disk used at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageId {
    /// Its file; `None`: a store that is no file.
    pub file: Option<FileId>,
    /// Number of snapshots of the disk before, by this process.
    pub generation: u64,
}
