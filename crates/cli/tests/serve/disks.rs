//! Disks of every format, location and engine in the sandbox.
//!
//! The image holds what a guest wrote.
use crate::daemon::{Daemon, Folder, paravane, skip, status, without_sandbox};
use crate::driver::{Driver, Random, Wish};
use crate::images::{Format, Image, has_qemu_img, qemu_img};
use crate::killed::survive;
use crate::rig::Disk;
use paravane_device::Device;
use paravane_device::blk::{Blk, BlkConfig};
use paravane_spec::feature::{EVENT_IDX, RING_PACKED};
use rustix::process::Signal;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Bytes of the disks.
const DISK: usize = 4 << 20;

/// Issues each kind of request, which must succeed.
fn exercise(socket: &Path, model: &mut [u8], packed: bool, seed: u64) {
    let wish = Wish { packed, event_idx: true, queues: 1, depth: 8 };
    let mut driver = Driver::connect(socket, wish).unwrap();
    driver.exercise(model, 300, &mut Random::new(seed));
}

/// An option of a disk.
#[derive(Clone, Copy)]
enum With {
    Engine(&'static str),
    Direct,
}

impl With {
    fn arguments(self) -> Vec<&'static str> {
        match self {
            Self::Engine(engine) => vec!["--engine", engine],
            Self::Direct => vec!["--direct"],
        }
    }

    /// The same in a file of devices.
    fn line(self) -> String {
        match self {
            Self::Engine(engine) => format!("engine = {engine:?}\n"),
            Self::Direct => "direct = true\n".to_owned(),
        }
    }
}

/// Serves an image in both ways.
///
/// As one device, whose daemon opens no file later; and from a file, whose daemon opens it again
/// after SIGHUP.
fn is_served(image: &Image, options: &[With]) {
    let folder = image.folder();
    let (socket, control) = (folder.text("s"), folder.text("control"));
    let common = ["--control", &control];
    let mut model = image.before().to_vec();

    let of_image = image.options();
    let of_image: Vec<&str> = of_image.iter().map(String::as_str).collect();
    let more: Vec<&str> = options.iter().flat_map(|option| option.arguments()).collect();
    let daemon = Daemon::start(&[&["blk", "--socket", &socket], &of_image[..], &more, &common].concat());
    exercise(&folder.path("s"), &mut model, false, 1);
    assert_eq!(status(&control)["devices"][0]["protocol_errors"], 0);
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
    image.check();

    let keys: String = options.iter().map(|option| option.line()).collect();
    let device = format!("[[blk]]\nname = \"vm\"\nsocket = {socket:?}\n{}{keys}", image.lines());
    let file = folder.write("devices.toml", &device);
    let mut daemon = Daemon::start(&["--config", &file, "--control", &control]);
    exercise(&folder.path("s"), &mut model, true, 2);
    // The device changes, and its image is opened once more.
    folder.write("devices.toml", &(device + "queues = 2\n"));
    daemon.signal(Signal::HUP);
    let line = daemon.wait_for("unchanged");
    assert!(line.contains("0 unchanged, 0 removed, 0 added, 0 failed, 1 restarted"), "{line}");
    exercise(&folder.path("s"), &mut model, false, 3);
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
    image.check();
    assert!(image.content() == model, "the image is not what was written");
}

/// Block size in bytes of a raw disk past the page cache.
///
/// `None`, with a message, if there is none.
fn direct_block(test: &str) -> Option<u32> {
    let image = Image::new(Format::Raw, false, DISK);
    let config = BlkConfig { direct: true, ..BlkConfig::new(image.folder().path("disk.img")) };
    match Blk::open(config) {
        Ok(disk) => {
            // `blk_size` of struct virtio_blk_config.
            let mut bytes = [0; 4];
            disk.read_config(20, &mut bytes);
            Some(u32::from_le_bytes(bytes))
        }
        Err(why) => {
            skip(&format!("{test} past the page cache"), why.to_string());
            None
        }
    }
}

#[test]
fn raw_images_are_served_by_every_engine() {
    const TEST: &str = "raw_images_are_served_by_every_engine";
    let mut engines = vec![With::Engine("threads"), With::Engine("immediate")];
    match paravane_device::blk::io_uring_available() {
        Ok(()) => engines.push(With::Engine("io_uring")),
        Err(why) => skip(&format!("{TEST} with io_uring"), why.to_string()),
    }
    for in_memory in [false, true] {
        for engine in &engines {
            is_served(&Image::new(Format::Raw, in_memory, DISK), &[*engine]);
        }
    }
    // Mapped.
    is_served(&Image::new(Format::Raw, true, DISK), &[]);
    match direct_block(TEST) {
        Some(512) => {
            for engine in engines {
                is_served(&Image::new(Format::Raw, false, DISK), &[With::Direct, engine]);
            }
        }
        Some(block) => skip(&format!("{TEST} past the page cache"), format!("it takes blocks of {block}")),
        None => {}
    }
}

/// A qcow2 image grows: Landlock must let the daemon change its length.
#[test]
fn qcow2_images_grow_in_the_sandbox() {
    if !has_qemu_img("qcow2_images_grow_in_the_sandbox") {
        return;
    }
    for format in [Format::Qcow2, Format::Overlay, Format::Chain] {
        for in_memory in [false, true] {
            for options in [&[][..], &[With::Engine("immediate")]] {
                is_served(&Image::new(format, in_memory, DISK), options);
            }
        }
    }
}

/// A block device of the host, detached when it goes.
struct Loop(PathBuf);

impl Loop {
    fn new(test: &str, file: &Path) -> Option<Self> {
        let why = match Command::new("losetup").args(["--find", "--show"]).arg(file).output() {
            Ok(output) if output.status.success() => {
                return Some(Self(String::from_utf8(output.stdout).unwrap().trim().into()));
            }
            Ok(output) => String::from_utf8_lossy(&output.stderr).trim().to_owned(),
            Err(error) => format!("losetup: {error}"),
        };
        skip(test, &why);
        None
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let detached = Command::new("losetup").arg("--detach").arg(&self.0).status();
        assert!(detached.is_ok_and(|status| status.success()), "{} is left over", self.0.display());
    }
}

#[test]
fn block_devices_are_served_by_every_engine() {
    const TEST: &str = "block_devices_are_served_by_every_engine";
    let folder = Folder::new();
    std::fs::write(folder.path("disk"), vec![0; DISK]).unwrap();
    let Some(device) = Loop::new(TEST, &folder.path("disk")) else { return };
    let (path, socket) = (device.0.to_str().unwrap(), folder.text("s"));
    let mut model = vec![0; DISK];
    for options in [&[][..], &["--engine", "threads"], &["--engine", "immediate"], &["--direct"]] {
        let arguments = ["blk", "--image", path, "--socket", &socket, "--control", "off"];
        let daemon = Daemon::start(&[&arguments[..], options].concat());
        exercise(&folder.path("s"), &mut model, false, 5);
        let (ended, log) = daemon.end();
        assert!(ended.success(), "{log:?}");
    }
    assert!(std::fs::read(path).unwrap() == model, "the device is not what was written");
}

#[test]
fn a_disk_in_memory_survives_kills() {
    survive(&Disk::of(Image::new(Format::Raw, true, DISK), &[]), EVENT_IDX, 10, 21);
}

#[test]
fn a_disk_served_by_threads_survives_kills() {
    survive(&Disk::of(Image::new(Format::Raw, false, DISK), &["--engine", "threads"]), RING_PACKED, 10, 22);
}

#[test]
fn a_qcow2_disk_survives_kills() {
    if !has_qemu_img("a_qcow2_disk_survives_kills") {
        return;
    }
    for (format, in_memory) in [(Format::Qcow2, false), (Format::Chain, true)] {
        let disk = Disk::of(Image::new(format, in_memory, DISK), &[]);
        survive(&disk, EVENT_IDX, 10, 23);
    }
}

/// Serving an encrypted image as plain would destroy it by the first write.
#[test]
fn an_encrypted_image_is_refused_and_left_as_it_is() {
    if !has_qemu_img("an_encrypted_image_is_refused_and_left_as_it_is") {
        return;
    }
    let folder = Folder::new();
    let (image, overlay) = (folder.text("disk.img"), folder.text("overlay.img"));
    let format = "encrypt.format=aes,encrypt.key-secret=key";
    let secret = ["--object", "secret,id=key,data=secret", "-f", "qcow2", "-o", format, &image, "1M"];
    qemu_img(&[&["create", "-q"], &secret[..]].concat());
    qemu_img(&["create", "-q", "-u", "-f", "qcow2", "-b", "disk.img", "-F", "qcow2", &overlay, "1M"]);
    for (method, name) in [(1, "AES"), (2, "LUKS")] {
        // Put into the header: to make LUKS, qemu-img measures its CPU time, which fails on some machines.
        let file = std::fs::File::options().write(true).open(&image).unwrap();
        file.write_all_at(&u32::to_be_bytes(method), 32).unwrap();
        let before = [&image, &overlay].map(|path| std::fs::read(path).unwrap());
        let socket = folder.text("s");
        let backing = format!("qcow2:{image}");
        for (path, more) in
            [(&image, &[][..]), (&image, &["--read-only"]), (&overlay, &["--backing", &backing])]
        {
            let arguments = [
                "serve",
                "blk",
                "--format",
                "qcow2",
                "--image",
                path,
                "--socket",
                &socket,
                "--control",
                "off",
            ];
            let mut daemon = Daemon::spawn(paravane().args(arguments).args(more).args(without_sandbox()));
            assert!(daemon.find("ready").is_err(), "{path} is served");
            let (ended, log) = daemon.end();
            assert_eq!(ended.code(), Some(2), "{log:?}");
            let words = format!("disk.img: is encrypted ({name})");
            assert!(log.iter().any(|line| line.contains(&words)), "{log:?}");
        }
        assert!([&image, &overlay].map(|path| std::fs::read(path).unwrap()) == before);
        assert!(!folder.path("s").exists());
    }
}
