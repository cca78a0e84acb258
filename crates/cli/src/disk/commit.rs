//! `paravane disk commit`.
use super::image::{failed, format, is_same, layers, open_bytes};
use super::work::Work;
use crate::failure::Failure;
use crate::images::Backing;
use crate::size::bytes;
use anyhow::anyhow;
use clap::Args;
use paravane_command_line::output;
use paravane_device::blk::images::{self, Disk, Use};
use paravane_device::blk::{Format, Layer};
use paravane_store::Location;

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
    /// They must be those that the images name. File names stored in images open nothing.
    #[arg(long, value_name = "FORMAT:LOCATION", required = true)]
    backing: Vec<Backing>,
    /// Merge into backing files other than those that the images name, for images that were moved
    ///
    /// A wrong backing file is destroyed.
    #[arg(long, visible_alias = "force")]
    force_layers: bool,
    /// Hide the progress bar
    #[arg(short, long)]
    quiet: bool,
}

pub(super) fn main(args: &CommitArgs) -> Result<(), Failure> {
    let Some((base, below)) = args.backing.split_first() else {
        return Err(Failure::request(anyhow!("--backing: names no backing file")));
    };
    let place = open_bytes(&args.overlay, false)?;
    let overlay = Disk::open_alone(&place).map_err(Failure::request)?;
    if is_same(&args.overlay, &base.location) {
        return Err(Failure::request(anyhow!("{}: is the overlay itself", base.location)));
    }
    // Of the image that is locked, whatever its path names by now.
    let layout = overlay.recorded().map_err(failed)?.and_then(|header| header.layout);
    if layout.is_none_or(|layout| layout.backing.is_none()) {
        return Err(Failure::request(anyhow!("{}: has no backing file", args.overlay)));
    }
    let (source, layers) = (open_bytes(&base.location, true)?, layers(below)?);
    if !args.force_layers {
        let all =
            [vec![Layer { source: source.clone(), format: format(base.format) }], layers.clone()].concat();
        images::check_layers(&place, Format::Qcow2, &all).map_err(Failure::request)?;
    }
    let target = match args.overlay.path() {
        Some(path) => Disk::open_base(&source, format(base.format), &layers, path),
        None => Disk::open(&source, format(base.format), &layers, Use::Write),
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
