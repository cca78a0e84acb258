//! A disk whose file system is full.
use crate::daemon::{Daemon, Folder, is_root, patience, skip, status, status_text};
use crate::driver::{Driver, Random, Wish};
use crate::images::{has_qemu_img, qemu_img};
use rustix::process::Signal;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

/// Bytes of the disk.
const DISK: usize = 4 << 20;

/// A small file system in memory, unmounted in the end.
pub(crate) struct Small(Folder);

impl Small {
    pub(crate) fn new() -> Result<Self, String> {
        let folder = Folder::new();
        mount(&["-t", "tmpfs", "-o", "size=1m", "none"], folder.root())?;
        Ok(Self(folder))
    }

    pub(crate) fn text(&self, name: &str) -> String {
        self.0.text(name)
    }

    pub(crate) fn grow(&self) {
        mount(&["-o", "remount,size=64m"], self.0.root()).unwrap();
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.root()).output();
    }
}

fn mount(arguments: &[&str], on: &Path) -> Result<(), String> {
    let output = Command::new("mount").args(arguments).arg(on).output().map_err(|error| error.to_string())?;
    match output.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
    }
}

#[test]
fn writes_wait_for_room_on_a_full_file_system() {
    const TEST: &str = "writes_wait_for_room_on_a_full_file_system";
    if !is_root() {
        return skip(TEST, "needs root to mount a file system");
    }
    for format in ["raw", "qcow2"] {
        if format == "qcow2" && !has_qemu_img(TEST) {
            return;
        }
        let small = match Small::new() {
            Ok(small) => small,
            Err(why) => return skip(TEST, why),
        };
        waits_for_room(&small, format);
    }
}

fn waits_for_room(small: &Small, format: &str) {
    let image = small.text("disk.img");
    match format {
        "raw" => std::fs::File::create(&image).unwrap().set_len(DISK as u64).unwrap(),
        _ => qemu_img(&["create", "-q", "-f", format, &image, &DISK.to_string()]),
    }
    let model = fill(small, &["--image", &image, "--format", format], vec![0; DISK]);
    let folder = Folder::new();
    let flat = match format {
        "raw" => image,
        _ => {
            qemu_img(&["check", "-q", &image]);
            qemu_img(&["convert", "-f", format, "-O", "raw", &image, &folder.text("flat.img")]);
            folder.text("flat.img")
        }
    };
    assert!(std::fs::read(flat).unwrap() == model, "{format}: the image is not what was written");
}

/// Fills a small file system through a disk until writes wait, and makes room.
///
/// The disk begins with `model`. Returns what was written to it.
pub(crate) fn fill(small: &Small, disk: &[&str], mut model: Vec<u8>) -> Vec<u8> {
    let folder = Folder::new();
    let (socket, control) = (folder.text("s"), folder.text("control"));
    let arguments = ["blk", "--name", "vm0", "--socket", &socket, "--control", &control];
    let mut daemon = Daemon::start(&[&arguments[..], disk].concat());
    std::thread::scope(|scope| {
        let client = scope.spawn(|| {
            let wish = Wish { packed: false, event_idx: true, queues: 1, depth: 8 };
            let mut driver = Driver::connect(Path::new(&socket), wish).unwrap();
            driver.be_patient();
            driver.exercise(&mut model, 2000, &mut Random::new(1));
        });
        daemon.wait_for("disk full: writes wait for room");
        let start = Instant::now();
        loop {
            let device = status(&control)["devices"][0].clone();
            if let Some(waiting) = device["full"]["requests"].as_u64() {
                assert!(
                    waiting > 0 && device["full"]["error"].as_str().unwrap().contains("space"),
                    "{device}"
                );
                assert_eq!(device["storage_errors"]["write"], 0, "{device}");
                break;
            }
            assert!(start.elapsed() < patience(), "{device}");
        }
        let text = status_text(&control);
        assert!(text.contains("! vm0: full since ") && text.contains(" writes wait for room: "), "{text}");
        assert!(!client.is_finished());
        small.grow();
        // Not only every second.
        daemon.signal(Signal::HUP);
        daemon.wait_for("disk no longer full");
        client.join().unwrap();
    });
    let device = status(&control)["devices"][0].clone();
    assert!(device["full"].is_null() && device["full_times"].as_u64() >= Some(1), "{device}");
    assert!(!status_text(&control).contains("full since"));
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
    model
}

#[test]
fn a_daemon_stops_while_writes_wait_for_room() {
    const TEST: &str = "a_daemon_stops_while_writes_wait_for_room";
    if !is_root() {
        return skip(TEST, "needs root to mount a file system");
    }
    let (small, folder) = match Small::new() {
        Ok(small) => (small, Folder::new()),
        Err(why) => return skip(TEST, why),
    };
    let image = small.0.text("disk.img");
    std::fs::File::create(&image).unwrap().set_len(DISK as u64).unwrap();
    let socket = folder.text("s");
    let arguments = ["blk", "--name", "vm0", "--image", &image, "--socket", &socket, "--control", "off"];
    let mut daemon = Daemon::start(&arguments);
    std::thread::scope(|scope| {
        // It ends when its device does: its requests fail, or never end.
        let client = scope.spawn(|| {
            let wish = Wish { packed: false, event_idx: true, queues: 1, depth: 8 };
            let mut driver = Driver::connect(Path::new(&socket), wish).unwrap();
            driver.exercise(&mut vec![0; DISK], 2000, &mut Random::new(1));
        });
        daemon.wait_for("disk full: writes wait for room");
        let (ended, log) = daemon.end();
        assert!(ended.success(), "{log:?}");
        assert!(client.join().is_err(), "its requests cannot all have succeeded");
    });
    drop(small);
}
