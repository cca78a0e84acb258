//! `paravane disk convert`.
use super::apart;
use super::image::{CLUSTER_SIZE, cluster_size, failed, is_same, layers, open_bytes};
use super::target::Target;
use super::work::Work;
use crate::failure::Failure;
use crate::images::Backing;
use crate::size::{Size, bytes};
use anyhow::anyhow;
use clap::Args;
use paravane_command_line::output;
use paravane_device::blk::images::{self, Content, Disk, ImageError, NewImage, NewQcow2, Use};
use paravane_device::blk::{Format, LayerSource};
use paravane_store::Location;
use std::os::unix::fs::FileTypeExt;

/// Copy a disk to an image of either format, with all its layers as one
///
/// Zeroes and holes are not read where the layers tell of them (SEEK_HOLE of files, mappings of qcow2
/// images, block status of NBD servers and Ceph), and are not written where the target reads as
/// zeroes. Snapshots and dirty bitmaps in a qcow2 image are not copied. The copy is durable at the
/// end. A progress bar is on stderr if that is a terminal.
#[derive(Debug, Args)]
pub(super) struct ConvertArgs {
    /// Image to read, as FORMAT:LOCATION
    #[arg(value_name = "SOURCE")]
    source: Backing,
    /// Image to create, or to overwrite with --target-exists, as FORMAT:LOCATION
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
    /// Replace a file that is there and not in use
    #[arg(long, conflicts_with = "target_exists")]
    force: bool,
    /// Overwrite a file, block device, NBD export or Ceph image that is there, in place
    ///
    /// A raw target must be at least as large as the disk; zeroes fill the rest of it. After an error or
    /// a signal it holds a part of the copy.
    #[arg(long)]
    target_exists: bool,
    /// Hide the progress bar
    #[arg(short, long)]
    quiet: bool,
}

pub(super) fn main(args: &ConvertArgs) -> Result<(), Failure> {
    if args.target.format == Format::Raw && args.cluster_size.is_some() {
        return Err(Failure::request(anyhow!("--cluster-size: raw images have no clusters")));
    }
    let target = &args.target.location;
    let sources = || [&args.source].into_iter().chain(&args.backing).map(|layer| &layer.location);
    if !args.target_exists {
        check_new(target).map_err(Failure::request)?;
        apart::check(target, sources())?;
    } else if sources().any(|source| is_same(source, target)) {
        return Err(Failure::request(anyhow!("{target}: is the source, or one of its layers")));
    }
    let place = open_bytes(&args.source.location, false)?;
    let layers = layers(&args.backing)?;
    let source = Disk::open(&place, args.source.format, &layers, Use::Read).map_err(Failure::request)?;
    if !args.force_layers {
        images::check_layers(&place, args.source.format, &layers).map_err(Failure::request)?;
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
    let copied = match args.target_exists {
        true => overwrite(args, &source, &new, &mut work)?,
        false => create(args, &source, &new, &mut work)?,
    };
    drop(work);
    output::print(&format!(
        "{target}: {}, {}, {} written\n",
        args.target.format.name(),
        bytes(copied.size),
        bytes(copied.written)
    ))?;
    Ok(())
}

/// What was copied.
struct Copied {
    /// Bytes of the target's disk.
    size: u64,
    /// Bytes of data written.
    written: u64,
}

/// Refuses a target that exists whatever this command does.
fn check_new(target: &Location) -> Result<(), anyhow::Error> {
    let what = match target {
        Location::Http(_) | Location::S3(_) => {
            return Err(anyhow!("{target}: objects of HTTP and S3 servers cannot be written"));
        }
        Location::File(path) => match path.metadata() {
            Ok(metadata) if metadata.file_type().is_block_device() => "block device",
            _ => return Ok(()),
        },
        _ => "store",
    };
    Err(anyhow!("{target}: is a {what}, whose content would be lost; --target-exists overwrites it"))
}

/// Copies to a new file, which appears when it is complete.
fn create(args: &ConvertArgs, source: &Disk, new: &NewImage, work: &mut Work) -> Result<Copied, Failure> {
    let file = Target::begin(&args.target.location, new, args.force, work)?;
    images::create(&file.place(), new).map_err(failed)?;
    let target = Disk::open(&file.place(), args.target.format, &[], Use::Write)?;
    let written = images::copy(source, &target, Content::Zeroes, &mut |at| work.step(at)).map_err(failed)?;
    drop(target);
    file.finish()?;
    Ok(Copied { size: source.size(), written })
}

/// Copies to a target that is there.
fn overwrite(args: &ConvertArgs, source: &Disk, new: &NewImage, work: &mut Work) -> Result<Copied, Failure> {
    let location = &args.target.location;
    if matches!(location, Location::Http(_) | Location::S3(_)) {
        check_new(location).map_err(Failure::request)?;
    }
    let place = open_bytes(location, true)?;
    let target = Disk::overwrite(&place, new).map_err(failed)?;
    let content = match new {
        NewImage::Raw(_) => Content::Unknown,
        NewImage::Qcow2(_) => Content::Zeroes,
    };
    let size = target.size();
    work.set_size(size);
    let part = |error: ImageError| {
        let Failure { status, error } = failed(error);
        Failure { status, error: error.context(format!("{location}: holds a part of the copy")) }
    };
    let written = images::copy(source, &target, content, &mut |at| work.step(at)).map_err(part)?;
    drop(target);
    check_connection(location, &place)?;
    Ok(Copied { size, written })
}

/// Checks that no server was lost meanwhile which had acknowledged writes, and not made them durable.
///
/// The flush at the end is answered by the server that came after it.
fn check_connection(location: &Location, place: &LayerSource) -> Result<(), anyhow::Error> {
    let writes_through = matches!(location, Location::Nbd(nbd) if nbd.write_through);
    match place {
        LayerSource::Store(store) if !writes_through && store.status().reconnects > 0 => Err(anyhow!(
            "{location}: the connection was lost, and the server may have lost writes; run the command again, \
             or add write-through=on to the URL"
        )),
        _ => Ok(()),
    }
}
