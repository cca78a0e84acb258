//! Guests keep the disk that they were told of: take-overs, restarts with a holder.
use crate::daemon::{Daemon, Folder, assert_refused, paravane, status, without_sandbox};
use crate::driver::Driver;
use crate::kill::Kept;
use crate::load::{SIZE, wish};
use rustix::process::Signal;
use std::fs::File;

/// A file with one disk, with these keys more.
fn file(folder: &Folder, keys: &str) -> String {
    let disk = "[[blk]]\nname = \"a\"\nimage = \"a.img\"\nsocket = \"a.sock\"\n";
    folder.write("d.toml", &format!("{disk}{keys}\n"))
}

fn resize(folder: &Folder, size: usize) {
    File::options().write(true).open(folder.path("a.img")).unwrap().set_len(size as u64).unwrap();
}

fn block(driver: &Driver) -> u32 {
    u32::from(driver.transport.get_config().unwrap().blk_size)
}

fn capacity(driver: &Driver) -> u64 {
    u64::from(driver.transport.get_config().unwrap().capacity) * 512
}

/// What [`Driver::write_once`] writes.
fn written(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|at| seed.wrapping_add(at as u8)).collect()
}

#[test]
fn a_take_over_that_would_change_the_disk_of_a_guest_is_refused() {
    let folder = Folder::new();
    folder.image("a.img");
    let (path, control) = (file(&folder, "queues = 2\nblock-size = 1024"), folder.text("control"));
    let mut daemon = Some(Daemon::start(&["--config", &path, "--control", &control]));
    let take_over = || {
        let mut command = paravane();
        let arguments = ["serve", "--config", &path, "--control", &control, "--take-over"];
        command.args(arguments).args(without_sandbox());
        command
    };
    let mut driver = Driver::connect(&folder.path("a.sock"), wish(true, true, 2)).unwrap();
    assert_eq!(block(&driver), 1024);
    for (keys, size, differs) in [
        ("queues = 1", SIZE, "queues: 2 for the guest, 1 here"),
        ("queues = 2\nqueue-size = 64", SIZE, "segments of a request: 126 for the guest, 62 here"),
        ("queues = 2\nread-only = true", SIZE, "read-only: false for the guest, true here"),
        ("queues = 2\nblock-size = 512", SIZE, "block size: 1024 for the guest, 512 here"),
        ("queues = 2\nno-packed = true", SIZE, "packed queues: in use for the guest, not offered here"),
        ("queues = 2", SIZE / 2, "size: 1048576 for the guest, 524288 here"),
        ("queues = 2", SIZE / 2 + 512, "not a multiple of 1024"),
    ] {
        file(&folder, keys);
        resize(&folder, size);
        let output = take_over().output().unwrap();
        resize(&folder, SIZE);
        assert_refused(&output, differs);
        assert_refused(&output, "device a");
        // The running daemon serves on.
        assert_eq!(driver.write_once(0, 4096, 7), 0, "{differs}");
        assert!(driver.read_once(0, 1024).unwrap() == written(7, 1024));
    }
    // The guest keeps its blocks, and is told of what has been added.
    file(&folder, "queues = 2");
    resize(&folder, 2 * SIZE);
    let mut new = Daemon::spawn(&mut take_over());
    new.wait_for("ready");
    let (ended, log) = daemon.take().unwrap().wait();
    assert!(ended.success(), "{log:?}");
    assert_eq!((block(&driver), capacity(&driver)), (1024, 2 * SIZE as u64));
    assert!(driver.read_once(0, 1024).unwrap() == written(7, 1024));
    assert_eq!(driver.write_once(SIZE, 4096, 8), 0);
}

#[test]
fn a_disk_that_no_guest_has_seen_may_be_taken_over_changed() {
    let folder = Folder::new();
    folder.image("a.img");
    let (path, control) = (file(&folder, "queues = 2\nblock-size = 4096"), folder.text("control"));
    let old = Daemon::start(&["--config", &path, "--control", &control]);
    file(&folder, "");
    let arguments = ["serve", "--config", &path, "--control", &control, "--take-over"];
    let mut new = Daemon::spawn(paravane().args(arguments).args(without_sandbox()));
    new.wait_for("ready");
    assert!(old.wait().0.success());
    let driver = Driver::connect(&folder.path("a.sock"), wish(false, true, 1)).unwrap();
    assert_eq!(block(&driver), 512);
}

#[test]
fn a_snapshot_keeps_the_block_size() {
    let folder = Folder::new();
    let (image, socket, control) = (folder.image("a.img"), folder.text("s"), folder.text("control"));
    let place = ["blk", "--socket", &socket, "--control", &control];
    let daemon = Daemon::start(&[&place[..], &["--image", &image, "--block-size", "4096"]].concat());
    let overlay = folder.text("a.qcow2");
    let arguments = ["disk", "snapshot", "blk", &overlay, "--pause-limit", "30s", "--control", &control];
    let output = paravane().args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut driver = Driver::connect(&folder.path("s"), wish(false, true, 1)).unwrap();
    assert_eq!((block(&driver), driver.write_once(4096, 4096, 7)), (4096, 0));
    drop(driver);
    assert!(daemon.end().0.success());
    // As it is printed.
    let text = String::from_utf8(output.stdout).unwrap();
    let line = text.lines().find(|line| line.starts_with("  --image ")).unwrap();
    let printed: Vec<&str> = line.split_whitespace().collect();
    let daemon = Daemon::start(&[&place[..], &printed].concat());
    let mut driver = Driver::connect(&folder.path("s"), wish(false, true, 1)).unwrap();
    assert_eq!(block(&driver), 4096, "{line}");
    assert!(driver.read_once(4096, 4096).unwrap() == written(7, 4096));
    drop((driver, daemon));
}

#[test]
fn a_session_that_is_resumed_has_the_same_disk() {
    let image = |folder: &Folder, keys: &str| {
        folder.image("a.img");
        format!("image = \"a.img\"\n{keys}")
    };
    let folder = Folder::new();
    let keys = image(&folder, "block-size = 2048\n");
    let kept = Kept::with_keys(folder, "", &["a"], |_| keys.clone());
    let text = std::fs::read_to_string(kept.folder.path("d.toml")).unwrap();
    let daemon = kept.start();
    let mut driver = Driver::connect(&kept.socket("a"), wish(false, true, 2)).unwrap();
    assert_eq!(driver.write_once(0, 4096, 7), 0);
    daemon.signal(Signal::KILL);
    drop(daemon.wait());
    let alone = text.replace("[[rng]]\nname = \"r\"\nsocket = \"r.sock\"\n", "");
    assert_ne!(alone, text);
    for (change, differs) in [
        (alone.replace("queues = 2", "queues = 1"), "queues: 2 for the guest, 1 here"),
        (alone.replace("2048", "512"), "block size: 2048 for the guest, 512 here"),
        (alone.replace("block-size", "read-only = true\nblock-size"), "read-only: false for the guest"),
    ] {
        kept.folder.write("d.toml", &change);
        let (ended, log) = kept.spawn(&[]).wait();
        assert_eq!(ended.code(), Some(2), "{log:?}");
        assert!(log.iter().any(|line| line.contains(differs)), "{differs:?} is not in {log:?}");
    }
    // Another device of the file is served, and the session waits.
    kept.folder.write("d.toml", &text.replace("queues = 2", "queues = 1"));
    let daemon = kept.start();
    let report = status(&kept.control);
    let failed = &report["failed"][0];
    assert_eq!((&failed["name"], &failed["kept"]), (&"a".into(), &true.into()), "{report}");
    assert!(failed["why"].as_str().unwrap().contains("queues: 2 for the guest, 1 here"), "{report}");
    kept.folder.write("d.toml", &text.replace("block-size = 2048\n", ""));
    daemon.signal(Signal::HUP);
    assert_eq!(block(&driver), 2048);
    assert!(driver.read_once(0, 2048).unwrap() == written(7, 2048));
    assert_eq!(driver.write_once(2048, 2048, 8), 0);
    drop((driver, daemon));
}
