//! Snapshots of disks in the sandbox, under clients that check their data.
use crate::daemon::{Daemon, Folder, assert_refused, paravane, patience, status, without_sandbox};
use crate::driver::{Driver, Random, Wish};
use crate::images::{has_qemu_img, qemu_img};
use crate::load::{self, DISKS, SIZE};
use paravane_device::blk::io_uring_available;
use rustix::process::Signal;
use serde_json::Value;
use std::path::Path;
use std::process::Output;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A disk of a file, with more keys.
pub(crate) fn disk(name: &str, keys: &str) -> String {
    format!("[[blk]]\nname = \"{name}\"\nsocket = \"{name}.sock\"\nqueues = 2\nworkers = 2\n{keys}")
}

pub(crate) fn take(control: &str, arguments: &[&str]) -> Output {
    paravane().arg("disk").args(arguments).args(["--control", control]).output().unwrap()
}

/// A snapshot that is taken; its report.
pub(crate) fn snapshot(control: &str, device: &str, overlay: &str) -> Value {
    // Generous: the host may be busy.
    let output = take(control, &["snapshot", device, overlay, "--json", "--pause-limit", "30s"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The images of a disk that has had snapshots, top first. The base may lie on a server.
#[derive(Clone, Debug)]
pub(crate) struct Chain {
    paths: Vec<String>,
    base: Option<String>,
}

impl Chain {
    /// A raw image.
    pub(crate) fn new(image: String) -> Self {
        Self { paths: vec![image], base: None }
    }

    /// An overlay on a base.
    pub(crate) fn on(overlay: String, base: String) -> Self {
        Self { paths: vec![overlay], base: Some(base) }
    }

    pub(crate) fn top(&self) -> &str {
        &self.paths[0]
    }

    /// Puts an overlay on top.
    pub(crate) fn put(&mut self, overlay: String) {
        self.paths.insert(0, overlay);
    }

    /// Number of overlays, without one that the disk began with.
    fn snapshots(&self) -> usize {
        self.paths.len() - 1
    }

    /// The layers below the top, as FORMAT:LOCATION.
    pub(crate) fn below(&self) -> Vec<String> {
        let last = self.paths.len() - 1;
        let layer = |(number, path): (usize, &String)| match number == last && self.base.is_none() {
            true => format!("raw:{path}"),
            false => format!("qcow2:{path}"),
        };
        self.paths.iter().enumerate().skip(1).map(layer).chain(self.base.clone()).collect()
    }

    /// Keys for the file of devices.
    pub(crate) fn keys(&self) -> String {
        let (top, below) = (self.top(), self.below());
        if below.is_empty() {
            return format!("image = {top:?}\n");
        }
        format!("image = {top:?}\nformat = \"qcow2\"\nbacking = {below:?}\n")
    }
}

#[test]
fn clients_notice_nothing_of_twenty_snapshots() {
    if !has_qemu_img("clients_notice_nothing_of_twenty_snapshots") {
        return;
    }
    let folder = Folder::new();
    let ring = if io_uring_available().is_ok() { "io_uring" } else { "auto" };
    let engines = ["auto", "threads", "immediate", ring];
    let mut chains: Vec<Chain> =
        DISKS.iter().map(|name| Chain::new(folder.image(&format!("{name}.img")))).collect();
    let text = |chains: &[Chain]| -> String {
        let named = DISKS.iter().zip(engines).zip(chains);
        named
            .map(|((name, engine), chain)| disk(name, &format!("engine = {engine:?}\n{}", chain.keys())))
            .collect()
    };
    let (file, control) = (folder.write("d.toml", &text(&chains)), folder.text("control"));
    let mut daemon = Daemon::start(&["--config", &file, "--control", &control]);
    let mut pauses = Vec::new();
    let mut frozen = Vec::new();
    let models = load::under_load(
        |name| folder.path(&format!("{name}.sock")),
        20,
        |number| {
            let at = number % DISKS.len();
            let overlay = folder.text(&format!("{}-{number}.qcow2", DISKS[at]));
            let report = snapshot(&control, DISKS[at], &overlay);
            let base = report["base"]["path"].as_str().unwrap().to_owned();
            assert_eq!(base, chains[at].top(), "{report}");
            assert!(report["unsynced"].is_null(), "{report}");
            pauses.push(report["pause_us"].as_f64().unwrap());
            frozen.push((std::fs::read(&base).unwrap(), base));
            chains[at].put(overlay.clone());
            let device = status(&control)["devices"][at].clone();
            assert!(device["back_end"].as_str().unwrap().starts_with(&overlay), "{device}");
            assert_eq!(device["snapshots"], chains[at].snapshots(), "{device}");
        },
        || status(&control).to_string(),
    );
    show("of four disks", pauses);
    for (content, path) in &frozen {
        assert!(std::fs::read(path).unwrap() == *content, "{path} was written to");
    }
    // The old file would have the disks write to frozen images.
    daemon.signal(Signal::HUP);
    let line = daemon.wait_for("reload failed");
    assert!(line.contains("is the backing file of"), "{line}");
    // Of the present overlay, not of the first one.
    assert!(
        chains.iter().any(|chain| line.contains(&format!("is the backing file of {} ", chain.top()))),
        "{line}"
    );
    folder.write("d.toml", &text(&chains));
    daemon.signal(Signal::HUP);
    daemon.wait_for("reloaded: 4 unchanged, 0 removed, 0 added, 0 failed");
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
    for (Chain { paths, .. }, (_, model)) in chains.iter().zip(&models) {
        paths[..paths.len() - 1].iter().for_each(|path| qemu_img(&["check", "-q", path]));
        let flat = folder.text("flat.img");
        qemu_img(&["convert", "-f", "qcow2", "-O", "raw", &paths[0], &flat]);
        assert!(std::fs::read(flat).unwrap() == *model, "{} is not what was written", paths[0]);
    }
    // The next daemon.
    let daemon = Daemon::start(&["--config", &file, "--control", &control]);
    let (name, mut model) = models.into_iter().next().unwrap();
    let mut driver =
        Driver::connect(&folder.path(&format!("{name}.sock")), load::wish(true, true, 2)).unwrap();
    driver.exercise(&mut model, 100, &mut Random::new(9));
    drop(driver);
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
}

/// Median and longest of these times in microseconds, for the log of the test.
fn show(what: &str, mut pauses: Vec<f64>) {
    pauses.sort_by(f64::total_cmp);
    let (median, longest) = (pauses[pauses.len() / 2], pauses[pauses.len() - 1]);
    eprintln!("pauses of {} snapshots {what}: median {median:.0} µs, longest {longest:.0} µs", pauses.len());
}

/// One guest writes all the time, and the chain gets long.
#[test]
fn a_chain_of_twenty_snapshots_is_one_disk() {
    if !has_qemu_img("a_chain_of_twenty_snapshots_is_one_disk") {
        return;
    }
    let folder = Folder::new();
    let (image, socket, control) = (folder.image("vm.img"), folder.text("s"), folder.text("control"));
    let arguments = ["blk", "--name", "vm0", "--socket", &socket, "--control", &control];
    let daemon = Daemon::start(&[&arguments[..], &["--image", &image]].concat());
    let mut chain = Chain::new(image);
    let (mut model, mut pauses) = (vec![0; SIZE], Vec::new());
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let client = scope.spawn(|| {
            let mut driver = Driver::connect(Path::new(&socket), wish()).unwrap();
            let mut random = Random::new(1);
            while !done.load(Ordering::Relaxed) {
                driver.exercise(&mut model, 50, &mut random);
            }
        });
        for number in 1..=20 {
            let overlay = folder.text(&format!("{number}.qcow2"));
            let report = snapshot(&control, "vm0", &overlay);
            assert_eq!(report["backing"].as_array().unwrap().len(), chain.snapshots(), "{report}");
            pauses.push(report["pause_us"].as_f64().unwrap());
            if number == 1 {
                // The frozen image is backed up while the daemon has it open.
                let copy = folder.text("copy.img");
                qemu_img(&["convert", "-f", "raw", "-O", "raw", chain.top(), &copy]);
                qemu_img(&["convert", "-U", "-f", "raw", "-O", "raw", chain.top(), &copy]);
                assert!(std::fs::read(copy).unwrap() == std::fs::read(chain.top()).unwrap());
            }
            chain.put(overlay);
            if client.is_finished() {
                break;
            }
        }
        done.store(true, Ordering::Relaxed);
        client.join().unwrap();
    });
    show("of one disk", pauses);
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
    chain.paths[..20].iter().for_each(|path| qemu_img(&["check", "-q", path]));
    let flat = folder.text("flat.img");
    qemu_img(&["convert", "-f", "qcow2", "-O", "raw", chain.top(), &flat]);
    assert!(std::fs::read(flat).unwrap() == model, "the chain is not what was written");
    let file = folder.write("d.toml", &disk("vm0", &chain.keys()));
    let daemon = Daemon::start(&["--config", &file, "--control", &control]);
    let mut driver = Driver::connect(&folder.path("vm0.sock"), load::wish(false, true, 2)).unwrap();
    driver.exercise(&mut model, 200, &mut Random::new(2));
    drop(driver);
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
}

fn wish() -> Wish {
    Wish { packed: true, event_idx: true, queues: 1, depth: 4 }
}

/// Whether the files of a folder can be marked.
pub(crate) fn has_marks(folder: &Folder) -> bool {
    let path = folder.write("probe", "");
    rustix::fs::setxattr(&path, "user.paravane.probe", b"1", rustix::fs::XattrFlags::empty()).is_ok()
}

#[test]
fn a_fork_begins_with_what_the_guest_had_and_the_old_image_is_refused() {
    let folder = Folder::new();
    let (image, socket, control) = (folder.image("vm.img"), folder.text("s"), folder.text("control"));
    let arguments = ["blk", "--name", "vm0", "--image", &image, "--socket", &socket];
    let daemon = Daemon::start(&[&arguments[..], &["--control", &control]].concat());
    let mut model = vec![0; SIZE];
    let mut driver = Driver::connect(Path::new(&socket), wish()).unwrap();
    driver.exercise(&mut model, 200, &mut Random::new(1));
    let (own, fork) = (folder.text("own.qcow2"), folder.text("fork.qcow2"));

    // What is refused leaves nothing behind.
    assert_refused(&take(&control, &["snapshot", "vm1", &own]), "no device is named \"vm1\"");
    let missing = folder.text("missing/own.qcow2");
    assert_refused(&take(&control, &["snapshot", "vm0", &missing]), "cannot open the image");
    let none = folder.text("none");
    assert_refused(&take(&none, &["snapshot", "vm0", &own]), "none");
    folder.write("taken.qcow2", "something");
    assert_refused(&take(&control, &["fork", "vm0", &own, &folder.text("taken.qcow2")]), "exists");
    assert!(!Path::new(&own).exists());
    assert_eq!(std::fs::read(folder.path("taken.qcow2")).unwrap(), b"something");

    let output = take(&control, &["fork", "vm0", &own, &fork, "--pause-limit", "30s"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for line in [
        format!("vm0: {image} is frozen; writes go to {own}"),
        format!("paravane serve blk --name vm0 --socket {socket} \\"),
        format!("  --image {own} --format qcow2 --backing raw:{image} --serial vm.img"),
        format!("  --image {fork} --format qcow2 --backing raw:{image}"),
    ] {
        assert!(text.lines().any(|there| there == line), "{line:?} is not in\n{text}");
    }
    let at_fork = model.clone();
    driver.exercise(&mut model, 200, &mut Random::new(2));
    assert!(std::fs::read(&image).unwrap() == at_fork, "the image is not that of the fork");

    // The other guest, at the same time.
    let (socket, backing) = (folder.text("t"), format!("raw:{image}"));
    let of_fork = ["--image", &fork, "--format", "qcow2", "--backing", &backing, "--control", "off"];
    let other = Daemon::start(&[&["blk", "--socket", &socket][..], &of_fork].concat());
    let mut forked = at_fork.clone();
    let mut second = Driver::connect(Path::new(&socket), wish()).unwrap();
    second.exercise(&mut forked, 200, &mut Random::new(3));
    driver.exercise(&mut model, 200, &mut Random::new(4));
    assert!(std::fs::read(&image).unwrap() == at_fork);
    drop((driver, second));
    for daemon in [daemon, other] {
        let (ended, log) = daemon.end();
        assert!(ended.success(), "{log:?}");
    }
    let old = || paravane().arg("serve").args(arguments).args(without_sandbox()).output().unwrap();
    match has_marks(&folder) {
        true => assert_refused(&old(), "is the backing file of"),
        false => crate::daemon::skip("the mark of a frozen image", "no extended attributes in this folder"),
    }
}

/// Runs the command that a snapshot has printed in a shell, and more options.
pub(crate) fn paste(printed: &str, control: &str) -> Daemon {
    let begin = printed.find("paravane serve").expect("a command is printed");
    let end = printed.find("\nor in its file:").expect("keys follow");
    let folder = Path::new(env!("CARGO_BIN_EXE_paravane")).parent().unwrap();
    let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap());
    let more = without_sandbox().unwrap_or_default();
    let script = format!("exec {} --control '{control}' {more}", &printed[begin..end]);
    let mut command = std::process::Command::new("sh");
    command.args(["-c", &script]).env("PATH", path).env_remove("NOTIFY_SOCKET").env_remove("RUST_LOG");
    let mut daemon = Daemon::spawn(&mut command);
    daemon.wait_for("ready");
    daemon
}

/// Takes a snapshot for people.
pub(crate) fn printed(control: &str, device: &str, overlay: &str) -> String {
    let output = take(control, &["snapshot", device, overlay, "--pause-limit", "30s"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_printed_command_is_pasted_into_a_shell() {
    let folder = Folder::new();
    std::fs::create_dir(folder.path("it's $HOME")).unwrap();
    let (image, socket) = (folder.image("it's $HOME/a very long name of an image.img"), folder.text("a b"));
    let control = folder.text("control");
    let options = "--queues 2 --queue-size 128 --engine threads --on-full error --slow 1s --no-packed --workers 2 \
                   --poll-us 7 --ops-per-second 100000 --burst-ops 5000 --bytes-per-second 1G --store-timeout 9";
    let daemon = Daemon::start(
        &[
            &["blk", "--name", "vm0", "--image", &image, "--socket", &socket, "--control", &control],
            &options.split_whitespace().collect::<Vec<_>>()[..],
        ]
        .concat(),
    );
    let told = status(&control)["devices"][0]["serial"].clone();
    let wish = Wish { packed: false, event_idx: true, queues: 2, depth: 4 };
    let mut model = vec![0; SIZE];
    let mut driver = Driver::connect(Path::new(&socket), wish).unwrap();
    driver.exercise(&mut model, 100, &mut Random::new(1));
    let text = printed(&control, "vm0", &folder.text("it's $HOME/1.qcow2"));
    driver.exercise(&mut model, 100, &mut Random::new(2));
    drop(driver);
    assert!(daemon.end().0.success());
    for option in options.split("--").filter(|option| !option.is_empty()) {
        let value = option.trim().replace("1G", &(1_u64 << 30).to_string());
        assert!(text.contains(&format!("--{value}")), "{value:?} is not in {text}");
    }

    let daemon = paste(&text, &control);
    let mut driver = Driver::connect(Path::new(&socket), wish).unwrap();
    driver.exercise(&mut model, 100, &mut Random::new(3));
    let device = status(&control)["devices"][0].clone();
    assert_eq!((&device["name"], &device["serial"]), (&"vm0".into(), &told), "{device}");
    assert_eq!(device["queues"].as_array().unwrap().len(), 2);
    // The next snapshot prints the same options.
    let again = printed(&control, "vm0", &folder.text("it's $HOME/2.qcow2"));
    let options =
        |text: &str| text[text.find(" --serial").unwrap()..text.find("\nor in").unwrap()].to_owned();
    assert_eq!(options(&again), options(&text));
    drop(driver);
    assert!(daemon.end().0.success());
}

#[test]
fn a_guest_keeps_the_serial_number_that_it_was_told() {
    let folder = Folder::new();
    let (image, control) = (folder.image("a very long name of an image.img"), folder.text("control"));
    let overlay = folder.text("1.qcow2");
    let keys = |serial: &str| {
        let backing = format!("raw:{image}");
        disk("vm", &(Chain::on(overlay.clone(), backing).keys() + serial))
    };
    let holder = folder.text("hold");
    let _holder = {
        let mut command = paravane();
        let mut holder = Daemon::spawn(command.args(["hold", "--socket", &holder]).args(without_sandbox()));
        holder.wait_for("ready");
        holder
    };
    let file = folder.write("d.toml", &disk("vm", &Chain::new(image.clone()).keys()));
    let arguments = ["--config", &file, "--control", &control, "--holder", &holder];
    let mut daemon = Daemon::start(&arguments);
    let told = || status(&control)["devices"][0]["serial"].as_str().unwrap().to_owned();
    let serial = told();
    assert!(serial.starts_with("a very long-") && serial.len() == 20, "{serial}");
    let mut driver = Driver::connect(&folder.path("vm.sock"), load::wish(false, true, 2)).unwrap();
    let (mut model, mut random) = (vec![0; SIZE], Random::new(1));
    driver.exercise(&mut model, 100, &mut random);
    snapshot(&control, "vm", &overlay);
    assert_eq!(told(), serial);
    // Files that name it, and that do not.
    for line in [String::new(), format!("serial = {serial:?}\n")] {
        folder.write("d.toml", &keys(&line));
        daemon.signal(Signal::HUP);
        daemon.wait_for("reloaded: 1 unchanged, 0 removed, 0 added, 0 failed");
    }
    folder.write("d.toml", &keys(""));
    let mut command = paravane();
    let mut new =
        Daemon::spawn(command.arg("serve").args(arguments).arg("--take-over").args(without_sandbox()));
    new.wait_for("ready");
    assert!(daemon.wait().0.success());
    assert_eq!(told(), serial, "after a take-over");
    driver.exercise(&mut model, 100, &mut random);
    // Killed: the session is kept.
    new.signal(Signal::KILL);
    new.wait_for_end();
    let daemon = Daemon::start(&arguments);
    driver.exercise(&mut model, 100, &mut random);
    assert_eq!(told(), serial, "after a kill");
    drop(driver);
    let end = Instant::now() + patience();
    while status(&control)["devices"][0]["connected"] == true {
        assert!(Instant::now() < end, "the session goes on");
        std::thread::sleep(Duration::from_millis(2));
    }
    assert!(daemon.end().0.success());
    // Without a guest, the name of the overlay counts, unless the file has the serial number.
    for (line, wanted) in [(String::new(), "1.qcow2"), (format!("serial = {serial:?}\n"), &serial)] {
        folder.write("d.toml", &keys(&line));
        let daemon = Daemon::start(&arguments);
        assert_eq!(told(), wanted);
        assert!(daemon.end().0.success());
    }
}

#[test]
fn a_new_daemon_takes_over_with_the_overlay_and_not_with_the_old_image() {
    let folder = Folder::new();
    if !has_marks(&folder) {
        let why = "no extended attributes in this folder";
        return crate::daemon::skip("a_new_daemon_takes_over_with_the_overlay", why);
    }
    let image = folder.image("vm.img");
    let overlay = folder.text("vm-1.qcow2");
    let before = Chain::new(image.clone());
    let after = Chain::on(overlay.clone(), format!("raw:{image}"));
    let (file, control) = (folder.write("d.toml", &disk("vm", &before.keys())), folder.text("control"));
    let daemon = Daemon::start(&["--config", &file, "--control", &control]);
    let mut model = vec![0; SIZE];
    let mut driver = Driver::connect(&folder.path("vm.sock"), load::wish(false, true, 2)).unwrap();
    let mut random = Random::new(1);
    driver.exercise(&mut model, 100, &mut random);
    snapshot(&control, "vm", &overlay);
    driver.exercise(&mut model, 100, &mut random);
    let take_over = || {
        let mut command = paravane();
        command
            .args(["serve", "--config", &file, "--control", &control, "--take-over"])
            .args(without_sandbox());
        command
    };
    assert_refused(&take_over().output().unwrap(), "is the backing file of");
    driver.exercise(&mut model, 100, &mut random);
    folder.write("d.toml", &disk("vm", &after.keys()));
    let mut new = Daemon::spawn(&mut take_over());
    new.wait_for("ready");
    let (ended, log) = daemon.wait();
    assert!(ended.success(), "{log:?}");
    driver.exercise(&mut model, 100, &mut random);
    drop(driver);
    let (ended, log) = new.end();
    assert!(ended.success(), "{log:?}");
}

/// A folder on a file system without extended attributes.
struct Ramfs(Folder);

impl Ramfs {
    fn mount(test: &str) -> Option<Self> {
        if !crate::daemon::is_root() {
            crate::daemon::skip(test, "not root");
            return None;
        }
        let folder = Folder::new();
        let mounted =
            std::process::Command::new("mount").args(["-t", "ramfs", "test"]).arg(folder.root()).output();
        match mounted {
            Ok(output) if output.status.success() && !has_marks(&folder) => Some(Self(folder)),
            output => {
                crate::daemon::skip(test, format!("no file system without extended attributes: {output:?}"));
                None
            }
        }
    }
}

impl Drop for Ramfs {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg("-l").arg(self.0.root()).output();
    }
}

/// Without a mark on the frozen image, the record of the session says which image its guest used.
#[test]
fn a_kept_session_does_not_resume_on_a_frozen_image_without_a_mark() {
    let Some(mount) = Ramfs::mount("a_kept_session_does_not_resume_on_a_frozen_image_without_a_mark") else {
        return;
    };
    let folder = &mount.0;
    let (image, overlay) = (folder.image("vm.img"), folder.text("vm-1.qcow2"));
    let before = Chain::new(image.clone());
    let after = Chain::on(overlay.clone(), format!("raw:{image}"));
    let (control, hold) = (folder.text("control"), folder.text("hold"));
    let mut command = paravane();
    let mut holder = Daemon::spawn(command.args(["hold", "--socket", &hold]).args(without_sandbox()));
    holder.wait_for("ready");
    let file = folder.write("d.toml", &disk("vm", &before.keys()));
    let arguments = ["--config", &file, "--control", &control, "--holder", &hold];
    let daemon = Daemon::start(&arguments);
    let mut model = vec![0; SIZE];
    let mut driver = Driver::connect(&folder.path("vm.sock"), load::wish(false, true, 2)).unwrap();
    let mut random = Random::new(1);
    driver.exercise(&mut model, 100, &mut random);
    assert_eq!(snapshot(&control, "vm", &overlay)["marked"], false);
    driver.exercise(&mut model, 100, &mut random);
    let kill = |mut daemon: Daemon| {
        daemon.signal(Signal::KILL);
        daemon.wait_for_end();
    };
    kill(daemon);
    // The file was not edited. The device is not served, and its session stays.
    let mut daemon = Daemon::start(&arguments);
    let why = format!("its guest used {overlay} last, and this is {image}");
    if !daemon.seen().iter().any(|line| line.contains(&why)) {
        daemon.wait_for(&why);
    }
    let failed = crate::daemon::status_text(&control);
    assert!(failed.contains(&why), "{failed}");
    folder.write("d.toml", &disk("vm", &after.keys()));
    daemon.signal(Signal::HUP);
    driver.exercise(&mut model, 100, &mut random);
    kill(daemon);
    let daemon = Daemon::start(&arguments);
    driver.exercise(&mut model, 100, &mut random);
    drop(driver);
    assert!(daemon.end().0.success());
}
