//! A file that is locked as an image, and not opened as one.
use super::super::image_file::{HeldFile, ImageFile, Opening};
use super::super::{FileId, Format, LayerSource, OpenError};
use super::info::{Info, info_of};
use super::open_file;
use std::path::Path;

/// An image that nobody writes to, as long as this lives.
#[derive(Debug)]
pub struct ReadLock(ImageFile);

impl ReadLock {
    /// Locks an image against writers.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn new(place: &LayerSource) -> Result<Self, OpenError> {
        // This format takes any size.
        open_file(place, Format::Qcow2, true).map(Self)
    }

    /// Describes the image, as [`info`](super::info()).
    ///
    /// # Errors
    /// As [`info`](super::info()).
    pub fn info(&self, format: Option<Format>) -> Result<Info, OpenError> {
        info_of(&self.0, format)
    }

    /// The file; `None`: the image lies in another store.
    #[must_use]
    pub fn file_id(&self) -> Option<FileId> {
        FileId::of_source(&self.0.source)
    }
}

/// A file that nobody has open as an image, as long as this lives: it is to be replaced.
#[derive(Debug)]
pub struct WriteLock(HeldFile);

impl WriteLock {
    /// Locks the file at `path`, whatever is in it.
    ///
    /// # Errors
    /// [`OpenReason::InUse`](crate::blk::OpenReason::InUse), or the file cannot be opened for writing.
    pub fn new(path: &Path) -> Result<Self, OpenError> {
        HeldFile::open(path, Opening::cached(Format::Qcow2, false)).map(Self)
    }

    /// Checks that the file is still at `path`.
    ///
    /// # Errors
    /// [`OpenReason::Replaced`](crate::blk::OpenReason::Replaced), [`OpenReason::Deleted`](crate::blk::OpenReason::Deleted).
    pub fn check(&self, path: &Path) -> Result<(), OpenError> {
        self.0.check(path)
    }
}
