//! The package's unit under systemd itself: restarts, kills and upgrades, and clients under load that
//! notice nothing.
//!
//! This changes /etc and /var/lib of the system, so it runs in a small Debian that is made for it
//! (`scripts/service-check`), which names the package in the environment. It is skipped elsewhere.
use crate::daemon::{names, patience, skip};
use crate::load::{self, DISKS, SIZE};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Environment variable: the Debian package, which is installed.
const PACKAGE: &str = "PARAVANE_SERVICE_PACKAGE";
/// Environment variable: number of daemons that are replaced [30].
const REPLACED: &str = "PARAVANE_SERVICE_REPLACED";
/// Where the unit's service keeps its sockets, and the images of this test are.
const SOCKETS: &str = "/run/paravane";
const IMAGES: &str = "/var/lib/paravane";

/// Runs a program, which must succeed. Returns what it prints.
fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{program} {arguments:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

/// Process identifier of the service; "0" while there is none.
fn main_pid() -> String {
    run("systemctl", &["show", "--property=MainPID", "--value", "paravane"]).trim().to_owned()
}

fn is_active() -> bool {
    run("systemctl", &["show", "--property=ActiveState", "--value", "paravane"]).trim() == "active"
}

/// Whether the daemon can have its sandbox here.
fn has_landlock() -> bool {
    let output = Command::new("paravane").arg("doctor").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines().any(|line| line.starts_with("ok") && line.contains("landlock"))
}

/// Waits until another process than `old` serves.
fn wait_for_another(old: &str) {
    let end = Instant::now() + patience();
    while main_pid() == old || !is_active() {
        assert!(Instant::now() < end, "{}", journal());
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The last lines of the service's log.
fn journal() -> String {
    run("journalctl", &["--no-pager", "--lines=60", "--unit=paravane"])
}

fn status() -> Value {
    let list: Value =
        serde_json::from_str(&run("paravane", &["status", "--seconds", "0", "--json"])).unwrap();
    list[0].clone()
}

#[test]
fn clients_notice_nothing_of_restarts_kills_and_upgrades() {
    let Ok(package) = std::env::var(PACKAGE) else {
        return skip("service", format!("it changes the system: scripts/service-check runs it ({PACKAGE})"));
    };
    let times = std::env::var(REPLACED).map_or(30, |times| times.parse().unwrap());
    let image = |name: &str| Path::new(IMAGES).join(format!("{name}.img"));
    let has_sandbox = has_landlock();
    eprintln!("sandbox: {has_sandbox}");
    let mut text = format!("[daemon]\nno-sandbox = {}\n", !has_sandbox);
    for name in DISKS {
        std::fs::write(image(name), vec![0; SIZE]).unwrap();
        text += &format!(
            "[[blk]]\nname = \"{name}\"\nimage = {:?}\nsocket = \"{SOCKETS}/{name}.sock\"\nqueues = 2\n",
            image(name)
        );
    }
    std::fs::write("/etc/paravane/devices.toml", text).unwrap();
    run("systemctl", &["restart", "paravane"]);
    let replace = |number: usize| {
        let old = main_pid();
        match number % 3 {
            0 => drop(run("dpkg", &["--install", &package])),
            1 => drop(run("systemctl", &["kill", "--signal=KILL", "paravane"])),
            _ => drop(run("systemctl", &["restart", "paravane"])),
        }
        wait_for_another(&old);
    };
    let socket = |name: &str| PathBuf::from(format!("{SOCKETS}/{name}.sock"));
    let written = load::under_load(socket, times, replace, journal);
    let report = status();
    assert_eq!(names(&report), DISKS);
    for device in report["devices"].as_array().unwrap() {
        assert_eq!((&device["sessions"], &device["protocol_errors"]), (&1.into(), &0.into()), "{device}");
    }
    for (name, model) in written {
        assert!(std::fs::read(image(name)).unwrap() == model, "disk {name}");
    }
}
