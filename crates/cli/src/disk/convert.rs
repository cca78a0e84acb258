//! `paravane disk convert`.
use super::image::{CLUSTER_SIZE, cluster_size, failed, format, layers, open_bytes};
use super::target::Target;
use super::work::Work;
use crate::failure::Failure;
use crate::output;
use crate::serve::args::{Backing, Format};
use crate::size::{Size, bytes};
use anyhow::anyhow;
use clap::Args;
use paravane_device::blk::images::{self, Disk, NewImage, NewQcow2, Use};

/// Copy a disk to a new image of either format, with all its layers as one
///
/// Zeroes and holes are not written: they stay holes. Snapshots and dirty bitmaps in a qcow2 image
/// are not copied. A progress bar is on stderr if that is a terminal.
#[derive(Debug, Args)]
pub(super) struct ConvertArgs {
    /// Image to read, as FORMAT:LOCATION
    #[arg(value_name = "SOURCE")]
    source: Backing,
    /// Image to create, as FORMAT:LOCATION
    #[arg(value_name = "TARGET")]
    target: Backing,
    /// Backing file of the source as FORMAT:LOCATION; repeat per layer, top first
    ///
    /// They must be those that the images name. File names stored in images open nothing.
    #[arg(long, value_name = "FORMAT:LOCATION")]
    backing: Vec<Backing>,
    /// Read backing files other than those that the images name, for images that were moved
    #[arg(long)]
    force_layers: bool,
    /// Cluster size of a qcow2 target, a power of two from 512 to 2M [default: 64k]
    #[arg(long, value_name = "SIZE")]
    cluster_size: Option<Size>,
    /// Replace an image that is there and not in use, or the content of a store
    #[arg(long)]
    force: bool,
    /// Hide the progress bar
    #[arg(short, long)]
    quiet: bool,
}

pub(super) fn main(args: &ConvertArgs) -> Result<(), Failure> {
    if args.target.format == Format::Raw && args.cluster_size.is_some() {
        return Err(Failure::request(anyhow!("--cluster-size: raw images have no clusters")));
    }
    let place = open_bytes(&args.source.location, false)?;
    let layers = layers(&args.backing)?;
    let source =
        Disk::open(&place, format(args.source.format), &layers, Use::Read).map_err(Failure::request)?;
    if !args.force_layers {
        images::check_layers(&place, format(args.source.format), &layers).map_err(Failure::request)?;
    }
    let size = source.size();
    let new = match args.target.format {
        Format::Raw => NewImage::Raw(size),
        Format::Qcow2 => NewImage::Qcow2(NewQcow2 {
            size,
            cluster_size: args.cluster_size.map_or(CLUSTER_SIZE, |size| cluster_size(size.0)),
            backing: None,
        }),
    };
    let mut work = Work::start("converting", size, args.quiet)?;
    let file = Target::begin(&args.target.location, &new, args.force, &work)?;
    images::create(&file.place(), &new).map_err(failed)?;
    let target = Disk::open(&file.place(), format(args.target.format), &[], Use::Write)?;
    let written = images::copy(&source, &target, &mut |at| work.step(at)).map_err(failed)?;
    drop(target);
    file.finish()?;
    drop(work);
    output::print(&format!(
        "{}: {}, {}, {} written\n",
        args.target.location,
        format(args.target.format).name(),
        bytes(size),
        bytes(written)
    ))?;
    Ok(())
}
