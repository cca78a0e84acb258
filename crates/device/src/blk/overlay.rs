//! An overlay for a disk that is served, on its way to the process that serves it.
//!
//! ```text
//!   process that may create files                     process that serves the disk
//!     Overlay::create  an empty qcow2 image, locked
//!     Overlay::files   two descriptors      ------>   Overlay::received
//!     closes its own                                  Snapshots::take
//! ```
//! The locks belong to the open file descriptions, and so go along.
use super::file_id::{FileId, ImageId};
use super::image_file::{ImageFile, Opening};
use super::images::NewImage;
use super::qcow2::{self, BackingName, NewQcow2};
use super::{Format, OpenError, OpenReason};
use paravane_store::file::FileStore;
use rustix::fs::OFlags;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// How an overlay is opened.
const OPENING: Opening = Opening::cached(Format::Qcow2, false);

/// What an overlay records of the image below it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverlayBase {
    /// Path of the image.
    pub path: PathBuf,
    /// Its format.
    pub format: Format,
    /// Size of the disk in bytes.
    pub size: u64,
    /// The image itself: an overlay for it is of no use when the disk has another one.
    pub id: ImageId,
}

/// Bytes of a cluster, as qemu-img has it.
const CLUSTER_SIZE: u32 = 64 << 10;

/// An overlay without data, open and locked.
#[derive(Debug)]
pub struct Overlay(pub(super) ImageFile);

impl Overlay {
    /// Creates the file of an overlay, and closes it.
    ///
    /// It gets the mode of the image below it, and its owner if this process may give files away.
    ///
    /// # Errors
    /// The file exists, or cannot be created. A file that was begun is removed.
    pub fn create_file(path: &Path, base: &OverlayBase) -> Result<(), OpenError> {
        let os = |source| OpenReason::Os { source }.at(path);
        let options = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).to_owned();
        let file = options.open(path).map_err(os)?;
        let fill = || {
            if let Ok(below) = base.path.metadata()
                && below.is_file()
            {
                // Only root may.
                let _ = std::os::unix::fs::fchown(&file, Some(below.uid()), Some(below.gid()));
                file.set_permissions(PermissionsExt::from_mode(below.mode() & 0o666))?;
            }
            let name = base.path.to_str().ok_or_else(|| {
                io::Error::new(io::ErrorKind::InvalidInput, "the path of the image below it is not UTF-8")
            })?;
            let source = FileStore::of(file.try_clone()?);
            let backing = Some(BackingName { name: name.to_owned(), format: base.format });
            let new = NewQcow2 { size: base.size, cluster_size: CLUSTER_SIZE, backing };
            // Its tables follow the size of the image below.
            NewImage::Qcow2(new.clone())
                .check()
                .map_err(|why| io::Error::new(io::ErrorKind::InvalidInput, why))?;
            qcow2::create(&source, &new)?;
            // Its name must not be lost when the daemon has written to it.
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
            File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
        };
        fill().map_err(|source| {
            let _ = std::fs::remove_file(path);
            os(source)
        })
    }

    /// Creates an overlay as [`Overlay::create_file`] does, and locks it.
    ///
    /// # Errors
    /// As above, or another process has it.
    pub fn create(path: &Path, base: &OverlayBase) -> Result<Self, OpenError> {
        Self::create_file(path, base)?;
        ImageFile::open(path, OPENING).map(Self)
    }

    /// Its file.
    #[must_use]
    pub fn file_id(&self) -> Option<FileId> {
        FileId::of_source(&self.0.source)
    }

    /// Descriptors for the process that serves the disk, in order.
    #[must_use]
    pub fn files(&self) -> Vec<BorrowedFd<'_>> {
        let process = self.0.guards.process().map(AsFd::as_fd);
        self.0.source.file().map(AsFd::as_fd).into_iter().chain(process).collect()
    }

    /// Takes an overlay over by its descriptors, which another process may have chosen.
    ///
    /// # Errors
    /// They are not those of an overlay.
    pub fn received(files: Vec<OwnedFd>, path: &Path) -> Result<Self, OpenError> {
        let mut files = files.into_iter().map(File::from);
        let wrong = || {
            let source = io::Error::new(io::ErrorKind::InvalidInput, "its descriptors are missing");
            OpenReason::Os { source }.at(path)
        };
        let file = files.next().ok_or_else(wrong)?;
        let flags = rustix::fs::fcntl_getfl(&file)
            .map_err(|error| OpenReason::Os { source: error.into() }.at(path))?;
        if !flags.contains(OFlags::RDWR) || flags.contains(OFlags::APPEND) {
            return Err(OpenReason::ReadOnly.at(path));
        }
        ImageFile::adopt(file, files.next(), path, OPENING).map(Self)
    }
}
