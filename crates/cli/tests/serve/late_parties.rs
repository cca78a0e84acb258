//! Parties that decide by what they were told, and act when it is not true any more.
//!
//! A client of a snapshot that stalls, a daemon that takes over or waits for a lock: beside snapshots,
//! reloads, take-overs and the end of the daemon.
use crate::daemon::{Daemon, Folder, assert_refused, paravane, patience, skip, status, without_sandbox};
use crate::driver::{Driver, Random};
use crate::load::{self, SIZE};
use crate::snapshot::{Chain, disk, has_marks, snapshot, take};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::Signal;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

/// A connection whose own end has a name: it asks for more than a report.
pub(crate) fn connect(control: &str) -> UnixStream {
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
    let socket = socket.unwrap();
    rustix::net::bind(&socket, &SocketAddrUnix::new_unnamed()).unwrap();
    rustix::net::connect(&socket, &SocketAddrUnix::new(control).unwrap()).unwrap();
    let stream = UnixStream::from(socket);
    stream.set_read_timeout(Some(patience())).unwrap();
    stream
}

/// A message without descriptors, as it is on the wire.
pub(crate) fn message(stream: &mut UnixStream) -> Vec<u8> {
    let mut bytes = vec![0; 16];
    stream.read_exact(&mut bytes).unwrap();
    let length = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
    let (len, none) = (length(4) + length(8), length(12));
    assert_eq!(none, 0, "it has descriptors");
    bytes.resize(16 + len, 0);
    stream.read_exact(&mut bytes[16..]).unwrap();
    bytes
}

/// A client that has heard of the image, and stalls.
pub(crate) fn stalled(control: &str, device: &str) -> UnixStream {
    let mut stream = connect(control);
    writeln!(stream, "{{\"snapshot\": {{\"device\": {device:?}}}}}").unwrap();
    let base = String::from_utf8_lossy(&message(&mut stream)).into_owned();
    assert!(base.contains("\"base\""), "{base}");
    stream
}

/// Ends a client that stalls. The daemon has noticed, or has ended.
pub(crate) fn leave(mut stream: UnixStream) {
    let _ = stream.shutdown(Shutdown::Write);
    let _ = stream.read_to_end(&mut Vec::new());
}

/// A daemon with a disk, and a client of it.
struct Setup {
    folder: Folder,
    image: String,
    file: String,
    control: String,
    model: Vec<u8>,
    random: Random,
}

impl Setup {
    fn new() -> (Self, Daemon, Driver) {
        let folder = Folder::new();
        let image = folder.image("vm.img");
        let file = folder.write("d.toml", &disk("vm", &Chain::new(image.clone()).keys()));
        let control = folder.text("control");
        let daemon = Daemon::start(&["--config", &file, "--control", &control]);
        let driver = Driver::connect(&folder.path("vm.sock"), load::wish(false, true, 2)).unwrap();
        let mut setup = Self { folder, image, file, control, model: vec![0; SIZE], random: Random::new(1) };
        let mut driver = driver;
        setup.work(&mut driver);
        (setup, daemon, driver)
    }

    /// Writes and reads back.
    fn work(&mut self, driver: &mut Driver) {
        driver.exercise(&mut self.model, 50, &mut self.random);
    }

    /// Another daemon that takes over from the control socket `control`.
    fn next(&self, control: &str) -> Daemon {
        let arguments = ["serve", "--config", &self.file, "--control", control, "--take-over"];
        Daemon::spawn(paravane().args(arguments).args(without_sandbox()))
    }
}

#[test]
fn of_two_snapshots_of_a_disk_the_second_one_is_refused() {
    let (mut setup, daemon, mut driver) = Setup::new();
    let control = setup.control.clone();
    let first = stalled(&control, "vm");
    let (one, two) = (setup.folder.text("1.qcow2"), setup.folder.text("2.qcow2"));
    for command in [vec!["snapshot", "vm", &one], vec!["fork", "vm", &one, &two]] {
        assert_refused(&take(&control, &command), "another snapshot of the disk is being taken; try again");
    }
    assert!(!Path::new(&one).exists() && !Path::new(&two).exists());
    setup.work(&mut driver);
    drop(first);
    // The daemon notices the end of the first client in its own time.
    let begin = Instant::now();
    while !take(&control, &["snapshot", "vm", &one, "--pause-limit", "30s"]).status.success() {
        assert!(begin.elapsed() < patience());
    }
    let at_snapshot = std::fs::read(&setup.image).unwrap();
    setup.work(&mut driver);
    snapshot(&control, "vm", &two);
    setup.work(&mut driver);
    assert!(std::fs::read(&setup.image).unwrap() == at_snapshot);
    drop(driver);
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
}

#[test]
fn a_client_that_stalls_keeps_no_image_from_the_next_daemon_or_device() {
    let (mut setup, daemon, mut driver) = Setup::new();
    let control = setup.control.clone();
    let (mut first, mut new) = (stalled(&control, "vm"), setup.next(&control));
    new.wait_for("ready");
    let (ended, log) = daemon.wait();
    assert!(ended.success(), "{log:?}");
    // The same session.
    setup.work(&mut driver);
    assert_eq!(first.read(&mut [0]).unwrap_or(0), 0);
    // A reload that starts the device anew.
    let second = stalled(&control, "vm");
    let keys = Chain::new(setup.image.clone()).keys() + "serial = \"new\"\n";
    setup.folder.write("d.toml", &disk("vm", &keys));
    drop(driver);
    new.signal(Signal::HUP);
    new.wait_for("reloaded: 0 unchanged, 0 removed, 0 added, 0 failed, 1 restarted");
    let mut driver = Driver::connect(&setup.folder.path("vm.sock"), load::wish(true, true, 2)).unwrap();
    setup.work(&mut driver);
    drop((driver, second));
    let (ended, log) = new.end();
    assert!(ended.success(), "{log:?}");
    assert!(std::fs::read(&setup.image).unwrap() == setup.model);
}

#[test]
fn an_overlay_of_a_client_that_names_no_image_is_refused() {
    let (_setup, daemon, _driver) = {
        let (setup, daemon, driver) = Setup::new();
        let mut stream = stalled(&setup.control, "vm");
        let text = br#"{"overlay": {"path": "/nowhere", "pause_limit_us": 1000}}"#;
        let mut bytes = b"PVHO".to_vec();
        [text.len() as u32, 0, 0].iter().for_each(|number| bytes.extend(number.to_le_bytes()));
        bytes.extend(text);
        stream.write_all(&bytes).unwrap();
        let answer = String::from_utf8_lossy(&message(&mut stream)).into_owned();
        assert!(answer.contains("does not say which image its overlay is for"), "{answer}");
        (setup, daemon, driver)
    };
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
}

/// Passes the messages of a take-over on, and does something in between.
fn delayed(setup: &Setup, proxy: &UnixListener, begins: bool, act: impl FnOnce()) {
    let (mut new, _) = proxy.accept().unwrap();
    let mut old = connect(&setup.control);
    let mut line = Vec::new();
    while !line.ends_with(b"\n") {
        let mut byte = [0];
        new.read_exact(&mut byte).unwrap();
        line.push(byte[0]);
    }
    let mut act = Some(act);
    if !begins {
        // It has opened its images.
        act.take().unwrap()();
    }
    old.write_all(&line).unwrap();
    new.write_all(&message(&mut old)).unwrap();
    if !begins {
        return;
    }
    let begin = message(&mut new);
    assert!(String::from_utf8_lossy(&begin).contains("begin"));
    act.take().unwrap()();
    old.write_all(&begin).unwrap();
    new.write_all(&message(&mut old)).unwrap();
}

#[test]
fn a_snapshot_during_a_take_over_makes_the_running_daemon_serve_on() {
    for begins in [false, true] {
        let (mut setup, daemon, mut driver) = Setup::new();
        // Where the new daemon looks for the running one.
        let proxy = setup.folder.text("proxy");
        let listener = UnixListener::bind(&proxy).unwrap();
        let new = setup.next(&proxy);
        let overlay = setup.folder.text("1.qcow2");
        delayed(&setup, &listener, begins, || {
            snapshot(&setup.control, "vm", &overlay);
        });
        let (ended, log) = new.wait();
        let told = match begins {
            false => "in the running daemon, since a snapshot perhaps, and",
            true => "refused: a device has changed since it was offered",
        };
        assert!(!ended.success() && log.iter().any(|line| line.contains(told)), "{log:?}");
        setup.work(&mut driver);
        let report = status(&setup.control);
        assert_eq!((&report["pid"], &report["take_overs"]), (&daemon.pid().into(), &0.into()));
        // With the right file it goes on.
        let keys = Chain::on(overlay.clone(), format!("raw:{}", setup.image)).keys();
        setup.folder.write("d.toml", &disk("vm", &keys));
        let mut new = setup.next(&setup.control);
        new.wait_for("ready");
        let (ended, log) = daemon.wait();
        assert!(ended.success(), "{log:?}");
        setup.work(&mut driver);
        drop(driver);
        let (ended, log) = new.end();
        assert!(ended.success(), "{log:?}");
    }
}

/// The descriptors of a process whose file is `path`.
fn has_open(daemon: &Daemon, path: &Path) -> bool {
    let Ok(fds) = std::fs::read_dir(format!("/proc/{}/fd", daemon.pid())) else { return false };
    let mut links = fds.filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok());
    links.any(|link| link == path)
}

#[test]
fn a_daemon_that_waited_for_the_lock_refuses_an_image_that_was_frozen_meanwhile() {
    const TEST: &str = "a_daemon_that_waited_for_the_lock_refuses_an_image_that_was_frozen_meanwhile";
    let (mut setup, daemon, mut driver) = Setup::new();
    if !has_marks(&setup.folder) {
        return skip(TEST, "no extended attributes in this folder");
    }
    let (image, socket) = (setup.image.clone(), setup.folder.text("other.sock"));
    let arguments = ["serve", "blk", "--image", &image, "--socket", &socket, "--control", "off"];
    let other = Daemon::spawn(paravane().args(arguments).args(without_sandbox()));
    let begin = Instant::now();
    // It has looked at the image, and waits for its lock for 2 s.
    while !has_open(&other, Path::new(&image)) {
        assert!(begin.elapsed() < patience());
        std::thread::sleep(Duration::from_millis(1));
    }
    let overlay = setup.folder.text("1.qcow2");
    snapshot(&setup.control, "vm", &overlay);
    setup.work(&mut driver);
    drop(driver);
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
    let (ended, log) = other.wait();
    // Unless the host was so busy that it waited in vain.
    let told = ["is the backing file of", "in use by another process"];
    let refused = log.iter().any(|line| told.iter().any(|told| line.contains(told)));
    assert!(ended.code() == Some(2) && refused, "{log:?}");
}
