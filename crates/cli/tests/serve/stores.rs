//! Disks on a server: the program in its sandbox, with the broker beside it, and real servers.
use crate::daemon::{Daemon, Folder, PATIENCE, paravane, skip, status, without_sandbox};
use crate::driver::{Driver, Random};
use crate::kill::{Kept, under_load_on};
use crate::load::{self, DISKS, SIZE, wish};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Whether a program is installed.
fn has(program: &str, package: &str, test: &str) -> bool {
    let found = Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if let Err(error) = &found {
        skip(test, format!("{program} (package {package}): {error}"));
    }
    found.is_ok()
}

/// nbdkit with the files of a folder as its exports, killed when dropped.
struct Nbdkit {
    child: Child,
    arguments: Vec<String>,
    folder: std::path::PathBuf,
}

impl Nbdkit {
    /// At the socket `nbd.sock` of the folder.
    fn start(folder: &Folder, more: &[&str]) -> Self {
        let arguments = more.iter().map(|argument| (*argument).to_owned()).collect();
        let folder = folder.root().to_owned();
        let child = Self::spawn(&folder, &arguments);
        Self { child, arguments, folder }
    }

    fn spawn(folder: &Path, more: &Vec<String>) -> Child {
        let socket = folder.join("nbd.sock");
        drop(std::fs::remove_file(&socket));
        let mut command = Command::new("nbdkit");
        // With several threads, nbdkit 1.32.5 fails an assertion at times when connections are cut.
        command
            .args(["--foreground", "--exit-with-parent", "--threads", "1", "--unix"])
            .arg(&socket)
            .args(more);
        command.arg("file").arg(format!("dir={}", folder.display()));
        let child = command.stderr(Stdio::null()).spawn().expect("nbdkit starts");
        let end = Instant::now() + PATIENCE;
        while !socket.exists() {
            assert!(Instant::now() < end, "nbdkit does not listen");
            std::thread::sleep(Duration::from_millis(2));
        }
        child
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn restart(&mut self) {
        self.kill();
        self.child = Self::spawn(&self.folder, &self.arguments);
    }
}

impl Drop for Nbdkit {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

fn location(export: &str) -> String {
    format!("nbd+unix:///{export}.img?socket=nbd.sock")
}

/// A file of four disks on the server, each with two queues.
fn config(folder: &Folder) -> String {
    let mut text = String::new();
    for name in DISKS {
        folder.image(&format!("{name}.img"));
        text += &format!(
            "[[blk]]\nname = \"{name}\"\nimage = \"{}\"\nsocket = \"{name}.sock\"\nqueues = 2\n",
            location(name)
        );
    }
    folder.write("d.toml", &text)
}

fn serve(folder: &Folder, config: &str) -> Daemon {
    let arguments = ["serve", "--config", config, "--control", &folder.text("control")];
    let mut daemon = Daemon::spawn(paravane().args(arguments).args(without_sandbox()));
    daemon.wait_for("ready");
    daemon
}

fn assert_content(folder: &Folder, models: Vec<(&'static str, Vec<u8>)>) {
    for (name, model) in models {
        let content = std::fs::read(folder.path(&format!("{name}.img"))).unwrap();
        assert!(content == model, "disk {name}");
    }
}

#[test]
fn clients_lose_nothing_when_their_server_is_killed() {
    if !has("nbdkit", "nbdkit", "clients_lose_nothing_when_their_server_is_killed") {
        return;
    }
    let folder = Folder::new();
    let config = config(&folder);
    let mut server = Nbdkit::start(&folder, &[]);
    let daemon = serve(&folder, &config);
    let report = || status(&folder.text("control")).to_string();
    let models =
        load::under_load(|name| folder.path(&format!("{name}.sock")), 20, |_| server.restart(), report);
    // The requests may have ended before the last server was there.
    let end = Instant::now() + PATIENCE;
    let report = loop {
        let report = status(&folder.text("control"));
        let devices = report["devices"].as_array().unwrap();
        if devices.iter().all(|device| device["stores"][0]["link"] == "up") {
            break report;
        }
        assert!(Instant::now() < end, "{report}");
        std::thread::sleep(Duration::from_millis(2));
    };
    for device in report["devices"].as_array().unwrap() {
        let store = &device["stores"][0];
        assert_eq!(device["storage_errors"]["write"], 0, "{device}");
        assert!(store["reconnects"].as_u64().unwrap() > 0, "{device}");
    }
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
    assert_content(&folder, models);
}

#[test]
fn clients_lose_nothing_when_daemons_of_disks_on_a_server_are_killed() {
    let test = "clients_lose_nothing_when_daemons_of_disks_on_a_server_are_killed";
    if !has("nbdkit", "nbdkit", test) {
        return;
    }
    let kept = Kept::with_images(&DISKS, location);
    let _server = Nbdkit::start(&kept.folder, &[]);
    under_load_on(&kept);
}

#[test]
fn requests_wait_for_a_lost_server_and_then_fail() {
    if !has("nbdkit", "nbdkit", "requests_wait_for_a_lost_server_and_then_fail") {
        return;
    }
    let folder = Folder::new();
    folder.image("a.img");
    let mut server = Nbdkit::start(&folder, &[]);
    let (socket, control) = (folder.path("a.sock"), folder.text("control"));
    let image = format!("nbd+unix:///a.img?socket={}", folder.text("nbd.sock"));
    let start = |timeout: &str| {
        Daemon::start(&[
            "blk",
            "--image",
            &image,
            "--socket",
            socket.to_str().unwrap(),
            "--control",
            &control,
            "--store-timeout",
            timeout,
        ])
    };
    let link = |wanted: &str| {
        let end = Instant::now() + PATIENCE;
        loop {
            let report = status(&control);
            let store = report["devices"][0]["stores"][0].clone();
            if store["link"] == wanted {
                return store;
            }
            assert!(Instant::now() < end, "{store}");
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    // A second is over at some time; until then the request waits.
    let daemon = start("1");
    let mut driver = Driver::connect(&socket, wish(false, true, 1)).unwrap();
    assert_eq!(link("up")["location"], image);
    server.kill();
    assert_eq!(driver.write_once(0, 512, 1), -libc::EIO);
    let store = link("down");
    assert!(store["error"].as_str().is_some_and(|error| !error.is_empty()), "{store}");
    let text = paravane().args(["status", "--control", &control]).output().unwrap();
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(text.contains("unreachable: requests fail"), "{text}");
    // The server is back: so is the disk.
    server.restart();
    link("up");
    let (mut model, mut random) = (vec![0; SIZE], Random::new(3));
    driver.exercise(&mut model, 100, &mut random);
    drop(driver);
    drop(daemon);
    assert!(std::fs::read(folder.path("a.img")).unwrap() == model);
}

#[test]
fn a_disk_on_a_server_grows_when_the_daemon_is_told_to_look() {
    let test = "a_disk_on_a_server_grows_when_the_daemon_is_told_to_look";
    if !has("nbdkit", "nbdkit", test) {
        return;
    }
    let folder = Folder::new();
    let file = folder.image("a.img");
    let _server = Nbdkit::start(&folder, &[]);
    let (socket, control) = (folder.path("a.sock"), folder.text("control"));
    let image = format!("nbd+unix:///a.img?socket={}", folder.text("nbd.sock"));
    let arguments = ["blk", "--image", &image, "--queues", "2", "--control", &control, "--socket"];
    let mut daemon = Daemon::start(&[&arguments[..], &[socket.to_str().unwrap()]].concat());
    let mut driver = Driver::connect(&socket, wish(false, true, 2)).unwrap();
    let (mut model, mut random) = (vec![0; 2 * SIZE], Random::new(3));
    driver.exercise(&mut model[..SIZE], 100, &mut random);
    std::fs::File::options().write(true).open(&file).unwrap().set_len(2 * SIZE as u64).unwrap();
    daemon.signal(rustix::process::Signal::HUP);
    daemon.wait_for("configuration has changed");
    assert_eq!(u64::from(driver.transport.get_config().unwrap().capacity), 2 * SIZE as u64 / 512);
    driver.exercise(&mut model, 300, &mut random);
    drop(driver);
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
    assert!(std::fs::read(&file).unwrap() == model);
}

#[test]
fn a_server_that_is_missing_at_the_start_is_named() {
    let folder = Folder::new();
    let image = format!("nbd+unix:///a?socket={}", folder.text("none.sock"));
    let socket = folder.text("a.sock");
    let arguments = ["serve", "blk", "--image", &image, "--socket", &socket, "--control", "off"];
    let output = paravane().args(arguments).args(without_sandbox()).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("nbd+unix:///a?socket=") && error.contains("No such file"), "{error}");
}

#[test]
fn an_overlay_has_its_base_on_a_server() {
    let test = "an_overlay_has_its_base_on_a_server";
    if !has("nbdkit", "nbdkit", test) || !has("qemu-img", "qemu-utils", test) {
        return;
    }
    let folder = Folder::new();
    std::fs::write(folder.path("base.img"), vec![7; SIZE]).unwrap();
    let _server = Nbdkit::start(&folder, &[]);
    let top = folder.text("top.qcow2");
    let base = format!("nbd:unix:{}:exportname=base.img", folder.text("nbd.sock"));
    let size = SIZE.to_string();
    let made = Command::new("qemu-img")
        .args(["create", "-q", "-u", "-f", "qcow2", "-b", &base, "-F", "raw", &top, &size])
        .status()
        .unwrap();
    assert!(made.success());
    let backing = format!("raw:nbd+unix:///base.img?socket={}", folder.text("nbd.sock"));
    let (socket, control) = (folder.path("a.sock"), folder.text("control"));
    let daemon = Daemon::start(&[
        "blk",
        "--image",
        &top,
        "--format",
        "qcow2",
        "--backing",
        &backing,
        "--socket",
        socket.to_str().unwrap(),
        "--control",
        &control,
    ]);
    let mut driver = Driver::connect(&socket, wish(false, true, 1)).unwrap();
    let (mut model, mut random) = (vec![7; SIZE], Random::new(3));
    driver.exercise(&mut model, 300, &mut random);
    let report = status(&control);
    assert_eq!(report["devices"][0]["stores"][0]["link"], "up", "{report}");
    drop(driver);
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
    assert!(std::fs::read(folder.path("base.img")).unwrap() == vec![7; SIZE], "the base has changed");
    // The same chain, read by another program.
    let raw = folder.path("model.img");
    std::fs::write(&raw, &model).unwrap();
    let compared = Command::new("qemu-img")
        .args(["compare", "-q", "-f", "qcow2", "-F", "raw", &top])
        .arg(&raw)
        .status()
        .unwrap();
    assert!(compared.success());
}

/// nginx with the files of a folder, killed when dropped.
struct Nginx {
    child: Child,
    port: u16,
}

impl Nginx {
    fn start(folder: &Folder) -> Self {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let root = folder.root().display();
        // As root it would serve as another user, who cannot read the folder.
        let user = if crate::daemon::is_root() { "user root; " } else { "" };
        let config = format!(
            "{user}daemon off; master_process off; pid {root}/nginx.pid; error_log {root}/nginx.log;\n\
             events {{}}\n\
             http {{ access_log off; client_body_temp_path {root}/t1; proxy_temp_path {root}/t2;\n\
             fastcgi_temp_path {root}/t3; uwsgi_temp_path {root}/t4; scgi_temp_path {root}/t5;\n\
             server {{ listen 127.0.0.1:{port}; root {root}; }} }}\n"
        );
        let config = folder.write("nginx.conf", &config);
        let mut command = Command::new("nginx");
        command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").args(["-c", &config]);
        let child = command.stderr(Stdio::null()).spawn().expect("nginx starts");
        let end = Instant::now() + PATIENCE;
        while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(Instant::now() < end, "nginx does not listen");
            std::thread::sleep(Duration::from_millis(2));
        }
        Self { child, port }
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

#[test]
fn an_overlay_has_its_base_on_an_http_server_with_a_cache() {
    let test = "an_overlay_has_its_base_on_an_http_server_with_a_cache";
    if !Path::new("/usr/sbin/nginx").exists() {
        return skip(test, "nginx (package nginx-light)");
    }
    let folder = Folder::new();
    std::fs::write(folder.path("base.img"), vec![7; SIZE]).unwrap();
    let nginx = Nginx::start(&folder);
    let backing = format!("raw:http://127.0.0.1:{}/base.img", nginx.port);
    let (socket, control) = (folder.path("a.sock"), folder.text("control"));
    let cache = folder.text("cache");
    std::fs::create_dir(&cache).unwrap();
    let mut random = Random::new(3);
    // Each round with an overlay of its own: one that was written reads its base no more.
    for round in 0..2 {
        let top = folder.text(&format!("top{round}.qcow2"));
        let made = paravane().args(["disk", "create", "--backing", &backing, &top]).output().unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let mut model = vec![7; SIZE];
        let daemon = Daemon::start(&[
            "blk",
            "--image",
            &top,
            "--format",
            "qcow2",
            "--backing",
            &backing,
            "--socket",
            socket.to_str().unwrap(),
            "--control",
            &control,
            "--cache",
            &cache,
        ]);
        let mut driver = Driver::connect(&socket, wish(false, true, 1)).unwrap();
        driver.exercise(&mut model, 300, &mut random);
        let report = status(&control);
        let store = &report["devices"][0]["stores"][0];
        assert_eq!(store["link"], "up", "{store}");
        let bytes = |name: &str| store["cache"][name].as_u64().unwrap();
        assert!(bytes("used_bytes") > 0 && bytes("not_kept") == 0, "{store}");
        if round == 0 {
            assert!(bytes("miss_bytes") + bytes("read_ahead_bytes") > 0, "{store}");
        } else {
            // Chunks of the first daemon.
            assert!(bytes("hit_bytes") > 0, "{store}");
        }
        drop(driver);
        let (ended, log) = daemon.end();
        assert!(ended.success(), "{log:?}");
    }
}

/// Runs a program of Ceph.
fn ceph(conf: &str, program: &str, arguments: &[&str]) -> Vec<u8> {
    let output = Command::new(program).args(["--conf", conf]).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

#[test]
fn a_disk_in_a_ceph_cluster_is_served_in_the_sandbox() {
    let test = "a_disk_in_a_ceph_cluster_is_served_in_the_sandbox";
    let Ok(conf) = std::env::var("PARAVANE_CEPH_CONF") else {
        return skip(test, "PARAVANE_CEPH_CONF names no cluster (scripts/ceph-one makes one)");
    };
    let image = format!("pool/serve-{}", std::process::id());
    ceph(&conf, "rbd", &["create", &image, "--size", "1M", "--object-size", "64K"]);
    let folder = Folder::new();
    let (socket, control) = (folder.path("a.sock"), folder.text("control"));
    let location = format!("rbd:{image}:conf={conf}");
    let arguments = ["blk", "--image", &location, "--queues", "2", "--control", &control, "--socket"];
    let daemon = Daemon::start(&[&arguments[..], &[socket.to_str().unwrap()]].concat());
    let mut driver = Driver::connect(&socket, wish(true, true, 2)).unwrap();
    let (mut model, mut random) = (vec![0; SIZE], Random::new(5));
    driver.exercise(&mut model, 300, &mut random);
    let store = status(&control)["devices"][0]["stores"][0].clone();
    assert_eq!((&store["link"], &store["location"]), (&"up".into(), &format!("rbd:{image}").into()));
    // A second daemon is told that the image is in use.
    let other = folder.text("b.sock");
    let second = paravane()
        .args(["serve", "blk", "--image", &location, "--control", "off", "--socket", &other])
        .args(without_sandbox())
        .output()
        .unwrap();
    let error = String::from_utf8(second.stderr).unwrap();
    assert_eq!(second.status.code(), Some(2), "{error}");
    assert!(error.contains("in use"), "{error}");
    drop(driver);
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
    assert!(ceph(&conf, "rbd", &["export", "--no-progress", &image, "-"]) == model);
    ceph(&conf, "rbd", &["rm", "--no-progress", &image]);
}
