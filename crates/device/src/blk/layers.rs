//! Whether the layers that an operator names are those that the headers of the images name.
//!
//! ```text
//!   top, qcow2: "base.img", raw ---- compared ---- raw:/img/base.img, as the operator names it
//! ```
//! A name in an image opens nothing: the operator's layers are opened, or none. But a wrong layer
//! shows the guest a mixture of two disks, and its writes make that permanent.
use super::qcow2::Recorded;
use super::{Format, Layer, LayerSource, OpenError, OpenReason};
use paravane_store::{Location, NbdLocation, Store, Target};
use std::fs::Metadata;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;

/// Checks the layers of `top`, an image at `path` with this format.
///
/// Warns of a layer that is larger than its overlay. A layer or header that cannot be read is left to
/// those who open it, which say why.
///
/// # Errors
/// [`OpenReason::Layer`].
pub(super) fn check(
    top: &Arc<dyn Store>,
    path: &Path,
    format: Format,
    backing: &[Layer],
) -> Result<(), OpenError> {
    let (mut overlay, mut path, mut format) = (Some(top.clone()), path.to_owned(), format);
    for layer in backing {
        let (Some(source), Format::Qcow2) = (&overlay, format) else { return Ok(()) };
        let Ok(Some(header)) = Recorded::read(source) else { return Ok(()) };
        let location = layer.source.path();
        compare(&header, &path, layer, &location)?;
        overlay = open(&layer.source);
        if let Some(size) = overlay.as_ref().and_then(|source| size(source, layer.format))
            && size > header.size
        {
            tracing::warn!(
                path = %path.display(),
                backing = %location.display(),
                "the image has {} bytes, less than the {size} bytes of its backing file: the rest is not seen",
                header.size
            );
        }
        (path, format) = (location, layer.format);
    }
    Ok(())
}

/// Compares what an overlay records of its backing file with the layer that is named.
fn compare(header: &Recorded, path: &Path, layer: &Layer, location: &Path) -> Result<(), OpenError> {
    let Some(layout) = &header.layout else { return Ok(()) };
    let Some(name) = &layout.backing else { return Ok(()) };
    let is_format = match layout.backing_format.as_deref() {
        // Drivers of QEMU for files and block devices.
        Some("raw" | "file" | "host_device") => layer.format == Format::Raw,
        Some(recorded) => recorded == layer.format.name(),
        None => true,
    };
    if is_format && name.starts_with("json:") {
        tracing::warn!(
            path = %path.display(),
            backing = %location.display(),
            "the image names its backing file by options of QEMU, which are not compared"
        );
        return Ok(());
    }
    if is_format && leads_to(name, path, &layer.source) {
        return Ok(());
    }
    let (name, format, layer_format) = (name.clone(), layout.backing_format.clone(), layer.format);
    Err(OpenReason::Layer { name, format, layer: location.to_owned(), layer_format }.at(path))
}

/// Whether the name in the overlay at `overlay` is that of the layer. Opens nothing.
fn leads_to(name: &str, overlay: &Path, layer: &LayerSource) -> bool {
    let path = match layer {
        LayerSource::Path(path) => path,
        LayerSource::Store(store) => {
            let own = store.status().location;
            // Snapshots of earlier versions recorded a URL as a path in the daemon's folder.
            let is_early = name.starts_with('/') && Path::new(name).ends_with(&own);
            return is_early || named_location(name) == named_location(&own);
        }
    };
    let protocols = ["file:", "host_device:"];
    let name = protocols.into_iter().find_map(|protocol| name.strip_prefix(protocol)).unwrap_or(name);
    let Ok(wanted) = path.metadata() else {
        // It cannot be opened, and whoever tries says why.
        return true;
    };
    // Of a link, the folder of the link, as in QEMU, or that of the file.
    let real = overlay.canonicalize().ok();
    let mut folders = [Some(overlay), real.as_deref()].into_iter().flatten().map(|file| file.parent());
    folders.any(|folder| {
        let named = folder.unwrap_or(Path::new("")).join(name);
        named.metadata().is_ok_and(|found| is_same(&found, &wanted))
    })
}

/// The location that QEMU means by this name, without parameters that say how to reach it.
fn named_location(name: &str) -> String {
    let parsed = match name.split_once(':') {
        Some(("nbd", rest)) if !rest.starts_with("//") => old_nbd(rest),
        // Parameters of librbd follow.
        Some(("rbd", rest)) => format!("rbd:{}", rest.split(':').next().unwrap_or_default()).parse().ok(),
        _ => name.parse().ok(),
    };
    parsed.map_or_else(|| name.to_owned(), |location: Location| location.to_string())
}

/// `HOST:PORT[:exportname=NAME]` or `unix:PATH[:exportname=NAME]`, which follows `nbd:`.
fn old_nbd(rest: &str) -> Option<Location> {
    let (target, export) = rest.split_once(":exportname=").unwrap_or((rest, ""));
    let target = match target.strip_prefix("unix:") {
        Some(path) => Target::Unix(path.into()),
        None => {
            let (host, port) = target.rsplit_once(':')?;
            let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
            Target::Tcp { host, port: port.parse().ok()? }
        }
    };
    Some(Location::Nbd(NbdLocation { target, export: export.into(), tls: None, write_through: false }))
}

/// Whether both are of one file or block device.
fn is_same(one: &Metadata, other: &Metadata) -> bool {
    let devices = [one, other].map(|file| file.file_type().is_block_device().then_some(file.rdev()));
    match devices {
        [None, None] => (one.dev(), one.ino()) == (other.dev(), other.ino()),
        [one, other] => one == other,
    }
}

/// The bytes of a layer, not locked.
fn open(layer: &LayerSource) -> Option<Arc<dyn Store>> {
    if let LayerSource::Path(path) = layer {
        // Opening another kind of file may have an effect by itself.
        let kind = path.metadata().ok()?.file_type();
        (kind.is_file() || kind.is_block_device()).then_some(())?;
    }
    layer.bytes(false).ok()
}

/// Size of the disk in a layer in bytes.
fn size(source: &Arc<dyn Store>, format: Format) -> Option<u64> {
    match (format, source) {
        (Format::Qcow2, _) => Some(Recorded::read(source).ok()??.size),
        (Format::Raw, source) => source.try_size().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_qemu_mean_locations() {
        for (name, location) in [
            ("nbd:unix:/run/n.sock:exportname=vm0", "nbd+unix:///vm0?socket=/run/n.sock"),
            ("nbd:unix:/run/n.sock", "nbd+unix:///?socket=/run/n.sock"),
            ("nbd:store:10809:exportname=a b", "nbd://store:10809/a%20b"),
            ("nbd:[::1]:7", "nbd://[::1]:7/"),
            ("nbd://store/vm0", "nbd://store:10809/vm0"),
            ("rbd:pool/disk@monday:id=vm:mon_host=a\\:1", "rbd:pool/disk@monday"),
            ("https://host/a.img?signature=x", "https://host/a.img"),
        ] {
            assert_eq!(named_location(name), location);
            assert_eq!(named_location(location), location);
        }
        for name in ["nbd:store", "nbd:a:b", "rbd:x", "nbd://", "fat:x"] {
            assert_eq!(named_location(name), name, "it is no location");
        }
    }

    #[test]
    fn a_name_in_an_overlay_is_taken_from_its_folder() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::create_dir(path("sub")).unwrap();
        for name in ["base.raw", "other.raw", "sub/base.raw", "sub/top.qcow2"] {
            std::fs::write(path(name), name).unwrap();
        }
        let leads =
            |name: &str, base: &str| leads_to(name, &path("sub/top.qcow2"), &LayerSource::Path(path(base)));
        assert!(leads("base.raw", "sub/base.raw") && leads("../base.raw", "base.raw"));
        assert!(leads("./base.raw", "sub/../sub/base.raw") && leads("file:base.raw", "sub/base.raw"));
        assert!(leads(path("other.raw").to_str().unwrap(), "other.raw"));
        assert!(!leads("base.raw", "base.raw") && !leads("missing.raw", "base.raw"));
        assert!(!leads("nbd://store/vm0", "base.raw") && !leads("", "base.raw"));
        // Through links, of the overlay and of the base.
        std::os::unix::fs::symlink("sub/top.qcow2", path("link.qcow2")).unwrap();
        std::os::unix::fs::symlink("sub/base.raw", path("link.raw")).unwrap();
        let linked = LayerSource::Path(path("link.raw"));
        assert!(leads_to("base.raw", &path("link.qcow2"), &linked));
        assert!(leads_to("sub/base.raw", &path("link.qcow2"), &linked));
        assert!(!leads_to("other.raw", &path("sub/top.qcow2"), &linked));
    }
}
