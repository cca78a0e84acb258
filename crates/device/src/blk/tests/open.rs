//! Opening an image: refusals, and that they change nothing.
use super::super::{OpenError, OpenReason};
use super::*;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::time::Duration;

fn open(path: &Path) -> Result<Blk, OpenError> {
    Blk::open(BlkConfig::new(path))
}

fn open_read_only(path: &Path) -> Result<Blk, OpenError> {
    Blk::open(BlkConfig { read_only: true, ..BlkConfig::new(path) })
}

#[test]
fn a_missing_file_is_refused_and_not_made() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("missing.img");
    match open(&path) {
        Err(OpenError { reason: OpenReason::Os { source, .. }, .. }) => {
            assert_eq!(source.kind(), std::io::ErrorKind::NotFound)
        }
        other => panic!("{other:?}"),
    }
    assert!(!path.exists());
}

#[test]
fn a_directory_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    assert!(matches!(open(folder.path()), Err(OpenError { reason: OpenReason::Directory, .. })));
    assert!(matches!(open_read_only(folder.path()), Err(OpenError { reason: OpenReason::Directory, .. })));
}

#[test]
fn what_is_no_file_is_refused_without_waiting() {
    let folder = tempfile::tempdir().unwrap();
    let fifo = folder.path().join("fifo");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let socket = folder.path().join("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    for path in [fifo.as_path(), socket.as_path(), Path::new("/dev/null")] {
        assert!(matches!(open(path), Err(OpenError { reason: OpenReason::Kind, .. })), "{path:?}");
        assert!(matches!(open_read_only(path), Err(OpenError { reason: OpenReason::Kind, .. })), "{path:?}");
    }
}

#[test]
fn half_a_sector_is_refused() {
    for size in [1, 511, 513, 1000] {
        let file = image(&vec![7; size]);
        match open(file.path()) {
            Err(OpenError { reason: OpenReason::Size { size: found, .. }, .. }) => {
                assert_eq!(found, size as u64)
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(content(&file), vec![7; size]);
    }
}

#[test]
fn an_empty_file_is_refused() {
    let file = image(&[]);
    assert!(matches!(open(file.path()), Err(OpenError { reason: OpenReason::Empty, .. })));
}

#[test]
fn no_permission_is_refused() {
    let file = image(&[0; 512]);
    std::fs::set_permissions(file.path(), std::fs::Permissions::from_mode(0o400)).unwrap();
    let path = file.path().to_owned();
    let refused = |result: Result<Blk, OpenError>| match result {
        Err(OpenError { reason: OpenReason::Os { source, .. }, .. }) => {
            assert_eq!(source.kind(), std::io::ErrorKind::PermissionDenied);
        }
        other => panic!("{other:?}"),
    };
    // Permissions do not bind root, so this thread becomes nobody as far as files are concerned.
    let is_root = rustix::process::geteuid().is_root();
    std::thread::spawn(move || {
        if is_root {
            // SAFETY: only changes what this thread may do with files.
            unsafe { libc::setfsuid(65534) };
        }
        refused(open(&path));
        if is_root {
            refused(open_read_only(&path));
        }
    })
    .join()
    .unwrap();
}

#[test]
fn a_second_writer_is_refused() {
    let file = image(&[0; 512]);
    let first = open(file.path()).unwrap();
    assert!(matches!(open(file.path()), Err(OpenError { reason: OpenReason::InUse, .. })));
    assert!(matches!(open_read_only(file.path()), Err(OpenError { reason: OpenReason::InUse, .. })));
    // A POSIX lock would be lost here: this process opens and closes the file.
    drop(content(&file));
    assert!(matches!(open(file.path()), Err(OpenError { reason: OpenReason::InUse, .. })));
    let verifier = first.image().unwrap();
    drop(first);
    assert!(
        matches!(open(file.path()), Err(OpenError { reason: OpenReason::RequestsInFlight, .. })),
        "the second descriptor has the lock too, and seems to be a dead process's"
    );
    drop(verifier);
    open(file.path()).unwrap();
}

#[test]
fn a_dead_process_may_seem_to_live_for_a_moment() {
    let file = image(&[0; 512]);
    let first = open(file.path()).unwrap();
    let requests = first.image().unwrap();
    // As a child process has it between fork and exec.
    let copy = first.current.image().file.guards.process().unwrap().try_clone().unwrap();
    drop(first);
    let child = std::thread::spawn(|| {
        std::thread::sleep(Duration::from_millis(20));
        drop(copy);
    });
    assert!(matches!(open(file.path()), Err(OpenError { reason: OpenReason::RequestsInFlight, .. })));
    drop(requests);
    child.join().unwrap();
}

#[test]
fn readers_share() {
    let file = image(&[0; 512]);
    let _first = open_read_only(file.path()).unwrap();
    let _second = open_read_only(file.path()).unwrap();
    assert!(matches!(open(file.path()), Err(OpenError { reason: OpenReason::InUse, .. })));
}

#[test]
fn who_asks_for_no_lock_has_none_and_minds_none() {
    let file = image(&[0; 512]);
    let unlocked = || Blk::open(BlkConfig { lock: false, ..BlkConfig::new(file.path()) });
    let locked = open(file.path()).unwrap();
    let _one = unlocked().unwrap();
    let _two = unlocked().unwrap();
    drop(locked);
    open(file.path()).unwrap();
}

#[test]
fn another_process_is_refused() {
    const IMAGE: &str = "PARAVANE_TEST_LOCKED_IMAGE";
    if let Some(path) = std::env::var_os(IMAGE) {
        // This is the other process.
        let refused = matches!(open(Path::new(&path)), Err(OpenError { reason: OpenReason::InUse, .. }));
        std::process::exit(if refused { 42 } else { 43 });
    }
    let file = image(&[0; 512]);
    let other = || {
        std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "blk::tests::open::another_process_is_refused"])
            .env(IMAGE, file.path())
            .output()
            .unwrap()
            .status
            .code()
    };
    let disk = open(file.path()).unwrap();
    assert_eq!(other(), Some(42));
    drop(disk);
    assert_eq!(other(), Some(43));
}

#[test]
fn a_process_that_has_ended_holds_no_lock() {
    use crate::Device;
    const IMAGE: &str = "PARAVANE_TEST_ABANDONED_IMAGE";
    if let Some(path) = std::env::var_os(IMAGE) {
        // This is the other process: it ends without taking anything down.
        let mut disk = open(Path::new(&path)).unwrap();
        let _handler = disk.start_queue(0, disk.features()).unwrap();
        std::process::exit(42);
    }
    let file = image(&[0; 512]);
    for _ in 0..10 {
        let other = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "blk::tests::open::a_process_that_has_ended_holds_no_lock"])
            .env(IMAGE, file.path())
            .output()
            .unwrap();
        assert_eq!(other.status.code(), Some(42));
        drop(open(file.path()).unwrap());
    }
}

#[test]
fn opening_changes_nothing() {
    let before = pattern(4096, 1);
    let file = image(&before);
    let metadata = file.path().metadata().unwrap();
    for way in ways("opening_changes_nothing") {
        drop(Blk::open(config(&file, way)).unwrap());
    }
    let after = file.path().metadata().unwrap();
    assert_eq!(content(&file), before);
    assert_eq!((metadata.mtime(), metadata.mtime_nsec()), (after.mtime(), after.mtime_nsec()));
    assert_eq!((metadata.ctime(), metadata.ctime_nsec()), (after.ctime(), after.ctime_nsec()));
    assert_eq!(metadata.blocks(), after.blocks());
}

#[test]
fn a_read_only_disk_has_a_read_only_descriptor() {
    let file = image(&[0; 512]);
    let disk = open_read_only(file.path()).unwrap();
    let flags = rustix::fs::fcntl_getfl(disk.image().unwrap()).unwrap();
    assert_eq!(flags & rustix::fs::OFlags::RWMODE, rustix::fs::OFlags::RDONLY);
    assert!(!flags.contains(rustix::fs::OFlags::NONBLOCK));
}

/// A lock that is about to be released is waited for.
#[test]
fn a_lock_that_goes_away_soon_is_no_obstacle() {
    let file = image(&[0; 512]);
    let first = open(file.path()).unwrap();
    let closer = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(50));
        drop(first);
    });
    open(file.path()).expect("half a second is enough");
    closer.join().unwrap();
}
