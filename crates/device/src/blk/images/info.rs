//! What is known of an image without opening the disk in it.
use super::super::image_file::ImageFile;
use super::super::magic;
use super::super::qcow2::Recorded;
use super::super::{Format, LayerSource, OpenError, OpenReason};
use super::open_file;
use paravane_spec::blk::SECTOR;
use std::os::unix::fs::MetadataExt;

/// What is known of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Info {
    /// Format: the one that was asked for, or the one that the header suggests.
    pub format: Format,
    /// Size of the disk in bytes.
    pub size: u64,
    /// Size of the file or store in bytes.
    pub file_size: u64,
    /// Bytes that the file takes on its file system. `None`: not a regular file.
    pub allocated: Option<u64>,
    /// What the header of a qcow2 image says.
    pub header: Option<Recorded>,
}

/// Describes an image. It is locked against writers meanwhile.
///
/// Without `format`, a file with the magic number of qcow2 is called qcow2, and every other raw. A
/// guest can write any header into a raw image: open no image by such a guess.
///
/// # Errors
/// The image cannot be opened, or is not qcow2 although `format` is.
pub fn info(place: &LayerSource, format: Option<Format>) -> Result<Info, OpenError> {
    // This format takes any size.
    info_of(&open_file(place, Format::Qcow2, true)?, format)
}

/// As [`info`], of a file that is open.
pub(super) fn info_of(file: &ImageFile, format: Option<Format>) -> Result<Info, OpenError> {
    let failed = |source| OpenReason::Os { source }.at(&file.path);
    let header = match format {
        Some(Format::Raw) => None,
        _ => Recorded::read(&file.source).map_err(failed)?,
    };
    if header.is_none() && format == Some(Format::Qcow2) {
        let source = Box::new(super::super::HeaderError::NotQcow2);
        return Err(OpenReason::Header { source }.at(&file.path));
    }
    if let Some(Format::Raw) = format
        && let Some(like) = magic::resembles(Format::Raw, |into, at| file.source.read_at(into, at))
    {
        magic::warn(&file.path, like);
    }
    let allocated = match file.source.file().map(std::fs::File::metadata).transpose().map_err(failed)? {
        Some(metadata) if metadata.is_file() => Some(metadata.blocks() * SECTOR),
        _ => None,
    };
    Ok(Info {
        format: if header.is_some() { Format::Qcow2 } else { Format::Raw },
        size: header.as_ref().map_or(file.size, |header| header.size),
        file_size: file.size,
        allocated,
        header,
    })
}
