//! Images in the format qcow2, checked by QEMU's own tool.
use super::model::{DISK, Model, SECTORS, op};
use super::*;
use crate::blk::{
    ClusterRole, Features, Format, HeaderError, Layer, LayerSource, OpenError, OpenReason, RefcountError,
};
use crate::rig::skipped;
use paravane_test_support::qemu_img;
use proptest::prelude::*;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// A folder for images; `None`, said loudly, where QEMU's tool is missing.
pub(super) fn folder(test: &str) -> Option<TempDir> {
    match Command::new("qemu-img").arg("--version").output() {
        Ok(_) => Some(tempfile::tempdir().unwrap()),
        Err(error) => {
            skipped(test, format!("qemu-img (package qemu-utils): {error}"));
            None
        }
    }
}

pub(super) fn done(arguments: &[&str]) {
    let output = qemu_img(arguments);
    assert!(output.status.success(), "qemu-img {arguments:?}: {output:?}");
}

pub(super) fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// An empty image of `size` bytes.
pub(super) fn create(folder: &TempDir, name: &str, size: u64, options: &str) -> PathBuf {
    let path = folder.path().join(name);
    let mut arguments = vec!["create", "-q", "-f", "qcow2"];
    if !options.is_empty() {
        arguments.extend(["-o", options]);
    }
    let size = size.to_string();
    arguments.extend([text(&path), &size]);
    done(&arguments);
    path
}

/// Creates an image of `size` bytes with the backing file `base`.
///
/// `base` need not exist.
pub(super) fn create_on(folder: &TempDir, name: &str, base: &Path, format: &str, size: u64) -> PathBuf {
    let path = folder.path().join(name);
    let size = size.to_string();
    done(&["create", "-q", "-u", "-f", "qcow2", "-b", text(base), "-F", format, text(&path), &size]);
    path
}

pub(super) fn disk(path: &Path) -> BlkConfig {
    BlkConfig { format: Format::Qcow2, ..BlkConfig::new(path) }
}

pub(super) fn layer(path: &Path, format: Format) -> Layer {
    Layer { source: LayerSource::Path(path.to_owned()), format }
}

pub(super) fn open(config: BlkConfig) -> Result<Blk, OpenError> {
    Blk::open(config)
}

/// Checks an image.
///
/// `-U` ignores locks: between fork and exec, a child of another test holds the lock of an image
/// that was closed meanwhile.
pub(super) fn check(path: &Path) {
    done(&["check", "-q", "-U", "-f", "qcow2", text(path)]);
}

/// Checks an image whose writer was killed: clusters may be counted and not used, and nothing else.
pub(super) fn check_crashed(path: &Path) {
    let output = qemu_img(&["check", "-q", "-U", "-f", "qcow2", text(path)]);
    // 3: leaks, and no errors.
    assert!(matches!(output.status.code(), Some(0 | 3)), "{output:?}");
}

/// QEMU reads the same from the image as is in `expected`.
pub(super) fn compare(path: &Path, expected: &[u8]) {
    let raw = image(expected);
    done(&["compare", "-q", "-f", "qcow2", "-F", "raw", text(path), text(raw.path())]);
}

pub(super) fn agrees(folder: &TempDir, options: &str, ops: &[super::model::Op], refused: u64) {
    use crate::Device;
    let path = create(folder, "model.qcow2", DISK as u64, options);
    let disk = open(disk(&path)).unwrap();
    let features = disk.features() & !refused;
    let mut rig = Rig::with_features(disk, features);
    let mut model = Model { bytes: vec![0; DISK], unknown: vec![false; DISK] };
    for op in ops {
        model.apply(op, &mut rig);
    }
    let end = rig.read(0, DISK);
    for (at, byte) in end.iter().enumerate() {
        assert!(model.unknown[at] || model.bytes[at] == *byte, "byte {at}");
    }
    drop(rig);
    check(&path);
    compare(&path, &end);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn a_qcow2_image_is_an_array_of_bytes(ops in prop::collection::vec(op(), 1..40), kind in 0..4_usize) {
        let Some(folder) = folder("a_qcow2_image_is_an_array_of_bytes") else { return Ok(()) };
        let options = ["", "cluster_size=512", "compat=0.10,cluster_size=4k", "lazy_refcounts=on"][kind];
        agrees(&folder, options, &ops, 0);
    }

    #[test]
    fn a_write_through_qcow2_image_is_one_too(ops in prop::collection::vec(op(), 1..10)) {
        let Some(folder) = folder("a_write_through_qcow2_image_is_one_too") else { return Ok(()) };
        agrees(&folder, "", &ops, blk::F_FLUSH);
    }

    /// Any bytes in the file: an answer, and no panic.
    #[test]
    fn broken_images_fail_requests_and_nothing_else(
        spoils in prop::collection::vec((0..0x5_0000_usize, any::<u8>()), 1..40),
        ops in prop::collection::vec((0..SECTORS, any::<bool>()), 1..20),
        read_only in any::<bool>(),
    ) {
        let Some(folder) = folder("broken_images_fail_requests_and_nothing_else") else { return Ok(()) };
        let path = create(&folder, "broken.qcow2", DISK as u64, "cluster_size=4k");
        {
            let mut rig = Rig::new(open(disk(&path)).unwrap());
            assert_eq!(rig.status(blk::T_OUT, 0, &pattern(64 * 512, 1)), blk::S_OK);
            assert_eq!(rig.status(blk::T_FLUSH, 0, &[]), blk::S_OK);
        }
        let mut bytes = std::fs::read(&path).unwrap();
        let len = bytes.len();
        for (at, byte) in spoils {
            // Mostly tables, which are at the beginning.
            bytes[(at >> (at % 4 * 3)) % len] = byte;
        }
        std::fs::write(&path, &bytes).unwrap();
        let Ok(disk) = open(BlkConfig { read_only, ..disk(&path) }) else { return Ok(()) };
        let mut rig = Rig::new(disk);
        for (sector, write) in ops {
            let (kind, payload, room) = match write {
                true => (blk::T_OUT, vec![7; 512], 0),
                false => (blk::T_IN, vec![], 512),
            };
            let answer = rig.request(kind, sector, &payload, room);
            prop_assert!(matches!(answer.status, blk::S_OK | blk::S_IOERR));
        }
    }
}

#[test]
fn the_disk_is_as_large_as_the_image_says() {
    let Some(folder) = folder("the_disk_is_as_large_as_the_image_says") else { return };
    let path = create(&folder, "disk.qcow2", 3 << 30, "");
    let blk = open(disk(&path)).unwrap();
    assert_eq!(blk.size(), 3 << 30);
    // In memory, clusters that are known are copied in the file's mapping.
    let engine = blk.engine();
    let names = ["io_uring, threads", "threads, mapped", "threads (io_uring: "];
    assert!(names.iter().any(|name| engine.starts_with(name)), "{engine}");
    let mut rig = Rig::new(blk);
    let end = (3 << 30) / 512;
    assert_eq!(rig.status(blk::T_OUT, end - 1, &[7; 512]), blk::S_OK);
    assert_eq!(rig.read(end - 2, 1024), [[0; 512], [7; 512]].concat());
    assert_eq!(rig.status(blk::T_OUT, end, &[7; 512]), blk::S_IOERR);
    drop(rig);
    check(&path);
    assert!(std::fs::metadata(&path).unwrap().len() < 2 << 20);
}

#[test]
fn requests_larger_than_a_workers_buffer_are_done_in_parts() {
    let Some(folder) = folder("requests_larger_than_a_workers_buffer_are_done_in_parts") else { return };
    let path = create(&folder, "disk.qcow2", 8 << 20, "");
    let mut rig = Rig::new(open(disk(&path)).unwrap());
    let data = pattern(2_500_096, 5);
    rig.poke(PAYLOAD, &data);
    rig.poke(HEADER, &header(blk::T_OUT, 100));
    let pieces = [segment(HEADER, 16), segment(PAYLOAD, 1_000_000), segment(PAYLOAD + 1_000_000, 1_500_096)];
    rig.one(&pieces, &[segment(STATUS, 1)]).unwrap();
    assert_eq!(rig.peek(STATUS, 1), [blk::S_OK]);
    rig.poke(PAYLOAD, &vec![UNTOUCHED; data.len()]);
    rig.poke(HEADER, &header(blk::T_IN, 100));
    let used = rig.one(&pieces[..1], &[pieces[1], pieces[2], segment(STATUS, 1)]).unwrap();
    assert_eq!(used.len as usize, data.len() + 1);
    assert_eq!(rig.peek(PAYLOAD, data.len()), data);
}

#[test]
fn many_requests_at_once_do_not_mix() {
    let Some(folder) = folder("many_requests_at_once_do_not_mix") else { return };
    let path = create(&folder, "disk.qcow2", 8 << 20, "cluster_size=64k");
    let mut rig = Rig::new(open(disk(&path)).unwrap());
    // Neighbours in one cluster, which all want to allocate it; and a discard of another between
    // them.
    for round in 0..4_u64 {
        for number in 0..64_u64 {
            let at = PAYLOAD + number * 4096;
            rig.poke(at, &pattern(4096, round * 64 + number));
            rig.poke(HEADER + number * 16, &header(blk::T_OUT, number * 8));
            rig.add(&[segment(HEADER + number * 16, 16), segment(at, 4096)], &[segment(STATUS + number, 1)]);
        }
        let spare = PAYLOAD + 0x8_0000;
        rig.poke(spare, &[header(blk::T_DISCARD, 0).to_vec(), range(4096, 4096, 0)].concat());
        rig.add(&[segment(spare, 32)], &[segment(STATUS + 64, 1)]);
        assert_eq!(rig.run().unwrap().len(), 65);
        assert_eq!(rig.peek(STATUS, 65), [blk::S_OK; 65]);
        for number in 0..64 {
            assert_eq!(rig.read(number * 8, 4096), pattern(4096, round * 64 + number));
        }
    }
    drop(rig);
    check(&path);
}

#[test]
fn a_name_in_an_image_opens_nothing() {
    let Some(folder) = folder("a_name_in_an_image_opens_nothing") else { return };
    let secret = folder.path().join("secret");
    std::fs::write(&secret, vec![b's'; 1 << 20]).unwrap();
    for format in ["raw", "qcow2"] {
        let path = create_on(&folder, "thief.qcow2", &secret, format, 1 << 20);
        match open(disk(&path)) {
            Err(OpenError { reason: OpenReason::Backing { name, .. }, .. }) => {
                assert_eq!(name, text(&secret))
            }
            other => panic!("{other:?}"),
        }
        // Not even beside what was named.
        let base = folder.path().join("base.raw");
        std::fs::write(&base, vec![b'b'; 1 << 20]).unwrap();
        let backing = vec![layer(&base, Format::Raw)];
        let config = BlkConfig { backing, force_layers: true, ..disk(&path) };
        let mut rig = Rig::new(open(config).unwrap());
        assert_eq!(rig.read(0, 512), [b'b'; 512]);
    }
    // A file for the data.
    let path = folder.path().join("data.qcow2");
    let options = format!("data_file={},data_file_raw=on", text(&folder.path().join("elsewhere.raw")));
    done(&["create", "-q", "-f", "qcow2", "-o", &options, text(&path), "1M"]);
    assert!(matches!(open(disk(&path)), Err(OpenError { reason: OpenReason::DataFile, .. })));
    // A raw image that its driver has made look like another.
    let guise = create_on(&folder, "guise", &secret, "raw", 1 << 20);
    let mut bytes = std::fs::read(&guise).unwrap();
    bytes.resize(bytes.len().next_multiple_of(512), 0);
    std::fs::write(&guise, &bytes).unwrap();
    let mut rig = Rig::new(open(BlkConfig::new(&guise)).unwrap());
    assert_eq!(rig.read(0, 512), bytes[..512]);
}

#[test]
fn an_image_is_based_on_what_was_named_and_that_is_only_read() {
    let Some(folder) = folder("an_image_is_based_on_what_was_named_and_that_is_only_read") else { return };
    let bottom = folder.path().join("bottom.raw");
    let before = pattern(1 << 20, 9);
    std::fs::write(&bottom, &before).unwrap();
    let middle = create_on(&folder, "middle.qcow2", Path::new("nowhere"), "raw", 1 << 20);
    let top = create_on(&folder, "top.qcow2", Path::new("nowhere"), "qcow2", 1 << 20);
    let raw = layer(&bottom, Format::Raw);
    {
        let config = BlkConfig { backing: vec![raw.clone()], force_layers: true, ..disk(&middle) };
        let mut rig = Rig::new(open(config).unwrap());
        assert_eq!(rig.status(blk::T_OUT, 100, &[7; 512]), blk::S_OK);
    }
    let middle_before = std::fs::read(&middle).unwrap();
    let layers = vec![layer(&middle, Format::Qcow2), raw.clone()];
    let config = BlkConfig { backing: layers.clone(), force_layers: true, ..disk(&top) };
    let mut rig = Rig::new(open(config).unwrap());
    let mut expected = before.clone();
    expected[100 * 512..101 * 512].fill(7);
    assert_eq!(rig.read(0, 1 << 20), expected);
    assert_eq!(rig.status(blk::T_OUT, 101, &[8; 512]), blk::S_OK);
    assert_eq!(rig.status(blk::T_WRITE_ZEROES, 0, &range(300, 5, 0)), blk::S_OK);
    assert_eq!(rig.status(blk::T_WRITE_ZEROES, 0, &range(512, 512, 1)), blk::S_OK);
    expected[101 * 512..102 * 512].fill(8);
    expected[300 * 512..305 * 512].fill(0);
    expected[512 * 512..1024 * 512].fill(0);
    assert_eq!(rig.read(0, 1 << 20), expected);
    // No process may write to the base meanwhile; others may read it.
    let of_base = |read_only| Blk::open(BlkConfig { read_only, ..BlkConfig::new(&bottom) });
    assert!(matches!(of_base(false), Err(OpenError { reason: OpenReason::InUse, .. })));
    assert!(of_base(true).is_ok());
    drop(rig);
    assert_eq!(std::fs::read(&bottom).unwrap(), before);
    assert_eq!(std::fs::read(&middle).unwrap(), middle_before);
    // QEMU goes by the names.
    for (image, format, base) in [(&middle, "raw", &bottom), (&top, "qcow2", &middle)] {
        done(&["rebase", "-q", "-u", "-f", "qcow2", "-F", format, "-b", text(base), text(image)]);
        check(image);
    }
    compare(&top, &expected);

    // Too few, too many, in the wrong format.
    let refused =
        |backing: Vec<Layer>| open(BlkConfig { backing, force_layers: true, ..disk(&top) }).unwrap_err();
    assert!(
        matches!(refused(vec![layers[0].clone()]), OpenError { reason: OpenReason::Backing { .. }, path } if path == middle)
    );
    assert!(
        matches!(refused(vec![raw.clone(), raw.clone()]), OpenError { reason: OpenReason::NoBacking, path } if path == bottom)
    );
    assert!(
        matches!(refused(vec![layer(&bottom, Format::Qcow2)]), OpenError { reason: OpenReason::Header { .. }, path } if path == bottom)
    );
    assert!(matches!(refused(vec![layer(&top, Format::Qcow2)]), OpenError { reason: OpenReason::InUse, .. }));
    let alone = create(&folder, "alone.qcow2", 1 << 20, "");
    let error = open(BlkConfig { backing: vec![raw.clone()], ..disk(&alone) }).unwrap_err();
    assert!(matches!(error, OpenError { reason: OpenReason::NoBacking, path } if path == alone));
    let error = open(BlkConfig { backing: vec![raw], ..BlkConfig::new(&bottom) }).unwrap_err();
    assert!(matches!(error, OpenError { reason: OpenReason::NoBacking, .. }));
}

#[test]
fn what_is_no_qcow2_image_is_refused() {
    let Some(folder) = folder("what_is_no_qcow2_image_is_refused") else { return };
    let good = std::fs::read(create(&folder, "good.qcow2", 1 << 20, "")).unwrap();
    let path = folder.path().join("bad.qcow2");
    for len in [1, 4, 71, 72, 103] {
        std::fs::write(&path, &good[..len]).unwrap();
        assert!(open(disk(&path)).is_err(), "{len} bytes of one");
    }
    std::fs::write(&path, vec![0; 1 << 20]).unwrap();
    assert!(matches!(header_error(disk(&path)), HeaderError::NotQcow2));
    std::fs::write(&path, []).unwrap();
    assert!(matches!(open(disk(&path)), Err(OpenError { reason: OpenReason::Empty, .. })));
}

#[test]
fn a_read_only_image_is_not_changed() {
    let Some(folder) = folder("a_read_only_image_is_not_changed") else { return };
    let path = create(&folder, "disk.qcow2", 1 << 20, "lazy_refcounts=on");
    {
        let mut rig = Rig::new(open(disk(&path)).unwrap());
        assert_eq!(rig.status(blk::T_OUT, 3, &[7; 512]), blk::S_OK);
    }
    let before = std::fs::read(&path).unwrap();
    let mut rig = Rig::new(open(BlkConfig { read_only: true, ..disk(&path) }).unwrap());
    assert_eq!(rig.read(3, 512), [7; 512]);
    assert_eq!(rig.status(blk::T_OUT, 3, &[8; 512]), blk::S_IOERR);
    drop(rig);
    assert_eq!(std::fs::read(&path).unwrap(), before);
}

#[test]
fn an_image_can_be_made_larger_and_smaller() {
    let Some(folder) = folder("an_image_can_be_made_larger_and_smaller") else { return };
    let path = create(&folder, "disk.qcow2", 1 << 20, "");
    let mut rig = Rig::new(open(disk(&path)).unwrap());
    let mut resizer = rig.device.resizer();
    assert!(!resizer.look().unwrap());
    assert!(resizer.resize(4 << 20).unwrap());
    assert_eq!(rig.device.size(), 4 << 20);
    assert_eq!(rig.status(blk::T_OUT, 8191, &[7; 512]), blk::S_OK);
    assert_eq!(rig.status(blk::T_OUT, 0, &[8; 512]), blk::S_OK);
    assert!(resizer.resize(1 << 19).unwrap());
    assert_eq!(rig.status(blk::T_OUT, 1024, &[7; 512]), blk::S_IOERR);
    assert_eq!(rig.read(0, 1024), [[8; 512], [0; 512]].concat());
    drop((rig, resizer));
    check(&path);
    let info = qemu_img(&["info", "--output=json", "-f", "qcow2", text(&path)]);
    assert!(String::from_utf8(info.stdout).unwrap().contains("\"virtual-size\": 524288"));
}

#[test]
fn what_was_flushed_is_there_after_a_crash() {
    let Some(folder) = folder("what_was_flushed_is_there_after_a_crash") else { return };
    let path = create(&folder, "disk.qcow2", 1 << 20, "");
    let mut rig = Rig::new(open(disk(&path)).unwrap());
    let data = pattern(64 * 512, 3);
    assert_eq!(rig.status(blk::T_OUT, 64, &data), blk::S_OK);
    assert_eq!(rig.status(blk::T_FLUSH, 0, &[]), blk::S_OK);
    // As the file is now, and not as it is left behind.
    let copy = folder.path().join("copy.qcow2");
    std::fs::copy(&path, &copy).unwrap();
    check_crashed(&copy);
    let mut after = Rig::new(open(disk(&copy)).unwrap());
    assert_eq!(after.read(64, data.len()), data);
    drop(after);
    check(&copy);
}

/// The tables of an image, by their offsets, to change them.
struct Anatomy {
    path: PathBuf,
    bytes: Vec<u8>,
}

impl Anatomy {
    fn of(path: &Path) -> Self {
        Self { path: path.to_owned(), bytes: std::fs::read(path).unwrap() }
    }

    fn long(&self, at: usize) -> u64 {
        u64::from_be_bytes(self.bytes[at..at + 8].try_into().unwrap())
    }

    fn l1_table(&self) -> usize {
        self.long(40) as usize
    }

    fn refcount_table(&self) -> usize {
        self.long(48) as usize
    }

    fn refcount_block(&self) -> usize {
        self.long(self.refcount_table()) as usize
    }

    fn l2_table(&self) -> usize {
        (self.long(self.l1_table()) & 0x00ff_ffff_ffff_fe00) as usize
    }

    fn put(mut self, at: usize, bytes: &[u8]) -> Self {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
        std::fs::write(&self.path, &self.bytes).unwrap();
        self
    }
}

/// An image with clusters of 64 KiB, the first of which is data.
fn filled(folder: &TempDir) -> PathBuf {
    let path = create(folder, "disk.qcow2", 1 << 20, "");
    let mut rig = Rig::new(open(disk(&path)).unwrap());
    assert_eq!(rig.status(blk::T_OUT, 0, &[7; 512]), blk::S_OK);
    path
}

#[test]
fn an_image_whose_tables_are_not_counted_is_not_written_to() {
    let Some(folder) = folder("an_image_whose_tables_are_not_counted_is_not_written_to") else { return };
    let refused = |broken: &Anatomy| {
        let error = open(disk(&broken.path)).unwrap_err();
        assert!(error.to_string().contains("qemu-img check"), "{error}");
        let mut rig = Rig::new(open(BlkConfig { read_only: true, ..disk(&broken.path) }).unwrap());
        assert_eq!(rig.read(0, 512), [7; 512]);
        match error {
            OpenError { reason: OpenReason::Refcounts { source, .. }, .. } => source,
            other => panic!("{other}"),
        }
    };
    let repaired = |path: &Path| {
        let _ = qemu_img(&["check", "-q", "-r", "all", "-f", "qcow2", text(path)]);
        let mut rig = Rig::new(open(disk(path)).unwrap());
        assert_eq!(rig.status(blk::T_OUT, 999, &[8; 512]), blk::S_OK);
        assert_eq!(rig.read(0, 512), [7; 512]);
        drop(rig);
        check(path);
    };
    // No block at all.
    let image = Anatomy::of(&filled(&folder));
    let table = image.refcount_table();
    let image = image.put(table, &[0; 8]);
    let free = |cluster, role| move |error: &RefcountError| matches!(error, RefcountError::Free { cluster: c, role: r } if (*c, *r) == (cluster, role));
    assert!(free(0, ClusterRole::Header)(&refused(&image)));
    repaired(&image.path);
    // One that counts the header as free.
    let image = Anatomy::of(&filled(&folder));
    let block = image.refcount_block();
    let image = image.put(block, &[0; 2]);
    assert!(free(0, ClusterRole::Header)(&refused(&image)));
    repaired(&image.path);
    // One that counts the refcount table as free.
    let image = Anatomy::of(&filled(&folder));
    let (block, cluster) = (image.refcount_block(), image.refcount_table() / 0x1_0000);
    let image = image.put(block + 2 * cluster, &[0; 2]);
    assert!(free(cluster as u64, ClusterRole::RefcountTable)(&refused(&image)));
    repaired(&image.path);
    // A block that is not there.
    let image = Anatomy::of(&filled(&folder));
    let table = image.refcount_table();
    let image = image.put(table, &(1_u64 << 40).to_be_bytes());
    let error = refused(&image);
    let (cluster, role) = (1 << 24, ClusterRole::RefcountBlock);
    assert!(
        matches!(error, RefcountError::Outside { cluster: c, role: r } if (c, r) == (cluster, role)),
        "{error}"
    );
    repaired(&image.path);
    // The refcount table is an L2 table, too.
    let image = Anatomy::of(&filled(&folder));
    let (l1, table) = (image.l1_table(), image.refcount_table());
    let image = image.put(l1 + 8, &(1 << 63 | table as u64).to_be_bytes()).put(39, &[2]);
    let error = refused(&image);
    assert!(
        matches!(error, RefcountError::Shared { cluster, .. } if cluster == table as u64 / 0x1_0000),
        "{error}"
    );
}

#[test]
fn an_image_whose_writer_was_killed_is_written_to_again() {
    let Some(folder) = folder("an_image_whose_writer_was_killed_is_written_to_again") else { return };
    for options in
        ["", "refcount_bits=1", "refcount_bits=4", "refcount_bits=64,cluster_size=512", "compat=0.10"]
    {
        let path = create(&folder, "disk.qcow2", 2 << 30, options);
        let before = Anatomy::of(&path);
        let mut rig = Rig::new(open(disk(&path)).unwrap());
        for gigabyte in 0..2 {
            assert_eq!(rig.status(blk::T_OUT, gigabyte << 21, &[7; 512]), blk::S_OK);
        }
        // As the file would be if the process had been killed when it had entered the new L2
        // tables, and before it wrote what counts them and what is in them.
        let copy = folder.path().join("copy.qcow2");
        std::fs::copy(&path, &copy).unwrap();
        let mut after = Anatomy::of(&copy);
        let cluster = 1 << after.bytes[23];
        for entry in (before.refcount_table()..).step_by(8).take(cluster / 8) {
            let block = before.long(entry) as usize;
            if block != 0 && block as u64 == after.long(entry) {
                after = after.put(block, &before.bytes[block..block + cluster]);
            }
        }
        for entry in (after.l1_table()..).step_by(8).take(after.long(32) as usize) {
            let l2_table = (after.long(entry) & 0x00ff_ffff_ffff_fe00) as usize;
            if l2_table != 0 {
                after = after.put(l2_table, &vec![0; cluster]);
            }
        }
        assert!(!qemu_img(&["check", "-q", "-f", "qcow2", text(&copy)]).status.success(), "{options}");
        let mut after = Rig::new(open(disk(&copy)).unwrap());
        for place in 0..64 {
            assert_eq!(after.status(blk::T_OUT, place << 16, &[place as u8; 512]), blk::S_OK);
        }
        drop(after);
        check(&copy);
        let mut after = Rig::new(open(disk(&copy)).unwrap());
        for place in 0..64 {
            assert_eq!(after.read(place << 16, 512), [place as u8; 512], "{options}");
        }
    }
}

/// Entries that name the image's own tables: data, compressed data, zeroes.
#[test]
fn an_open_image_does_not_give_its_tables_away() {
    let Some(folder) = folder("an_open_image_does_not_give_its_tables_away") else { return };
    let image = Anatomy::of(&filled(&folder));
    let (l1, l2, table) = (image.l1_table() as u64, image.l2_table(), image.refcount_table() as u64);
    for raw in [1 << 62, 1 << 62 | 0x200, 1 << 63 | l1, 1 << 63 | table, l1, 1 << 63 | table | 1] {
        let image = Anatomy::of(&image.path).put(l2 + 8, &u64::to_be_bytes(raw));
        let tables = [0..0x1_0000, l1 as usize..l1 as usize + 8, table as usize..table as usize + 8];
        let before = tables.clone().map(|part| image.bytes[part].to_vec());
        let mut rig = Rig::new(open(disk(&image.path)).unwrap());
        assert_eq!(rig.status(blk::T_OUT, 128, &[8; 0x1_0000]), blk::S_IOERR, "{raw:x}");
        assert_eq!(rig.status(blk::T_DISCARD, 0, &range(128, 128, 0)), blk::S_IOERR);
        let last = rig.device.errors().totals().last.unwrap();
        assert!(last.error.contains("the image is corrupt"), "{last:?}");
        // The others go on.
        assert_eq!(rig.status(blk::T_OUT, 256, &[9; 0x1_0000]), blk::S_OK);
        assert_eq!(rig.read(0, 512), [7; 512]);
        drop(rig);
        let after = Anatomy::of(&image.path);
        assert!(tables.map(|part| after.bytes[part].to_vec()) == before, "{raw:x}");
    }
}

/// What QEMU makes in other ways is no broken image.
#[test]
fn images_that_qemu_has_worked_on_are_written_to() {
    let Some(folder) = folder("images_that_qemu_has_worked_on_are_written_to") else { return };
    let raw = image(&pattern(4 << 20, 9));
    let convert = |name: &str, options: &[&str]| {
        let path = folder.path().join(name);
        let images = [text(raw.path()), text(&path)];
        done(&[&["convert", "-q", "-f", "raw", "-O", "qcow2"], options, &images].concat());
        path
    };
    let snapshot = |path: &Path, name| done(&["snapshot", "-c", name, text(path)]);
    let compressed = convert("compressed.qcow2", &["-c"]);
    let with_snapshots = convert("snapshots.qcow2", &["-o", "cluster_size=4k"]);
    snapshot(&with_snapshots, "one");
    snapshot(&with_snapshots, "two");
    let large = convert("large.qcow2", &["-o", "cluster_size=512,refcount_bits=64"]);
    done(&["resize", "-q", text(&large), "3G"]);
    let allocated = create(&folder, "allocated.qcow2", 64 << 20, "preallocation=falloc,cluster_size=2M");
    let discarded = convert("discarded.qcow2", &[]);
    let write = ["-f", "qcow2", "-c", "discard 0 2M", "-c", "write -z 3M 512k", text(&discarded)];
    assert!(Command::new("qemu-io").args(write).output().is_ok_and(|output| output.status.success()));
    for path in [compressed, with_snapshots, large, allocated, discarded] {
        let mut rig = Rig::new(open(disk(&path)).unwrap());
        for place in 0..16 {
            assert_eq!(rig.status(blk::T_OUT, place * 511, &[place as u8; 1024]), blk::S_OK, "{path:?}");
        }
        drop(rig);
        check(&path);
        let mut rig = Rig::new(open(disk(&path)).unwrap());
        for place in 0..16 {
            assert_eq!(rig.read(place * 511, 512), [place as u8; 512], "{path:?}");
        }
    }
}

#[test]
fn layers_that_the_headers_contradict_are_refused() {
    let Some(folder) = folder("layers_that_the_headers_contradict_are_refused") else { return };
    let (raw, other) = (folder.path().join("base.raw"), folder.path().join("other.raw"));
    for path in [&raw, &other] {
        std::fs::write(path, vec![9; 1 << 20]).unwrap();
    }
    let middle = create_on(&folder, "middle.qcow2", &raw, "raw", 1 << 20);
    let top = create_on(&folder, "top.qcow2", &middle, "qcow2", 1 << 20);
    let contents = || [&middle, &top].map(|path| std::fs::read(path).unwrap());
    let before = contents();
    let layers = |named: &[(&PathBuf, Format)]| -> Vec<Layer> {
        named.iter().map(|(path, format)| layer(path, *format)).collect()
    };
    // One is left out; another base, at the top and further down; a format.
    for (named, wrong) in [
        (layers(&[(&raw, Format::Raw)]), &top),
        (layers(&[(&other, Format::Raw)]), &top),
        (layers(&[(&middle, Format::Qcow2), (&other, Format::Raw)]), &middle),
        (layers(&[(&middle, Format::Raw)]), &top),
        (layers(&[(&middle, Format::Qcow2), (&raw, Format::Qcow2)]), &middle),
    ] {
        let config = BlkConfig { backing: named, ..disk(&top) };
        let is_wrong = |error: OpenError| match error {
            OpenError { reason: OpenReason::Layer { .. }, path } => assert_eq!(path, *wrong),
            error => panic!("{error}"),
        };
        // Before the image is locked, which another daemon may have, and after.
        is_wrong(Blk::prepare(config.clone()).unwrap_err());
        is_wrong(open(config).unwrap_err());
    }
    assert!(contents() == before);
    let right = layers(&[(&middle, Format::Qcow2), (&raw, Format::Raw)]);
    drop(open(BlkConfig { backing: right, ..disk(&top) }).unwrap());
    // They were moved, and the operator says so.
    let moved = folder.path().join("moved.raw");
    std::fs::rename(&raw, &moved).unwrap();
    let config =
        BlkConfig { backing: layers(&[(&middle, Format::Qcow2), (&moved, Format::Raw)]), ..disk(&top) };
    assert!(matches!(open(config.clone()), Err(OpenError { reason: OpenReason::Layer { .. }, .. })));
    let mut rig = Rig::new(open(BlkConfig { force_layers: true, ..config }).unwrap());
    assert_eq!(rig.read(0, 512), [9; 512]);
}

/// Why the header of an image is refused.
fn header_error(config: BlkConfig) -> HeaderError {
    match open(config) {
        Err(OpenError { reason: OpenReason::Header { source, .. }, .. }) => *source,
        other => panic!("{other:?}"),
    }
}

/// Refuses an image with a changed header, alone and as a backing file.
///
/// To write and to read; nothing is written to it.
fn refuses(folder: &TempDir, image: &Anatomy, wanted: impl Fn(&HeaderError) -> bool) {
    let overlay = create_on(folder, "overlay.qcow2", Path::new("nowhere"), "qcow2", 1 << 20);
    let backing = vec![layer(&image.path, Format::Qcow2)];
    for config in [
        disk(&image.path),
        BlkConfig { read_only: true, ..disk(&image.path) },
        BlkConfig { backing, force_layers: true, ..disk(&overlay) },
    ] {
        let error = header_error(config);
        assert!(wanted(&error), "{error}");
    }
    assert!(std::fs::read(&image.path).unwrap() == image.bytes);
}

#[test]
fn an_encrypted_image_is_refused() {
    let Some(folder) = folder("an_encrypted_image_is_refused") else { return };
    let path = folder.path().join("encrypted.qcow2");
    let secret = ["--object", "secret,id=key,data=secret", "-o", "encrypt.format=aes,encrypt.key-secret=key"];
    done(&[&["create", "-q", "-f", "qcow2"], &secret[..], &[text(&path), "1M"]].concat());
    let aes = Anatomy::of(&path);
    refuses(&folder, &aes, |error| matches!(error, HeaderError::Encrypted(1)));
    // LUKS is put into the header: to make it, qemu-img measures its CPU time, which fails on some machines.
    refuses(&folder, &aes.put(32, &[0, 0, 0, 2]), |error| matches!(error, HeaderError::Encrypted(2)));
    // A method that nobody knows, also in version 2; and the header of an encryption without a
    // method.
    for options in ["", "compat=0.10"] {
        let image = Anatomy::of(&create(&folder, "disk.qcow2", 1 << 20, options)).put(32, &[0, 0, 0, 9]);
        refuses(&folder, &image, |error| matches!(error, HeaderError::Encrypted(9)));
    }
    let image = Anatomy::of(&create(&folder, "disk.qcow2", 1 << 20, "")).put(104 + 8, &[5, 0x37, 0xbe, 0x77]);
    refuses(&folder, &image, |error| matches!(error, HeaderError::CryptoHeader));
}

#[test]
fn what_is_not_understood_of_a_header_is_refused() {
    let Some(folder) = folder("what_is_not_understood_of_a_header_is_refused") else { return };
    let fresh = || Anatomy::of(&create(&folder, "disk.qcow2", 1 << 20, ""));
    // Features that writing must clear are set, too: the header would be written if it were opened.
    let incompatible = |bits: u64| fresh().put(72, &bits.to_be_bytes()).put(88, &3_u64.to_be_bytes());
    refuses(&folder, &incompatible(3), |error| matches!(error, HeaderError::Corrupt));
    for (bits, words) in [
        (1 << 3, "a compression type other than zlib,"),
        (1 << 4, "extended L2 entries,"),
        (1 << 5 | 1 << 63, "the unknown incompatible feature 5 and the unknown incompatible feature 63,"),
    ] {
        let named = |error: &HeaderError| {
            matches!(error, HeaderError::Features(Features(found)) if *found == bits)
                && error.to_string().contains(words)
        };
        refuses(&folder, &incompatible(bits), named);
    }
    let zstd = create(&folder, "zstd.qcow2", 1 << 20, "compression_type=zstd");
    refuses(&folder, &Anatomy::of(&zstd), |error| matches!(error, HeaderError::Features(_)));
    let extended = create(&folder, "extended.qcow2", 1 << 20, "extended_l2=on");
    refuses(&folder, &Anatomy::of(&extended), |error| matches!(error, HeaderError::Features(_)));

    let word = |at: usize, value: u32| fresh().put(at, &value.to_be_bytes());
    for version in [0, 1, 4, u32::MAX] {
        refuses(&folder, &word(4, version), |error| matches!(error, HeaderError::Version(_)));
    }
    for bits in [0, 8, 22, 32, u32::MAX] {
        refuses(&folder, &word(20, bits), |error| matches!(error, HeaderError::ClusterBits(_)));
    }
    for order in [7, u32::MAX] {
        refuses(&folder, &word(96, order), |error| matches!(error, HeaderError::RefcountOrder(_)));
    }
    for len in [0, 72, 103, 105, 0x1_0008, u32::MAX] {
        refuses(&folder, &word(100, len), |error| matches!(error, HeaderError::HeaderLength(_)));
    }
    refuses(&folder, &fresh().put(104, &[1]), |error| matches!(error, HeaderError::CompressionType(1)));
    refuses(&folder, &fresh().put(24, &[0xff; 8]), |error| matches!(error, HeaderError::Size(u64::MAX)));
    for (at, value) in [(44, 0x1_0200), (52, 0x1_0200), (36, u32::MAX), (56, u32::MAX)] {
        refuses(&folder, &word(at, value), |error| matches!(error, HeaderError::Table(_)));
    }
    // An unknown extension may be ignored; one that does not end may not.
    let image = fresh().put(104 + 8, &[0x12, 0x34, 0x56, 0x78]);
    drop(open(disk(&image.path)).unwrap());
    let image = fresh().put(104 + 8, &[0x12, 0x34, 0x56, 0x78, 0, 1, 0, 0]);
    refuses(&folder, &image, |error| matches!(error, HeaderError::Extension));
}

/// A writer that keeps no dirty bitmaps marks them inconsistent.
///
/// A backup would miss its writes otherwise.
#[test]
fn bitmaps_are_inconsistent_once_the_image_is_open_for_writing() {
    let Some(folder) = folder("bitmaps_are_inconsistent_once_the_image_is_open_for_writing") else { return };
    let path = create(&folder, "disk.qcow2", 1 << 20, "");
    done(&["bitmap", "--add", text(&path), "backup"]);
    let autoclear = || Anatomy::of(&path).long(88);
    assert_eq!(autoclear(), 1);
    drop(open(BlkConfig { read_only: true, ..disk(&path) }).unwrap());
    assert_eq!(autoclear(), 1);
    let mut rig = Rig::new(open(disk(&path)).unwrap());
    assert_eq!(autoclear(), 0);
    assert_eq!(rig.status(blk::T_OUT, 0, &[7; 512]), blk::S_OK);
    drop(rig);
    // 3: it has leaked clusters, those of the bitmap, and no errors.
    let output = qemu_img(&["check", "-q", "-f", "qcow2", text(&path)]);
    assert_eq!(output.status.code(), Some(3), "{output:?}");
}

/// An internal snapshot keeps its contents.
///
/// Clusters that are shared with it are copied before they are written.
#[test]
fn snapshots_keep_what_they_had() {
    let Some(folder) = folder("snapshots_keep_what_they_had") else { return };
    for options in ["", "cluster_size=4k", "compat=0.10"] {
        let path = create(&folder, "disk.qcow2", 4 << 20, options);
        let data = pattern(64 * 512, 3);
        let mut rig = Rig::new(open(disk(&path)).unwrap());
        assert_eq!(rig.status(blk::T_OUT, 100, &data), blk::S_OK);
        drop(rig);
        done(&["snapshot", "-c", "before", text(&path)]);
        let mut rig = Rig::new(open(disk(&path)).unwrap());
        assert_eq!(rig.status(blk::T_OUT, 110, &[9; 1024]), blk::S_OK);
        assert_eq!(rig.status(blk::T_DISCARD, 0, &range(128, 128, 0)), blk::S_OK);
        drop(rig);
        check(&path);
        done(&["snapshot", "-a", "before", text(&path)]);
        let mut rig = Rig::new(open(disk(&path)).unwrap());
        assert_eq!(rig.read(100, data.len()), data, "{options}");
        drop(rig);
        check(&path);
    }
}

/// The file serves the successor of a killed process, without a flush.
#[test]
fn what_is_complete_is_there_after_a_kill() {
    let Some(folder) = folder("what_is_complete_is_there_after_a_kill") else { return };
    let path = create(&folder, "disk.qcow2", 8 << 20, "");
    let mut rig = Rig::new(open(disk(&path)).unwrap());
    let killed = |mut expected: Vec<(u64, Vec<u8>)>| {
        // As the file is now, and not as it is left behind.
        let copy = folder.path().join("copy.qcow2");
        std::fs::copy(&path, &copy).unwrap();
        check_crashed(&copy);
        let mut after = Rig::new(open(disk(&copy)).unwrap());
        for (sector, data) in expected.drain(..) {
            assert!(after.read(sector, data.len()) == data, "sector {sector}");
        }
        drop(after);
        check(&copy);
    };
    let data = pattern(64 * 512, 3);
    assert_eq!(rig.status(blk::T_OUT, 64, &data), blk::S_OK);
    killed(vec![(64, data.clone())]);
    assert_eq!(rig.status(blk::T_WRITE_ZEROES, 0, &range(0, 128, 1)), blk::S_OK);
    assert_eq!(rig.status(blk::T_OUT, 8000, &data), blk::S_OK);
    killed(vec![(0, vec![0; 128 * 512]), (8000, data)]);
}
