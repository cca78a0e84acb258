//! Snapshots between random requests, with requests in flight, and such as are not taken.
use super::model::{DISK, Model, Op, op};
use super::*;
use crate::Device;
use crate::blk::clear_overlay_mark;
use crate::blk::tests::qcow2::{check, compare, done, folder, text};
use crate::blk::{
    FileId, Format, ImageId, Layer, LayerSource, OVERLAY_MARK, OpenError, OpenReason, Overlay, OverlayBase,
    Snapshot, SnapshotError, Snapshots,
};
use proptest::prelude::*;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;
use tempfile::TempDir;

/// Longer than any test waits.
const PATIENCE: Duration = Duration::from_secs(60);

/// An overlay as another process makes and sends it.
fn overlay(path: &Path, base: &OverlayBase) -> Overlay {
    let made = Overlay::create(path, base).unwrap();
    let files: Vec<OwnedFd> =
        made.files().into_iter().map(|file| file.try_clone_to_owned().unwrap()).collect();
    assert_eq!(files.len(), 2);
    drop(made);
    Overlay::received(files, path).unwrap()
}

/// Takes a snapshot while the queue is served.
fn take(rig: &mut Rig<Blk>, snapshots: &Snapshots, path: &Path) -> Result<Snapshot, SnapshotError> {
    let base = snapshots.base().unwrap();
    let overlay = overlay(path, &base);
    std::thread::scope(|scope| {
        let taking = scope.spawn(|| snapshots.take(overlay, base.id, PATIENCE));
        while !taking.is_finished() {
            rig.serve().unwrap();
            rig.handler.rest(true);
            std::thread::yield_now();
        }
        taking.join().unwrap()
    })
}

fn layer(path: &Path, format: Format) -> Layer {
    Layer { source: LayerSource::Path(path.to_owned()), format }
}

fn assert_agrees(model: &Model, bytes: &[u8]) {
    for (at, byte) in bytes.iter().enumerate() {
        assert!(model.unknown[at] || model.bytes[at] == *byte, "byte {at}");
    }
}

/// The disk in a qcow2 image and what it is based on, as QEMU reads it.
fn read_chain(folder: &TempDir, path: &Path) -> Vec<u8> {
    let raw = folder.path().join("converted.raw");
    done(&["convert", "-U", "-f", "qcow2", "-O", "raw", text(path), text(&raw)]);
    std::fs::read(&raw).unwrap()
}

/// Runs requests with a snapshot before each part but the first one.
fn freezes(way: Way, parts: &[Vec<Op>], format: Format) {
    let Some(folder) = folder("freezes") else { return };
    let path = folder.path().join("disk.img");
    let mut model = Model { bytes: vec![0; DISK], unknown: vec![false; DISK] };
    match format {
        Format::Raw => {
            model.bytes = pattern(DISK, 1);
            std::fs::write(&path, &model.bytes).unwrap();
        }
        Format::Qcow2 => done(&["create", "-q", "-f", "qcow2", text(&path), &DISK.to_string()]),
    }
    let disk = Blk::open(BlkConfig { format, ..config_at(&path, way) }).unwrap();
    let snapshots = disk.snapshots();
    let mut rig = Rig::new(disk);
    let mut frozen = Vec::new();
    for (number, ops) in parts.iter().enumerate() {
        if number > 0 {
            let path = folder.path().join(format!("overlay-{number}.qcow2"));
            let below = rig.read(0, DISK);
            assert_agrees(&model, &below);
            let snapshot = take(&mut rig, &snapshots, &path).unwrap();
            assert_eq!((snapshot.queues, &snapshot.unsynced), (1, &None));
            assert_eq!(snapshots.image(), path);
            frozen.push((snapshot.base, below));
        }
        for op in ops {
            model.apply(op, &mut rig);
        }
    }
    let end = rig.read(0, DISK);
    assert_agrees(&model, &end);
    assert_eq!(rig.status(blk::T_FLUSH, 0, &[]), blk::S_OK);
    drop(rig);
    let top = snapshots.image();
    drop(snapshots);
    for (number, (path, below)) in frozen.iter().enumerate() {
        match (number, format) {
            (0, Format::Raw) => assert!(std::fs::read(path).unwrap() == *below, "the base was written to"),
            _ => {
                check(path);
                assert!(read_chain(&folder, path) == *below, "{} was written to", path.display());
            }
        }
    }
    check(&top);
    compare(&top, &end);
    // As the next process opens it.
    let mut layers: Vec<Layer> = frozen.iter().rev().map(|(path, _)| layer(path, Format::Qcow2)).collect();
    if let Some(last) = layers.last_mut() {
        last.format = format;
    }
    if !frozen.is_empty() {
        let config = BlkConfig { format: Format::Qcow2, backing: layers, ..BlkConfig::new(&top) };
        let mut again = Rig::new(Blk::open(config).unwrap());
        assert!(again.read(0, DISK) == end);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 6, ..ProptestConfig::default() })]

    #[test]
    fn a_snapshot_is_the_disk_at_its_moment(
        parts in prop::collection::vec(prop::collection::vec(op(), 1..12), 2..5)
    ) {
        for way in ways("a_snapshot_is_the_disk_at_its_moment") {
            freezes(way, &parts, Format::Raw);
        }
        for engine in [EngineChoice::Auto, EngineChoice::Threads, EngineChoice::Immediate] {
            freezes(engine.into(), &parts, Format::Qcow2);
        }
    }
}

fn frozen_by(path: &Path) -> Option<PathBuf> {
    match Blk::open(BlkConfig::new(path)) {
        Err(OpenError { reason: OpenReason::Frozen { overlay, .. }, .. }) => Some(overlay),
        other => panic!("the image is not frozen: {other:?}"),
    }
}

#[test]
fn the_image_below_is_shared_and_marked() {
    let Some(folder) = folder("the_image_below_is_shared_and_marked") else { return };
    let base = folder.path().join("base.img");
    let content = pattern(DISK, 3);
    std::fs::write(&base, &content).unwrap();
    let disk = Blk::open(BlkConfig::new(&base)).unwrap();
    let snapshots = disk.snapshots();
    let below = snapshots.base().unwrap();
    let id = ImageId { file: FileId::at(&base).ok(), generation: 0 };
    assert_eq!(below, OverlayBase { path: base.clone(), format: Format::Raw, size: DISK as u64, id });
    let mut rig = Rig::new(disk);
    let (one, other) = (folder.path().join("one.qcow2"), folder.path().join("other.qcow2"));
    Overlay::create_file(&other, &below).unwrap();
    let again = Overlay::create_file(&other, &below).unwrap_err();
    assert!(again.to_string().contains("exists"), "{again}");
    let on_base = |path: &Path| BlkConfig {
        format: Format::Qcow2,
        backing: vec![layer(&base, Format::Raw)],
        ..BlkConfig::new(path)
    };
    assert!(
        matches!(Blk::open(on_base(&other)), Err(OpenError { reason: OpenReason::InUse, .. })),
        "its base is written to"
    );
    let snapshot = take(&mut rig, &snapshots, &one).unwrap();
    // A fork, by another guest.
    let mut fork = Rig::new(Blk::open(on_base(&other)).unwrap());
    assert_eq!(fork.status(blk::T_OUT, 0, &[7; 512]), blk::S_OK);
    assert_eq!(rig.status(blk::T_OUT, 1, &[8; 512]), blk::S_OK);
    assert_eq!(rig.read(0, 1024), [&content[..512], &[8; 512]].concat());
    assert_eq!(fork.read(0, 1024), [&[7; 512], &content[512..1024]].concat());
    assert!(std::fs::read(&base).unwrap() == content);
    if snapshot.is_marked {
        assert_eq!(frozen_by(&base), Some(one));
        drop((rig, fork, snapshots));
        assert!(frozen_by(&base).is_some(), "also when nobody has it open");
        clear_overlay_mark(&std::fs::File::open(&base).unwrap());
        Blk::open(BlkConfig::new(&base)).unwrap();
    } else {
        skipped("the_image_below_is_shared_and_marked: the mark", "no extended attributes of users here");
    }
}

#[test]
fn requests_in_flight_are_waited_for_and_a_timeout_changes_nothing() {
    let Some(folder) = folder("requests_in_flight_are_waited_for") else { return };
    let base = folder.path().join("base.img");
    std::fs::write(&base, vec![0; DISK]).unwrap();
    let disk = Blk::open(config_at(&base, EngineChoice::Threads)).unwrap();
    let (snapshots, features) = (disk.snapshots(), disk.features());
    let orders = Arc::new(Mutex::new(Orders::default()));
    let handler = held_handler(&disk, orders.clone(), features);
    let mut rig = Rig::with_handler(disk, features, Box::new(handler));
    let write = |rig: &mut Rig<Blk>, number: u64| {
        rig.poke(HEADER + number * 16, &header(blk::T_OUT, number));
        rig.poke(PAYLOAD + number * 512, &[1 + number as u8; 512]);
        let readable = [segment(HEADER + number * 16, 16), segment(PAYLOAD + number * 512, 512)];
        rig.add(&readable, &[segment(STATUS + number, 1)]);
    };
    write(&mut rig, 0);
    assert_eq!(rig.serve().unwrap().taken, 1);
    let path = folder.path().join("overlay.qcow2");
    let late = overlay(&path, &snapshots.base().unwrap());
    // The host does nothing: no wait is long enough.
    let limit = Duration::from_millis(20);
    let error = std::thread::scope(|scope| {
        let taking = scope.spawn(|| snapshots.take(late, snapshots.image_id(), limit));
        while !taking.is_finished() {
            assert_eq!(rig.serve().unwrap().completed, 0);
        }
        taking.join().unwrap().unwrap_err()
    });
    assert!(matches!(error, SnapshotError::Timeout(_)), "{error}");
    assert_eq!(snapshots.image(), base);
    assert_eq!(rustix::fs::getxattr(&base, OVERLAY_MARK, &mut [0; 0][..]).ok(), None);
    // The queue takes requests again.
    write(&mut rig, 1);
    assert_eq!(rig.serve().unwrap().taken, 1);
    std::fs::remove_file(&path).unwrap();
    let next = overlay(&path, &snapshots.base().unwrap());
    let snapshot = std::thread::scope(|scope| {
        let taking = scope.spawn(|| snapshots.take(next, snapshots.image_id(), PATIENCE));
        // Held: what is available stays so.
        while rig.handler.rest(false).kicks() {
            rig.serve().unwrap();
        }
        write(&mut rig, 2);
        assert_eq!(rig.serve().unwrap(), crate::Served::default());
        assert!(!taking.is_finished(), "two writes are in flight");
        // The host goes on.
        orders.lock().unwrap().prompt = true;
        let mut served = 0;
        while !taking.is_finished() || served < 3 {
            served += rig.serve().unwrap().completed;
        }
        taking.join().unwrap().unwrap()
    });
    assert_eq!((snapshot.queues, snapshots.image()), (1, path));
    assert_eq!(rig.peek(STATUS, 3), [blk::S_OK; 3]);
    let below = std::fs::read(&base).unwrap();
    let expected = |count: u8| (1..=count).flat_map(|byte| [byte; 512]).collect::<Vec<u8>>();
    assert!(below[..1536] == [expected(2), vec![0; 512]].concat(), "the third write is after the snapshot");
    while rig.driver.pop_used().unwrap().is_some() {}
    assert!(rig.read(0, 1536) == expected(3));
}

#[test]
fn a_disk_without_queues_has_snapshots_and_grows_afterwards() {
    let Some(folder) = folder("a_disk_without_queues_has_snapshots") else { return };
    let base = folder.path().join("base.img");
    std::fs::write(&base, pattern(DISK, 9)).unwrap();
    let disk = Blk::open(config_at(&base, EngineChoice::Threads)).unwrap();
    let (snapshots, mut resizer) = (disk.snapshots(), disk.resizer());
    let path = folder.path().join("overlay.qcow2");
    let snapshot =
        snapshots.take(overlay(&path, &snapshots.base().unwrap()), snapshots.image_id(), PATIENCE).unwrap();
    assert_eq!((snapshot.queues, snapshot.base), (0, base.clone()));
    assert!(resizer.resize(2 * DISK as u64).unwrap());
    assert_eq!(disk.size(), 2 * DISK as u64);
    let mut rig = Rig::new(disk);
    assert!(rig.read(0, 2 * DISK) == [pattern(DISK, 9), vec![0; DISK]].concat());
    assert_eq!(std::fs::metadata(&base).unwrap().len(), DISK as u64);
}

#[test]
fn what_cannot_be_a_base_is_refused_and_so_is_a_wrong_overlay() {
    let Some(folder) = folder("what_cannot_be_a_base_is_refused") else { return };
    let file = image(&[0; DISK]);
    let read_only = Blk::open(BlkConfig { read_only: true, ..config(&file, EngineChoice::Threads) }).unwrap();
    assert!(matches!(read_only.snapshots().base(), Err(SnapshotError::ReadOnly)));
    drop(read_only);
    let unlocked = Blk::open(BlkConfig { lock: false, ..config(&file, EngineChoice::Threads) }).unwrap();
    assert!(matches!(unlocked.snapshots().base(), Err(SnapshotError::Unlocked)));
    drop(unlocked);
    let disk = Blk::open(config(&file, EngineChoice::Threads)).unwrap();
    let snapshots = disk.snapshots();
    let base = snapshots.base().unwrap();
    let small = overlay(&folder.path().join("small.qcow2"), &OverlayBase { size: 512, ..base.clone() });
    let error = snapshots.take(small, base.id, PATIENCE).unwrap_err();
    assert!(matches!(error, SnapshotError::Size { overlay: 512, disk } if disk == DISK as u64), "{error}");
    // No qcow2 image.
    let raw = image(&[7; 4096]);
    let files = vec![OwnedFd::from(raw.reopen().unwrap())];
    let error = snapshots.take(Overlay::received(files, raw.path()).unwrap(), base.id, PATIENCE).unwrap_err();
    assert!(
        matches!(error, SnapshotError::Overlay(OpenError { reason: OpenReason::Header { .. }, .. })),
        "{error}"
    );
    assert!(Overlay::received(Vec::new(), raw.path()).is_err());
    // Not locked by us.
    let locked = folder.path().join("locked.qcow2");
    let _owner = Overlay::create(&locked, &base).unwrap();
    let stranger = std::fs::File::options().read(true).write(true).open(&locked).unwrap();
    let error = Overlay::received(vec![stranger.into()], &locked).unwrap_err();
    assert!(matches!(error, OpenError { reason: OpenReason::InUse, .. }), "{error}");
    assert_eq!(snapshots.image(), file.path());
    let mut rig = Rig::new(disk);
    assert_eq!(rig.status(blk::T_OUT, 0, &[1; 512]), blk::S_OK);
}

#[test]
fn an_overlay_for_an_earlier_image_is_refused() {
    let Some(folder) = folder("an_overlay_for_an_earlier_image_is_refused") else { return };
    let base = folder.path().join("base.img");
    std::fs::write(&base, pattern(DISK, 3)).unwrap();
    let disk = Blk::open(BlkConfig::new(&base)).unwrap();
    let snapshots = disk.snapshots();
    let mut rig = Rig::new(disk);
    // Two clients hear of the same image.
    let (one, other) = (snapshots.base().unwrap(), snapshots.base().unwrap());
    let paths = ["one.qcow2", "other.qcow2"].map(|name| folder.path().join(name));
    let late = overlay(&paths[1], &other);
    take(&mut rig, &snapshots, &paths[0]).unwrap();
    assert_eq!(rig.status(blk::T_OUT, 0, &[7; 512]), blk::S_OK);
    let error = snapshots.take(late, other.id, PATIENCE).unwrap_err();
    assert!(matches!(error, SnapshotError::Changed), "{error}");
    assert_eq!((snapshots.image(), rig.read(0, 512)), (paths[0].clone(), vec![7; 512]));
    // Nor one for another file, or another number.
    for id in [
        one.id,
        ImageId { file: FileId::at(&base).ok(), ..snapshots.image_id() },
        ImageId { generation: 0, ..snapshots.image_id() },
    ] {
        let path = folder.path().join("third.qcow2");
        let error = snapshots.take(overlay(&path, &snapshots.base().unwrap()), id, PATIENCE).unwrap_err();
        assert!(matches!(error, SnapshotError::Changed), "{error}");
        std::fs::remove_file(path).unwrap();
    }
    take(&mut rig, &snapshots, &folder.path().join("third.qcow2")).unwrap();
}

/// A process waits for the lock of an image while its owner takes a snapshot and ends.
#[test]
fn an_image_that_was_frozen_before_its_lock_was_there_is_refused() {
    const TEST: &str = "an_image_that_was_frozen_before_its_lock_was_there_is_refused";
    let Some(folder) = folder(TEST) else { return };
    let base = folder.path().join("base.img");
    std::fs::write(&base, pattern(DISK, 3)).unwrap();
    let disk = Blk::open(BlkConfig::new(&base)).unwrap();
    let snapshots = disk.snapshots();
    let waiting = Blk::prepare(BlkConfig::new(&base)).unwrap();
    let shared = Blk::prepare(BlkConfig { read_only: true, ..BlkConfig::new(&base) }).unwrap();
    let path = folder.path().join("overlay.qcow2");
    let snapshot =
        snapshots.take(overlay(&path, &snapshots.base().unwrap()), snapshots.image_id(), PATIENCE).unwrap();
    drop((disk, snapshots));
    if !snapshot.is_marked {
        return skipped(TEST, "no extended attributes of users here");
    }
    assert!(
        matches!(waiting.lock(), Err(OpenError { reason: OpenReason::Frozen { overlay, .. }, .. }) if overlay == path)
    );
    assert!(matches!(shared.lock(), Ok(Ok(_))), "a backing file is read");
}

#[test]
fn an_image_that_was_replaced_before_its_lock_was_there_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (path, other) = (folder.path().join("vm.img"), folder.path().join("new.img"));
    std::fs::write(&path, [1; 512]).unwrap();
    std::fs::write(&other, [2; 512]).unwrap();
    let prepare = || Blk::prepare(BlkConfig::new(&path)).unwrap();
    assert!(matches!(prepare().lock(), Ok(Ok(_))));
    let first = prepare();
    std::fs::rename(&other, &path).unwrap();
    assert!(matches!(first.lock(), Err(OpenError { reason: OpenReason::Replaced, .. })));
    let second = prepare();
    std::fs::remove_file(&path).unwrap();
    assert!(matches!(second.lock(), Err(OpenError { reason: OpenReason::Deleted, .. })));
}
