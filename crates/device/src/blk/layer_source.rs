//! Where an image lies, by an operator's name.
use super::image_file::{ImageFile, Opening};
use super::{Format, OpenError, OpenReason};
use paravane_store::Store;
use paravane_store::file::FileStore;
use std::fs::OpenOptions;
use std::path::PathBuf;
use std::sync::Arc;

/// A backing file, used read-only.
#[derive(Clone, Debug)]
pub struct Layer {
    /// Where it lies.
    pub source: LayerSource,
    /// Format of the image.
    pub format: Format,
}

/// Where a backing file lies.
#[derive(Clone, Debug)]
pub enum LayerSource {
    /// Path of a file, which is opened and locked.
    Path(PathBuf),
    /// A store that is open.
    Store(Arc<dyn Store>),
}

impl LayerSource {
    /// Path or location.
    pub(super) fn path(&self) -> PathBuf {
        match self {
            Self::Path(path) => path.clone(),
            Self::Store(store) => store.status().location.into(),
        }
    }

    /// Opens the image, and locks it.
    pub(super) fn image(&self, opening: Opening) -> Result<ImageFile, OpenError> {
        match self {
            Self::Path(path) => ImageFile::open(path, opening),
            Self::Store(store) => ImageFile::over(store.clone(), opening),
        }
    }

    /// The bytes, not locked.
    pub(super) fn bytes(&self, writable: bool) -> Result<Arc<dyn Store>, OpenError> {
        match self {
            Self::Path(path) => {
                let file = OpenOptions::new().read(true).write(writable).open(path);
                Ok(FileStore::of(file.map_err(|source| OpenReason::Os { source }.at(path))?))
            }
            Self::Store(store) => Ok(store.clone()),
        }
    }
}
