//! A file of devices of which one cannot be served: the others are, and their sessions go on.
use crate::daemon::{
    Daemon, Folder, assert_refused, names, paravane, patience, status, status_text, without_sandbox,
};
use crate::driver::{Driver, Random};
use crate::load::{self, SIZE};
use crate::snapshot::{Chain, disk, has_marks, snapshot};
use rustix::process::Signal;
use serde_json::Value;
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::time::{Duration, Instant};

/// Waits until the report of the daemon is as wanted.
fn wait(control: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    let begin = Instant::now();
    loop {
        let report = status(control);
        if wanted(&report) {
            return report;
        }
        assert!(begin.elapsed() < patience(), "{report}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Two disks, a holder, and a client of each.
struct Setup {
    folder: Folder,
    _holder: Daemon,
    control: String,
    drivers: [Driver; 2],
    models: [Vec<u8>; 2],
    random: Random,
}

fn raw(folder: &Folder, name: &str) -> String {
    disk(name, &Chain::new(folder.text(&format!("{name}.img"))).keys())
}

impl Setup {
    fn new() -> (Self, Daemon) {
        let folder = Folder::new();
        let mut holder = paravane();
        holder.args(["hold", "--socket", &folder.text("hold")]).args(without_sandbox());
        let mut holder = Daemon::spawn(&mut holder);
        holder.wait_for("ready");
        for name in ["a", "b"] {
            folder.image(&format!("{name}.img"));
        }
        folder.write("d.toml", &(raw(&folder, "a") + &raw(&folder, "b")));
        let control = folder.text("control");
        let daemon = start(&folder);
        let drivers = ["a", "b"].map(|name| {
            let socket = folder.path(&format!("{name}.sock"));
            let mut driver = Driver::connect(&socket, load::wish(false, true, 2)).unwrap();
            driver.be_patient();
            driver
        });
        let models = [vec![0; SIZE], vec![0; SIZE]];
        let mut setup = Self { folder, _holder: holder, control, drivers, models, random: Random::new(5) };
        setup.work(0);
        setup.work(1);
        wait(&setup.control, |report| {
            report["devices"].as_array().unwrap().iter().all(|device| device["kept"] == true)
        });
        (setup, daemon)
    }

    /// The client of a disk writes and reads back.
    fn work(&mut self, number: usize) {
        self.drivers[number].exercise(&mut self.models[number], 50, &mut self.random);
    }
}

fn start(folder: &Folder) -> Daemon {
    let (file, control, hold) = (folder.text("d.toml"), folder.text("control"), folder.text("hold"));
    Daemon::start(&["--config", &file, "--control", &control, "--holder", &hold])
}

#[test]
fn a_missing_image_costs_the_other_sessions_nothing_and_its_own_session_waits() {
    let (mut setup, daemon) = Setup::new();
    let control = setup.control.clone();
    drop(daemon);
    std::fs::rename(setup.folder.path("a.img"), setup.folder.path("away")).unwrap();
    let mut daemon = start(&setup.folder);
    setup.work(1);
    let report = wait(&control, |report| names(report) == ["b"]);
    let failed = &report["failed"][0];
    assert_eq!((&failed["name"], &failed["kept"]), (&"a".into(), &true.into()), "{report}");
    assert!(failed["why"].as_str().unwrap().contains("a.img"), "{report}");
    let text = status_text(&control);
    assert!(
        text.lines()
            .any(|line| line.starts_with("  ! a: not served: ") && line.contains("its session is kept")),
        "{text}"
    );
    // Nor does another kill.
    drop(daemon);
    daemon = start(&setup.folder);
    setup.work(1);
    assert_eq!(wait(&control, |report| names(report) == ["b"])["devices"][0]["sessions"], 1);
    // A take-over would end it.
    let take_over = ["serve", "--config", &setup.folder.text("d.toml"), "--control", &control, "--take-over"];
    let output = paravane().args(take_over).args(without_sandbox()).output().unwrap();
    assert!(!output.status.success());
    // It is tried again, without a signal.
    std::fs::rename(setup.folder.path("away"), setup.folder.path("a.img")).unwrap();
    let report = wait(&control, |report| names(report) == ["a", "b"]);
    assert_eq!((&report["devices"][0]["sessions"], &report["failed"]), (&1.into(), &Value::Array(vec![])));
    setup.work(0);
    setup.work(1);
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
}

#[test]
fn a_snapshot_whose_line_was_not_edited_is_one_such_device() {
    const TEST: &str = "a_snapshot_whose_line_was_not_edited_is_one_such_device";
    let (mut setup, daemon) = Setup::new();
    if !has_marks(&setup.folder) {
        return crate::daemon::skip(TEST, "no extended attributes in this folder");
    }
    let control = setup.control.clone();
    let overlay = setup.folder.text("1.qcow2");
    snapshot(&control, "a", &overlay);
    setup.work(0);
    drop(daemon);
    let mut daemon = start(&setup.folder);
    setup.work(1);
    let report = wait(&control, |report| names(report) == ["b"]);
    let why = report["failed"][0]["why"].as_str().unwrap().to_owned();
    assert!(
        why.contains(&format!("is the backing file of {overlay}: serve that with --format qcow2")),
        "{why}"
    );
    // With the right line, SIGHUP resumes the session.
    let image = setup.folder.text("a.img");
    let keys = Chain::on(overlay, format!("raw:{image}")).keys();
    setup.folder.write("d.toml", &(disk("a", &keys) + &raw(&setup.folder, "b")));
    daemon.signal(Signal::HUP);
    daemon.wait_for("reloaded: 1 unchanged");
    let report = wait(&control, |report| names(report) == ["a", "b"]);
    assert_eq!(report["devices"][0]["sessions"], 1, "{report}");
    setup.work(0);
    setup.work(1);
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
}

#[test]
fn a_device_that_is_removed_while_it_fails_ends_its_session() {
    let (mut setup, daemon) = Setup::new();
    drop(daemon);
    std::fs::remove_file(setup.folder.path("a.img")).unwrap();
    let mut daemon = start(&setup.folder);
    setup.folder.write("d.toml", &raw(&setup.folder, "b"));
    daemon.signal(Signal::HUP);
    daemon.wait_for("device is not configured any more: its session ends");
    setup.work(1);
    let report = wait(&setup.control, |report| report["failed"] == Value::Array(vec![]));
    assert_eq!(names(&report), ["b"]);
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
}

#[test]
fn a_server_that_does_not_answer_holds_up_nobody() {
    let (mut setup, daemon) = Setup::new();
    let control = setup.control.clone();
    drop(daemon);
    let silent = ["nbd0", "nbd1"].map(|name| UnixListener::bind(setup.folder.path(name)).unwrap());
    // One is the image, the other one below an image.
    let top = setup.folder.text("top.qcow2");
    let made = paravane().args(["disk", "create", "--size", "1M", &top]).output().unwrap();
    assert!(made.status.success(), "{made:?}");
    let [url, below] =
        ["nbd0", "nbd1"].map(|name| format!("nbd+unix:///?socket={}", setup.folder.text(name)));
    let more = [
        format!("image = {url:?}\nstore-timeout = 3600\n"),
        format!(
            "image = {top:?}\nformat = \"qcow2\"\nbacking = [{:?}]\nstore-timeout = 3600\n",
            format!("raw:{below}")
        ),
    ];
    let more = ["c", "d"].into_iter().zip(&more).map(|(name, keys)| disk(name, keys)).collect::<String>();
    setup.folder.write("d.toml", &(more + &raw(&setup.folder, "a") + &raw(&setup.folder, "b")));
    let daemon = start(&setup.folder);
    setup.work(0);
    setup.work(1);
    let report = wait(&control, |report| names(report) == ["a", "b"]);
    let waiting = report["waiting"].as_array().unwrap();
    assert_eq!(waiting.iter().map(|device| &device["name"]).collect::<Vec<_>>(), ["c", "d"], "{report}");
    drop(silent);
    let (ended, log) = daemon.end();
    assert!(ended.code().is_some(), "{log:?}");
}

#[test]
fn what_is_not_served_is_in_the_managers_status_and_the_exit_status() {
    let folder = Folder::new();
    folder.image("a.img");
    let text = raw(&folder, "a") + &raw(&folder, "b");
    let (file, control) = (folder.write("d.toml", &text), folder.text("control"));
    let manager = UnixDatagram::bind(folder.path("notify")).unwrap();
    manager.set_read_timeout(Some(patience())).unwrap();
    let until = |wanted: &dyn Fn(&str) -> bool| loop {
        let mut message = [0; 1024];
        let len = manager.recv(&mut message).unwrap();
        let message = String::from_utf8(message[..len].to_vec()).unwrap();
        if wanted(&message) {
            return message;
        }
    };
    let mut command = paravane();
    command.args(["serve", "--config", &file, "--control", &control]).args(without_sandbox());
    let mut daemon = Daemon::spawn(command.env("NOTIFY_SOCKET", folder.path("notify")));
    until(&|message| message == "READY=1\n");
    let told = until(&|message| message.starts_with("STATUS=serving 1 of 2 devices; not served: device b: "));
    assert!(told.contains("b.img"), "{told}");
    daemon.wait_for("ready");
    let ask = ["status", "--seconds", "0", "--control", &control];
    let exit = || paravane().args(ask).output().unwrap().status.code();
    assert_eq!(exit(), Some(3));
    // A restart keeps its meaning: a unit that fails loses what the manager holds.
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");

    let mut daemon = Daemon::spawn(command.env("NOTIFY_SOCKET", folder.path("notify")));
    daemon.wait_for("ready");
    folder.image("b.img");
    until(&|message| message == "STATUS=\n");
    assert_eq!(exit(), Some(0));
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");

    // With none, there is nothing to serve.
    for name in ["a.img", "b.img"] {
        std::fs::remove_file(folder.path(name)).unwrap();
    }
    assert_refused(&command.output().unwrap(), "device a: ");
}
