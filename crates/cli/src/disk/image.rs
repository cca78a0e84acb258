//! Images of the command line, as the library takes them.
use crate::failure::Failure;
use crate::images::Backing;
use paravane_device::blk::images::ImageError;
use paravane_device::blk::{Layer, LayerSource};
use paravane_store::{Direct, Location, OpenOptions};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::sync::Arc;

/// Cluster size of new qcow2 images, as QEMU's: 64 KiB.
pub(super) const CLUSTER_SIZE: u32 = 64 << 10;

/// The bytes of an image, to be read, or written, too.
///
/// Only stores are opened here; a file is opened and locked with its image.
pub(super) fn open_bytes(location: &Location, write: bool) -> Result<LayerSource, Failure> {
    match location {
        Location::File(path) => Ok(LayerSource::Path(path.clone())),
        remote => {
            let options = OpenOptions { read_only: !write, ..OpenOptions::default() };
            let store = paravane_store::open(remote, &options, Arc::new(Direct)).map_err(Failure::request)?;
            Ok(LayerSource::Store(store))
        }
    }
}

/// Opens the bytes of backing files, top first.
pub(super) fn layers(backing: &[Backing]) -> Result<Vec<Layer>, Failure> {
    let layer =
        |layer: &Backing| Ok(Layer { source: open_bytes(&layer.location, false)?, format: layer.format });
    backing.iter().map(layer).collect()
}

/// Whether two locations are known to name the same bytes.
///
/// A server can give them several names, which nobody can tell.
pub(super) fn is_same(one: &Location, other: &Location) -> bool {
    match (one, other) {
        (Location::File(one), Location::File(other)) => {
            let (Ok(one), Ok(other)) = (one.metadata(), other.metadata()) else { return false };
            let (kind, other_kind) = (one.file_type(), other.file_type());
            match kind.is_block_device() && other_kind.is_block_device() {
                true => one.rdev() == other.rdev(),
                false => (one.dev(), one.ino()) == (other.dev(), other.ino()),
            }
        }
        (Location::Nbd(one), Location::Nbd(other)) => {
            (&one.target, &one.export) == (&other.target, &other.export)
        }
        (Location::Rbd(one), Location::Rbd(other)) => {
            (&one.pool, &one.namespace, &one.image, &one.snapshot)
                == (&other.pool, &other.namespace, &other.image, &other.snapshot)
        }
        _ => one == other,
    }
}

/// A cluster size, checked further by the library.
pub(super) fn cluster_size(bytes: u64) -> u32 {
    u32::try_from(bytes).unwrap_or(u32::MAX)
}

/// Status 2 for what was refused before anything was changed, 130 for a signal.
pub(super) fn failed(error: ImageError) -> Failure {
    let status = match error {
        ImageError::Open(_) | ImageError::New { .. } | ImageError::Grow { .. } | ImageError::Small { .. } => {
            2
        }
        ImageError::Stopped => 130,
        _ => 1,
    };
    Failure { status, error: error.into() }
}
