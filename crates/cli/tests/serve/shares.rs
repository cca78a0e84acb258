//! The room of a holder is shared by devices: none is pushed out by another one's client.
use crate::daemon::{Daemon, Folder, paravane, patience, status, status_text, without_sandbox};
use crate::driver::{Driver, Random};
use crate::load::{self, SIZE};
use crate::raw::{Machine, Raw};
use paravane_spec::vhost_user::{MemoryRegion, SingleRegion, request};
use rustix::fs::{MemfdFlags, memfd_create};
use serde_json::Value;
use std::os::fd::AsFd;
use std::time::Instant;

/// Descriptors that the holder takes: 15 are the share of each of four devices.
const ROOM: &str = "120";

/// Waits until the report of a device is as wanted.
fn wait(control: &str, device: usize, wanted: impl Fn(&Value) -> bool) -> Value {
    let begin = Instant::now();
    loop {
        let report = status(control)["devices"][device].clone();
        if wanted(&report) {
            return report;
        }
        assert!(begin.elapsed() < patience(), "{report}");
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
}

#[test]
fn a_client_with_many_descriptors_pushes_no_other_session_out() {
    let folder = Folder::new();
    let mut holder = paravane();
    holder
        .args(["hold", "--socket", &folder.text("hold"), "--max-descriptors", ROOM])
        .args(without_sandbox());
    let mut holder = Daemon::spawn(&mut holder);
    holder.wait_for("ready");
    let device = |name: &str| {
        folder.image(&format!("{name}.img"));
        format!("[[blk]]\nname = \"{name}\"\nimage = \"{name}.img\"\nsocket = \"{name}.sock\"\nqueues = 2\n")
    };
    let devices: String = ["a", "b", "c", "d"].map(device).concat();
    let file = folder.write("d.toml", &devices);
    let (control, hold) = (folder.text("control"), folder.text("hold"));
    let arguments = ["--config", &file, "--control", &control, "--holder", &hold];
    let mut daemon = Daemon::start(&arguments);

    // Three clients with as much memory as a session may have.
    let greedy = |name: &str| {
        let raw = Raw::connect(&folder.path(&format!("{name}.sock")));
        let mut machine = Machine::new(0, 64, 4);
        machine.attach(&raw, 0, false);
        for number in 1..32 {
            let more = std::fs::File::from(memfd_create("more", MemfdFlags::CLOEXEC).unwrap());
            more.set_len(4096).unwrap();
            let at = (1 << 36) + (number << 20);
            let region = MemoryRegion { gpa: at, size: 4096, user: at, offset: 0 };
            raw.say(request::ADD_MEM_REG, &SingleRegion { padding: 0, region }, &[more.as_fd()]);
        }
        (raw, machine)
    };
    let others: Vec<_> = ["a", "c", "d"].map(greedy).into_iter().collect();
    let pushed = ["a", "c", "d"].iter().filter(|name| {
        let report = status(&control);
        let devices = report["devices"].as_array().unwrap();
        devices.iter().any(|device| device["name"] == **name && device["not_kept"].is_string())
    });
    assert!(pushed.count() > 0, "the room was enough for all: {}", status(&control));
    let told = "sessions are not kept for the next daemon: the device has";
    assert!(status_text(&control).lines().any(|line| line.starts_with("  ! ") && line.contains(told)));
    daemon.wait_for("sessions are not kept for the next process any more");

    // The fourth one has its share, before and after a kill.
    let mut driver = Driver::connect(&folder.path("b.sock"), load::wish(false, true, 2)).unwrap();
    driver.be_patient();
    let (mut model, mut random) = (vec![0; SIZE], Random::new(3));
    driver.exercise(&mut model, 50, &mut random);
    let report = wait(&control, 1, |device| device["kept"] == true);
    assert!(report["not_kept"].is_null() && report["connected"] == true, "{report}");
    drop(daemon);
    let daemon = Daemon::start(&arguments);
    driver.exercise(&mut model, 50, &mut random);
    assert_eq!(wait(&control, 1, |device| device["connected"] == true)["sessions"], 1);

    // When others leave, there is room again, and for each of them.
    drop(others);
    for (index, name) in [(0, "a"), (2, "c"), (3, "d")] {
        wait(&control, index, |device| device["connected"] == false);
        let mut driver =
            Driver::connect(&folder.path(&format!("{name}.sock")), load::wish(true, true, 2)).unwrap();
        driver.exercise(&mut vec![0; SIZE], 5, &mut Random::new(4));
        wait(&control, index, |device| device["kept"] == true && device["not_kept"].is_null());
    }
    drop(driver);
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
}
