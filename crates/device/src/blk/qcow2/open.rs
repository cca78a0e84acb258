//! Opens an image and its backing files.
use super::counts::Counts;
use super::entry::Shape;
use super::header::Header;
use super::io::Io;
use super::layer::{Below, Core};
use super::map::Map;
use super::tables::Tables;
use super::{rebuild, refcounts};
use crate::blk::image_file::{ImageFile, Opening};
use crate::blk::{Format, Layer, OpenError, OpenReason};
use paravane_spec::blk::SECTOR;
use std::path::Path;
use std::sync::Arc;

/// Offset of the autoclear features in the header.
const AUTOCLEAR: u64 = 88;

/// Opens an image and its backing files.
///
/// Without `layers`, the image is opened without the backing file that it may have.
pub(super) fn open(
    image: &ImageFile,
    layers: Option<&[Layer]>,
    files: &mut Vec<ImageFile>,
) -> std::result::Result<Core, OpenError> {
    let path = &image.path;
    let (mut core, backing) = open_core(image)?;
    let Some(layers) = layers else { return Ok(core) };
    match (backing, layers.split_first()) {
        (None, None) => {}
        (Some(_), Some((layer, rest))) => core.below = Some(open_backing(layer, rest, files)?),
        (Some(name), None) => return Err(OpenReason::Backing { name }.at(path)),
        (None, Some(_)) => return Err(OpenReason::NoBacking.at(path)),
    }
    Ok(core)
}

/// Opens an image without its backing files. Returns the name of its backing file, too.
pub(super) fn open_core(image: &ImageFile) -> std::result::Result<(Core, Option<String>), OpenError> {
    let (path, is_writable) = (&image.path, !image.read_only);
    let failed = |source| unusable(path, source);
    let header = Header::read(&image.source)
        .map_err(|source| OpenReason::Header { source: Box::new(source) }.at(path))?;
    if header.data_file {
        return Err(OpenReason::DataFile.at(path));
    }
    let io = Io::new(image.source.clone()).map_err(failed)?;
    let shape = Shape { cluster_bits: header.cluster_bits, version: header.version };
    let counts = match is_writable {
        true => Some(prepare_writing(image, &header, &io)?),
        false => None,
    };
    let map = Map::read(&image.source, &header).map_err(failed)?;
    let tables = Tables::new(map, counts, shape);
    let core = Core::new(io, shape, &header, tables);
    Ok((core, header.backing))
}

/// Checks what a writer relies on, and clears what it does not keep up to date.
fn prepare_writing(image: &ImageFile, header: &Header, io: &Io) -> std::result::Result<Counts, OpenError> {
    let path = &image.path;
    let failed = |source| unusable(path, source);
    let wrong = |source| OpenReason::Refcounts { source }.at(path);
    let mut counts = Counts::read(&image.source, header).map_err(|error| wrong(error.into()))?;
    let size = image.size / SECTOR * SECTOR;
    refcounts::check_and_repair(&image.source, size, header, (io, &mut counts)).map_err(wrong)?;
    if header.is_dirty() || header.version < 3 && rebuild::is_quick(&image.source, header).map_err(failed)? {
        rebuild::rebuild(&image.source, path, header, (io, &mut counts)).map_err(wrong)?;
    }
    if header.autoclear != 0 {
        // That must be on disk before the first write.
        io.write(&[0; 8], AUTOCLEAR).and_then(|()| io.sync()).map_err(failed)?;
        if header.has_bitmaps() {
            tracing::warn!(
                path = %path.display(),
                "the image has dirty bitmaps, which are not updated; QEMU will report them as inconsistent"
            );
        }
    }
    Ok(counts)
}

/// Opens a backing file.
fn open_backing(
    layer: &Layer,
    rest: &[Layer],
    files: &mut Vec<ImageFile>,
) -> std::result::Result<Below, OpenError> {
    let image = layer.source.image(Opening::cached(layer.format, true))?;
    let below = match layer.format {
        Format::Qcow2 => Below::Qcow2(Arc::new(open(&image, Some(rest), files)?)),
        Format::Raw if rest.is_empty() => {
            Below::raw(image.source.clone()).map_err(|source| unusable(&image.path, source))?
        }
        Format::Raw => return Err(OpenReason::NoBacking.at(image.path)),
    };
    files.push(image);
    Ok(below)
}

fn unusable(path: &Path, source: std::io::Error) -> OpenError {
    OpenReason::Qcow2 { source }.at(path)
}
