//! `paravane disk create`.
use super::apart;
use super::image::{CLUSTER_SIZE, cluster_size, failed};
use super::target::Target;
use super::work::Work;
use crate::choices::one_of;
use crate::failure::Failure;
use crate::images::{Backing, FORMATS};
use crate::kinds::checked::directory_of;
use crate::size::{Size, bytes};
use anyhow::{Context, anyhow};
use clap::Args;
use paravane_command_line::output;
use paravane_device::blk::Format;
use paravane_device::blk::images::{self, BackingName, NewImage, NewQcow2, ReadLock};
use paravane_store::Location;
use std::path::{Path, PathBuf};

/// Create an empty image, or an overlay on a backing file
///
/// An overlay holds what its guest writes. All else is read from the backing file, which stays as it
/// is and may have any number of overlays. Its name and format are recorded in the overlay for
/// `qemu-img` and `paravane disk commit`; `paravane serve` takes them from --backing only.
#[derive(Debug, Args)]
pub(super) struct CreateArgs {
    /// Image to create
    #[arg(value_name = "LOCATION")]
    location: Location,
    /// Format of the image
    #[arg(long, value_parser = one_of(FORMATS), value_name = "FORMAT", default_value = "qcow2")]
    format: Format,
    /// Size of the disk, a multiple of 512 bytes [default: that of the backing file]
    #[arg(long, value_name = "SIZE", required_unless_present = "backing")]
    size: Option<Size>,
    /// Backing file of a qcow2 image as FORMAT:LOCATION [default: none]
    ///
    /// It is checked, and locked against writers meanwhile. A path below the folder of the image is
    /// recorded from there, another one in full.
    #[arg(long, value_name = "FORMAT:LOCATION")]
    backing: Option<Backing>,
    /// Cluster size of a qcow2 image, a power of two from 512 to 2M [default: 64k]
    ///
    /// Small clusters make an overlay take less space, and its tables more.
    #[arg(long, value_name = "SIZE")]
    cluster_size: Option<Size>,
    /// Replace an image that is there and not in use, or the content of a store
    ///
    /// Never one that the new image is based on, also through the names that its layers record.
    #[arg(long)]
    force: bool,
}

pub(super) fn main(args: &CreateArgs) -> Result<(), Failure> {
    if args.format == Format::Raw {
        let only =
            |option| Err(Failure::request(anyhow!("{option}: raw images have none; use --format qcow2")));
        match (&args.backing, args.cluster_size) {
            (Some(_), _) => return only("--backing"),
            (None, Some(_)) => return only("--cluster-size"),
            (None, None) => {}
        }
    }
    // Locked until the image is in its place.
    let lock =
        args.backing.as_ref().map(|backing| apart::lock_backing(&args.location, backing)).transpose()?;
    let base = lock.as_ref().zip(args.backing.as_ref()).map(|(lock, backing)| size_of(lock, backing));
    let base = base.transpose()?;
    // One of them is given.
    let size = args.size.map(|size| size.0).or(base).unwrap_or_default();
    if let Some(base) = base.filter(|base| *base > size) {
        tracing::warn!(
            path = %args.location,
            "the image has {size} bytes, less than the {base} bytes of its backing file: the rest is not seen"
        );
    }
    let backing = args.backing.as_ref().map(|backing| recorded(backing, args.location.path())).transpose();
    let backing = backing.map_err(Failure::request)?;
    let new = match args.format {
        Format::Raw => NewImage::Raw(size),
        Format::Qcow2 => NewImage::Qcow2(NewQcow2 {
            size,
            cluster_size: args.cluster_size.map_or(CLUSTER_SIZE, |size| cluster_size(size.0)),
            backing,
        }),
    };
    let work = Work::start("creating", size, true)?;
    let target = Target::begin(&args.location, &new, args.force, &work)?;
    images::create(&target.place(), &new).map_err(failed)?;
    target.finish()?;
    drop(lock);
    let on = args.backing.as_ref().map_or_else(String::new, |backing| format!(", on {}", backing.location));
    output::print(&format!("{}: {}, {}{on}\n", args.location, args.format.name(), bytes(size)))?;
    Ok(())
}

/// Size of a backing file's disk in bytes.
fn size_of(lock: &ReadLock, backing: &Backing) -> Result<u64, Failure> {
    let info = lock.info(Some(backing.format)).map_err(Failure::request)?;
    match info.header.and_then(|header| header.refused) {
        Some(reason) => Err(Failure::request(anyhow!("{}: {reason}", backing.location))),
        None => Ok(info.size),
    }
}

/// What an overlay, at `overlay` if it is a file, records of its backing file.
///
/// QEMU takes a relative path from the folder of the overlay.
fn recorded(backing: &Backing, overlay: Option<&Path>) -> Result<BackingName, anyhow::Error> {
    let format = backing.format;
    let Location::File(path) = &backing.location else {
        return Ok(BackingName { name: backing.location.to_string(), format });
    };
    let named = |path: &Path| path.display().to_string();
    let full = full_path(path).with_context(|| named(path))?;
    let home = overlay.map(|overlay| full_path(overlay).with_context(|| named(overlay))).transpose()?;
    let folder = home.as_deref().and_then(Path::parent).filter(|_| path.is_relative());
    let below = folder.and_then(|folder| full.strip_prefix(folder).ok());
    let name = below.unwrap_or(&full).to_str().ok_or_else(|| anyhow!("{}: is not UTF-8", named(path)))?;
    // QEMU takes what is before a colon for a protocol.
    let colon = name.split('/').next().is_some_and(|first| first.contains(':'));
    Ok(BackingName { name: if colon { format!("./{name}") } else { name.to_owned() }, format })
}

/// The path from the root, without links but the file's own name.
fn full_path(path: &Path) -> std::io::Result<PathBuf> {
    let name = path.file_name().ok_or(std::io::ErrorKind::InvalidFilename)?;
    Ok(directory_of(path).canonicalize()?.join(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(backing: &str, overlay: &Path) -> String {
        recorded(&format!("raw:{backing}").parse().unwrap(), Some(overlay)).unwrap().name
    }

    #[test]
    fn a_backing_file_is_recorded_as_qemu_finds_it() {
        let folder = tempfile::tempdir_in(".").unwrap();
        let home = folder.path().canonicalize().unwrap();
        std::fs::create_dir(home.join("sub")).unwrap();
        // Relative to the folder in which the test runs.
        let here = folder.path().file_name().unwrap().to_str().unwrap();
        let text = |path: PathBuf| path.to_str().unwrap().to_owned();
        let (top, deep) = (home.join("top"), home.join("sub/top"));
        assert_eq!(name(&format!("{here}/base.raw"), &top), "base.raw");
        assert_eq!(name(&format!("./{here}/sub/base.raw"), &top), "sub/base.raw");
        assert_eq!(name(&format!("{here}/a:b.raw"), &top), "./a:b.raw");
        assert_eq!(name(&format!("{here}/base.raw"), &deep), text(home.join("base.raw")));
        // In full, as it was given.
        assert_eq!(name(&text(home.join("base.raw")), &top), text(home.join("base.raw")));
        assert_eq!(name("nbd://store/vm0", &top), "nbd://store:10809/vm0");
    }
}
