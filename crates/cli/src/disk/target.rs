//! Where a new image is made: in a new file, or in a store that is there.
use super::image::open_bytes;
use super::new_file::NewFile;
use super::work::Work;
use crate::failure::Failure;
use anyhow::anyhow;
use paravane_device::blk::LayerSource;
use paravane_device::blk::images::NewImage;
use paravane_store::Location;

/// The place of a new image.
pub(super) enum Target {
    /// It appears when it is complete.
    File(NewFile),
    /// It is written in place. After an error, the store holds a part.
    Store(LayerSource),
}

impl Target {
    /// Makes an empty file, or opens a store.
    ///
    /// # Errors
    /// See [`NewFile::create`]. A store needs `force`, since its content is lost, and a format that
    /// tells zeroes from what the store held before.
    pub(super) fn begin(
        location: &Location,
        new: &NewImage,
        force: bool,
        work: &Work,
    ) -> Result<Self, Failure> {
        new.check().map_err(|reason| Failure::request(anyhow!("{location}: {reason}")))?;
        let refused = |why| Err(Failure::request(anyhow!("{location}: {why}")));
        match (location, new) {
            (Location::File(path), _) => {
                let file = NewFile::create(path, force)?;
                work.unfinished(file.path());
                Ok(Self::File(file))
            }
            (_, NewImage::Raw(_)) => refused(
                "is a store, whose size is fixed; make qcow2, or copy a disk to it with `paravane disk convert`",
            ),
            _ if !force => refused("is a store, whose content would be lost; --force overwrites it"),
            _ => open_bytes(location, true).map(Self::Store),
        }
    }

    pub(super) fn place(&self) -> LayerSource {
        match self {
            Self::File(file) => file.place(),
            Self::Store(store) => store.clone(),
        }
    }

    /// Puts a complete file in its place.
    pub(super) fn finish(self) -> Result<(), Failure> {
        match self {
            Self::File(file) => file.finish(),
            Self::Store(_) => Ok(()),
        }
    }
}
