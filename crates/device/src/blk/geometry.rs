//! What a driver would be told of a disk that another process still serves.
use super::image_file::{Opening, Sizes};
use super::qcow2::Recorded;
use super::{Format, HeaderError, OpenError, OpenReason};
use paravane_spec::blk::SECTOR;
use paravane_store::Store;
use paravane_store::file::FileStore;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

/// Size and block of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Size of the disk in bytes.
    pub size: u64,
    /// Block in bytes.
    pub block: u32,
}

impl Geometry {
    /// Of an image file or block device, which another process may have locked.
    pub(super) fn of_file(file: &File, path: &Path, opening: Opening) -> Result<Self, OpenError> {
        let Sizes { size, block, .. } = Sizes::of(file, path, opening)?;
        let copy = file.try_clone().map_err(|source| OpenReason::Os { source }.at(path))?;
        Self::of(&FileStore::of(copy), size, block, path, opening.format)
    }

    /// Of the disk in a file or store of `size` bytes, whose drivers are told of blocks of `block`.
    pub(super) fn of(
        source: &Arc<dyn Store>,
        size: u64,
        block: u64,
        path: &Path,
        format: Format,
    ) -> Result<Self, OpenError> {
        let size = match format {
            Format::Raw => size,
            Format::Qcow2 => match Recorded::read(source) {
                Ok(Some(header)) => header.size / SECTOR * SECTOR,
                Ok(None) => {
                    let source = Box::new(HeaderError::NotQcow2);
                    return Err(OpenReason::Header { source }.at(path));
                }
                Err(source) => return Err(OpenReason::Os { source }.at(path)),
            },
        };
        match size % block {
            // Refused otherwise.
            0 => Ok(Self { size, block: block as u32 }),
            _ => Err(OpenReason::DiskSize { size, block }.at(path)),
        }
    }
}
