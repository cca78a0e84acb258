//! A disk that grows or shrinks while it is served.
//!
//! ```text
//!   truncate, lvextend, Resizer::resize -> file -> Resizer::look -> size: requests, configuration
//!                                                     '-> true: notify the driver of the change
//! ```
//! Handlers check each batch against the size that was found last, and fail requests beyond it.
//! After the file has shrunk and before that is found, a read beyond its end fails, and a write
//! extends it again. So shrink the guest's file systems first.
use super::current::Current;
use super::geometry::Geometry;
use paravane_spec::blk::SECTOR;
use rustix::fs::{AtFlags, StatxFlags};
use std::io;
use std::sync::Arc;

/// Detects and makes changes of a disk's size.
///
/// Several may exist; each reports changes that are new to it.
#[derive(Debug)]
pub struct Resizer {
    current: Arc<Current>,
    /// Size that it has reported last, in sectors.
    seen: u64,
}

impl Resizer {
    pub(super) fn new(current: Arc<Current>) -> Self {
        Self { seen: current.image().sectors(), current }
    }

    /// Reads the size of the image; `true` if it has changed since the last call.
    ///
    /// The configuration space has then changed: notify the driver.
    ///
    /// # Errors
    /// The host does not report the size. The disk has not changed.
    pub fn look(&mut self) -> io::Result<bool> {
        let sectors = self.current.look()?;
        Ok(std::mem::replace(&mut self.seen, sectors) != sectors)
    }

    /// Sets the size of the image to `size` bytes, then acts as [`Resizer::look`].
    ///
    /// New data reads as zeroes. Data beyond a new end is lost.
    ///
    /// # Errors
    /// The size is 0 or not a multiple of the block that drivers are told;
    /// the disk is read-only; or the host refuses, as for a block device.
    pub fn resize(&mut self, size: u64) -> io::Result<bool> {
        let image = self.current.image();
        let block = image.file.block;
        if size == 0 || !size.is_multiple_of(block) {
            let what =
                format!("invalid disk size of {size} bytes: it must be a positive multiple of {block}");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        {
            let _kept = self.current.try_keep_size().ok_or_else(|| {
                io::Error::new(io::ErrorKind::ResourceBusy, "a snapshot is being taken; try again")
            })?;
            // It may be another one by now.
            self.current.image().resize(size)?;
        }
        self.look()
    }

    /// Error of the last look at the image, by any resizer of the disk.
    #[must_use]
    pub fn error(&self) -> Option<String> {
        self.current.image().look_error()
    }

    /// Whether the image has been deleted, so that its data is lost when it is closed.
    ///
    /// Never blocks.
    #[must_use]
    pub fn is_deleted(&self) -> bool {
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let is_gone =
            |file| rustix::fs::statx(file, c"", flags, StatxFlags::NLINK).map(|found| found.stx_nlink == 0);
        self.current.image().file.source.file().is_some_and(|file| is_gone(file).unwrap_or(false))
    }

    /// What drivers are told of the disk. Never blocks.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        let image = self.current.image();
        // At most 4096.
        Geometry { size: image.sectors() * SECTOR, block: image.file.block as u32 }
    }

    /// Size of the disk in bytes at the last look at the image. Never blocks.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.current.image().sectors() * SECTOR
    }
}
