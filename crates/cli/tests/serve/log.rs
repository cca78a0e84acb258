//! The log: clients cannot flood it, a blocked reader does not block the daemon.
use crate::daemon::{Daemon, Folder, names, paravane, patience, sandbox_usable, status, without_sandbox};
use crate::driver::{Driver, Random, Wish};
use crate::raw::Ask;
use crate::watching::Client;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::process::{Pid, Signal, kill_process};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// A file with disks a and b, and `more`.
fn config(folder: &Folder, more: &str) -> String {
    let disk = |name| {
        if !folder.path(&format!("{name}.img")).exists() {
            folder.image(&format!("{name}.img"));
        }
        format!("[[blk]]\nname = \"{name}\"\nimage = \"{name}.img\"\nsocket = \"{name}.sock\"\n")
    };
    folder.write("d.toml", &(disk("a") + &disk("b") + more))
}

/// A daemon observed by its control socket only; killed if a test fails.
struct Quiet {
    child: Child,
    control: String,
}

impl Quiet {
    fn start(folder: &Folder, stderr: impl Into<Stdio>, more: &[&str]) -> Self {
        let (file, control) = (config(folder, ""), folder.text("control"));
        let mut command = paravane();
        command.args(["serve", "--config", &file, "--control", &control]).args(more).args(without_sandbox());
        let child = command.stderr(stderr).spawn().expect("the daemon starts");
        let mut quiet = Self { child, control };
        // Each begins by itself, and its file exists a moment before its socket listens.
        quiet.wait("it is not ready", |_| {
            listens(&folder.path("a.sock")) && UnixStream::connect(folder.path("b.sock")).is_ok()
        });
        quiet
    }

    fn wait(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        let end = Instant::now() + patience();
        while !done(self) {
            assert!(Instant::now() < end, "{what}");
            assert_eq!(self.child.try_wait().unwrap(), None, "{what}: it has ended");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    fn end(mut self) -> ExitStatus {
        self.signal(Signal::TERM);
        let end = Instant::now() + patience();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < end, "it does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether a socket listens; without a session.
fn listens(socket: &Path) -> bool {
    /// `__SO_ACCEPTON`.
    const LISTENS: &str = "00010000";
    let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
    let is_it = |line: &str| {
        line.ends_with(socket.to_str().unwrap()) && line.split_whitespace().nth(3) == Some(LISTENS)
    };
    sockets.lines().any(is_it)
}

/// Clients in sequence, each disconnected for an unknown request.
fn flap(socket: &Path, sessions: usize) {
    // Each with another error: repeated ones are logged once.
    (0..sessions).for_each(|session| be_thrown_out(socket, 99 + session as u32));
}

/// A session that ends by an unknown request.
fn be_thrown_out(socket: &Path, request: u32) {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(patience())).unwrap();
    let header = [request, 1, 0].map(u32::to_ne_bytes).concat();
    stream.write_all(&header).unwrap();
    assert_eq!(stream.read(&mut [0]).unwrap_or(0), 0, "it was not thrown out");
}

/// Another disk, signals and status work while the log is blocked.
fn assert_serves(folder: &Folder, mut daemon: Quiet, sessions: usize) {
    let wish = Wish { packed: false, event_idx: true, queues: 1, depth: 8 };
    let mut driver = Driver::connect(&folder.path("b.sock"), wish).unwrap();
    let mut model = std::fs::read(folder.path("b.img")).unwrap();
    let mut random = Random::new(3);
    driver.exercise(&mut model, 20, &mut random);
    flap(&folder.path("a.sock"), sessions);
    driver.exercise(&mut model, 20, &mut random);
    let json = status(&daemon.control);
    assert_eq!(names(&json), ["a", "b"]);
    for device in json["devices"].as_array().unwrap() {
        assert!(device["failed"].is_null(), "{device}");
    }
    assert_eq!(json["devices"][0]["sessions"], sessions);

    config(folder, "[[rng]]\nname = \"c\"\nsocket = \"c.sock\"\n");
    daemon.signal(Signal::HUP);
    daemon.wait("SIGHUP is not obeyed", |daemon| names(&status(&daemon.control)) == ["a", "b", "c"]);
    driver.exercise(&mut model, 20, &mut random);
    let ended = daemon.end();
    assert_eq!(ended.code(), Some(0), "{ended}");
    assert!(!folder.path("b.sock").exists());
}

/// Both ends of a full pipe.
fn full_pipe() -> (OwnedFd, OwnedFd) {
    let (read, write) = rustix::pipe::pipe().unwrap();
    let flags = fcntl_getfl(&write).unwrap();
    fcntl_setfl(&write, flags | OFlags::NONBLOCK).unwrap();
    while rustix::io::write(&write, b"............................................................x\n")
        .is_ok()
    {}
    while rustix::io::write(&write, b"\n").is_ok() {}
    fcntl_setfl(&write, flags).unwrap();
    (read, write)
}

#[test]
fn a_slow_disk_hides_none_of_its_storage_errors() {
    let folder = Folder::new();
    let (image, socket, control) = (folder.image("vm.img"), folder.text("s"), folder.text("control"));
    let arguments = ["blk", "--image", &image, "--socket", &socket, "--control", &control];
    // Every request is slow.
    let mut daemon = Daemon::start(&[&arguments[..], &["--slow", "1ns", "--log-format", "json"]].concat());
    let wish = Wish { packed: false, event_idx: true, queues: 1, depth: 4 };
    let mut driver = Driver::connect(&folder.path("s"), wish).unwrap();
    driver.exercise(&mut std::fs::read(&image).unwrap(), 200, &mut Random::new(9));
    drop(driver);
    File::options().write(true).open(&image).unwrap().set_len(64 << 10).unwrap();
    assert_eq!(Client::connect(&folder.path("s")).ask(Ask::Read, 1000), 1);
    daemon.wait_for("storage error");
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
    let lines = log.iter().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let (mut written, mut left_out) = (0, 0);
    for line in lines.filter(|line| line["message"].as_str().unwrap().starts_with("slow request")) {
        written += u64::from(line["message"] == "slow request");
        left_out += line["left_out"].as_u64().unwrap_or(0);
    }
    assert!(written >= 20 && left_out > 0, "{log:?}");
    assert_eq!(written + left_out, 201, "{log:?}");
}

#[test]
fn a_full_disk_under_the_log_stops_nothing() {
    sandbox_usable("a_full_disk_under_the_log_stops_nothing");
    let folder = Folder::new();
    let full = File::options().write(true).open("/dev/full").unwrap();
    let daemon = Quiet::start(&folder, full, &["-v"]);
    assert_serves(&folder, daemon, 300);
}

#[test]
fn a_log_whose_reader_is_gone_stops_nothing() {
    sandbox_usable("a_log_whose_reader_is_gone_stops_nothing");
    let folder = Folder::new();
    let (read, write) = rustix::pipe::pipe().unwrap();
    drop(read);
    let daemon = Quiet::start(&folder, write, &["-v"]);
    assert_serves(&folder, daemon, 300);
}

#[test]
fn a_log_that_nobody_reads_stops_nothing() {
    sandbox_usable("a_log_that_nobody_reads_stops_nothing");
    let folder = Folder::new();
    let (_read, write) = full_pipe();
    let daemon = Quiet::start(&folder, write, &["-v"]);
    assert_serves(&folder, daemon, 1000);
}

#[test]
fn who_reads_the_log_again_is_told_how_much_is_lost() {
    sandbox_usable("who_reads_the_log_again_is_told_how_much_is_lost");
    let folder = Folder::new();
    let (read, write) = full_pipe();
    let daemon = Quiet::start(&folder, write, &["--log-rate", "0"]);
    // More lines than pipe, writer and queue hold.
    flap(&folder.path("a.sock"), 5000);
    let mut reader = BufReader::new(File::from(read));
    let mut sessions = Vec::new();
    let lost = loop {
        let mut line = String::new();
        assert_ne!(reader.read_line(&mut line).unwrap(), 0, "the log ends");
        if line.contains("log lines lost") {
            break line;
        }
        // The probe for readiness was a session of `b`.
        let of_a = line.contains("device=\"a\"").then(|| line.split("session=").nth(1)).flatten();
        if let Some(session) = of_a {
            sessions.push(session.split_whitespace().next().unwrap().parse::<usize>().unwrap());
        }
    };
    let words: Vec<_> = lost.split_whitespace().collect();
    let lost: usize = words[2].parse().unwrap_or_else(|_| panic!("{lost}"));
    assert!(lost > 0 && lost < 10_000, "{lost}");
    assert!(sessions.len() > 100 && sessions.is_sorted(), "{sessions:?}");
    drop(std::thread::spawn(move || reader.lines().for_each(drop)));
    assert!(daemon.end().success());
}

#[test]
fn clients_that_come_and_go_leave_a_bounded_log() {
    const SESSIONS: usize = 1500;
    sandbox_usable("clients_that_come_and_go_leave_a_bounded_log");
    let folder = Folder::new();
    let (file, control) = (config(&folder, ""), folder.text("control"));
    let start = Instant::now();
    let daemon = Daemon::start(&["--config", &file, "--control", &control, "--log-format", "json"]);
    flap(&folder.path("a.sock"), SESSIONS);
    flap(&folder.path("b.sock"), 1);
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
    let seconds = start.elapsed().as_secs() as usize;
    let log: Vec<serde_json::Value> = log.iter().map(|line| serde_json::from_str(line).unwrap()).collect();
    let of = |name: &'static str| log.iter().filter(move |line| line["device"] == name);
    // Startup, two lines a session, one or two at the end, and reports of suppressed lines.
    let told = of("a").filter(|line| line["message"] == "messages suppressed").count();
    let (written, left_out) =
        of("a").fold((0, 0), |(lines, sum), line| (lines + 1, sum + line["left_out"].as_u64().unwrap_or(0)));
    let all = written - told + left_out as usize;
    assert!(all > 2 * SESSIONS && all <= 2 * SESSIONS + 5, "{all}: {written} written, {left_out} left out");
    // The limit goes by the clock: a burst, and a line a second, however long all this takes. The
    // last lines are not limited.
    assert!(written <= 20 + seconds + 5, "{written} lines in {seconds} s");
    assert!(of("b").any(|line| line["message"].as_str().unwrap().starts_with("session ended")), "{log:?}");
    assert!(of("b").all(|line| line["left_out"].is_null()), "{log:?}");
}

#[test]
fn a_client_that_repeats_its_error_is_reported_once() {
    sandbox_usable("a_client_that_repeats_its_error_is_reported_once");
    let folder = Folder::new();
    let (file, control) = (config(&folder, ""), folder.text("control"));
    let daemon = Daemon::start(&["--config", &file, "--control", &control]);
    for _ in 0..9 {
        be_thrown_out(&folder.path("b.sock"), 99);
    }
    be_thrown_out(&folder.path("b.sock"), 98);
    let wish = Wish { packed: false, event_idx: true, queues: 1, depth: 8 };
    let mut driver = Driver::connect(&folder.path("b.sock"), wish).unwrap();
    let mut model = std::fs::read(folder.path("b.img")).unwrap();
    driver.exercise(&mut model, 20, &mut Random::new(3));
    drop(driver);
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
    let count = |text: &str| log.iter().filter(|line| line.contains(text)).count();
    assert_eq!(count("session ended: unknown request 99"), 1, "{log:?}");
    assert_eq!(count("session ended again: unknown request 99; the client repeats"), 1, "{log:?}");
    assert_eq!(count("session ended: unknown request 98"), 1, "{log:?}");
    assert_eq!(count("client disconnected"), 1, "{log:?}");
    assert!(count("client connected") <= 5, "{log:?}");
}

#[test]
fn what_was_left_out_is_told_when_the_flood_is_over() {
    sandbox_usable("what_was_left_out_is_told_when_the_flood_is_over");
    let folder = Folder::new();
    let (file, control) = (config(&folder, ""), folder.text("control"));
    let mut daemon = Daemon::start(&["--config", &file, "--control", &control]);
    flap(&folder.path("a.sock"), 300);
    let line = daemon.wait_for("messages suppressed device=\"a\" left_out=");
    assert!(line.contains("WARN"), "{line}");
}

#[test]
fn a_vmm_that_hangs_up_at_once_is_asked_less_and_less_often() {
    sandbox_usable("a_vmm_that_hangs_up_at_once_is_asked_less_and_less_often");
    let folder = Folder::new();
    let listener = UnixListener::bind(folder.path("s")).unwrap();
    let mut daemon = Daemon::start(&["rng", "--connect", &folder.text("s"), "--control", "off", "-v"]);
    let mut pauses = Vec::new();
    for _ in 0..4 {
        drop(listener.accept().unwrap());
        let line = daemon.wait_for("next attempt");
        let pause = line.split("pause=").nth(1).unwrap().split(' ').next().unwrap().to_owned();
        let (number, factor) = match pause.strip_suffix("ms") {
            Some(number) => (number, 1.0),
            None => (pause.trim_end_matches('s'), 1000.0),
        };
        pauses.push(number.parse::<f64>().unwrap() * factor);
    }
    assert!(pauses.is_sorted_by(|one, next| one < next), "{pauses:?}");
    // A failed connection is logged once.
    drop(listener);
    daemon.wait_for("cannot connect to ");
    for _ in 0..2 {
        let line = daemon.wait_for("cannot connect to ");
        assert!(line.contains("DEBUG"), "{line}");
    }
    assert!(daemon.end().0.success());
}

#[test]
fn lines_of_queues_name_their_device() {
    sandbox_usable("lines_of_queues_name_their_device");
    let folder = Folder::new();
    let (file, control) = (config(&folder, ""), folder.text("control"));
    let mut daemon = Daemon::start(&["--config", &file, "--control", &control, "-v"]);
    let wish = Wish { packed: false, event_idx: true, queues: 1, depth: 8 };
    let _driver = Driver::connect(&folder.path("b.sock"), wish).unwrap();
    let line = daemon.wait_for("queue started");
    assert!(line.contains(" device=\"b\""), "{line}");
}

#[test]
fn a_request_at_fault_has_its_status_though_nobody_reads_why() {
    let full = || File::options().write(true).open("/dev/full").unwrap();
    let closed = || rustix::pipe::pipe().unwrap().1;
    for arguments in [&["serve", "--config", "/nonexistent.toml"][..], &["nonsense"], &["serve", "rng"]] {
        for stderr in [Stdio::from(full()), Stdio::from(closed())] {
            let status = paravane().args(arguments).stderr(stderr).status().unwrap();
            assert_eq!(status.code(), Some(2), "{arguments:?}");
        }
    }
    // Help and reports may be truncated.
    for arguments in [&["--help"][..], &["status"], &["doctor"]] {
        let output = paravane().args(arguments).stdout(closed()).stderr(Stdio::piped()).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && stderr.is_empty(), "{arguments:?}: {stderr}");
    }
    let full = paravane().arg("status").stdout(full()).output().unwrap();
    assert_eq!(full.status.code(), Some(1));
    assert_eq!(String::from_utf8_lossy(&full.stderr).lines().count(), 1);
}
