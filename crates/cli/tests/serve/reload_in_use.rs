//! `paravane reload`: devices change while their clients stay connected.
use crate::daemon::{Daemon, Folder, names, paravane, patience, status};
use crate::driver::Driver;
use crate::late_parties::{connect, message};
use crate::load::{DISKS, under_load, wish};
use crate::reload::{is_closed, is_open};
use rustix::process::Signal;
use serde_json::Value;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::process::Output;
use std::time::{Duration, Instant};

/// A folder with the disks of [`DISKS`], and a file that has them.
struct Host {
    folder: Folder,
    file: String,
    control: String,
}

impl Host {
    fn new(keys: &str) -> Self {
        let folder = Folder::new();
        DISKS.iter().for_each(|name| drop(folder.image(&format!("{name}.img"))));
        let (file, control) = (folder.text("d.toml"), folder.text("control"));
        let host = Self { folder, file, control };
        host.write("", |_| keys.to_owned());
        host
    }

    /// Writes the file: the table [daemon], and keys of each disk.
    fn write(&self, daemon: &str, keys: impl Fn(&str) -> String) {
        let disk = |name: &&str| {
            let place =
                format!("name = \"{name}\"\nimage = \"{name}.img\"\nsocket = \"{name}.sock\"\nqueues = 2\n");
            format!("[[blk]]\n{place}{}\n", keys(name))
        };
        let disks: Vec<_> = DISKS.iter().map(disk).collect();
        self.folder.write("d.toml", &format!("[daemon]\n{daemon}\n{}", disks.concat()));
    }

    fn start(&self, options: &[&str]) -> Daemon {
        Daemon::start(&[&["--config", &self.file, "--control", &self.control], options].concat())
    }

    fn reload(&self, options: &[&str]) -> Output {
        paravane().args(["reload", "--control", &self.control]).args(options).output().unwrap()
    }

    /// Reloads, and asserts the exit status. Returns what was printed.
    fn reloads(&self, options: &[&str], code: i32) -> String {
        let output = self.reload(options);
        let (text, error) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert_eq!(output.status.code(), Some(code), "{text}{error}");
        text.into_owned() + &error
    }

    fn device(&self, name: &str) -> Value {
        let json = status(&self.control);
        let at =
            names(&json).iter().position(|other| *other == name).unwrap_or_else(|| panic!("{name}: {json}"));
        json["devices"][at].clone()
    }
}

/// Checks what the disks have.
fn verify(host: &Host, written: Vec<(&str, Vec<u8>)>) {
    for (name, model) in written {
        let image = std::fs::read(host.folder.path(&format!("{name}.img"))).unwrap();
        assert!(image == model, "disk {name} has other data");
    }
}

#[test]
fn settings_change_in_place_while_requests_are_in_flight() {
    let host = Host::new("");
    let daemon = host.start(&["--io-threads", "3"]);
    let steps = [
        "ops-per-second = 3000\nslow = \"1us\"",
        "bytes-per-second = \"20M\"\nburst-bytes = \"1M\"\npoll-us = 0",
        "latencies = \"off\"\non-full = \"error\"",
        "poll-us = 200\nslow = \"90s\"",
        "ops-per-second = 100000\nlatencies = \"on\"",
        "",
    ];
    let written = under_load(
        |name| host.folder.path(&format!("{name}.sock")),
        2 * steps.len(),
        |number| {
            let keys = steps[(number - 1) % steps.len()];
            let level = if number % 2 == 1 { "debug" } else { "info" };
            host.write(&format!("log-rate = {number}\nlog-level = \"{level}\""), |_| keys.to_owned());
            let text = host.reloads(&[], 0);
            assert_eq!(text.matches(": changed in place: ").count(), DISKS.len() + 1, "{text}");
            assert!(text.contains("[daemon]: changed in place: log-level, log-rate\n"), "{text}");
            let settings = host.device("a")["settings"].clone();
            let has = |key: &str| keys.contains(key);
            assert_eq!(settings["ops_per_second"].is_u64(), has("ops-per"), "{settings}");
            assert_eq!(settings["burst_bytes"] == (1 << 20), has("burst"), "{settings}");
            assert_eq!(settings["latencies"], !has("\"off\""), "{settings}");
            assert_eq!(settings["on_full"], if has("on-full") { "error" } else { "wait" });
            assert_eq!(settings["slow_us"].is_u64(), has("slow"), "{settings}");
        },
        || status(&host.control).to_string(),
    );
    verify(&host, written);
    for name in DISKS {
        assert_eq!(host.device(name)["sessions"], 1, "{name}");
    }
    let log = daemon.end().1.join("\n");
    assert!(!log.contains("session=2"), "{log}");
    assert!(log.contains("slow request"), "{log}");
}

#[test]
fn a_limit_that_is_lifted_lets_go_what_it_held() {
    let host = Host::new("");
    let daemon = host.start(&["--io-threads", "2"]);
    let written = under_load(
        |name| host.folder.path(&format!("{name}.sock")),
        3,
        |_| {
            let before = host.device("b")["throttled"].as_u64().unwrap();
            // One request of 4 KiB owes an hour.
            host.write("", |_| "bytes-per-second = 1\nburst-bytes = 0".to_owned());
            host.reloads(&[], 0);
            let end = Instant::now() + patience();
            while host.device("b")["throttled"].as_u64().unwrap() == before {
                assert!(Instant::now() < end, "nothing is held");
                std::thread::sleep(Duration::from_millis(5));
            }
            host.write("", |_| String::new());
            host.reloads(&[], 0);
        },
        || status(&host.control).to_string(),
    );
    verify(&host, written);
    drop(daemon.end());
}

#[test]
fn a_device_that_is_opened_again_keeps_its_session() {
    let host = Host::new("");
    let daemon = host.start(&["--io-threads", "2"]);
    let steps = ["engine = \"threads\"", "workers = 2", "serial = \"other\"\nslow = \"9s\"", ""];
    let written = under_load(
        |name| host.folder.path(&format!("{name}.sock")),
        2 * steps.len(),
        |number| {
            let keys = steps[(number - 1) % steps.len()];
            host.write("", |_| keys.to_owned());
            let text = host.reloads(&[], 0);
            assert_eq!(text.matches(": restarted, its session goes on: ").count(), DISKS.len(), "{text}");
            assert_eq!(host.device("c")["workers"], if keys.contains("workers") { 2 } else { 0 });
        },
        || status(&host.control).to_string(),
    );
    verify(&host, written);
    for name in DISKS {
        assert_eq!(host.device(name)["sessions"], 1, "{name}");
    }
    drop(daemon.end());
}

#[test]
fn a_change_that_would_cut_a_client_is_refused_unless_it_is_named() {
    let host = Host::new("");
    let mut daemon = host.start(&[]);
    let mut driver = Driver::connect(&host.folder.path("a.sock"), wish(false, true, 2)).unwrap();
    host.folder.image("other.img");
    for (keys, why) in [
        ("read-only = true", "read-only: false for the guest, true here"),
        ("queue-size = 64", "segments of a request: 126 for the guest, 62 here"),
        (
            "engine = \"threads\"\nforce-layers = true\nblock-size = 4096",
            "block size: 512 for the guest, 4096 here",
        ),
    ] {
        host.write("", |name| if name == "a" { format!("{keys}\nslow = \"1s\"") } else { String::new() });
        let text = host.reloads(&[], 3);
        assert!(text.contains("a: refused: ") && text.contains(why), "{text}");
        assert!(text.contains("restart it with --restart a\n") && text.contains("b: unchanged\n"), "{text}");
        // Nothing of it is done.
        assert!(host.device("a")["settings"]["slow_us"].is_null());
        assert_eq!(driver.write_once(0, 4096, 7), 0);
    }
    host.write("", |name| if name == "a" { "queue-size = 64".to_owned() } else { String::new() });
    let unknown = host.reloads(&["--restart", "nosuch"], 2);
    assert!(unknown.contains("--restart nosuch: the file has no device of this name"), "{unknown}");
    let text = host.reloads(&["--restart", "a"], 0);
    assert!(text.contains("a: restarted: queue-size: its session ended: "), "{text}");
    let line = daemon.wait_for("device restarts, a client has to reconnect: changed: queue-size");
    assert!(line.contains("WARN") && line.contains("a"), "{line}");
    assert!(UnixStream::connect(host.folder.path("a.sock")).is_ok());
}

#[test]
fn what_needs_a_refused_devices_socket_is_refused_too() {
    let folder = Folder::new();
    ["a", "b", "c"].iter().for_each(|name| drop(folder.image(&format!("{name}.img"))));
    let disk = |name: &str, image: &str, socket: &str| {
        format!("[[blk]]\nname = \"{name}\"\nimage = \"{image}.img\"\nsocket = \"{socket}.sock\"\n")
    };
    let file = folder.write("d.toml", &(disk("a", "a", "a") + &disk("b", "b", "b")));
    let control = folder.text("control");
    let host = Host { folder, file, control };
    let daemon = host.start(&[]);
    let client = UnixStream::connect(host.folder.path("a.sock")).unwrap();
    let other = UnixStream::connect(host.folder.path("b.sock")).unwrap();
    let end = Instant::now() + patience();
    while host.device("a")["connected"] == false || host.device("b")["connected"] == false {
        assert!(Instant::now() < end);
        std::thread::sleep(Duration::from_millis(2));
    }
    // They change places: neither may.
    host.folder.write("d.toml", &(disk("a", "a", "b") + &disk("b", "b", "a")));
    let text = host.reloads(&["--restart", "b"], 3);
    assert!(text.contains("a: refused: socket: its guest would find another device"), "{text}");
    assert!(text.contains("b: refused: socket: device a keeps what it needs"), "{text}");
    assert!(is_open(&client) && is_open(&other));
    // The image of one goes to another that is new.
    host.folder.write("d.toml", &(disk("a", "c", "a") + &disk("b", "b", "b") + &disk("c", "a", "c")));
    let text = host.reloads(&[], 3);
    assert!(text.contains("a: refused: image: ") && text.contains("b: unchanged\n"), "{text}");
    assert!(text.contains("c: refused: device a keeps what it needs"), "{text}");
    assert!(!host.folder.path("c.sock").exists());
    // Together they may. A daemon that is told by a signal asks nobody.
    host.folder.write("d.toml", &(disk("a", "a", "b") + &disk("b", "b", "a")));
    let text = host.reloads(&["--restart", "b", "--restart", "a"], 0);
    assert!(text.contains("a: restarted: socket\n") && text.contains("b: restarted: socket\n"), "{text}");
    assert!(is_closed(&client) && is_closed(&other));
    drop(daemon);
}

#[test]
fn a_signal_restarts_what_it_has_to_and_warns() {
    let host = Host::new("");
    let mut daemon = host.start(&[]);
    let mut driver = Driver::connect(&host.folder.path("b.sock"), wish(true, true, 2)).unwrap();
    let client = UnixStream::connect(host.folder.path("a.sock")).unwrap();
    host.write("", |name| match name {
        "a" => "read-only = true".to_owned(),
        "b" => "engine = \"threads\"".to_owned(),
        _ => "poll-us = 0".to_owned(),
    });
    let end = Instant::now() + patience();
    while host.device("a")["connected"] == false {
        assert!(Instant::now() < end);
        std::thread::sleep(Duration::from_millis(2));
    }
    daemon.signal(Signal::HUP);
    let line = daemon.wait_for("reloaded: ");
    assert!(line.contains("0 unchanged, 0 removed, 0 added, 0 failed, 2 changed in place, "), "{line}");
    // No driver was told of disk a: it may change within its session.
    assert!(line.contains("1 restarted within their sessions") || line.contains("2 restarted"), "{line}");
    assert_eq!(driver.write_once(0, 4096, 7), 0);
    assert_eq!(host.device("b")["sessions"], 1);
    drop((client, daemon));
}

#[test]
fn each_device_has_its_outcome() {
    let host = Host::new("");
    let daemon = host.start(&[]);
    let disk = |name: &str, more: &str| {
        format!(
            "[[blk]]\nname = \"{name}\"\nimage = \"{name}.img\"\nsocket = \"{name}.sock\"\nqueues = 2\n{more}\n"
        )
    };
    let text = disk("a", "") + &disk("b", "slow = \"1s\"") + &disk("c", "workers = 1") + &disk("nosuch", "");
    host.folder.write("d.toml", &("[daemon]\nio-threads = 1\n".to_owned() + &text));
    let check = || {
        let arguments = ["serve", "--check", "--config", &host.file, "--against", &host.control];
        paravane().args(arguments).output().unwrap()
    };
    // The file is valid, but for an image that is missing.
    host.folder.image("nosuch.img");
    let plan = check();
    std::fs::remove_file(host.folder.path("nosuch.img")).unwrap();
    let planned = String::from_utf8(plan.stdout).unwrap();
    for line in [
        "a: unchanged",
        "b: changes in place: slow",
        "c: restarts: workers",
        "nosuch: is added",
        "d: is removed",
        "[daemon]: is refused: io-threads; applies when the daemon is restarted, or taken over from",
    ] {
        assert!(planned.lines().any(|there| there == line), "{line}: {planned}");
    }
    assert_eq!(plan.status.code(), Some(3), "{planned}");
    assert_eq!(names(&status(&host.control)), DISKS);
    let done = host.reloads(&["--timeout", "30"], 1);
    for line in ["a: unchanged", "b: changed in place: slow", "c: restarted: workers", "d: removed"] {
        assert!(done.lines().any(|there| there == line), "{line}: {done}");
    }
    assert!(done.contains("nosuch: failed: ") && done.contains("nosuch.img"), "{done}");
    let json = host.reload(&["--json"]);
    let json: Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!((&json[0]["name"], &json[0]["outcome"]), (&"a".into(), &"unchanged".into()), "{json}");
    host.folder.write("d.toml", &(disk("a", "queues = 0")));
    let invalid = host.reloads(&[], 2);
    assert!(invalid.contains("d.toml:"), "{invalid}");
    let other = host.folder.write("e.toml", &disk("a", ""));
    let arguments = ["serve", "--check", "--config", &other, "--against", &host.control];
    let output = paravane().args(arguments).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("the daemon reloads "));
    drop(daemon);
    let gone = host.reloads(&[], 2);
    assert!(gone.contains("control"), "{gone}");
}

#[test]
fn a_daemon_without_a_file_has_nothing_to_reload() {
    let folder = Folder::new();
    let (image, socket, control) = (folder.image("a.img"), folder.text("s"), folder.text("control"));
    let _daemon = Daemon::start(&["blk", "--image", &image, "--socket", &socket, "--control", &control]);
    // Clients that come together wake the daemon once.
    for _ in 0..20 {
        let client = || paravane().args(["reload", "--control", &control]).output().unwrap();
        let outputs = std::thread::scope(|scope| {
            let clients: Vec<_> = (0..6).map(|_| scope.spawn(client)).collect();
            clients.into_iter().map(|client| client.join().unwrap()).collect::<Vec<_>>()
        });
        for output in outputs {
            assert_eq!(output.status.code(), Some(2));
            let error = String::from_utf8_lossy(&output.stderr);
            assert!(error.contains("there is nothing to reload"), "{error}");
        }
    }
}

#[test]
fn cards_change_their_limits_with_their_clients() {
    let folder = Folder::new();
    let card = |name: &str, more: &str| {
        format!("[[net]]\nname = \"{name}\"\nsocket = \"{name}.sock\"\nlink = \"l\"\n{more}\n")
    };
    let file = folder.write("d.toml", &(card("a", "") + &card("b", "")));
    let control = folder.text("control");
    let host = Host { folder, file, control };
    let daemon = host.start(&[]);
    let client = UnixStream::connect(host.folder.path("a.sock")).unwrap();
    host.folder.write("d.toml", &(card("a", "ops-per-second = 7") + &card("b", "bytes-per-second = 9")));
    let text = host.reloads(&[], 0);
    assert_eq!(text, "a: changed in place: ops-per-second\nb: changed in place: bytes-per-second\n");
    assert_eq!(host.device("a")["settings"]["ops_per_second"], 7);
    assert!(is_open(&client));
    drop(daemon);
}

#[test]
fn clients_that_wait_for_a_reload_are_bounded() {
    let host = Host::new("");
    let daemon = host.start(&[]);
    let ask = || {
        let mut stream = connect(&host.control);
        writeln!(stream, "{{\"reload\": {{}}}}").unwrap();
        let answer = String::from_utf8_lossy(&message(&mut stream)).into_owned();
        (stream, answer)
    };
    let stalled: Vec<_> = (0..4).map(|_| ask()).collect();
    assert!(stalled.iter().all(|(_, answer)| answer.contains("ready")), "{:?}", stalled[0].1);
    let (_, answer) = ask();
    assert!(answer.contains("this process waits for 4 reloads"), "{answer}");
    // Others are not kept out.
    assert!(host.reloads(&[], 0).contains("a: unchanged\n"));
    // A message that is no reload is answered, and changes nothing.
    drop(stalled);
    drop(daemon);
}

#[test]
fn reloads_of_several_clients_follow_one_another() {
    let host = Host::new("");
    let daemon = host.start(&[]);
    let clients: Vec<_> = (0..6)
        .map(|_| {
            let arguments = ["reload", "--control", &host.control, "--timeout", "600"];
            paravane().args(arguments).stdout(std::process::Stdio::piped()).spawn().unwrap()
        })
        .collect();
    for client in clients {
        let output = client.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.matches("unchanged").count() == DISKS.len(), "{text}");
    }
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
}
