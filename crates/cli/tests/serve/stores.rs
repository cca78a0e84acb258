//! Disks on servers: the program in its sandbox, with the broker beside it, and real servers.
//!
//! | file | content |
//! |---|---|
//! | `servers` | nbdkit and nginx, with the files of a folder |
//! | `nbd` | NBD servers that are killed, missing, or grow a disk |
//! | `proxy` | what lies between a daemon and an NBD server, and fails as it is told |
//! | `messages` | where messages of NBD begin and end |
//! | `network` | networks and servers that stall, reorder, split, and say wrong things |
//! | `take_over` | daemons that take over |
//! | `tls` | certificates that expire |
//! | `http` | HTTP servers that are killed, objects that change, and caches that are full |
//! | `named_files` | certificates, keys and digests that locations name |
//! | `overlays` | overlays whose base lies on a server |
//! | `ceph` | images of a Ceph cluster, whose OSD is killed, or hangs |
//! | `kills` | daemons that are killed again and again |
mod ceph;
mod http;
mod kills;
mod messages;
mod named_files;
mod nbd;
mod network;
mod overlays;
mod proxy;
mod servers;
mod take_over;
mod tls;

use crate::daemon::{Daemon, Folder, paravane, patience, skip, status, status_text, without_sandbox};
use crate::load::DISKS;
use serde_json::Value;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Environment variable: seconds for which a server goes on to stall when the status names it [0].
const STALL: &str = "PARAVANE_STALL";

/// Whether a program is installed.
fn has(program: &str, package: &str, test: &str) -> bool {
    let found = Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if let Err(error) = &found {
        skip(test, format!("{program} (package {package}): {error}"));
    }
    found.is_ok()
}

/// As [`devices`], with a file of the folder for each disk, which a server has.
fn config(folder: &Folder, location: impl Fn(&str) -> String) -> String {
    DISKS.iter().for_each(|name| drop(folder.image(&format!("{name}.img"))));
    devices(folder, location)
}

/// The file of [`DISKS`] at these locations, each with two queues and a large store-timeout.
fn devices(folder: &Folder, location: impl Fn(&str) -> String) -> String {
    let mut text = String::new();
    for name in DISKS {
        text += &format!(
            "[[blk]]\nname = \"{name}\"\nimage = \"{}\"\nsocket = \"{name}.sock\"\nqueues = 2\n\
             store-timeout = 600\n",
            location(name)
        );
    }
    folder.write("d.toml", &text)
}

/// Serves a file of devices.
fn serve(folder: &Folder, config: &str) -> Daemon {
    let arguments = ["serve", "--config", config, "--control", &folder.text("control")];
    let mut daemon = Daemon::spawn(paravane().args(arguments).args(without_sandbox()));
    daemon.wait_for("ready");
    daemon
}

/// The stores of all devices.
fn stores(report: &Value) -> Vec<&Value> {
    let devices = report["devices"].as_array().unwrap();
    devices.iter().flat_map(|device| device["stores"].as_array().unwrap()).collect()
}

/// Waits until the store of each device is as wanted. Returns the report.
fn wait_for_stores(control: &str, mut wanted: impl FnMut(&Value) -> bool) -> Value {
    let end = Instant::now() + patience();
    loop {
        let report = status(control);
        if stores(&report).into_iter().all(&mut wanted) {
            return report;
        }
        assert!(Instant::now() < end, "{report}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until the status for people is as wanted.
fn wait_for_text(control: &str, mut wanted: impl FnMut(&str) -> bool) {
    let end = Instant::now() + patience();
    loop {
        let text = status_text(control);
        if wanted(&text) {
            return;
        }
        assert!(Instant::now() < end, "{text}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until the stores of all devices are up.
fn wait_until_up(control: &str) -> Value {
    wait_for_stores(control, |store| store["link"] == "up")
}

/// Waits until the status names each store as stalled. It goes on to for [`STALL`].
fn see_stall(control: &str) {
    let more = std::env::var(STALL).map_or(0, |seconds| seconds.parse().expect("PARAVANE_STALL is a number"));
    let is_stalled = |store: &Value| store["link"] == "stalled";
    let names_stall = |report: &Value| {
        for store in stores(report) {
            assert!(is_stalled(store) && store["waiting"].as_u64() > Some(0), "{store}");
            let error = store["error"].as_str().unwrap_or_default();
            assert!(error.contains(" requests have had no reply for "), "{store}");
        }
    };
    names_stall(&wait_for_stores(control, is_stalled));
    std::thread::sleep(Duration::from_secs(more));
    names_stall(&status(control));
    let text = status_text(control);
    assert!(names_each(&text, "no reply: ") && names_each(&text, " requests wait"), "{text}");
}

/// Ends a daemon, which has served disks without an error.
fn end_without_errors(daemon: Daemon, control: &str) {
    for device in wait_until_up(control)["devices"].as_array().unwrap() {
        let errors = device["storage_errors"].as_object().unwrap();
        assert!(errors.values().all(|count| *count == 0 || count.is_null()), "{device}");
    }
    let text = status_text(control);
    assert!(!text.contains("! "), "{text}");
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
}

/// Compares the files of disks with what was written to the disks.
fn assert_content(folder: &Folder, models: Vec<(&'static str, Vec<u8>)>) {
    for (name, model) in models {
        let content = std::fs::read(folder.path(&format!("{name}.img"))).unwrap();
        assert!(content == model, "disk {name}");
    }
}

/// Whether a text says something of each disk.
fn names_each(text: &str, what: &str) -> bool {
    DISKS.iter().all(|name| {
        let start = format!("! {name}: ");
        text.lines().any(|line| line.trim_start().starts_with(&start) && line.contains(what))
    })
}
