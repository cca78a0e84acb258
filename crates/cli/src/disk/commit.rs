//! `paravane disk commit`.
use super::image::{failed, format, layers, open_bytes};
use super::work::Work;
use crate::failure::Failure;
use crate::output;
use crate::serve::args::Backing;
use crate::size::bytes;
use anyhow::anyhow;
use clap::Args;
use paravane_device::blk::Format;
use paravane_device::blk::images::{self, Disk, Use};
use paravane_store::Location;
use std::path::Path;

/// Merge an overlay into its backing file
///
/// Writes what the overlay holds to the backing file, which grows to the overlay's size if it is
/// smaller, and makes it durable. Nobody may use either meanwhile. The overlay stays as it is, and
/// may then be removed.
///
/// Other overlays of the same backing file are destroyed: their disks change below them.
///
/// At any moment the overlay reads as before. After an error, a signal or a crash, keep it and run
/// the command again.
#[derive(Debug, Args)]
pub(super) struct CommitArgs {
    /// Overlay, a qcow2 image
    #[arg(value_name = "LOCATION")]
    overlay: Location,
    /// Backing file to write to as FORMAT:LOCATION; repeat for its own layers, top first
    ///
    /// It must be the one that the overlay names. File names stored in images open nothing.
    #[arg(long, value_name = "FORMAT:LOCATION", required = true)]
    backing: Vec<Backing>,
    /// Merge into a backing file other than the one that the overlay names
    ///
    /// For images that were moved. A wrong backing file is destroyed.
    #[arg(long)]
    force: bool,
    /// Hide the progress bar
    #[arg(short, long)]
    quiet: bool,
}

pub(super) fn main(args: &CommitArgs) -> Result<(), Failure> {
    let Some((base, below)) = args.backing.split_first() else {
        return Err(Failure::request(anyhow!("--backing: names no backing file")));
    };
    let place = open_bytes(&args.overlay, false)?;
    let info = images::info(&place, Some(Format::Qcow2)).map_err(Failure::request)?;
    let layout = info.header.and_then(|header| header.layout);
    let (name, named_format) = layout.map_or((None, None), |layout| (layout.backing, layout.backing_format));
    let Some(name) = name else {
        return Err(Failure::request(anyhow!("{}: has no backing file", args.overlay)));
    };
    let agrees = leads_to(&args.overlay, &name, &base.location)
        && named_format.as_ref().is_none_or(|named| named == format(base.format).name());
    if !agrees && !args.force {
        let named = named_format.as_deref().unwrap_or("unknown format");
        return Err(Failure::request(anyhow!(
            "{}: has backing file {name:?} ({named}), not {} ({}); pass that one, or --force if it was moved",
            args.overlay,
            base.location,
            format(base.format).name()
        )));
    }
    let overlay = Disk::open_alone(&place).map_err(Failure::request)?;
    let (place, layers) = (open_bytes(&base.location, true)?, layers(below)?);
    let target = match args.overlay.path() {
        Some(path) => Disk::open_base(&place, format(base.format), &layers, path),
        None => Disk::open(&place, format(base.format), &layers, Use::Write),
    }
    .map_err(Failure::request)?;
    let mut work = Work::start("merging", overlay.size(), args.quiet)?;
    let merged = images::merge(&overlay, &target, &mut |at| work.step(at)).map_err(failed)?;
    drop(work);
    output::print(&format!(
        "{}: {} merged from {}, which may be removed\n",
        base.location,
        bytes(merged),
        args.overlay
    ))?;
    Ok(())
}

/// Whether the name in the overlay is that of the backing file. Opens nothing.
fn leads_to(overlay: &Location, name: &str, base: &Location) -> bool {
    let (Some(overlay), Some(base)) = (overlay.path(), base.path()) else {
        return name == base.to_string();
    };
    let name = Path::new(name.strip_prefix("file:").unwrap_or(name));
    let folder = overlay.parent().unwrap_or(Path::new(""));
    match (folder.join(name).canonicalize(), base.canonicalize()) {
        (Ok(named), Ok(base)) => named == base,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_in_an_overlay_is_taken_from_its_folder() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::create_dir(path("sub")).unwrap();
        for name in ["base.raw", "other.raw", "sub/base.raw", "sub/top.qcow2"] {
            std::fs::write(path(name), name).unwrap();
        }
        let leads =
            |name: &str, base: &str| leads_to(&path("sub/top.qcow2").into(), name, &path(base).into());
        assert!(leads("base.raw", "sub/base.raw") && leads("../base.raw", "base.raw"));
        assert!(leads("./base.raw", "sub/../sub/base.raw") && leads("file:base.raw", "sub/base.raw"));
        assert!(leads(path("other.raw").to_str().unwrap(), "other.raw"));
        assert!(!leads("base.raw", "base.raw") && !leads("missing.raw", "base.raw"));
        assert!(!leads("nbd://store/vm0", "base.raw") && !leads("", "base.raw"));
        let url: Location = "nbd://store:10809/vm0".parse().unwrap();
        assert!(leads_to(&path("sub/top.qcow2").into(), "nbd://store:10809/vm0", &url));
        assert!(!leads_to(&path("sub/top.qcow2").into(), "nbd://store:10809/vm1", &url));
    }
}
