//! A disk that grows or shrinks while it is served.
//!
//! ```text
//!   truncate, lvextend, Resizer::resize -> the file -> Resizer::look -> capacity: requests, configuration space
//!                                                            '-> true: tell the driver that the configuration has changed
//! ```
//! Handlers check each batch against the size that was found last. A request beyond a new end is answered with an error from then
//! on; before, a read finds nothing there and fails as well, and a write makes the file longer again. So tell the driver to use
//! less before the file is made shorter.
use super::image::Image;
use paravane_spec::blk::SECTOR;
use rustix::fs::{AtFlags, StatxFlags};
use std::io;
use std::sync::Arc;

/// Looks at the size of a disk's image, and changes it. There may be several; each says what is new to it.
#[derive(Debug)]
pub struct Resizer {
    image: Arc<Image>,
    /// What it has said last, in sectors.
    seen: u64,
}

impl Resizer {
    pub(super) fn new(image: Arc<Image>) -> Self {
        Self { seen: image.sectors(), image }
    }

    /// Looks at the image, after somebody may have changed its size. `true`: the disk's size is another than when this was last
    /// asked, so the configuration space has changed, of which the driver is to be told.
    ///
    /// # Errors
    /// The host does not say; all is as before.
    pub fn look(&mut self) -> io::Result<bool> {
        let sectors = self.image.look()?;
        Ok(std::mem::replace(&mut self.seen, sectors) != sectors)
    }

    /// Makes the image `size` bytes long, and looks at it as [`Resizer::look`] does. What is new reads as zeroes; what is
    /// beyond the end is lost.
    ///
    /// # Errors
    /// No multiple of 512 (past the page cache, of the block that the driver is told), or 0; the disk is read-only; or the host
    /// refuses, as for a block device.
    pub fn resize(&mut self, size: u64) -> io::Result<bool> {
        let block = self.image.block();
        if size == 0 || !size.is_multiple_of(block) {
            let what = format!("{size} bytes are not a number of blocks of {block}");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        self.image.resize(size)?;
        self.look()
    }

    /// Why the last look at the image failed, whoever looked.
    #[must_use]
    pub fn error(&self) -> Option<String> {
        self.image.look_error()
    }

    /// Whether the image has no name any more: its data go when it is closed. Waits for no file server.
    #[must_use]
    pub fn is_deleted(&self) -> bool {
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        rustix::fs::statx(&self.image.file, c"", flags, StatxFlags::NLINK)
            .is_ok_and(|found| found.stx_nlink == 0)
    }

    /// Size of the disk in bytes, when somebody last looked at the image. Never waits.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.image.sectors() * SECTOR
    }
}
