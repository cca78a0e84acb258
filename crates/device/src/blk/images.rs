//! Disk images without a guest: made, described, copied, merged into their backing files.
//!
//! ```text
//!   create -----> an empty image
//!   info -------> Info: what its header says
//!   Disk::open --> Disk: a chain of layers as one disk --copy--> another Disk
//!   Disk::overwrite --> Disk: a new image in a file, device or store that is there
//!   Disk::open_alone -> one layer, without its backing file --merge--> the Disk below it
//! ```
//! Images are locked as disks that are served: what a daemon writes to cannot be opened here.
//!
//! ```no_run
//! use paravane_device::blk::images::{self, Content, Disk, NewImage, NewQcow2, Use};
//! use paravane_device::blk::{Format, LayerSource};
//! use std::ops::ControlFlow;
//!
//! let from = Disk::open(&LayerSource::Path("vm.img".into()), Format::Raw, &[], Use::Read)?;
//! let new = NewQcow2 { size: from.size(), cluster_size: 65536, backing: None };
//! let place = LayerSource::Path("vm.qcow2".into());
//! std::fs::File::create_new("vm.qcow2")?;
//! images::create(&place, &NewImage::Qcow2(new))?;
//! let to = Disk::open(&place, Format::Qcow2, &[], Use::Write)?;
//! images::copy(&from, &to, Content::Zeroes, &mut |_| ControlFlow::Continue(()))?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
mod copy;
mod disk;
mod info;
mod locked;
mod merge;

use super::image_file::{ImageFile, Opening};
use super::layers;
use super::qcow2::create as write_tables;
use super::{Format, Layer, LayerSource, OpenError};
use paravane_spec::blk::SECTOR;
use paravane_store::Store;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use thiserror::Error;

pub use super::qcow2::{BackingName, Extent, Layout, NewQcow2, Recorded};
pub use copy::{Content, copy};
pub use disk::{Disk, Use};
pub use info::{Info, info};
pub use locked::{ReadLock, WriteLock};
pub use merge::merge;

/// Longest name of a backing file that a header can hold, in bytes.
const MAX_NAME: usize = 1023;

/// Clusters that images can have, in bytes: a power of two in this range.
pub const CLUSTER_SIZES: std::ops::RangeInclusive<u32> = 512..=2 << 20;

/// Work on an image has failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ImageError {
    /// An image cannot be opened. Nothing was changed.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The image to be made is impossible. Nothing was changed.
    #[error("{}: {reason}", path.display())]
    New {
        /// Path of the image.
        path: PathBuf,
        /// What is wrong, and what is right.
        reason: String,
    },
    /// A read or write has failed.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io {
        /// Path of the image.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// Cause.
        source: io::Error,
    },
    /// The target of a copy is too small.
    #[error("{}: has {target} bytes, less than the {source_size} bytes to copy", path.display())]
    Small {
        /// Path of the target.
        path: PathBuf,
        /// Bytes of the target.
        target: u64,
        /// Bytes of the source.
        source_size: u64,
    },
    /// A backing file that has one itself would have to grow.
    #[error(
        "{}: has {base} bytes and a backing file; the overlay has {overlay}: grow it first with `qemu-img resize`",
        path.display()
    )]
    Grow {
        /// Path of the backing file.
        path: PathBuf,
        /// Bytes of its disk.
        base: u64,
        /// Bytes of the overlay's disk.
        overlay: u64,
    },
    /// The observer has ended the work.
    #[error("stopped by a signal")]
    Stopped,
}

/// An image that is to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NewImage {
    /// Raw: a hole of this many bytes.
    Raw(u64),
    /// qcow2.
    Qcow2(NewQcow2),
}

impl NewImage {
    /// Size of the disk in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        match self {
            Self::Raw(size) | Self::Qcow2(NewQcow2 { size, .. }) => *size,
        }
    }

    /// Whether the image can be made.
    ///
    /// # Errors
    /// What is wrong, and what is right.
    pub fn check(&self) -> Result<(), String> {
        let size = self.size();
        if size == 0 || !size.is_multiple_of(SECTOR) {
            return Err(format!("a disk has a size that is a multiple of {SECTOR} bytes, not {size}"));
        }
        let Self::Qcow2(new) = self else { return Ok(()) };
        let cluster = new.cluster_size;
        if !cluster.is_power_of_two() || !CLUSTER_SIZES.contains(&cluster) {
            return Err(format!("a cluster has a power of two from 512 to 2097152 bytes, not {cluster}"));
        }
        // An L2 table fills a cluster with entries of 8 bytes; an L1 table has at most 32 MiB.
        let most = (u64::from(cluster) * u64::from(cluster) / 8).saturating_mul(4 << 20);
        if size > most {
            return Err(format!("clusters of {cluster} bytes allow at most {most} bytes, not {size}"));
        }
        match &new.backing {
            Some(BackingName { name, .. }) if name.is_empty() || name.len() > MAX_NAME => {
                Err(format!("the name of a backing file has 1 to {MAX_NAME} bytes, not {}", name.len()))
            }
            _ => Ok(()),
        }
    }
}

/// Makes an empty image in a file that exists and is empty, or in a store.
///
/// Not locked: nobody else may know the file yet. A store of a fixed size keeps it; what it holds
/// is overwritten.
///
/// # Errors
/// [`ImageError::New`], or the file cannot be written.
pub fn create(place: &LayerSource, new: &NewImage) -> Result<(), ImageError> {
    create_in(&place.bytes(true)?, &place.path(), new)
}

fn create_in(source: &Arc<dyn Store>, path: &Path, new: &NewImage) -> Result<(), ImageError> {
    new.check().map_err(|reason| ImageError::New { path: path.to_owned(), reason })?;
    let made = match new {
        NewImage::Raw(size) => match source.try_size() {
            Ok(found) if found == *size => Ok(()),
            Ok(_) => source.set_size(*size),
            Err(error) => Err(error),
        }
        .and_then(|()| source.sync()),
        NewImage::Qcow2(new) => write_tables(source, new),
    };
    made.map_err(|source| ImageError::Io { path: path.to_owned(), action: "make the image", source })
}

/// Opens the bytes of an image, and locks them.
fn open_file(place: &LayerSource, format: Format, read_only: bool) -> Result<ImageFile, OpenError> {
    place.image(Opening::cached(format, read_only))
}

/// Checks that `backing`, top first, are the layers that the headers of the images name.
///
/// Warns of layers that are larger than their overlays. Nothing is locked.
///
/// # Errors
/// [`OpenReason::Layer`](crate::blk::OpenReason::Layer), or the image cannot be read.
pub fn check_layers(place: &LayerSource, format: Format, backing: &[Layer]) -> Result<(), OpenError> {
    layers::check(&place.bytes(false)?, &place.path(), format, backing)
}
