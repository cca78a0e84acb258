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
//! | `ceph` | images of a Ceph cluster |
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

use crate::daemon::{Daemon, Folder, PATIENCE, paravane, skip, status, status_text, without_sandbox};
use crate::load::DISKS;
use serde_json::Value;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Whether a program is installed.
fn has(program: &str, package: &str, test: &str) -> bool {
    let found = Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if let Err(error) = &found {
        skip(test, format!("{program} (package {package}): {error}"));
    }
    found.is_ok()
}

/// The file of [`DISKS`] at these locations, each with two queues and a large store-timeout.
fn config(folder: &Folder, location: impl Fn(&str) -> String) -> String {
    let mut text = String::new();
    for name in DISKS {
        folder.image(&format!("{name}.img"));
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
    let end = Instant::now() + PATIENCE;
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
    let end = Instant::now() + PATIENCE;
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
