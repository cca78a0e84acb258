//! A third-party driver on a daemon in its sandbox.
use crate::daemon::{Daemon, Folder, sandbox_usable, status};
use crate::driver::{Driver, Random, Wish};
use crate::images::{has_qemu_img, qemu_img};
use crate::raw::{Ask, MEMORY, Machine, Raw};
use paravane_spec::vhost_user::{MemoryRegion, SingleRegion, request};
use rustix::fs::{MemfdFlags, memfd_create};
use serde_json::Value;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// Runs a driver for each engine and ring, and compares the image with its writes.
fn exercise(arguments: &[&str], folder: &Folder, image: &str) {
    let control = folder.text("control");
    let mut daemon = Daemon::start(&[arguments, &["--control", &control]].concat());
    let mut model = std::fs::read(image).unwrap();
    let mut random = Random::new(7);
    let mut requests = [0, 0];
    for packed in [false, true] {
        for (queues, depth) in [(1, 1), (2, 16)] {
            let wish = Wish { packed, event_idx: true, queues, depth };
            let mut driver = match Driver::connect(&folder.path("s"), wish) {
                Ok(driver) => driver,
                Err(error) => panic!("{error}: {}", daemon.wait_for("session ended")),
            };
            driver.exercise(&mut model, 200, &mut random);
            requests.iter_mut().take(queues).for_each(|sum| *sum += 200);
            assert_eq!(status(&control)["devices"][0]["connected"], true);
        }
    }
    let start = Instant::now();
    let device = loop {
        let device = status(&control)["devices"][0].clone();
        if device["connected"] == false {
            break device;
        }
        assert!(start.elapsed() < crate::daemon::patience(), "{device}");
        std::thread::sleep(Duration::from_millis(10));
    };
    assert_eq!((&device["sessions"], &device["protocol_errors"]), (&4.into(), &0.into()), "{device}");
    for (queue, requests) in device["queues"].as_array().unwrap().iter().zip(requests) {
        assert_eq!(queue["completed"], requests, "{device}");
        assert!(queue["kicks"].as_u64() > Some(0) && queue["interrupts"].as_u64() > Some(0), "{device}");
    }
    // Stays connected until the end.
    let wish = Wish { packed: true, event_idx: false, queues: 2, depth: 8 };
    let mut driver = Driver::connect(&folder.path("s"), wish).unwrap();
    driver.exercise(&mut model, 100, &mut random);
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
    assert!(!folder.path("s").exists());
    assert!(std::fs::read(image).unwrap() == model, "the image is not what was written");
}

#[test]
fn a_disk_is_served_in_the_sandbox() {
    // On a host without a sandbox the disk is still served, and the test reports it.
    sandbox_usable("a_disk_is_served_in_the_sandbox");
    for engine in ["auto", "threads"] {
        let folder = Folder::new();
        let (image, socket) = (folder.image("vm.img"), folder.text("s"));
        let arguments = ["blk", "--image", &image, "--socket", &socket, "--queues", "2"];
        exercise(&[&arguments[..], &["--engine", engine, "--workers", "2"]].concat(), &folder, &image);
    }
}

/// Memory that the kernel pins for the daemon, in kB.
fn held(daemon: &Daemon) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{}/status", daemon.pid())).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("VmPin:")).unwrap();
    line.trim_end_matches("kB").trim().parse().unwrap()
}

#[test]
fn a_disk_is_served_past_the_page_cache_from_registered_buffers() {
    const TEST: &str = "a_disk_is_served_past_the_page_cache_from_registered_buffers";
    let folder = Folder::new();
    let (image, socket) = (folder.image("vm.img"), folder.text("s"));
    let arguments = ["blk", "--image", &image, "--socket", &socket, "--queues", "2", "--workers", "2"];
    let arguments = [&arguments[..], &["--engine", "io_uring", "--direct", "--registered-buffers"]].concat();
    // Checks the host's support; no memory is shared here.
    let config = paravane_device::blk::BlkConfig {
        direct: true,
        engine: paravane_device::blk::EngineChoice::IoUring,
        ..paravane_device::blk::BlkConfig::new(&image)
    };
    if let Err(why) = paravane_device::blk::Blk::open(config) {
        return crate::daemon::skip(TEST, why.to_string());
    }
    sandbox_usable(TEST);
    exercise(&arguments, &folder, &image);

    let daemon = Daemon::start(&[&arguments[..], &["--control", "off"]].concat());
    let holds = |wanted: u64| {
        let start = Instant::now();
        while held(&daemon) != wanted {
            assert!(start.elapsed() < crate::daemon::patience(), "{wanted} kB? {}", held(&daemon));
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    let wish = Wish { packed: false, event_idx: true, queues: 1, depth: 8 };
    let mut driver = Driver::connect(&folder.path("s"), wish).unwrap();
    let mut model = std::fs::read(&image).unwrap();
    driver.exercise(&mut model, 100, &mut Random::new(8));
    assert!(held(&daemon) > 0);
    drop(driver);
    holds(0);

    // Registration follows the client's memory, also with idle queues.
    let mut machine = Machine::new(0, 64, 4);
    let raw = Raw::connect(&folder.path("s"));
    machine.attach(&raw, 0, false);
    machine.ask(0, Ask::Read, 0, 512);
    machine.kick();
    holds(MEMORY >> 10);
    let more = std::fs::File::from(memfd_create("more", MemfdFlags::CLOEXEC).unwrap());
    more.set_len(MEMORY).unwrap();
    let region = MemoryRegion { gpa: 0x10_0000, size: MEMORY, user: 0x1000, offset: 0 };
    raw.say(request::ADD_MEM_REG, &SingleRegion { padding: 0, region }, &[more.as_fd()]);
    holds((2 * MEMORY) >> 10);
    raw.say(request::REM_MEM_REG, &SingleRegion { padding: 0, region }, &[]);
    holds(MEMORY >> 10);
    drop(raw);
    holds(0);
    let (ended, log) = daemon.end();
    assert!(ended.success() && !log.iter().any(|line| line.contains("not registered")), "{log:?}");
}

#[test]
fn a_disk_of_a_file_is_served_in_the_sandbox() {
    sandbox_usable("a_disk_of_a_file_is_served_in_the_sandbox");
    let folder = Folder::new();
    let image = folder.image("vm.img");
    let device = "[[blk]]\nname = \"vm0\"\nimage = \"vm.img\"\nsocket = \"s\"\nqueues = 2\npoll-us = 0\n";
    let file = folder.write("d.toml", device);
    exercise(&["--config", &file], &folder, &image);
}

#[test]
fn a_disk_grows_when_the_daemon_is_told_to_look() {
    let folder = Folder::new();
    let (image, socket, control) = (folder.image("vm.img"), folder.text("s"), folder.text("control"));
    let limits = ["--bytes-per-second", "1G", "--ops-per-second", "1000000"];
    let arguments = ["blk", "--image", &image, "--socket", &socket, "--control", &control];
    let mut daemon = Daemon::start(&[&arguments[..], &limits[..]].concat());
    let size = || status(&control)["devices"][0]["size"].as_u64();
    assert_eq!(size(), Some(1 << 20));
    let wish = Wish { packed: false, event_idx: true, queues: 1, depth: 4 };
    let mut driver = Driver::connect(&folder.path("s"), wish).unwrap();
    let capacity = |driver: &Driver| u64::from(driver.transport.get_config().unwrap().capacity);
    assert_eq!(capacity(&driver), 2048);
    let mut model = vec![0; 2 << 20];
    driver.exercise(&mut model[..1 << 20], 100, &mut Random::new(3));
    std::fs::File::options().write(true).open(&image).unwrap().set_len(2 << 20).unwrap();
    assert_eq!((size(), capacity(&driver)), (Some(1 << 20), 2048), "nobody has looked");
    daemon.signal(rustix::process::Signal::HUP);
    daemon.wait_for("configuration has changed");
    assert_eq!((size(), capacity(&driver)), (Some(2 << 20), 4096));
    driver.exercise(&mut model, 300, &mut Random::new(4));
    assert!(std::fs::read(&image).unwrap() == model, "the image is not what was written");
}

#[test]
fn an_overlay_is_served_on_the_base_that_is_named() {
    if !has_qemu_img("an_overlay_is_served_on_the_base_that_is_named") {
        return;
    }
    let folder = Folder::new();
    let (base, overlay) = (folder.path("base.img"), folder.text("vm.qcow2"));
    let mut model: Vec<u8> = (0..1 << 20).map(|index: u32| (index >> 9) as u8).collect();
    std::fs::write(&base, &model).unwrap();
    let backing = format!("raw:{}", base.display());
    let create = ["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "base.img", &overlay];
    qemu_img(&create);
    let socket = folder.text("s");
    let arguments =
        ["blk", "--image", &overlay, "--format", "qcow2", "--socket", &socket, "--control", "off"];
    // The file name stored in the image is ignored.
    let mut refused = crate::daemon::paravane();
    let output =
        refused.arg("serve").args(arguments).args(crate::daemon::without_sandbox()).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", String::from_utf8_lossy(&output.stderr));
    let daemon = Daemon::start(&[&arguments[..], &["--backing", &backing]].concat());
    let wish = Wish { packed: true, event_idx: true, queues: 1, depth: 8 };
    let mut driver = Driver::connect(&folder.path("s"), wish).unwrap();
    let before = model.clone();
    driver.exercise(&mut model, 300, &mut Random::new(5));
    drop(driver);
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
    assert!(std::fs::read(&base).unwrap() == before, "the base was written");
    qemu_img(&["check", "-q", &overlay]);
    qemu_img(&["convert", "-O", "raw", &overlay, &folder.text("flat.img")]);
    assert!(std::fs::read(folder.path("flat.img")).unwrap() == model, "the image is not what was written");
}

/// The memory of one VMM disappears while in use.
///
/// A disk of another VMM on the same daemon works on.
#[test]
fn memory_that_is_taken_away_fails_one_device() {
    let folder = Folder::new();
    let disk = |name: &str| {
        folder.image(&format!("{name}.img"));
        format!("[[blk]]\nname = \"{name}\"\nimage = \"{name}.img\"\nsocket = \"{name}\"\n")
    };
    let file = folder.write("d.toml", &(disk("a") + &disk("b")));
    let control = folder.text("control");
    let mut daemon = Daemon::start(&["--config", &file, "--control", &control]);
    let wish = Wish { packed: false, event_idx: true, queues: 1, depth: 4 };
    let mut driver = Driver::connect(&folder.path("b"), wish).unwrap();
    let (mut model, mut random) = (vec![0; 1 << 20], Random::new(6));
    for round in 1..=3 {
        let mut machine = Machine::new(0, 64, 4);
        let raw = Raw::connect(&folder.path("a"));
        raw.begin(machine.features);
        // Its ring is in a separate file.
        let memory = std::fs::File::from(memfd_create("taken", MemfdFlags::CLOEXEC).unwrap());
        memory.set_len(MEMORY).unwrap();
        machine.share_as(&raw, memory.as_fd());
        machine.start(&raw, 0);
        driver.exercise(&mut model, 50, &mut random);
        memory.set_len(0).unwrap();
        machine.ask(0, Ask::Read, 0, 512);
        machine.kick();
        assert!(raw.is_closed());
        // Later repeats are only counted.
        if round <= 2 {
            daemon.wait_for("is lost");
        }
        driver.exercise(&mut model, 50, &mut random);
        let errors = |json: &Value, index: usize| json["devices"][index]["protocol_errors"].as_u64();
        let begun = Instant::now();
        let json = loop {
            let json = status(&control);
            if errors(&json, 0) == Some(round) || begun.elapsed() > crate::daemon::patience() {
                break json;
            }
        };
        assert_eq!((errors(&json, 0), errors(&json, 1)), (Some(round), Some(0)), "{json}");
        assert_eq!(json["devices"][1]["sessions"], 1);
    }
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
    assert!(std::fs::read(folder.path("b.img")).unwrap() == model);
}
