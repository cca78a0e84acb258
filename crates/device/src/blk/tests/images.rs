//! Images without a guest, checked by QEMU's own tool: made by one, read by the other.
use super::super::images::{
    self, BackingName, CLUSTER_SIZES, Content, Disk, Extent, ImageError, NewImage, NewQcow2, Use,
};
use super::qcow2::{check, create, create_on, disk, done, folder, layer, open, text};
use super::stores::{LIMITS, TestStore};
use super::{image, pattern};
use crate::blk::{BlkConfig, Format, Layer, LayerSource, OVERLAY_MARK, OpenError, OpenReason};
use crate::rig::skipped;
use proptest::prelude::*;
use std::fs::File;
use std::ops::ControlFlow;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

const MIB: u64 = 1 << 20;

fn place(path: &Path) -> LayerSource {
    LayerSource::Path(path.to_owned())
}

fn qcow2(size: u64, cluster_size: u32) -> NewImage {
    NewImage::Qcow2(NewQcow2 { size, cluster_size, backing: None })
}

fn make(folder: &TempDir, name: &str, new: &NewImage) -> PathBuf {
    let path = folder.path().join(name);
    File::create_new(&path).unwrap();
    images::create(&place(&path), new).unwrap();
    path
}

fn writable(path: &Path, format: Format, backing: &[Layer]) -> Disk {
    Disk::open(&place(path), format, backing, Use::Write).unwrap()
}

fn on(_: u64) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// `qemu-img` reads the same from both.
fn same(one: (&Path, Format), other: (&Path, Format)) {
    done(&["compare", "-q", "-f", one.1.name(), "-F", other.1.name(), text(one.0), text(other.0)]);
}

fn qemu_info(path: &Path) -> String {
    let output = Command::new("qemu-img").args(["info", "-U", "--output=json", text(path)]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn qemu_accepts_the_images_that_are_made() {
    let Some(folder) = folder("qemu_accepts_the_images_that_are_made") else { return };
    std::fs::write(folder.path().join("base.raw"), pattern(MIB as usize, 3)).unwrap();
    for (number, (size, cluster_size)) in
        [(512, 512), (3 * MIB + 512, 65536), (5 << 40, 2 << 20), (100 * MIB, 4096)].into_iter().enumerate()
    {
        let path = make(&folder, &format!("{number}.qcow2"), &qcow2(size, cluster_size));
        check(&path);
        let info = qemu_info(&path);
        assert!(info.contains(&format!("\"virtual-size\": {size}")), "{info}");
        assert!(info.contains(&format!("\"cluster-size\": {cluster_size}")), "{info}");
        let disk = writable(&path, Format::Qcow2, &[]);
        assert_eq!((disk.size(), disk.grain()), (size, cluster_size.into()));
    }
    let backing = Some(BackingName { name: "base.raw".into(), format: Format::Raw });
    let new = NewImage::Qcow2(NewQcow2 { size: MIB, cluster_size: 65536, backing });
    let path = make(&folder, "top.qcow2", &new);
    check(&path);
    let info = qemu_info(&path);
    assert!(info.contains("\"backing-filename\": \"base.raw\""), "{info}");
    assert!(info.contains("\"backing-filename-format\": \"raw\""), "{info}");
    // QEMU finds the base beside it.
    same((&path, Format::Qcow2), (&folder.path().join("base.raw"), Format::Raw));
}

#[test]
fn images_that_cannot_be_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let named = |name: String| {
        let backing = Some(BackingName { name, format: Format::Raw });
        NewImage::Qcow2(NewQcow2 { size: 512, cluster_size: 512, backing })
    };
    for (number, (new, part)) in [
        (NewImage::Raw(0), "multiple of 512"),
        (NewImage::Raw(513), "multiple of 512"),
        (qcow2(0, 65536), "multiple of 512"),
        (qcow2(512, 256), "power of two"),
        (qcow2(512, 4 << 20), "power of two"),
        (qcow2(512, 3 << 10), "power of two"),
        (qcow2(256 << 30, 512), "at most 137438953472 bytes"),
        (named(String::new()), "1 to 1023"),
        (named("x".repeat(1024)), "1 to 1023"),
    ]
    .into_iter()
    .enumerate()
    {
        let path = folder.path().join(number.to_string());
        File::create_new(&path).unwrap();
        match images::create(&place(&path), &new) {
            Err(ImageError::New { reason, .. }) => assert!(reason.contains(part), "{reason}"),
            other => panic!("{new:?}: {other:?}"),
        }
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 0, "{new:?}");
    }
    assert!(CLUSTER_SIZES.contains(&512) && CLUSTER_SIZES.contains(&(2 << 20)));
}

#[test]
fn extents_of_a_raw_image_are_those_of_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = make(&folder, "sparse.raw", &NewImage::Raw(8 * MIB));
    let disk = writable(&path, Format::Raw, &[]);
    assert_eq!(disk.extent(0, 8 * MIB).unwrap(), (Extent::Hole, 8 * MIB));
    disk.write(&pattern(MIB as usize, 1), 2 * MIB).unwrap();
    assert_eq!(disk.extent(0, 8 * MIB).unwrap(), (Extent::Hole, 2 * MIB));
    assert_eq!(disk.extent(2 * MIB, 8 * MIB - 2 * MIB).unwrap(), (Extent::Data, MIB));
    assert_eq!(disk.extent(2 * MIB, 4096).unwrap(), (Extent::Data, 4096));
    disk.zero(2 * MIB, MIB).unwrap();
    assert_eq!(disk.extent(0, 8 * MIB).unwrap(), (Extent::Hole, 8 * MIB));
    for (offset, len) in [(0, 0), (8 * MIB, 1), (8 * MIB - 1, 2), (u64::MAX, 2)] {
        assert!(disk.extent(offset, len).is_err(), "{offset} {len}");
    }
    assert!(disk.write(&[0; 2], 8 * MIB - 1).is_err() && disk.zero(u64::MAX, 2).is_err());
    drop(disk);
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 8 * MIB);
    let disk = Disk::open(&place(&path), Format::Raw, &[], Use::Read).unwrap();
    assert!(disk.write(&[1; 512], 0).is_err(), "opened for reading");
}

/// A chain of two overlays over a raw base, with data, zeroes and holes in each.
struct Chain {
    folder: TempDir,
    top: PathBuf,
    middle: PathBuf,
    base: PathBuf,
}

const SIZE: u64 = 12 * MIB;

impl Chain {
    fn new(folder: TempDir, cluster_size: u32) -> Self {
        let base = make(&folder, "base.raw", &NewImage::Raw(SIZE - 3 * MIB - 512));
        let of = |name: &str, format| Some(BackingName { name: name.into(), format });
        let overlay = |size, backing| NewImage::Qcow2(NewQcow2 { size, cluster_size, backing });
        let middle = make(&folder, "middle.qcow2", &overlay(SIZE - MIB, of("base.raw", Format::Raw)));
        let top = make(&folder, "top.qcow2", &overlay(SIZE, of("middle.qcow2", Format::Qcow2)));
        let chain = Self { folder, top, middle, base };
        let disk = writable(&chain.base, Format::Raw, &[]);
        disk.write(&pattern(3 * MIB as usize, 1), MIB).unwrap();
        disk.write(&pattern(MIB as usize, 2), 6 * MIB + 512).unwrap();
        drop(disk);
        let disk = writable(&chain.middle, Format::Qcow2, &chain.below_middle());
        disk.write(&pattern(100_000, 3), 2 * MIB + 3 * 512).unwrap();
        disk.zero(3 * MIB, 512 * 300).unwrap();
        disk.write(&pattern(512, 4), disk.size() - 512).unwrap();
        drop(disk);
        let disk = writable(&chain.top, Format::Qcow2, &chain.below_top());
        disk.write(&pattern(70_000, 5), 2 * MIB).unwrap();
        disk.zero(6 * MIB, 300_032).unwrap();
        disk.write(&vec![0; 300_032], 7 * MIB).unwrap();
        disk.write(&pattern(5120, 6), SIZE - 5120).unwrap();
        disk.sync().unwrap();
        drop(disk);
        chain
    }

    fn below_middle(&self) -> Vec<Layer> {
        vec![layer(&self.base, Format::Raw)]
    }

    fn below_top(&self) -> Vec<Layer> {
        vec![layer(&self.middle, Format::Qcow2), layer(&self.base, Format::Raw)]
    }

    /// What the top reads as, by QEMU.
    fn flat(&self, name: &str) -> PathBuf {
        let flat = self.folder.path().join(name);
        done(&["convert", "-q", "-f", "qcow2", "-O", "raw", text(&self.top), text(&flat)]);
        flat
    }
}

#[test]
fn a_copy_of_a_chain_is_what_qemu_reads_of_it() {
    for (from, to) in [(65536, 65536), (512, 2 << 20), (4096, 512)] {
        let Some(folder) = folder("a_copy_of_a_chain_is_what_qemu_reads_of_it") else { return };
        let chain = Chain::new(folder, from);
        let flat = chain.flat("flat.raw");
        let source = Disk::open(&place(&chain.top), Format::Qcow2, &chain.below_top(), Use::Read).unwrap();
        for new in [NewImage::Raw(SIZE), qcow2(SIZE, to)] {
            let format = if new == NewImage::Raw(SIZE) { Format::Raw } else { Format::Qcow2 };
            let path = make(&chain.folder, &format!("copy.{}", format.name()), &new);
            let target = writable(&path, format, &[]);
            let mut seen = Vec::new();
            let written = images::copy(&source, &target, Content::Zeroes, &mut |at| {
                seen.push(at);
                ControlFlow::Continue(())
            })
            .unwrap();
            assert!(seen.is_sorted() && seen.last() == Some(&SIZE), "{seen:?}");
            drop(target);
            same((&flat, Format::Raw), (&path, format));
            // About 4.6 MiB have data.
            assert!(written < 6 * MIB + 8 * u64::from(to), "{written}");
            if format == Format::Qcow2 {
                check(&path);
            } else {
                assert!(std::fs::metadata(&path).unwrap().blocks() * 512 < 6 * MIB);
                assert_eq!(std::fs::metadata(&path).unwrap().len(), SIZE);
            }
        }
    }
}

#[test]
fn a_copy_stops_when_it_is_told_and_needs_room() {
    let folder = tempfile::tempdir().unwrap();
    let from = image(&pattern(6 * MIB as usize, 1));
    let from = Disk::open(&place(from.path()), Format::Raw, &[], Use::Read).unwrap();
    let to = writable(&make(&folder, "to", &NewImage::Raw(6 * MIB)), Format::Raw, &[]);
    let stop = &mut |at| if at >= 2 * MIB { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
    assert!(matches!(images::copy(&from, &to, Content::Zeroes, stop), Err(ImageError::Stopped)));
    let small = writable(&make(&folder, "small", &NewImage::Raw(MIB)), Format::Raw, &[]);
    assert!(matches!(images::copy(&from, &small, Content::Zeroes, &mut on), Err(ImageError::Small { .. })));
}

#[test]
fn an_overlay_is_merged_into_its_base() {
    for cluster_size in [512, 65536] {
        let Some(folder) = folder("an_overlay_is_merged_into_its_base") else { return };
        let chain = Chain::new(folder, cluster_size);
        // The middle ends before the top, and has a base.
        let overlay = Disk::open_alone(&place(&chain.top)).unwrap();
        let base = writable(&chain.middle, Format::Qcow2, &chain.below_middle());
        match images::merge(&overlay, &base, &mut on) {
            Err(ImageError::Grow { base, overlay, .. }) => assert_eq!((base, overlay), (SIZE - MIB, SIZE)),
            other => panic!("{other:?}"),
        }
        drop((overlay, base));
        // QEMU grows it, as the message says.
        done(&["resize", "-q", "-f", "qcow2", text(&chain.middle), &SIZE.to_string()]);
        let flat = chain.flat("flat.raw");
        // Stopped after 1, 2, 4, ... steps, and run again.
        let mut steps = 1;
        loop {
            let overlay = Disk::open_alone(&place(&chain.top)).unwrap();
            let base = writable(&chain.middle, Format::Qcow2, &chain.below_middle());
            steps *= 2;
            let mut left = steps / 2;
            let merged = images::merge(&overlay, &base, &mut |_| {
                left -= 1;
                if left == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            });
            drop((overlay, base));
            check(&chain.middle);
            // At any moment the overlay reads as before.
            same((&flat, Format::Raw), (&chain.top, Format::Qcow2));
            match merged {
                Err(ImageError::Stopped) => assert!(steps < 1 << 12),
                merged => {
                    assert!(merged.unwrap() >= 70_000 + 2 * 300_032);
                    break;
                }
            }
        }
        assert!(steps > 4, "{steps}");
        same((&flat, Format::Raw), (&chain.middle, Format::Qcow2));
        // And on, into the raw image, which grows.
        let overlay = Disk::open_alone(&place(&chain.middle)).unwrap();
        let base = writable(&chain.base, Format::Raw, &[]);
        images::merge(&overlay, &base, &mut on).unwrap();
        drop((overlay, base));
        same((&flat, Format::Raw), (&chain.base, Format::Raw));
        assert_eq!(std::fs::metadata(&chain.base).unwrap().len(), SIZE);
        assert_eq!(std::fs::read(&chain.base).unwrap(), std::fs::read(&flat).unwrap());
    }
}

#[test]
fn compressed_overlays_and_larger_bases_are_merged() {
    let Some(folder) = folder("compressed_overlays_and_larger_bases_are_merged") else { return };
    let source = image(&pattern(MIB as usize, 9));
    let overlay = folder.path().join("compressed.qcow2");
    done(&["convert", "-q", "-c", "-f", "raw", "-O", "qcow2", text(source.path()), text(&overlay)]);
    let base = create(&folder, "base.qcow2", 3 * MIB, "cluster_size=4k");
    let disk = writable(&base, Format::Qcow2, &[]);
    disk.write(&pattern(3 * MIB as usize, 8), 0).unwrap();
    let merged = images::merge(&Disk::open_alone(&place(&overlay)).unwrap(), &disk, &mut on).unwrap();
    assert_eq!((merged, disk.size()), (MIB, 3 * MIB));
    let (mut read, mut expected) = (vec![0; 3 * MIB as usize], pattern(3 * MIB as usize, 8));
    expected[..MIB as usize].copy_from_slice(&pattern(MIB as usize, 9));
    disk.read(&mut read, 0).unwrap();
    assert!(read == expected);
    drop(disk);
    check(&base);
}

#[test]
fn an_image_in_use_is_refused() {
    let Some(folder) = folder("an_image_in_use_is_refused") else { return };
    let base = make(&folder, "base.raw", &NewImage::Raw(MIB));
    let path = create_on(&folder, "top.qcow2", &base, "raw", MIB);
    let served = open(BlkConfig { backing: vec![layer(&base, Format::Raw)], ..disk(&path) }).unwrap();
    let in_use = |error: Option<OpenError>| {
        assert!(matches!(error, Some(OpenError { reason: OpenReason::InUse, .. })), "{error:?}")
    };
    in_use(Disk::open_alone(&place(&path)).err());
    in_use(Disk::open(&place(&base), Format::Raw, &[], Use::Write).err());
    in_use(images::info(&place(&path), None).err());
    in_use(images::WriteLock::new(&path).err());
    // A backing file can be read by others.
    Disk::open(&place(&base), Format::Raw, &[], Use::Read).unwrap();
    drop(served);
    images::WriteLock::new(&path).unwrap();
    let merging = Disk::open_alone(&place(&path)).unwrap();
    in_use(open(BlkConfig { backing: vec![layer(&base, Format::Raw)], ..disk(&path) }).err());
    drop(merging);
}

#[test]
fn an_image_is_described_with_what_is_not_supported() {
    let Some(folder) = folder("an_image_is_described_with_what_is_not_supported") else { return };
    let info = |path: &Path, format| images::info(&place(path), format).unwrap();
    let header = |path: &Path| info(path, None).header.unwrap();
    let base = make(&folder, "base.raw", &NewImage::Raw(MIB));
    let raw = info(&base, None);
    assert_eq!((raw.format, raw.size, raw.allocated, raw.header), (Format::Raw, MIB, Some(0), None));
    let path = create_on(&folder, "top.qcow2", &base, "raw", 3 * MIB);
    let top = header(&path);
    let layout = top.layout.unwrap();
    assert_eq!((top.size, top.version, top.snapshots, top.refused), (3 * MIB, 3, 0, None));
    assert_eq!((layout.cluster_size, layout.backing.as_deref()), (65536, Some(text(&base))));
    assert_eq!((layout.backing_format.as_deref(), layout.bitmaps), (Some("raw"), 0));
    // Asked for as raw, it is bytes.
    let raw = info(&path, Some(Format::Raw));
    assert_eq!((raw.format, raw.size, raw.header), (Format::Raw, raw.file_size, None));
    assert!(matches!(
        images::info(&place(&base), Some(Format::Qcow2)),
        Err(OpenError { reason: OpenReason::Header { .. }, .. })
    ));

    let old = header(&create(&folder, "old.qcow2", MIB, "compat=0.10,cluster_size=4k"));
    assert_eq!((old.version, old.features, old.layout.unwrap().cluster_size), (2, vec![], 4096));
    let path = create(&folder, "lazy.qcow2", MIB, "lazy_refcounts=on");
    done(&["snapshot", "-q", "-c", "one", text(&path)]);
    done(&["bitmap", "--add", text(&path), "map"]);
    let lazy = header(&path);
    assert_eq!((lazy.snapshots, lazy.layout.unwrap().bitmaps, lazy.refused), (1, 1, None));
    assert_eq!(lazy.features, ["lazy-refcounts", "bitmaps"]);
    let path = create(&folder, "l2.qcow2", MIB, "extended_l2=on,cluster_size=64k,compression_type=zstd");
    let l2 = header(&path);
    assert_eq!(l2.features, ["extended-l2", "compression-zstd"]);
    assert!(l2.refused.unwrap().contains("extended L2 entries"));
    let data = format!("data_file={}", text(&folder.path().join("data.raw")));
    let external = header(&create(&folder, "external.qcow2", MIB, &data));
    assert_eq!(external.features, ["data-file"]);
    assert!(external.refused.unwrap().contains("external data file"));
}

#[test]
fn a_frozen_base_takes_in_the_overlay_that_it_is_frozen_for() {
    let folder = tempfile::tempdir().unwrap();
    let base = make(&folder, "base.raw", &NewImage::Raw(MIB));
    let (top, other) = (folder.path().join("top.qcow2"), folder.path().join("other.qcow2"));
    let backing = Some(BackingName { name: "base.raw".into(), format: Format::Raw });
    let new = NewImage::Qcow2(NewQcow2 { size: MIB, cluster_size: 65536, backing });
    for path in [&top, &other] {
        File::create_new(path).unwrap();
        images::create(&place(path), &new).unwrap();
    }
    let flags = rustix::fs::XattrFlags::empty();
    if let Err(error) = rustix::fs::setxattr(&base, OVERLAY_MARK, text(&top).as_bytes(), flags) {
        let why = format!("no extended attributes of users here: {error}");
        return skipped("a_frozen_base_takes_in_the_overlay_that_it_is_frozen_for", why);
    }
    let below = [layer(&base, Format::Raw)];
    let disk = writable(&top, Format::Qcow2, &below);
    disk.write(&[7; 512], 512).unwrap();
    drop(disk);
    let frozen = |disk: Result<Disk, OpenError>| match disk {
        Err(OpenError { reason: OpenReason::Frozen { overlay, .. }, .. }) => assert_eq!(overlay, top),
        other => panic!("{other:?}"),
    };
    frozen(Disk::open(&place(&base), Format::Raw, &[], Use::Write));
    frozen(Disk::open_base(&place(&base), Format::Raw, &[], &other));
    let overlay = Disk::open_alone(&place(&top)).unwrap();
    let disk = Disk::open_base(&place(&base), Format::Raw, &[], &top).unwrap();
    assert!(images::merge(&overlay, &disk, &mut |_| ControlFlow::Break(())).is_err());
    drop(disk);
    // Still frozen: only the overlay is complete.
    frozen(Disk::open(&place(&base), Format::Raw, &[], Use::Write));
    let disk = Disk::open_base(&place(&base), Format::Raw, &[], &folder.path().join("./top.qcow2")).unwrap();
    images::merge(&overlay, &disk, &mut on).unwrap();
    drop(disk);
    let disk = writable(&base, Format::Raw, &[]);
    let mut read = [0; 1024];
    disk.read(&mut read, 0).unwrap();
    assert_eq!(read[..], [[0; 512], [7; 512]].concat());
}

#[test]
fn an_overlay_in_a_store_is_made_over_what_the_store_held() {
    let Some(folder) = folder("an_overlay_in_a_store_is_made_over_what_the_store_held") else { return };
    let base = make(&folder, "base.raw", &NewImage::Raw(8 * MIB));
    let disk = writable(&base, Format::Raw, &[]);
    disk.write(&pattern(8 * MIB as usize, 1), 0).unwrap();
    drop(disk);
    let path = folder.path().join("store");
    std::fs::write(&path, pattern(4 * MIB as usize, 2)).unwrap();
    let mut store = TestStore::new(&path, LIMITS);
    std::sync::Arc::get_mut(&mut store).unwrap().has_fixed_size = true;
    let store = LayerSource::Store(store);
    let backing = Some(BackingName { name: text(&base).into(), format: Format::Raw });
    let new = NewImage::Qcow2(NewQcow2 { size: 8 * MIB, cluster_size: 65536, backing });
    images::create(&store, &new).unwrap();
    let disk = Disk::open(&store, Format::Qcow2, &[layer(&base, Format::Raw)], Use::Write).unwrap();
    disk.write(&pattern(1024, 3), 3 * MIB).unwrap();
    disk.zero(5 * MIB, 512).unwrap();
    let mut read = vec![0; 8 * MIB as usize];
    disk.read(&mut read, 0).unwrap();
    let mut expected = pattern(8 * MIB as usize, 1);
    expected[3 * MIB as usize..][..1024].copy_from_slice(&pattern(1024, 3));
    expected[5 * MIB as usize..][..512].fill(0);
    assert!(read == expected);
    disk.sync().unwrap();
    drop(disk);
    check(&path);
    same((&path, Format::Qcow2), (image(&expected).path(), Format::Raw));
    // And merged from there.
    let base = writable(&base, Format::Raw, &[]);
    images::merge(&Disk::open_alone(&store).unwrap(), &base, &mut on).unwrap();
    base.read(&mut read, 0).unwrap();
    assert!(read == expected);
}

proptest! {
    /// Any header: an answer, and no panic.
    #[test]
    fn any_header_is_described(
        spoils in prop::collection::vec((0..200_usize, any::<u8>()), 0..12),
        len in 0..600_usize,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = make(&folder, "spoilt.qcow2", &qcow2(MIB, 512));
        let mut bytes = std::fs::read(&path).unwrap();
        for (at, byte) in spoils {
            bytes[at] = byte;
        }
        bytes.truncate(len + 8);
        bytes[..4].copy_from_slice(b"QFI\xfb");
        std::fs::write(&path, &bytes).unwrap();
        let info = images::info(&place(&path), None).unwrap();
        prop_assert_eq!(info.format, if bytes.len() < 72 { Format::Raw } else { Format::Qcow2 });
    }
}
