//! A new image must not replace what it is made from.
use super::image::{is_same, open_bytes};
use crate::failure::Failure;
use crate::images::Backing;
use anyhow::anyhow;
use paravane_device::blk::images::ReadLock;
use paravane_device::blk::{FileId, LayerSource};
use paravane_store::Location;
use std::path::{Path, PathBuf};

/// Most layers that are looked at.
const MOST: usize = 256;

/// Refuses a new image at `target` in the place of one that it is made from.
pub(super) fn check<'a>(
    target: &Location,
    sources: impl IntoIterator<Item = &'a Location>,
) -> Result<(), Failure> {
    match sources.into_iter().find(|source| is_same(target, source)) {
        Some(source) => Err(refused(target, source)),
        None => Ok(()),
    }
}

/// Locks the backing file of a new image at `target`, which must not be one of its layers.
///
/// Reads the headers of the chain as far as its images name each other. Nothing else of them is used.
pub(super) fn lock_backing(target: &Location, backing: &Backing) -> Result<ReadLock, Failure> {
    check(target, [&backing.location])?;
    let place = open_bytes(&backing.location, false)?;
    let lock = ReadLock::new(&place).map_err(Failure::request)?;
    let (Some(path), Some(there)) =
        (backing.location.path(), target.path().and_then(|path| FileId::at(path).ok()))
    else {
        return Ok(lock);
    };
    let mut next = named_by(&lock, Some(backing.format), path);
    for _ in 0..MOST {
        let Some(path) = next else { return Ok(lock) };
        if FileId::at(&path).is_ok_and(|file| file == there) {
            return Err(refused(target, &backing.location));
        }
        // What cannot be opened is not the target, which can be replaced.
        let layer = ReadLock::new(&LayerSource::Path(path.clone()));
        next = layer.ok().and_then(|layer| named_by(&layer, None, &path));
    }
    Ok(lock)
}

/// The file that an image at `path` names as its backing file.
fn named_by(image: &ReadLock, format: Option<paravane_device::blk::Format>, path: &Path) -> Option<PathBuf> {
    let name = image.info(format).ok()?.header?.layout?.backing?;
    let name = name.strip_prefix("file:").unwrap_or(&name);
    Some(path.parent().unwrap_or(Path::new("")).join(name))
}

fn refused(target: &Location, source: &Location) -> Failure {
    Failure::request(anyhow!("{target}: the new image is based on it, by {source}; choose another name"))
}
