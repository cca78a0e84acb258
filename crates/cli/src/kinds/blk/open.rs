//! Opens disks.
use super::args::Blk;
use super::disk::{ConnectedDisk, image_config, image_options, unlocked};
use super::told;
use crate::kinds::opening::{OpenContext, Opening};
use crate::serve::told::{SIZE, Told};
use paravane_device::blk::Geometry;
use paravane_store::Location;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

/// Opens a disk, which keeps the block that a guest was `told` unless its specification names one.
///
/// # Errors
/// The image cannot be opened.
pub(super) fn disk(
    name: &str,
    blk: &Blk,
    context: &OpenContext,
    told: &Told,
) -> Result<Opening, anyhow::Error> {
    if let Some(image) = blk.image.path() {
        let mut disk = unlocked(name, blk, image, Some(context))?;
        disk.keep(told);
        return Opening::locked(disk);
    }
    let store = paravane_store::open(&blk.image, &image_options(blk, context), context.connector.clone())?;
    let mut disk = ConnectedDisk::new(name, blk, context, store)?;
    disk.keep(told);
    Ok(disk.open()?.into())
}

/// Opens the store of a disk ahead, if that can be.
fn ahead(name: &str, blk: &Blk, context: &OpenContext) -> Result<Opening, anyhow::Error> {
    match paravane_store::open_ahead(&blk.image, &image_options(blk, context), context.connector.clone()) {
        Ok(Some(store)) => Ok(Opening::Ahead(Box::new(ConnectedDisk::new(name, blk, context, store)?))),
        Ok(None) => Ok(Opening::Late(Told::default())),
        Err(error) => {
            // A server that has one client at a time lets this one wait.
            tracing::info!("opened when the running daemon has closed it: {error}");
            Ok(Opening::Late(Told::default()))
        }
    }
}

/// Opens what can be open in two daemons at once.
///
/// # Errors
/// The image cannot be opened.
pub(super) fn prepare(name: &str, blk: &Blk, context: &OpenContext) -> Result<Opening, anyhow::Error> {
    let is_block_device = |path: &Path| {
        let is = |file: std::fs::Metadata| FileTypeExt::is_block_device(&file.file_type());
        std::fs::metadata(path).is_ok_and(is)
    };
    match blk.image.path() {
        Some(image) if !is_block_device(image) => {
            Ok(Opening::Unlocked(Box::new(unlocked(name, blk, image, Some(context))?)))
        }
        // Claimed by the daemon that serves it.
        Some(image) => {
            let mut known = Told::default();
            let Geometry { size, block } = image_config(blk, image).geometry_of_device()?;
            known.put(SIZE, size);
            // It is opened when the other daemon has closed it, and keeps its block then.
            blk.block_size.into_iter().for_each(|_| known.put(told::BLOCK, block));
            Ok(Opening::Late(known))
        }
        None => ahead(name, blk, context),
    }
}

/// Opens what needs no server, for a disk that others must not wait for.
///
/// # Errors
/// A file cannot be opened.
pub(super) fn without_servers(
    name: &str,
    blk: &Blk,
    changes_user: bool,
) -> Result<Option<Opening>, anyhow::Error> {
    let locations = blk.layers();
    let remote = locations.iter().filter(|location| location.path().is_none()).count();
    Ok(match blk.image.path() {
        _ if remote == 0 => None,
        Some(image) => Some(Opening::Unlocked(Box::new(unlocked(name, blk, image, None)?))),
        // The keyring may be readable by this user only, and so a backing file.
        None if changes_user && (remote < locations.len() || matches!(blk.image, Location::Rbd(_))) => None,
        None => Some(Opening::Late(Told::default())),
    })
}
