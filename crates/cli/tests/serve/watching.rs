//! Status and metrics when storage fails, and with clients that block connections.
use crate::daemon::{Daemon, Folder, is_root, names, paravane, patience, skip, status, without_sandbox};
use crate::raw::{Ask, Machine, Raw, STATUS};
use serde_json::Value;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

const OK: u8 = 0;
const IOERR: u8 = 1;

/// A client of a disk with one request at a time.
pub(crate) struct Client {
    machine: Machine,
    // Open while the queue is served.
    _raw: Raw,
    slot: usize,
}

impl Client {
    const REQUESTS: usize = 16;

    pub(crate) fn connect(socket: &Path) -> Self {
        let mut machine = Machine::new(0, 64, Self::REQUESTS);
        let raw = Raw::connect(socket);
        machine.attach(&raw, 0, false);
        Self { machine, _raw: raw, slot: 0 }
    }

    /// Status of a request for one sector.
    pub(crate) fn ask(&mut self, ask: Ask, sector: usize) -> u8 {
        let slot = self.submit(ask, sector..sector + 1);
        self.wait(slot)
    }

    /// Submits requests for one sector each, together; returns the slot of the last.
    pub(crate) fn submit(&mut self, ask: Ask, sectors: Range<usize>) -> usize {
        for sector in sectors {
            self.machine.ask(self.slot, ask, sector * 512, 512);
            self.slot += 1;
        }
        self.machine.kick();
        self.slot - 1
    }

    /// Waits for the end of a request; returns its status.
    pub(crate) fn wait(&mut self, slot: usize) -> u8 {
        let end = Instant::now() + patience();
        loop {
            let status = self.machine.bytes(Machine::slot(slot) + STATUS, 1)[0];
            if status != 0xff {
                return status;
            }
            assert!(Instant::now() < end, "no answer");
            self.machine.wait(Duration::from_millis(10));
        }
    }
}

/// Metrics of the daemon with this address.
pub(crate) fn get(address: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(patience())).unwrap();
    stream
        .write_all(b"GET /metrics HTTP/1.1\r\nHost: test\r\nAccept: application/openmetrics-text\r\n\r\n")
        .unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

/// A disk, its control socket, and the address of its metrics.
fn serve(folder: &Folder, image: &str, more: &[&str]) -> (Daemon, String, String) {
    let (socket, control) = (folder.text("s"), folder.text("c"));
    let arguments = ["serve", "blk", "--name", "vm0", "--image", image, "--socket", &socket];
    let options = ["--control", &control, "--metrics", "127.0.0.1:0", "--log-format", "json"];
    let mut daemon =
        Daemon::spawn(paravane().args(arguments).args(options).args(more).args(without_sandbox()));
    let line: Value = serde_json::from_str(&daemon.wait_for("/metrics")).unwrap();
    daemon.wait_for("ready");
    (daemon, control, line["address"].as_str().unwrap().to_owned())
}

/// Checks all outputs on `count` failed requests, the last for `sector`.
fn assert_shown(
    (daemon, control, address): &mut (Daemon, String, String),
    (operation, sector, count): (&str, u64, u64),
) {
    let device = status(control)["devices"][0].clone();
    let errors = &device["storage_errors"];
    assert_eq!(errors[operation], count, "{device}");
    let last = &errors["last"];
    assert_eq!((&last["operation"], &last["sector"]), (&operation.into(), &sector.into()), "{device}");
    assert_eq!((&last["bytes"], &last["queue"]), (&512.into(), &0.into()), "{device}");
    assert_eq!(device["queues"][0]["storage_errors"], count, "{device}");
    let (time, error) = (last["time"].as_str().unwrap(), last["error"].as_str().unwrap());
    assert!(time.starts_with("20") && time.ends_with('Z') && time.contains('T'), "{time}");
    assert!(!error.is_empty());

    let table = paravane().args(["status", "--seconds", "0", "--control", control]).output().unwrap();
    let table = String::from_utf8(table.stdout).unwrap();
    assert!(table.contains(&format!("storage errors: {count} {operation}; last {time}")), "{table}");
    assert!(table.contains(&format!("sector {sector}, 512 bytes, queue 0: {error}")), "{table}");
    assert!(table.contains(&format!("{count} errors ({count} storage)")), "{table}");

    let metrics = get(address);
    let labels = format!("{{device=\"vm0\",kind=\"blk\",operation=\"{operation}\"}}");
    let line = format!("paravane_blk_errors_total{labels} {count}");
    assert!(metrics.lines().any(|there| there == line), "{line} is not in\n{metrics}");

    let line: Value = serde_json::from_str(&daemon.wait_for("storage error")).unwrap();
    assert_eq!((&line["level"], &line["device"]), (&"WARN".into(), &"vm0".into()), "{line}");
    assert_eq!((&line["operation"], &line["bytes"]), (&operation.into(), &512.into()), "{line}");
}

/// A folder on tmpfs, or `None` if this host has none.
fn in_memory() -> Option<tempfile::TempDir> {
    Path::new("/dev/shm").is_dir().then(|| tempfile::tempdir_in("/dev/shm").ok()).flatten()
}

#[test]
fn an_image_that_is_cut_shows_with_sector_and_time() {
    const TEST: &str = "an_image_that_is_cut_shows_with_sector_and_time";
    let memory = in_memory();
    if memory.is_none() {
        skip(TEST, "in memory: there is no /dev/shm");
    }
    let places = [None, memory.as_ref().map(|memory| memory.path().to_owned())];
    for (place, options) in [(0, &[][..]), (0, &["--engine", "threads"]), (1, &[])] {
        let folder = Folder::new();
        let image = match (place, &places[place]) {
            (0, _) => folder.path("vm.img"),
            (_, Some(memory)) => memory.join("vm.img"),
            (_, None) => continue,
        };
        let file = std::fs::File::create(&image).unwrap();
        file.set_len(1 << 20).unwrap();
        let mut shown = serve(&folder, image.to_str().unwrap(), options);
        let mut client = Client::connect(&folder.path("s"));
        assert_eq!(client.ask(Ask::Write(1), 100), OK);
        assert_eq!(status(&shown.1)["devices"][0]["storage_errors"]["last"], Value::Null);
        file.set_len(64 << 10).unwrap();
        assert_eq!(client.ask(Ask::Read, 1000), IOERR);
        assert_eq!(client.ask(Ask::Read, 1001), IOERR);
        // Invalid requests of the guest are counted separately.
        assert_eq!(client.ask(Ask::Read, 1 << 20), IOERR);
        assert_shown(&mut shown, ("read", 1001, 2));
        assert_eq!(status(&shown.1)["devices"][0]["rejected_requests"], 1);
        let (ended, log) = shown.0.end();
        assert!(ended.success(), "{log:?}");
    }
}

/// A small tmpfs, unmounted when dropped.
struct Mounted(PathBuf);

impl Mounted {
    fn new(path: PathBuf, size: &str) -> Result<Self, String> {
        std::fs::create_dir(&path).unwrap();
        let options = format!("size={size}");
        let mut mount = Command::new("mount");
        let output = mount.args(["-t", "tmpfs", "-o", &options, "paravane-test"]).arg(&path).output();
        match output {
            Ok(output) if output.status.success() => Ok(Self(path)),
            Ok(output) => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
            Err(error) => Err(format!("mount: {error}")),
        }
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn a_full_file_system_shows_for_raw_and_qcow2() {
    const TEST: &str = "a_full_file_system_shows_for_raw_and_qcow2";
    if !is_root() {
        return skip(TEST, "only root can mount a file system");
    }
    for format in ["raw", "qcow2"] {
        let folder = Folder::new();
        let mounted = match Mounted::new(folder.path("small"), "2m") {
            Ok(mounted) => mounted,
            Err(why) => return skip(TEST, &why),
        };
        let image = mounted.0.join("vm.img");
        let image = image.to_str().unwrap();
        // Tables and length are allocated; only data pages are missing.
        let preallocate = if format == "qcow2" { "preallocation=metadata" } else { "preallocation=off" };
        let mut create = Command::new("qemu-img");
        match create.args(["create", "-q", "-f", format, "-o", preallocate, image, "64M"]).output() {
            Ok(output) => {
                assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            }
            Err(error) => return skip(TEST, format!("qemu-img: {error}")),
        }
        let mut shown = serve(&folder, image, &["--format", format, "--on-full", "error"]);
        let fill = std::fs::write(mounted.0.join("fill"), vec![1; 4 << 20]);
        assert!(fill.is_err(), "the file system is full");
        let mut client = Client::connect(&folder.path("s"));
        assert_eq!(client.ask(Ask::Write(1), 4096), IOERR, "{format}");
        assert_eq!(client.ask(Ask::Write(1), 8192), IOERR, "{format}");
        assert_shown(&mut shown, ("write", 8192, 2));
        std::fs::remove_file(mounted.0.join("fill")).unwrap();
        assert_eq!(client.ask(Ask::Write(1), 4096), OK, "{format}: there is room again");
        let (ended, log) = shown.0.end();
        assert!(ended.success(), "{log:?}");
    }
}

#[test]
fn an_image_that_is_deleted_shows() {
    let folder = Folder::new();
    let image = folder.image("vm.img");
    let (_daemon, control, address) = serve(&folder, &image, &[]);
    let line = |count: u32| format!("\nparavane_blk_image_deleted{{device=\"vm0\",kind=\"blk\"}} {count}\n");
    assert!(get(&address).contains(&line(0)));
    std::fs::remove_file(&image).unwrap();
    assert_eq!(status(&control)["devices"][0]["image_deleted"], true);
    assert!(get(&address).contains(&line(1)));
    let mut command = paravane();
    let table =
        command.args(["status", "--seconds", "0", "--problems", "--control", &control]).output().unwrap();
    let table = String::from_utf8(table.stdout).unwrap();
    assert!(table.contains("! vm0: the image was deleted"), "{table}");
}

#[test]
fn slow_clients_keep_no_scrape_out() {
    let folder = Folder::new();
    let image = folder.image("vm.img");
    let (daemon, control, address) = serve(&folder, &image, &[]);
    // Some clients send nothing, some send part of a request.
    let silent: Vec<_> = (0..64).map(|_| TcpStream::connect(&address).unwrap()).collect();
    let slow: Vec<_> = (0..64)
        .map(|_| {
            let mut stream = TcpStream::connect(&address).unwrap();
            // The daemon may have evicted it.
            let _ = stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n");
            stream
        })
        .collect();
    for _ in 0..3 {
        assert!(get(&address).starts_with("HTTP/1.1 200"));
    }
    // Clients that never read do not block others either.
    let deaf: Vec<_> = (0..64).map(|_| UnixStream::connect(&control).unwrap()).collect();
    assert_eq!(names(&status(&control)), ["vm0"]);
    drop((silent, slow, deaf));
    assert!(get(&address).starts_with("HTTP/1.1 200"));
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
}

#[test]
fn many_who_ask_at_once_are_all_answered() {
    let folder = Folder::new();
    let image = folder.image("vm.img");
    let (_daemon, control, address) = serve(&folder, &image, &[]);
    std::thread::scope(|scope| {
        for _ in 0..24 {
            scope.spawn(|| assert!(get(&address).ends_with("# EOF\n")));
            scope.spawn(|| assert_eq!(names(&status(&control)), ["vm0"]));
        }
    });
}

#[test]
fn status_sorts_filters_and_sums_up() {
    let folder = Folder::new();
    let device = |number: u32| format!("[[rng]]\nname = \"vm{number}\"\nsocket = \"s{number}\"\n");
    let file = folder.write("d.toml", &[10, 9, 2, 1].map(device).concat());
    let control = folder.text("c");
    let _daemon = Daemon::start(&["--config", &file, "--control", &control]);
    let run = |arguments: &[&str]| {
        let arguments = [&["status", "--seconds", "0", "--control", &control], arguments].concat();
        let output = paravane().args(arguments).output().unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap())
    };
    let listed = |arguments: &[&str]| {
        let (code, text) = run(arguments);
        assert_eq!(code, Some(0), "{text}");
        let rows = text.lines().filter(|line| line.starts_with("vm"));
        rows.map(|line| line.split_whitespace().next().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(listed(&[]), ["vm1", "vm2", "vm9", "vm10"]);
    assert_eq!(listed(&["--reverse", "--limit", "2"]), ["vm10", "vm9"]);
    assert_eq!(listed(&["vm1*", "vm9"]), ["vm1", "vm9", "vm10"]);
    assert_eq!(listed(&["--problems"]), Vec::<String>::new());
    let (_, summary) = run(&["--summary"]);
    assert_eq!(summary.lines().count(), 2, "{summary}");
    assert!(summary.contains("4 devices, 0 connected, 0 errors"), "{summary}");
    assert_eq!(run(&["vm3"]).0, Some(1), "there is no such device");
    let (_, json) = run(&["--json", "--filter", "S1"]);
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(names(&json[0]), ["vm10", "vm1"], "their endpoints, in the order of the file");
    assert_eq!(json[0]["summary"]["devices"], 2);
}
