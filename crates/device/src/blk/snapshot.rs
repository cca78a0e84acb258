//! Snapshots of a disk while its queues run.
//!
//! ```text
//!   prepare: open the overlay on the image, sync the image, make engines, mark the image
//!   pause:   hold the queues, wait for what is in flight, replace the image     Current::replace
//!   after:   share the image's lock, end the old engines, sync the image again
//! ```
//! The image is then the backing file of the overlay, and not written to again: it has all writes
//! that were completed before the pause, and none that began after. What fails before the replacement
//! changes nothing.
//!
//! A write that was in flight is completed in the image. So nothing that the driver has been told is
//! missing there, and nothing that it was not told matters: the image is what a crash would have left.
use super::current::{Attached, Current};
use super::engine::Engine;
use super::file_id::{FileId, ImageId};
use super::image::Image;
use super::image_file;
use super::mark;
use super::overlay::{Overlay, OverlayBase};
use super::qcow2::Qcow2;
use super::serial::Serial;
use super::{BlkConfig, EngineChoice, Format, OpenError};
use paravane_spec::blk::SECTOR;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, TryLockError};
use std::time::Duration;
use thiserror::Error;

/// A snapshot was not taken. The disk is as it was.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// The disk takes no writes.
    #[error("the disk is read-only: its image is a snapshot already")]
    ReadOnly,
    /// The image is not locked.
    #[error("the image is not locked, and another process may write to it: serve it without --no-lock")]
    Unlocked,
    /// The overlay was made for an image that the disk does not use any more.
    #[error("the disk has got another image since the overlay was made for it: try again")]
    Changed,
    /// Another snapshot is being taken.
    #[error("another snapshot of the disk is being taken; try again")]
    Busy,
    /// The overlay cannot be used.
    #[error(transparent)]
    Overlay(#[from] OpenError),
    /// The overlay has another size than the disk.
    #[error("the overlay has {overlay} bytes, the disk {disk}: it has changed its size; try again")]
    Size {
        /// Size of the overlay's disk in bytes.
        overlay: u64,
        /// Size of the disk in bytes.
        disk: u64,
    },
    /// The image cannot be used as a backing file, or not be synced.
    #[error("cannot prepare the image: {0}")]
    Image(io::Error),
    /// Requests in flight have taken too long.
    #[error(
        "requests in flight did not end within {} ms (--pause-limit); the disk runs on without a snapshot",
        .0.as_millis()
    )]
    Timeout(Duration),
}

/// A snapshot that was taken.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Snapshot {
    /// Time from the first hold of a queue until all go on.
    pub pause: Duration,
    /// Number of queues that ran.
    pub queues: usize,
    /// Path of the image below, which is frozen.
    pub base: PathBuf,
    /// The image below is marked; see [`OVERLAY_MARK`](super::OVERLAY_MARK).
    pub is_marked: bool,
    /// Engine of the overlay.
    pub engine: String,
    /// Serial number that the guest knows the disk by.
    pub serial: String,
    /// Why the image below may lose its last writes in a crash of the host until the next flush.
    pub unsynced: Option<String>,
}

/// Takes snapshots of a disk.
#[derive(Debug)]
pub struct Snapshots {
    current: Arc<Current>,
    choice: EngineChoice,
    serial: Arc<Serial>,
    alone: Mutex<()>,
}

impl Snapshots {
    pub(super) fn new(current: Arc<Current>, choice: EngineChoice, serial: Arc<Serial>) -> Self {
        Self { current, choice, serial, alone: Mutex::default() }
    }

    /// What an overlay of the disk has to record.
    ///
    /// # Errors
    /// The disk has no snapshots.
    pub fn base(&self) -> Result<OverlayBase, SnapshotError> {
        let (generation, image) = self.current.numbered();
        check(&image)?;
        let id = id(generation, &image);
        Ok(OverlayBase {
            path: image.file.path.clone(),
            format: format(&image),
            size: image.sectors() * SECTOR,
            id,
        })
    }

    /// The image in use.
    #[must_use]
    pub fn image_id(&self) -> ImageId {
        let (generation, image) = self.current.numbered();
        id(generation, &image)
    }

    /// Whether the image in use would have a [mark](super::OVERLAY_MARK) if a snapshot had frozen it.
    #[must_use]
    pub fn has_marks(&self) -> bool {
        self.current.image().file.source.file().is_some_and(mark::is_possible)
    }

    /// Format of the image in use.
    #[must_use]
    pub fn format(&self) -> Format {
        format(&self.current.image())
    }

    /// Path of the image in use.
    #[must_use]
    pub fn image(&self) -> PathBuf {
        self.current.image().file.path.clone()
    }

    /// Serial number that the guest knows the disk by.
    #[must_use]
    pub fn serial(&self) -> String {
        self.serial.text()
    }

    /// Name of its engine, as [`Blk::engine`](super::Blk::engine).
    #[must_use]
    pub fn engine(&self) -> String {
        self.current.attached().engine.name
    }

    /// Freezes the image, and has the disk write to `overlay` from now on.
    ///
    /// `made_for`: the image for which the overlay was made ([`OverlayBase::id`]). The queues are held for `limit` at most. May block on storage before and after that.
    ///
    /// # Errors
    /// See [`SnapshotError`]. Nothing has changed.
    pub fn take(
        &self,
        overlay: Overlay,
        made_for: ImageId,
        limit: Duration,
    ) -> Result<Snapshot, SnapshotError> {
        let _alone = match self.alone.try_lock() {
            Ok(alone) => alone,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Err(SnapshotError::Busy),
        };
        let taken = self.take_alone(overlay, made_for, limit);
        self.current.clear();
        taken
    }

    /// The engine of an overlay on this image.
    fn overlay_engine(&self) -> EngineChoice {
        match self.choice {
            // It has no thread of its own that it may block.
            EngineChoice::Immediate if !self.current.attached().engine.blocks => EngineChoice::Auto,
            choice => choice,
        }
    }

    fn take_alone(
        &self,
        Overlay(file): Overlay,
        made_for: ImageId,
        limit: Duration,
    ) -> Result<Snapshot, SnapshotError> {
        // From here on neither the image nor its size changes.
        let _kept = self.current.keep_size();
        let (generation, base) = self.current.numbered();
        check(&base)?;
        if id(generation, &base) != made_for {
            return Err(SnapshotError::Changed);
        }
        let path = file.path.clone();
        let below = base.as_base().map_err(SnapshotError::Image)?;
        let below_size = below.size().map_err(SnapshotError::Image)?;
        let qcow2 = Qcow2::over(&file, below)?;
        let image = Arc::new(Image::overlay(file, qcow2, base.clone())?);
        let config = BlkConfig { engine: self.overlay_engine(), ..BlkConfig::new(&path) };
        let engine = Engine::choose(&image, &config, None)?;
        let name = engine.name.clone();
        let attached = Attached { image: image.clone(), engine };
        // So that little is left to write afterwards.
        base.sync().map_err(SnapshotError::Image)?;
        self.current.prepare(&attached).map_err(SnapshotError::Image)?;
        let marked = base.file.source.file().map(|file| mark::set(file, &path));
        let is_marked = marked.transpose().map_err(SnapshotError::Image)?.unwrap_or(false);
        let mut undo = Unmark(Some(base.clone()));

        let (disk, overlay) = (base.sectors() * SECTOR, image.sectors() * SECTOR);
        if overlay != disk || below_size / SECTOR * SECTOR != disk {
            return Err(SnapshotError::Size { overlay, disk });
        }
        let queues = self.current.queues();
        let pause = self.current.replace(attached, limit).ok_or(SnapshotError::Timeout(limit))?;
        undo.0 = None;

        if let Some(file) = base.file.source.file()
            && let Err(error) = image_file::share(file)
        {
            tracing::warn!(path = %base.file.path.display(), %error, "the image below cannot be shared by other overlays");
        }
        self.current.clear();
        let unsynced = image.sync_base().err().map(|error| error.to_string());
        let (base, serial) = (base.file.path.clone(), self.serial.text());
        Ok(Snapshot { pause, queues, base, is_marked, engine: name, serial, unsynced })
    }
}

fn id(generation: u64, image: &Image) -> ImageId {
    ImageId { file: FileId::of_source(&image.file.source), generation }
}

fn format(image: &Image) -> Format {
    if image.qcow2.is_some() { Format::Qcow2 } else { Format::Raw }
}

/// Whether an image can be frozen.
fn check(image: &Image) -> Result<(), SnapshotError> {
    if image.file.read_only {
        return Err(SnapshotError::ReadOnly);
    }
    if image.file.guards.is_shared {
        return Err(SnapshotError::Unlocked);
    }
    Ok(())
}

/// Removes the mark of an image, if it is left to do so.
struct Unmark(Option<Arc<Image>>);

impl Drop for Unmark {
    fn drop(&mut self) {
        if let Some(file) = self.0.as_ref().and_then(|image| image.file.source.file()) {
            mark::clear_overlay_mark(file);
        }
    }
}
