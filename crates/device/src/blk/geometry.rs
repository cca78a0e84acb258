//! What a driver would be told of a disk that another process still serves.
use super::image_file::{ImageFile, Look, Opening};
use super::qcow2::Recorded;
use super::{Format, HeaderError, OpenError};
use paravane_spec::blk::SECTOR;
use paravane_store::Store;
use std::path::{Path, PathBuf};
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
    /// Of a block device that another process may have claimed.
    pub(super) fn of_device(path: &Path, opening: Opening) -> Result<Self, OpenError> {
        Self::of(&Look::at_device(path, opening)?, path, opening.format)
    }

    /// Of a store that is open.
    pub(super) fn of_store(store: &Arc<dyn Store>, opening: Opening) -> Result<Self, OpenError> {
        let file = ImageFile::over(store.clone(), opening)?;
        let look = Look { source: file.source, size: file.size, block: file.block };
        Self::of(&look, &file.path, opening.format)
    }

    /// Of a file or store that is open.
    pub(super) fn of(look: &Look, path: &Path, format: Format) -> Result<Self, OpenError> {
        let Look { source, size, block } = look;
        let path = || PathBuf::from(path);
        let size = match format {
            Format::Raw => *size,
            Format::Qcow2 => match Recorded::read(source) {
                Ok(Some(header)) => header.size / SECTOR * SECTOR,
                Ok(None) => {
                    let source = Box::new(HeaderError::NotQcow2);
                    return Err(OpenError::Header { path: path(), source });
                }
                Err(source) => return Err(OpenError::Os { path: path(), source }),
            },
        };
        match size % block {
            // Refused otherwise.
            0 => Ok(Self { size, block: *block as u32 }),
            _ => Err(OpenError::DiskSize { path: path(), size, block: *block }),
        }
    }
}
