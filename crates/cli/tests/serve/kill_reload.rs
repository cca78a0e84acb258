//! `--holder`: daemons that are killed while a reload has a device opened again within its session.
//!
//! A lock holds such a device where no device serves the session: the image seems to have requests of a
//! dead process in flight, for which its new device waits.
use crate::daemon::{paravane, patience, status};
use crate::driver::Random;
use crate::kill::{Kept, under_load};
use crate::load::{DISKS, SIZE};
use crate::raw::{Machine, Raw};
use paravane_spec::feature::{EVENT_IDX, INDIRECT_DESC, RING_PACKED};
use paravane_spec::vhost_user::request;
use rustix::process::Signal;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::process::{Child, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

const LAYOUTS: [u64; 3] = [0, INDIRECT_DESC | EVENT_IDX, RING_PACKED | INDIRECT_DESC | EVENT_IDX];

/// Byte that requests of a process lock, of the last one of all slots (`image_file/lock.rs`).
const REQUESTS: i64 = (1 << 62) + 63;

/// Locks an image of the folder as requests of a dead process do.
fn requests_of_the_dead(kept: &Kept, image: &str) -> File {
    let file = File::options().read(true).write(true).open(kept.folder.path(image)).unwrap();
    // SAFETY: `flock` is plain data, for which all zeroes are valid.
    let mut range: libc::flock = unsafe { std::mem::zeroed() };
    (range.l_type, range.l_start, range.l_len) = (libc::F_WRLCK as libc::c_short, REQUESTS, 1);
    // SAFETY: the descriptor is open, and the kernel only reads the structure.
    assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const range) }, 0);
    file
}

/// Changes a setting for which all disks are opened again within their sessions.
fn change(kept: &Kept) {
    let text = kept.text();
    let (from, to) = if text.contains("workers = 2") { (2, 1) } else { (1, 2) };
    let new = text.replace(&format!("workers = {from}"), &format!("workers = {to}"));
    kept.folder.write("d.toml", &new);
}

/// Begins a reload, which ends with its daemon at the latest.
fn begin_reload(kept: &Kept) -> Child {
    let mut reload = paravane();
    reload.args(["reload", "--control", &kept.control]).stdout(Stdio::null()).stderr(Stdio::null());
    reload.spawn().unwrap()
}

/// Waits until the new device of disk d waits for the lock of its image.
fn wait_until_it_waits(kept: &Kept) {
    let end = Instant::now() + patience();
    loop {
        let report = status(&kept.control);
        let waiting = &report["waiting"][0];
        if waiting["why"].as_str().is_some_and(|why| why.contains("a dead process has requests in flight")) {
            assert_eq!(waiting["name"], "d");
            return;
        }
        assert!(Instant::now() < end, "{report}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Has daemons killed while no device of theirs serves the session.
fn killed_between_two_devices(features: u64, tracked: bool) {
    let kept = Kept::new(&["d"]);
    let mut daemon = kept.start();
    let raw = Raw::connect(&kept.socket("d"));
    let (mut model, mut random) = (vec![0; SIZE], Random::new(61));
    let mut machine = Machine::new(features, 64, 16);
    machine.attach(&raw, machine.first_base(), tracked);
    for _ in 0..4 {
        machine.fill(SIZE, &mut random);
        machine.finish(&mut model);
        kept.wait_until_kept();
        let lock = requests_of_the_dead(&kept, "d.img");
        change(&kept);
        machine.fill(SIZE, &mut random);
        let mut reload = begin_reload(&kept);
        wait_until_it_waits(&kept);
        // Kicks are counted, and messages stay on the connection, while nobody serves.
        machine.fill(SIZE, &mut random);
        raw.send(request::GET_QUEUE_NUM, &[], &[]).unwrap();
        daemon.signal(Signal::KILL);
        drop((daemon.wait(), reload.wait(), lock));
        daemon = kept.start();
        let log = daemon.seen();
        assert!(!log.iter().any(|line| line.contains("session not resumed")), "{log:?}");
        machine.finish(&mut model);
        assert_eq!(raw.receive().unwrap().0.request, request::GET_QUEUE_NUM);
        assert_eq!(raw.ask_number(request::GET_QUEUE_NUM), 2, "another reply");
    }
    let report = status(&kept.control);
    let disk = &report["devices"][1];
    assert_eq!((&disk["sessions"], &disk["protocol_errors"]), (&1.into(), &0.into()), "{disk}");
    drop((raw, daemon));
    assert!(std::fs::read(kept.folder.path("d.img")).unwrap() == model);
}

#[test]
fn a_kill_between_two_devices_of_a_session_loses_nothing() {
    for features in LAYOUTS {
        killed_between_two_devices(features, false);
        killed_between_two_devices(features, true);
    }
}

#[test]
fn kills_during_reloads_lose_nothing() {
    let random = Mutex::new(Random::new(62));
    under_load(&Kept::new(&DISKS), |kept, old, _| {
        kept.wait_until_kept();
        change(kept);
        let mut reload = begin_reload(kept);
        let time = random.lock().unwrap().below(80_000);
        std::thread::sleep(Duration::from_micros(time as u64));
        let next = kept.kill(old);
        let _ = reload.wait();
        let log = next.seen();
        assert!(!log.iter().any(|line| line.contains("session not resumed")), "{log:?}");
        next
    });
}

#[test]
fn a_session_that_no_device_continues_is_not_kept() {
    let kept = Kept::new(&["d"]);
    let daemon = kept.start();
    let raw = Raw::connect(&kept.socket("d"));
    let mut machine = Machine::new(0, 64, 16);
    machine.attach(&raw, 0, false);
    kept.wait_until_kept();
    let lock = requests_of_the_dead(&kept, "d.img");
    change(&kept);
    let mut reload = begin_reload(&kept);
    wait_until_it_waits(&kept);
    // It is removed, and neither the new device nor the old one may have the session.
    let text = kept.text();
    kept.folder.write("d.toml", &text[..text.find("[[blk]]").unwrap()]);
    daemon.signal(Signal::HUP);
    // The holder has no copy of the connection.
    assert!(raw.is_closed());
    let _ = reload.wait();
    daemon.signal(Signal::KILL);
    drop((daemon.wait(), lock));
    kept.folder.write("d.toml", &text);
    let next = kept.start();
    let log = next.seen();
    assert!(!log.iter().any(|line| line.contains("session")), "{log:?}");
}
