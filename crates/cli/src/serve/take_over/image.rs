//! The image of a disk, as one daemon tells the next.
use paravane_device::blk::FileId;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// The image of a disk that is offered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct OfferedImage {
    pub(crate) location: String,
    pub(crate) format: String,
    /// Numbers of its file system and file; `None`: it lies in another store.
    pub(crate) file: Option<[u64; 2]>,
}

impl OfferedImage {
    /// The overlay that a snapshot goes on with.
    pub(crate) fn overlay(path: &Path, file: Option<FileId>) -> Self {
        let file = file.map(|file| [file.device, file.inode]);
        Self { location: path.display().to_string(), format: "qcow2".to_owned(), file }
    }

    /// As the note of an export, for a daemon that starts after a crash.
    pub(crate) fn to_note(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// The image in a note; `None`: an earlier version has noted nothing.
    pub(crate) fn from_note(note: &[u8]) -> Option<Self> {
        serde_json::from_slice(note).ok()
    }

    /// Whether a guest that used this image last may go on with `other`.
    ///
    /// One that was moved, or made anew under the same name, is taken for the same.
    pub(crate) fn goes_on_with(&self, other: &Self) -> bool {
        (self.file.is_some() && self.file == other.file) || self.location == other.location
    }

    /// Whether its path names it still.
    pub(crate) fn is_there(&self) -> bool {
        let found = FileId::at(Path::new(&self.location)).map(|file| [file.device, file.inode]);
        self.file.is_some() && found.ok() == self.file
    }

    /// Whether both are the same image.
    pub(crate) fn is(&self, other: &Self) -> bool {
        let same = match (self.file, other.file) {
            // The paths may differ, as in two name spaces.
            (Some(one), Some(other)) => one == other,
            (None, None) => self.location == other.location,
            _ => false,
        };
        same && self.format == other.format
    }
}
