//! `--holder`: clients under load, and daemons that are killed or stopped, one after the other.
//!
//! A holder, or a service manager, has the sessions.
use crate::daemon::{Daemon, Folder, names, paravane, patience, status, without_sandbox};
use crate::driver::{Driver, Random};
use crate::load::{self, DISKS, EndClients, SIZE, wish};
use crate::manager::Manager;
use rustix::process::Signal;
use std::io::ErrorKind;
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// Environment variable: number of daemons that are replaced, or OSDs that are killed, in a test,
/// instead of its own number.
const KILLS: &str = "PARAVANE_KILLS";

/// How often to kill.
pub(crate) fn kills(default: usize) -> usize {
    std::env::var(KILLS).map_or(default, |times| times.parse().expect("PARAVANE_KILLS is a number"))
}

/// Who keeps sessions.
pub(crate) enum Store {
    Holder(Daemon),
    Manager(Manager),
}

/// A descriptor store, and a folder with a file of devices.
pub(crate) struct Kept {
    pub(crate) folder: Folder,
    store: Store,
    file: String,
    pub(crate) control: String,
}

impl Kept {
    pub(crate) fn new(disks: &[&str]) -> Self {
        Self::of("hold", disks, holder)
    }

    /// A service manager keeps the sessions, with at most `maximum` descriptors.
    fn by_manager(maximum: usize, disks: &[&str]) -> Self {
        Self::of("systemd", disks, |folder| Store::Manager(Manager::new(folder.root(), maximum)))
    }

    fn of(holder: &str, disks: &[&str], store: impl FnOnce(&Folder) -> Store) -> Self {
        let folder = Folder::new();
        let image = |name: &str| {
            folder.image(&format!("{name}.img"));
            format!("image = \"{name}.img\"\n")
        };
        let text = devices(&format!("holder = \"{holder}\"\n"), disks, image);
        Self::with(folder, &text, store)
    }

    /// A holder, and disks with these keys. `daemon` has more keys of the daemon.
    pub(crate) fn with_keys(
        folder: Folder,
        daemon: &str,
        disks: &[&str],
        keys: impl Fn(&str) -> String,
    ) -> Self {
        let text = devices(&format!("holder = \"hold\"\n{daemon}"), disks, keys);
        Self::with(folder, &text, holder)
    }

    fn with(folder: Folder, text: &str, store: impl FnOnce(&Folder) -> Store) -> Self {
        let (file, control) = (folder.write("d.toml", text), folder.text("control"));
        let store = store(&folder);
        Self { folder, store, file, control }
    }

    /// Starts a daemon, which need not become ready.
    pub(crate) fn spawn(&self, more: &[&str]) -> Daemon {
        let arguments = ["serve", "--config", &self.file, "--control", &self.control];
        let mut command = match &self.store {
            Store::Holder(_) => paravane(),
            Store::Manager(manager) => manager.command(env!("CARGO_BIN_EXE_paravane")),
        };
        Daemon::spawn(command.args(arguments).args(more).args(without_sandbox()))
    }

    pub(crate) fn start(&self) -> Daemon {
        let mut daemon = self.spawn(&[]);
        daemon.wait_for("ready");
        daemon
    }

    /// The file of devices.
    pub(crate) fn text(&self) -> String {
        std::fs::read_to_string(&self.file).unwrap()
    }

    pub(crate) fn socket(&self, name: &str) -> std::path::PathBuf {
        self.folder.path(&format!("{name}.sock"))
    }

    /// Waits until all sessions are kept, and listening sockets.
    pub(crate) fn wait_until_kept(&self) {
        let end = Instant::now() + patience();
        let is_kept = |report: &serde_json::Value| {
            report["devices"].as_array().unwrap().iter().all(|device| device["kept"] == true)
        };
        while !is_kept(&status(&self.control)) {
            assert!(Instant::now() < end, "{}", status(&self.control));
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Kills a daemon and starts the next one.
    pub(crate) fn kill(&self, old: Daemon) -> Daemon {
        self.kill_and(old, || ())
    }

    /// Kills a daemon, does what its death asks for, and starts the next one.
    fn kill_and(&self, old: Daemon, dead: impl FnOnce()) -> Daemon {
        old.signal(Signal::KILL);
        let (_, log) = old.wait();
        assert!(!log.iter().any(|line| line.contains("not kept")), "{log:?}");
        dead();
        self.start()
    }
}

/// A file of an entropy device and disks.
fn devices(daemon: &str, disks: &[&str], keys: impl Fn(&str) -> String) -> String {
    let mut text = format!("[daemon]\n{daemon}[[rng]]\nname = \"r\"\nsocket = \"r.sock\"\n");
    for name in disks {
        text += &format!(
            "[[blk]]\nname = \"{name}\"\nsocket = \"{name}.sock\"\nqueues = 2\nworkers = 2\n{}",
            keys(name)
        );
    }
    text
}

/// Starts `paravane hold`.
fn holder(folder: &Folder) -> Store {
    let arguments = ["hold", "-v", "--socket", &folder.text("hold")];
    let mut holder = Daemon::spawn(paravane().args(arguments).args(without_sandbox()));
    holder.wait_for("ready");
    Store::Holder(holder)
}

/// Runs clients while the daemon is killed [`KILLS`] times, `default` times without that.
///
/// The disks begin with `content`. Returns what was written to them. `dead` is called with 1 and so
/// on when a daemon is dead. `meanwhile` runs beside the clients, until it is told to end.
pub(crate) fn killed_under_load(
    kept: &Kept,
    content: &[u8],
    default: usize,
    dead: impl Fn(usize),
    meanwhile: impl FnOnce(&AtomicBool) + Send,
) -> Vec<(&'static str, Vec<u8>)> {
    let next = |kept: &Kept, old, number| kept.kill_and(old, || dead(number));
    replaced_under_load(kept, content, default, next, meanwhile)
}

/// Runs clients on files while `next` replaces the daemon [`KILLS`] times.
pub(crate) fn under_load(kept: &Kept, next: impl Fn(&Kept, Daemon, usize) -> Daemon) {
    for (name, model) in replaced_under_load(kept, &vec![0; SIZE], 20, next, |_| ()) {
        let content = std::fs::read(kept.folder.path(&format!("{name}.img"))).unwrap();
        assert!(content == model, "disk {name}");
    }
}

fn replaced_under_load(
    kept: &Kept,
    content: &[u8],
    default: usize,
    next: impl Fn(&Kept, Daemon, usize) -> Daemon,
    meanwhile: impl FnOnce(&AtomicBool) + Send,
) -> Vec<(&'static str, Vec<u8>)> {
    let mut daemon = Some(kept.start());
    let times = kills(default);
    let replace = |number| daemon = daemon.take().map(|old| next(kept, old, number));
    let report = || status(&kept.control).to_string();
    let done = AtomicBool::new(false);
    let mut models = std::thread::scope(|scope| {
        let beside = scope.spawn(|| meanwhile(&done));
        let end = EndClients(&done);
        let models = load::under_load_from(content, |name| kept.socket(name), times, replace, report);
        drop(end);
        beside.join().unwrap();
        models
    });
    let report = status(&kept.control);
    assert!(names(&report).starts_with(&["r", "a", "b", "c", "d"]), "{report}");
    for device in &report["devices"].as_array().unwrap()[1..] {
        assert_eq!((&device["sessions"], &device["protocol_errors"]), (&1.into(), &0.into()), "{device}");
        assert_eq!(device["storage_errors"]["write"], 0, "{device}");
    }
    // A new client is served, too.
    let mut driver = Driver::connect(&kept.socket("a"), wish(false, true, 2)).unwrap();
    driver.exercise(&mut models[0].1, 100, &mut Random::new(5));
    drop(driver);
    drop(daemon);
    models
}

#[test]
fn clients_notice_nothing_of_kills() {
    under_load(&Kept::new(&DISKS), |kept, old, _| kept.kill(old));
}

#[test]
fn clients_notice_nothing_of_kills_under_a_service_manager() {
    under_load(&Kept::by_manager(1000, &DISKS), |kept, old, number| match number % 4 {
        0 => {
            let (ended, log) = old.end();
            assert!(ended.success(), "{log:?}");
            kept.start()
        }
        _ => kept.kill(old),
    });
}

#[test]
fn what_a_service_manager_dropped_ends_one_session() {
    let kept = Kept::by_manager(1000, &["a", "b"]);
    let daemon = kept.start();
    kept.wait_until_kept();
    let mut driver = Driver::connect(&kept.socket("a"), wish(false, true, 2)).unwrap();
    let mut model = vec![0; SIZE];
    driver.exercise(&mut model, 50, &mut Random::new(5));
    let Store::Manager(manager) = &kept.store else { panic!("no manager") };
    let before = manager.stored();
    // Its maximum is reached: systemd drops the next ones without a word.
    manager.set_maximum(before + 3);
    let raw = crate::raw::Raw::connect(&kept.socket("b"));
    let mut machine = crate::raw::Machine::new(0, 64, 8);
    machine.attach(&raw, 0, false);
    assert_eq!(manager.stored(), before + 3);
    let daemon = kept.kill(daemon);
    let line = daemon.seen().iter().find(|line| line.contains("session not resumed")).unwrap();
    assert!(line.contains("device=\"b\"") && line.contains("FileDescriptorStoreMax="), "{line}");
    assert!(raw.is_closed());
    // The other one goes on, and the device serves the next client.
    driver.exercise(&mut model, 50, &mut Random::new(6));
    manager.set_maximum(1000);
    // The image may have requests of the dead process in flight: it is served once they are done.
    let end = Instant::now() + patience();
    let mut driver = loop {
        match Driver::connect(&kept.socket("b"), wish(false, true, 2)) {
            Err(error) if error.kind() == ErrorKind::ConnectionRefused && Instant::now() < end => {
                std::thread::sleep(Duration::from_millis(2));
            }
            connected => break connected.unwrap(),
        }
    };
    driver.exercise(&mut vec![0; SIZE], 50, &mut Random::new(5));
}

#[test]
fn clients_notice_nothing_of_restarts() {
    under_load(&Kept::new(&DISKS), |kept, old, _| {
        let (ended, log) = old.end();
        assert!(ended.success(), "{log:?}");
        kept.start()
    });
}

#[test]
fn clients_notice_nothing_of_kills_between_take_overs() {
    under_load(&Kept::new(&DISKS), |kept, old, number| match number % 2 {
        0 => kept.kill(old),
        _ => {
            let mut new = kept.spawn(&["--take-over"]);
            new.wait_for("ready");
            let (ended, log) = old.wait();
            assert!(ended.success(), "{log:?}");
            // The holder has served the old daemon until then.
            kept.wait_until_kept();
            new
        }
    });
}

#[test]
fn a_client_that_comes_while_no_daemon_runs_waits() {
    let kept = Kept::new(&["a"]);
    let daemon = kept.start();
    kept.wait_until_kept();
    daemon.signal(Signal::KILL);
    daemon.wait();
    // The holder has the listening socket.
    let client = UnixStream::connect(kept.socket("a")).unwrap();
    let _daemon = kept.start();
    drop(client);
    let mut driver = Driver::connect(&kept.socket("a"), wish(false, true, 2)).unwrap();
    driver.exercise(&mut vec![0; SIZE], 50, &mut Random::new(5));
}

#[test]
fn what_is_not_configured_any_more_is_not_kept() {
    let kept = Kept::new(&["a", "b"]);
    let mut daemon = kept.start();
    kept.wait_until_kept();
    let raw = crate::raw::Raw::connect(&kept.socket("b"));
    raw.begin(0);
    daemon.signal(Signal::KILL);
    drop(daemon.wait());
    let text = kept.text();
    let at = text.find("[[blk]]\nname = \"b\"").unwrap();
    kept.folder.write("d.toml", &text[..at]);
    daemon = kept.start();
    assert!(raw.is_closed());
    assert_eq!(names(&status(&kept.control)), ["r", "a"]);
    drop(daemon.end());
}

#[test]
fn without_its_holder_a_daemon_serves_on_and_says_so() {
    let mut kept = Kept::new(&["a"]);
    let mut daemon = kept.start();
    kept.wait_until_kept();
    let Store::Holder(holder) = &mut kept.store else { panic!("no holder") };
    holder.signal(Signal::KILL);
    holder.wait_for_end();
    let mut driver = Driver::connect(&kept.socket("a"), wish(false, true, 2)).unwrap();
    driver.exercise(&mut vec![0; SIZE], 50, &mut Random::new(5));
    let line = daemon.wait_for("not kept for the next process any more");
    assert!(line.contains("WARN"), "{line}");
    let report = status(&kept.control);
    assert_eq!(report["devices"][1]["kept"], false, "{report}");
    assert_eq!(report["devices"][1]["connected"], true, "{report}");
}
