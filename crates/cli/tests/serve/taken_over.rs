//! What a process can still do when a guest has taken it over, seen from inside.
//!
//! A stopped process makes the system calls of [`attempts`], and the result is compared with the
//! table in SECURITY.md.
mod attempts;
mod inject;

use crate::daemon::{Daemon, Folder, paravane, patience, sandbox_usable, skip};
use attempts::ATTEMPTS;
use inject::Injector;
use rustix::net::RecvFlags;
use std::io::Read;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Columns of the table, after the first one.
const COLUMNS: [&str; 6] =
    ["daemon, one device", "daemon with a file", "broker, with a file", "reader", "holder", "inspector"];

/// What processes are tried on.
struct Stage {
    /// `conf`: the file of devices; `images`; `run`: sockets; `other`.
    folder: Folder,
    victim: Child,
    beside: String,
    key: String,
    secret: String,
    removable: String,
    service: String,
    port: u16,
    server: TcpListener,
    _service: UnixListener,
}

impl Stage {
    fn new() -> Self {
        let folder = Folder::new();
        for name in ["conf", "images", "run", "other"] {
            std::fs::create_dir(folder.path(name)).unwrap();
        }
        folder.image("images/a.img");
        let beside = folder.image("images/b.img");
        let key = folder.write("conf/key", "key");
        let secret = folder.write("other/secret", "secret");
        std::fs::set_permissions(&secret, PermissionsExt::from_mode(0o600)).unwrap();
        let service = folder.text("other/service");
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        Self {
            victim: Command::new("sleep").arg("1000").spawn().unwrap(),
            removable: folder.text("run/removable"),
            port: server.local_addr().unwrap().port(),
            _service: UnixListener::bind(&service).unwrap(),
            server,
            folder,
            beside,
            key,
            secret,
            service,
        }
    }

    fn victim(&self) -> u32 {
        self.victim.id()
    }

    /// Tries everything in a process. `None`: it cannot be traced.
    fn attempt(&self, process: u32, test: &str) -> Option<Vec<bool>> {
        self.folder.write("run/removable", "");
        let mut injector = match Injector::attach(process) {
            Ok(injector) => injector,
            Err(why) => {
                skip(test, why);
                return None;
            }
        };
        let results = ATTEMPTS.iter().map(|(what, attempt)| {
            let can = attempt(&mut injector, self);
            println!("{what}: {can}");
            can
        });
        Some(results.collect())
    }

    /// Compares a column of SECURITY.md with a process.
    fn compare(&self, column: &str, process: u32, test: &str) {
        let Some(results) = self.attempt(process, test) else { return };
        let at = COLUMNS.iter().position(|there| *there == column).unwrap();
        for ((what, _), can) in ATTEMPTS.iter().zip(results) {
            let said = table(what)[at].starts_with("yes");
            assert_eq!(can, said, "{column}: can it {what}? SECURITY.md says {:?}", table(what)[at]);
        }
        let limits = std::fs::read_to_string(format!("/proc/{}/limits", self.victim())).unwrap();
        assert!(!limits.lines().any(|line| line.starts_with("Max open files") && line.contains(" 0 ")));
        assert_eq!(std::fs::metadata(&self.secret).unwrap().permissions().mode() & 0o777, 0o600);
    }

    /// A daemon with a file of devices, of which one is on a server, if there is an NBD server.
    fn daemon_with_file(&self, test: &str) -> Option<(Daemon, Server)> {
        let server = Server::start(&self.folder, test)?;
        let text = |name: &str| self.folder.text(name);
        let config = format!(
            "[[blk]]\nname = \"a\"\nimage = \"{}\"\nsocket = \"{}\"\n\
             [[blk]]\nname = \"n\"\nimage = \"nbd+unix:///?socket={}\"\nsocket = \"{}\"\n",
            text("images/a.img"),
            text("run/a.sock"),
            text("other/nbd.sock"),
            text("run/n.sock")
        );
        let file = self.folder.write("conf/devices.toml", &config);
        Some((Daemon::start(&["--config", &file, "--control", "off"]), server))
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        drop(self.victim.kill());
        drop(self.victim.wait());
    }
}

/// nbdkit with a disk of zeroes, killed when dropped.
struct Server(Child);

impl Server {
    fn start(folder: &Folder, test: &str) -> Option<Self> {
        let socket = folder.path("other/nbd.sock");
        let mut command = Command::new("nbdkit");
        command.args(["--foreground", "--exit-with-parent", "--unix"]).arg(&socket);
        match command.args(["memory", "1M"]).stderr(Stdio::null()).spawn() {
            Ok(child) => {
                let end = Instant::now() + patience();
                while !socket.exists() {
                    assert!(Instant::now() < end, "nbdkit does not listen");
                    std::thread::sleep(Duration::from_millis(2));
                }
                Some(Self(child))
            }
            Err(error) => {
                skip(test, format!("nbdkit (package nbdkit): {error}"));
                None
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// The cells of a row of the table in SECURITY.md.
fn table(row: &str) -> Vec<String> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../SECURITY.md");
    let text = std::fs::read_to_string(file).unwrap();
    let section = text.split("\n## What a process that was taken over can do\n").nth(1).expect("the section");
    let section = section.split("\n## ").next().unwrap();
    let cells = |line: &str| -> Vec<String> {
        line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect()
    };
    let rows: Vec<_> = section.lines().filter(|line| line.starts_with('|')).map(cells).collect();
    assert_eq!(rows[0][1..], COLUMNS, "the columns");
    assert_eq!(rows.len(), ATTEMPTS.len() + 2, "a row has no attempt here, or the other way round");
    let found = rows.iter().find(|cells| cells[0] == row);
    found.unwrap_or_else(|| panic!("SECURITY.md has no row {row:?}"))[1..].to_vec()
}

/// A process that another one has started with this argument.
fn child(of: u32, argument: &str) -> u32 {
    let is_it = |process: &u32| {
        let line = std::fs::read(format!("/proc/{process}/cmdline")).unwrap_or_default();
        let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
        line.split(|byte| *byte == 0).nth(1) == Some(argument.as_bytes())
            && status.lines().any(|line| line == format!("PPid:\t{of}"))
    };
    let names =
        std::fs::read_dir("/proc").unwrap().filter_map(|entry| entry.unwrap().file_name().into_string().ok());
    names.filter_map(|name| name.parse().ok()).find(is_it).unwrap_or_else(|| panic!("there is no {argument}"))
}

fn usable(test: &str) -> bool {
    if !cfg!(target_arch = "x86_64") {
        skip(test, "system calls are injected on x86-64 only");
        return false;
    }
    if paravane_device::blk::io_uring_available().is_err() {
        skip(test, "the host has no io_uring, of which the table tells");
        return false;
    }
    sandbox_usable(test)
}

#[test]
fn a_daemon_with_one_device_does_what_the_table_says() {
    const TEST: &str = "a_daemon_with_one_device_does_what_the_table_says";
    if !usable(TEST) {
        return;
    }
    let stage = Stage::new();
    let (image, socket) = (stage.folder.text("images/a.img"), stage.folder.text("run/a.sock"));
    let daemon = Daemon::start(&["blk", "--image", &image, "--socket", &socket, "--control", "off"]);
    stage.compare(COLUMNS[0], daemon.pid(), TEST);
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
}

#[test]
fn a_daemon_with_a_file_and_its_helpers_do_what_the_table_says() {
    const TEST: &str = "a_daemon_with_a_file_and_its_helpers_do_what_the_table_says";
    if !usable(TEST) {
        return;
    }
    let stage = Stage::new();
    let Some((daemon, _server)) = stage.daemon_with_file(TEST) else { return };
    stage.compare(COLUMNS[1], daemon.pid(), TEST);
    let [broker, reader, inspector] = ["broker", "reader", "inspector"].map(|name| child(daemon.pid(), name));
    for helper in [broker, reader, inspector] {
        let environment = std::fs::read_to_string(format!("/proc/{helper}/environ")).unwrap();
        assert!(environment.split('\0').all(|item| item.is_empty() || item.starts_with("RES_OPTIONS=")));
    }
    stage.compare(COLUMNS[2], broker, TEST);
    stage.compare(COLUMNS[3], reader, TEST);
    stage.compare(COLUMNS[5], inspector, TEST);
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
}

#[test]
fn a_holder_does_what_the_table_says() {
    const TEST: &str = "a_holder_does_what_the_table_says";
    if !usable(TEST) {
        return;
    }
    let stage = Stage::new();
    let mut holder = Daemon::spawn(paravane().args(["hold", "--socket", &stage.folder.text("run/hold")]));
    holder.wait_for("ready");
    stage.compare(COLUMNS[4], holder.pid(), TEST);
}

/// Asks the broker, as code in the daemon could, to connect to a server. Returns the answer.
fn ask_broker(daemon: u32, message: &str, test: &str) -> Option<String> {
    let mut injector = match Injector::attach(daemon) {
        Ok(injector) => injector,
        Err(why) => {
            skip(test, why);
            return None;
        }
    };
    let pair = injector.put(&[0; 8]);
    let kind = libc::SOCK_SEQPACKET as u64;
    injector.call(libc::SYS_socketpair, &[libc::AF_UNIX as u64, kind, 0, pair]).unwrap();
    let [near, far] = [0, 4].map(|at| u32::from_ne_bytes(injector.get(pair + at, 4).try_into().unwrap()));
    let text = injector.put(message.as_bytes());
    let part = injector.put(&[text.to_ne_bytes(), (message.len() as u64).to_ne_bytes()].concat());
    // A message with a descriptor: cmsghdr of 20 bytes.
    let rights =
        [&20_u64.to_ne_bytes()[..], &1_u32.to_ne_bytes(), &1_u32.to_ne_bytes(), &far.to_ne_bytes(), &[0; 4]];
    let rights = injector.put(&rights.concat());
    let header = [0, 0, part, 1, rights, 24, 0].map(u64::to_ne_bytes).concat();
    let header = injector.put(&header);
    // Sockets of this kind lead to the broker, and to reader and inspector, which do not answer.
    let (value, size) = (injector.put(&[0; 4]), injector.put(&4_u32.to_ne_bytes()));
    let mut sent = 0;
    for fd in (3..64).filter(|fd| ![near, far].contains(fd)).map(u64::from) {
        let option = [fd, libc::SOL_SOCKET as u64, libc::SO_TYPE as u64, value, size];
        if injector.call(libc::SYS_getsockopt, &option).is_ok() && injector.get(value, 4)[0] == kind as u8 {
            // The inspector ends with the first such message.
            if let Err(error) = injector.call(libc::SYS_sendmsg, &[fd, header, 0]) {
                assert_eq!(error, nix::errno::Errno::EPIPE);
            }
            sent += 1;
        }
    }
    assert_eq!(sent, 3, "sockets of the broker, the reader and the inspector");
    injector.call(libc::SYS_close, &[far.into()]).unwrap();
    let buffer = injector.put(&[0; 1024]);
    let end = Instant::now() + patience();
    loop {
        let received = injector
            .call(libc::SYS_recvfrom, &[near.into(), buffer, 1024, RecvFlags::DONTWAIT.bits().into(), 0, 0]);
        match received {
            Ok(count) => {
                injector.call(libc::SYS_close, &[near.into()]).unwrap();
                return Some(String::from_utf8(injector.get(buffer, count as usize)).unwrap());
            }
            Err(nix::errno::Errno::EAGAIN) => assert!(Instant::now() < end, "no answer"),
            Err(error) => panic!("{error}"),
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_daemon_that_was_taken_over_adds_no_server() {
    const TEST: &str = "a_daemon_that_was_taken_over_adds_no_server";
    if !usable(TEST) {
        return;
    }
    for beside in [false, true] {
        let stage = Stage::new();
        let Some(_server) = Server::start(&stage.folder, TEST) else { return };
        let folder = if beside { "images" } else { "conf" };
        let text = |name: &str| stage.folder.text(name);
        let device = |name: &str, image: &str| {
            format!(
                "[[blk]]\nname = \"{name}\"\nimage = \"{image}\"\nsocket = \"{}\"\n",
                text(&format!("run/{name}"))
            )
        };
        let on_server = format!("nbd+unix:///?socket={}", text("other/nbd.sock"));
        let named = device("a", &text("images/a.img")) + &device("n", &on_server);
        let file = stage.folder.write(&format!("{folder}/devices.toml"), &named);
        let mut daemon = Daemon::spawn(paravane().args(["serve", "--config", &file, "--control", "off"]));
        daemon.wait_for("ready");
        let warns = daemon.seen().iter().any(|line| line.contains("a reload adds no servers"));
        assert_eq!(warns, beside, "{:?}", daemon.seen());
        // What code in the daemon writes into the file, where it can.
        let port = stage.port;
        let server = format!("nbd://127.0.0.1:{port}/");
        if beside {
            stage.folder.write("images/devices.toml", &(named.clone() + &device("evil", &server)));
        }
        let ask = format!(
            "{{\"connect\":{{\"target\":{{\"tcp\":{{\"host\":\"127.0.0.1\",\"port\":{port}}}}},\"millis\":3000}}}}"
        );
        let refused = |daemon: &Daemon| {
            let answer = ask_broker(daemon.pid(), &ask, TEST);
            println!("{answer:?}");
            answer.is_none_or(|answer| answer.contains("is not configured"))
        };
        assert!(refused(&daemon));
        daemon.signal(rustix::process::Signal::HUP);
        if beside {
            daemon.wait_for("is not configured: restart the daemon to add it");
            assert!(refused(&daemon));
            continue;
        }
        daemon.wait_for("reload");
        // The operator adds a server, which the daemon may use after a reload.
        stage.folder.write("conf/devices.toml", &(named + &device("more", &server)));
        daemon.signal(rustix::process::Signal::HUP);
        let (mut stream, _) = stage.server.accept().unwrap();
        // It waits for a greeting.
        stream.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        assert!(stream.read(&mut [0]).is_err());
    }
}
