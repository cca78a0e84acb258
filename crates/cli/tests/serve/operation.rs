//! Status, metrics, log and signals of a daemon.
use crate::daemon::{Daemon, Folder, is_root, names, paravane, skip, status, without_sandbox};
use serde_json::Value;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixDatagram;

#[test]
fn it_is_ready_when_it_says_so_and_leaves_nothing_behind() {
    let folder = Folder::new();
    let (image, socket, control) = (folder.image("vm.img"), folder.text("s"), folder.text("c"));
    let daemon = Daemon::start(&[
        "blk",
        "--image",
        &image,
        "--socket",
        &socket,
        "--control",
        &control,
        "--name",
        "vm0",
    ]);
    for path in ["s", "c"] {
        let mode = std::fs::metadata(folder.path(path)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{path}");
    }
    let json = status(&control);
    assert_eq!((&json["pid"], names(&json)), (&daemon.pid().into(), vec!["vm0"]));
    let device = &json["devices"][0];
    assert_eq!((&device["kind"], &device["connected"]), (&"blk".into(), &false.into()));
    assert_eq!((&device["sessions"], device["queues"].as_array().unwrap().len()), (&0.into(), 1));
    assert!(device["back_end"].as_str().unwrap().contains("vm.img"), "{device}");
    let table = paravane().args(["status", "--seconds", "0.1", "--control", &control]).output().unwrap();
    let table = String::from_utf8(table.stdout).unwrap();
    let row = table.lines().nth(3).unwrap();
    assert_eq!(
        row.split_whitespace().take(5).collect::<Vec<_>>(),
        ["vm0", "blk", "-", "0", "0/1"],
        "{table}"
    );

    let second = ["serve", "rng", "--socket", &socket, "--control", "off"];
    let second = paravane().args(second).args(without_sandbox()).output().unwrap();
    assert_eq!(second.status.code(), Some(1), "a live socket is not taken over");
    assert!(folder.path("s").exists());

    let (status, log) = daemon.end();
    assert!(status.success(), "{log:?}");
    assert!(!folder.path("s").exists() && !folder.path("c").exists());
    let gone = paravane().args(["status", "--control", &control]).output().unwrap();
    assert_eq!(gone.status.code(), Some(1));
}

#[test]
fn one_image_is_served_once() {
    let folder = Folder::new();
    let image = folder.image("vm.img");
    let arguments = ["blk", "--image", &image, "--socket", &folder.text("s"), "--control", "off"];
    let _first = Daemon::start(&arguments);
    let second = ["blk", "--image", &image, "--socket", &folder.text("t"), "--control", "off"];
    let second = paravane().arg("serve").args(second).args(without_sandbox()).output().unwrap();
    let stderr = String::from_utf8_lossy(&second.stderr);
    assert_eq!(second.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("in use by another process"), "{stderr}");
    assert!(!folder.path("t").exists());
}

#[test]
fn it_listens_again_where_a_killed_one_did() {
    let folder = Folder::new();
    let socket = folder.text("s");
    let arguments = ["rng", "--socket", &socket, "--control", "off"];
    drop(Daemon::start(&arguments));
    assert!(folder.path("s").exists(), "it was killed");
    let (status, log) = Daemon::start(&arguments).end();
    assert!(status.success(), "{log:?}");
    assert!(!folder.path("s").exists());
}

fn http(address: &str, request: &str) -> String {
    http_accepting("*/*", address, request)
}

fn http_accepting(accept: &str, address: &str, request: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    let headers = format!("Host: test\r\nAccept: {accept}\r\nConnection: close");
    write!(stream, "{request} HTTP/1.1\r\n{headers}\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn metrics_are_served_over_http() {
    let folder = Folder::new();
    let arguments = ["serve", "net", "--echo", "--socket", &folder.text("s"), "--metrics", "127.0.0.1:0"];
    let options = ["--control", "off", "--log-format", "json", "--name", "card"];
    let mut daemon = Daemon::spawn(paravane().args(arguments).args(options).args(without_sandbox()));
    let line: Value = serde_json::from_str(&daemon.wait_for("/metrics")).unwrap();
    let address = line["address"].as_str().unwrap().to_owned();
    daemon.wait_for("ready");
    let response = http(&address, "GET /metrics");
    assert!(response.starts_with("HTTP/1.1 200 OK\r\n"), "{response}");
    assert!(response.contains("content-type: text/plain; version=0.0.4"), "{response}");
    for line in [
        "paravane_device_connected{device=\"card\",kind=\"net\"} 0",
        "paravane_net_transmitted_frames_total{device=\"card\",kind=\"net\"} 0",
    ] {
        assert!(response.lines().any(|there| there == line), "{response}");
    }
    assert!(!response.contains("# EOF"), "{response}");
    let response = http_accepting("application/openmetrics-text", &address, "GET /metrics");
    assert!(response.contains("content-type: application/openmetrics-text"), "{response}");
    assert!(response.trim_end().ends_with("# EOF"), "{response}");
    assert!(http(&address, "GET /").starts_with("HTTP/1.1 404"));
    assert!(http(&address, "POST /metrics").starts_with("HTTP/1.1 405"));
    // A silent client does not block others.
    let _silent = TcpStream::connect(&address).unwrap();
    assert!(http(&address, "GET /metrics").starts_with("HTTP/1.1 200"));
    let (_, log) = daemon.end();
    for line in log {
        let line: Value = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"));
        assert!(line["level"].is_string() && line["timestamp"].is_string(), "{line}");
    }
}

#[test]
fn the_service_manager_is_told() {
    let folder = Folder::new();
    let manager = UnixDatagram::bind(folder.path("notify")).unwrap();
    manager.set_read_timeout(Some(crate::daemon::patience())).unwrap();
    let next = || {
        let mut message = [0; 256];
        let len = manager.recv(&mut message).unwrap();
        String::from_utf8(message[..len].to_vec()).unwrap()
    };
    let notifying = |arguments: &[&str]| {
        let mut command = paravane();
        command.args(arguments).args(without_sandbox()).env("NOTIFY_SOCKET", folder.path("notify"));
        command
    };
    let arguments = ["serve", "rng", "--socket", &folder.text("s"), "--control", "off"];
    let daemon = Daemon::spawn(&mut notifying(&arguments));
    assert_eq!(next(), "READY=1\n");
    let (status, log) = daemon.end();
    assert!(status.success(), "{log:?}");
    assert_eq!(next(), "STOPPING=1\nEXTEND_TIMEOUT_USEC=15000000\n");

    let file = folder.write("d.toml", "[[rng]]\nname = \"r\"\nsocket = \"s\"\n");
    let arguments = ["serve", "--config", &file, "--control", "off"];
    let daemon = Daemon::spawn(&mut notifying(&arguments));
    assert_eq!(next(), "READY=1\n");
    daemon.signal(rustix::process::Signal::HUP);
    let reloading = next();
    assert!(reloading.starts_with("RELOADING=1\nMONOTONIC_USEC="), "{reloading}");
    assert_eq!(next(), "READY=1\n");
}

#[test]
fn another_user_has_the_sockets_and_nothing_else() {
    const TEST: &str = "another_user_has_the_sockets_and_nothing_else";
    if !is_root() {
        return skip(TEST, "only root can become another user");
    }
    // A user that owns no files.
    let passwd = std::fs::read_to_string("/etc/passwd").unwrap();
    if !passwd.lines().any(|line| line.starts_with("nobody:")) {
        return skip(TEST, "there is no user nobody");
    }
    let folder = Folder::new();
    std::fs::set_permissions(folder.root(), PermissionsExt::from_mode(0o777)).unwrap();
    let image = folder.image("vm.img");
    std::fs::set_permissions(&image, PermissionsExt::from_mode(0o600)).unwrap();
    let socket = folder.text("s");
    let arguments =
        ["blk", "--image", &image, "--socket", &socket, "--user", "nobody", "--control", &folder.text("c")];
    let daemon = Daemon::start(&arguments);
    for task in std::fs::read_dir(format!("/proc/{}/task", daemon.pid())).unwrap() {
        // A thread may have ended since it was listed.
        let Ok(text) = std::fs::read_to_string(task.unwrap().path().join("status")) else { continue };
        let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim();
        assert!(field("Uid:").split_whitespace().all(|uid| uid != "0"), "{text}");
        assert!(field("Gid:").split_whitespace().all(|gid| gid != "0"), "{text}");
        assert_eq!(field("CapEff:"), "0000000000000000", "{text}");
    }
    assert_ne!(std::fs::metadata(&socket).unwrap().uid(), 0);
    assert_eq!(status(&folder.text("c"))["devices"][0]["name"], "blk");
    let (status, log) = daemon.end();
    assert!(status.success(), "{log:?}");
    assert!(!folder.path("s").exists());
}
