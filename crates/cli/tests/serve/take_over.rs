//! `--take-over`: clients under load, and daemons that follow one another.
use crate::daemon::{Daemon, Folder, assert_refused, names, paravane, patience, status, without_sandbox};
use crate::driver::{Driver, Random};
use crate::load::{self, DISKS, SIZE, wish};
use rustix::process::Signal;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Output;
use std::time::Instant;

/// A folder with a file of devices.
struct Setup {
    folder: Folder,
    file: String,
    control: String,
}

impl Setup {
    fn new(disks: &[&str]) -> Self {
        let folder = Folder::new();
        let mut text = "[[rng]]\nname = \"r\"\nsocket = \"r.sock\"\n".to_owned();
        for name in disks {
            folder.image(&format!("{name}.img"));
            text += &disk(name);
        }
        let (file, control) = (folder.write("d.toml", &text), folder.text("control"));
        Self { folder, file, control }
    }

    fn start(&self) -> Daemon {
        Daemon::start(&["--config", &self.file, "--control", &self.control])
    }

    fn spawn(&self) -> Daemon {
        let arguments = ["serve", "--config", &self.file, "--control", &self.control, "--take-over"];
        Daemon::spawn(paravane().args(arguments).args(without_sandbox()))
    }

    /// Has a new daemon take over; `old` must exit with success.
    fn take_over(&self, old: Daemon) -> Daemon {
        let mut new = self.spawn();
        new.wait_for("ready");
        let (status, log) = old.wait();
        assert!(status.success(), "{log:?}");
        assert!(log.iter().any(|line| line.contains("handed over")), "{log:?}");
        new
    }

    /// The output of a daemon that cannot take over.
    fn refused(&self) -> Output {
        let arguments = ["serve", "--config", &self.file, "--control", &self.control, "--take-over"];
        paravane().args(arguments).args(without_sandbox()).output().unwrap()
    }

    fn socket(&self, name: &str) -> std::path::PathBuf {
        self.folder.path(&format!("{name}.sock"))
    }
}

fn disk(name: &str) -> String {
    format!(
        "[[blk]]\nname = \"{name}\"\nimage = \"{name}.img\"\nsocket = \"{name}.sock\"\nqueues = 2\nworkers = 2\n"
    )
}

fn write_and_check(socket: &Path, model: &mut [u8]) {
    let mut driver = Driver::connect(socket, wish(false, true, 2)).unwrap();
    driver.exercise(model, 100, &mut Random::new(5));
}

#[test]
fn clients_notice_nothing_of_twenty_take_overs() {
    let setup = Setup::new(&DISKS);
    let mut daemon = Some(setup.start());
    let replace = |number| {
        daemon = daemon.take().map(|old| setup.take_over(old));
        let report = status(&setup.control);
        assert_eq!(report["take_overs"], number);
        assert_eq!(report["pid"], daemon.as_ref().unwrap().pid());
    };
    let report = || status(&setup.control).to_string();
    let mut models = load::under_load(|name| setup.socket(name), 20, replace, report);
    assert_eq!(names(&status(&setup.control)), ["r", "a", "b", "c", "d"]);
    // A new client is served, too.
    write_and_check(&setup.socket("a"), &mut models[0].1);
    let (ended, log) = daemon.unwrap().end();
    assert!(ended.success(), "{log:?}");
    assert!(!setup.socket("a").exists() && !Path::new(&setup.control).exists());
    for (name, model) in models {
        assert!(std::fs::read(setup.folder.path(&format!("{name}.img"))).unwrap() == model, "{name}");
    }
}

#[test]
fn a_new_daemon_that_cannot_serve_changes_nothing() {
    let setup = Setup::new(&["a"]);
    let daemon = setup.start();
    let mut model = vec![0; SIZE];
    let text = std::fs::read_to_string(&setup.file).unwrap();

    // An image is missing.
    setup.folder.write("d.toml", &text.replace("a.img", "missing.img"));
    assert_refused(&setup.refused(), "missing.img");
    // The devices differ.
    setup.folder.write("d.toml", &disk("a"));
    assert_refused(&setup.refused(), "only the running daemon has the device r");
    setup.folder.image("b.img");
    setup.folder.write("d.toml", &(text.clone() + &disk("b")));
    assert_refused(&setup.refused(), "the running daemon has no device b");
    setup.folder.write("d.toml", &text);
    write_and_check(&setup.socket("a"), &mut model);

    let daemon = setup.take_over(daemon);
    write_and_check(&setup.socket("a"), &mut model);
    drop(daemon);
    // Nobody is there.
    assert!(String::from_utf8_lossy(&setup.refused().stderr).contains("cannot reach the running daemon"));
}

/// A connection that asks for a handover, and does not begin.
fn ask(control: &str) -> UnixStream {
    let socket = rustix::net::socket(rustix::net::AddressFamily::UNIX, rustix::net::SocketType::STREAM, None);
    let socket = socket.unwrap();
    rustix::net::bind(&socket, &rustix::net::SocketAddrUnix::new_unnamed()).unwrap();
    rustix::net::connect(&socket, &rustix::net::SocketAddrUnix::new(control).unwrap()).unwrap();
    let mut stream = UnixStream::from(socket);
    stream.write_all(b"{\"hand_over\": {\"version\": 1}}\n").unwrap();
    stream
}

#[test]
fn one_daemon_takes_over_at_a_time() {
    let setup = Setup::new(&["a"]);
    let daemon = setup.start();
    let mut first = ask(&setup.control);
    std::io::Read::read_exact(&mut first, &mut [0]).unwrap();
    assert_refused(&setup.refused(), "another daemon takes over already");
    drop(first);
    let end = Instant::now() + patience();
    let (new, old) = loop {
        let mut new = setup.spawn();
        // The running daemon may not have noticed yet that the first one is gone.
        if new.find("taking over").is_ok() {
            new.wait_for("ready");
            break (new, daemon);
        }
        assert!(Instant::now() < end);
    };
    assert!(old.wait().0.success());
    drop(new);
}

#[test]
fn the_death_of_the_new_daemon_loses_nothing() {
    let setup = Setup::new(&["a"]);
    let mut model = vec![0; SIZE];
    let daemon = setup.start();
    write_and_check(&setup.socket("a"), &mut model);
    // It says to begin, and dies: the header of a message and its text.
    let mut new = ask(&setup.control);
    // The whole offer, or the daemon may find the connection closed before it has made it.
    let mut header = [0; 16];
    std::io::Read::read_exact(&mut new, &mut header).unwrap();
    let len = u32::from_le_bytes(std::array::from_fn(|byte| header[4 + byte]));
    std::io::Read::read_exact(&mut new, &mut vec![0; len as usize]).unwrap();
    let mut begin = b"PVHO".to_vec();
    for number in [7_u32, 0, 0] {
        begin.extend_from_slice(&number.to_le_bytes());
    }
    begin.extend_from_slice(b"\"begin\"");
    new.write_all(&begin).unwrap();
    drop(new);
    let (status, log) = daemon.wait();
    assert_eq!(status.code(), Some(1), "{log:?}");
    assert!(log.iter().any(|line| line.contains("handover failed: the new daemon has")), "{log:?}");
    let daemon = setup.start();
    write_and_check(&setup.socket("a"), &mut model);
    daemon.signal(Signal::TERM);
    assert!(daemon.wait().0.success());
}
