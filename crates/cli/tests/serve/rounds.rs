//! Everything that decides about an image, in random order, under clients that check their data.
//!
//! Snapshots, forks, commits, growth, reloads, take-overs, kills of the daemon and of its holder, also
//! two of them at once, and clients of snapshots that stall. `PARAVANE_ROUNDS` and `PARAVANE_SEED` repeat
//! a run or make a longer one.
use crate::daemon::{Daemon, Folder, paravane, patience, status, without_sandbox};
use crate::driver::Random;
use crate::images::{has_qemu_img, qemu_img};
use crate::late_parties::{leave, stalled};
use crate::load::{self, DISKS, SIZE};
use crate::snapshot::has_marks;
use rustix::process::Signal;
use serde_json::Value;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Output, Stdio};
use std::time::{Duration, Instant};

/// Environment variables: number of rounds, and what they begin with.
const ROUNDS: &str = "PARAVANE_ROUNDS";
const SEED: &str = "PARAVANE_SEED";

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
}

/// A disk's images, top first, each with its format.
#[derive(Clone, Debug)]
struct Chain(Vec<(String, &'static str)>);

impl Chain {
    fn top(&self) -> &str {
        &self.0[0].0
    }

    /// Keys for the file of devices.
    fn keys(&self) -> String {
        let (top, format) = &self.0[0];
        let below: Vec<String> =
            self.0[1..].iter().map(|(path, format)| format!("{format}:{path}")).collect();
        let backing = if below.is_empty() { String::new() } else { format!("backing = {below:?}\n") };
        format!("image = {top:?}\nformat = \"{format}\"\n{backing}")
    }

    /// The layers below the top, as options.
    fn backing(&self) -> Vec<String> {
        self.0[1..]
            .iter()
            .flat_map(|(path, format)| ["--backing".into(), format!("{format}:{path}")])
            .collect()
    }
}

/// What happens in a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    Snapshot,
    Fork,
    TwoSnapshots,
    Commit,
    CommitServed,
    Grow,
    Reload,
    Change,
    TakeOver,
    Kill,
    Stop,
    KillHolder,
    SnapshotBesideTakeOver,
    SnapshotBesideKill,
    SnapshotBesideReload,
    SnapshotBesideChange,
    KillBesideChange,
}

const EVENTS: [Event; 17] = [
    Event::Snapshot,
    Event::Fork,
    Event::TwoSnapshots,
    Event::Commit,
    Event::CommitServed,
    Event::Grow,
    Event::Reload,
    Event::Change,
    Event::TakeOver,
    Event::Kill,
    Event::Stop,
    Event::KillHolder,
    Event::SnapshotBesideTakeOver,
    Event::SnapshotBesideKill,
    Event::SnapshotBesideReload,
    Event::SnapshotBesideChange,
    Event::KillBesideChange,
];

/// Keys of all disks, of which a change cuts no client off.
const KEYS: [&str; 4] =
    ["", "ops-per-second = 100000\n", "engine = \"threads\"\n", "poll-us = 0\nslow = \"9s\"\n"];

/// Daemon, holder and images.
struct Host {
    folder: Folder,
    control: String,
    chains: Vec<Chain>,
    daemon: Option<Daemon>,
    holder: Option<Daemon>,
    random: Random,
    /// Number of overlays so far.
    overlays: usize,
    /// Other guests' disks.
    forks: Vec<Chain>,
    stalled: Vec<UnixStream>,
    /// Those of [`KEYS`] that the disks have.
    keys: &'static str,
}

impl Host {
    fn new(seed: u64) -> Self {
        let folder = Folder::new();
        let chain = |(index, name): (usize, &&str)| match index % 2 {
            0 => Chain(vec![(folder.image(&format!("{name}.img")), "raw")]),
            _ => {
                let path = folder.text(&format!("{name}.qcow2"));
                qemu_img(&["create", "-q", "-f", "qcow2", &path, &SIZE.to_string()]);
                Chain(vec![(path, "qcow2")])
            }
        };
        let chains = DISKS.iter().enumerate().map(chain).collect();
        let (control, random) = (folder.text("control"), Random::new(seed));
        let (daemon, holder) = (None, None);
        let mut host = Self {
            folder,
            control,
            chains,
            daemon,
            holder,
            random,
            overlays: 0,
            forks: Vec::new(),
            stalled: Vec::new(),
            keys: KEYS[0],
        };
        host.write();
        host.holder = Some(host.start_holder());
        host.start();
        host
    }

    /// Writes the file of devices.
    fn write(&self) {
        let disk = |(name, chain): (&&str, &Chain)| {
            format!(
                "[[blk]]\nname = \"{name}\"\nsocket = \"{name}.sock\"\nqueues = 2\nworkers = 2\n{}{}",
                self.keys,
                chain.keys()
            )
        };
        let devices: String = DISKS.iter().zip(&self.chains).map(disk).collect();
        // In one step, as an editor does: a reload may read it at any moment.
        let new = self.folder.write("d.toml.new", &format!("[daemon]\nholder = \"hold\"\n{devices}"));
        std::fs::rename(new, self.folder.path("d.toml")).unwrap();
    }

    fn start_holder(&self) -> Daemon {
        let arguments = ["hold", "--socket", &self.folder.text("hold")];
        let mut holder = Daemon::spawn(paravane().args(arguments).args(without_sandbox()));
        holder.wait_for("ready");
        holder
    }

    fn spawn(&self, more: &[&str]) -> Daemon {
        let arguments = ["serve", "--config", &self.folder.text("d.toml"), "--control", &self.control];
        Daemon::spawn(paravane().args(arguments).args(more).args(without_sandbox()))
    }

    fn start(&mut self) {
        let mut daemon = self.spawn(&[]);
        daemon.wait_for("ready");
        self.daemon = Some(daemon);
    }

    fn daemon(&mut self) -> &mut Daemon {
        self.daemon.as_mut().unwrap()
    }

    /// Waits until all disks are served, and their sessions kept.
    fn wait_until_kept(&self) {
        let begin = Instant::now();
        let is_kept = |report: &Value| {
            let devices = report["devices"].as_array().unwrap();
            devices.len() == DISKS.len() && devices.iter().all(|device| device["kept"] == true)
        };
        loop {
            let report = status(&self.control);
            if is_kept(&report) {
                return;
            }
            assert!(begin.elapsed() < patience(), "{}", brief(&report));
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn overlay(&mut self) -> String {
        self.overlays += 1;
        self.folder.text(&format!("{}.qcow2", self.overlays))
    }

    /// Begins a command for a disk that is served.
    fn begin(&self, command: &str, disk: usize, overlays: &[&str]) -> Child {
        let mut snapshot = paravane();
        snapshot.args(["disk", command, DISKS[disk]]).args(overlays);
        snapshot.args(["--json", "--pause-limit", "30s", "--control", &self.control]);
        snapshot.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// Notes the result of a snapshot. Returns whether it was taken.
    fn note(&mut self, disk: usize, overlay: &str, output: &Output) -> bool {
        if output.status.success() {
            let report: Value = serde_json::from_slice(&output.stdout).unwrap();
            assert_eq!(report["base"]["path"], self.chains[disk].top(), "{report}");
            self.chains[disk].0.insert(0, (overlay.to_owned(), "qcow2"));
        }
        output.status.success()
    }

    fn snapshot(&mut self, disk: usize) {
        let overlay = self.overlay();
        let output = self.begin("snapshot", disk, &[&overlay]).wait_with_output().unwrap();
        assert!(self.note(disk, &overlay, &output), "{}", String::from_utf8_lossy(&output.stderr));
        self.write();
    }

    fn fork(&mut self, disk: usize) {
        let (own, other) = (self.overlay(), self.overlay());
        let mut forked = self.chains[disk].clone();
        let output = self.begin("fork", disk, &[&own, &other]).wait_with_output().unwrap();
        assert!(self.note(disk, &own, &output), "{}", String::from_utf8_lossy(&output.stderr));
        forked.0.insert(0, (other, "qcow2"));
        self.forks.push(forked);
        self.write();
    }

    fn two_snapshots(&mut self, disk: usize) {
        let overlays = [self.overlay(), self.overlay()];
        let children: Vec<_> =
            overlays.iter().map(|overlay| self.begin("snapshot", disk, &[overlay])).collect();
        let mut results: Vec<_> = overlays
            .iter()
            .zip(children.into_iter().map(|child| child.wait_with_output().unwrap()))
            .collect();
        // The first one has the image that was there.
        let top = self.chains[disk].top().to_owned();
        results.sort_by_key(|(_, output)| {
            serde_json::from_slice::<Value>(&output.stdout)
                .map_or(2, |report| i32::from(report["base"]["path"] != top))
        });
        let mut taken = 0;
        for (overlay, output) in results {
            match self.note(disk, overlay, &output) {
                true => taken += 1,
                false => assert!(!Path::new(overlay).exists(), "{output:?}"),
            }
        }
        assert!(taken > 0);
        self.write();
    }

    /// The daemon dies, and an overlay is merged before the next one starts.
    fn commit(&mut self, disk: usize) {
        self.wait_until_kept();
        drop(self.daemon.take());
        let chain = &mut self.chains[disk];
        // Others are destroyed by a commit.
        let is_shared =
            |below: &str| self.forks.iter().any(|fork| fork.0[1..].iter().any(|(path, _)| path == below));
        if chain.0.len() > 1 && !is_shared(&chain.0[1].0) {
            let arguments =
                [vec!["commit".to_owned(), "-q".to_owned(), chain.top().to_owned()], chain.backing()];
            let output = commit(&arguments.concat());
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            chain.0.remove(0);
            self.write();
        }
        self.start();
    }

    /// Nobody merges, replaces or converts onto what is served.
    fn commit_served(&mut self, disk: usize) {
        let chain = &self.chains[disk];
        let (top, format) = chain.0[0].clone();
        let onto = format!("{format}:{top}");
        let refused = |arguments: &[&str]| {
            let output = commit(&arguments.iter().map(ToString::to_string).collect::<Vec<_>>());
            assert_eq!(
                output.status.code(),
                Some(2),
                "{arguments:?}: {}",
                String::from_utf8_lossy(&output.stderr)
            );
        };
        refused(&["create", "--force", "--size", "1M", &top]);
        if chain.0.len() > 1 {
            let backing = chain.backing();
            let arguments =
                [vec!["commit", "-q", &top], backing.iter().map(String::as_str).collect()].concat();
            refused(&arguments);
            let below = format!("{}:{}", chain.0[1].1, chain.0[1].0);
            refused(&["convert", "-q", "--force", &below, &onto]);
        }
    }

    fn grow(&mut self, disk: usize) {
        if let [(path, "raw")] = self.chains[disk].0.as_slice() {
            let file = std::fs::File::options().write(true).open(path).unwrap();
            file.set_len(file.metadata().unwrap().len() + 65536).unwrap();
        }
        self.reload();
    }

    fn reload(&mut self) {
        self.daemon().signal(Signal::HUP);
        self.daemon().wait_for("reloaded: 4 unchanged, 0 removed, 0 added, 0 failed");
    }

    /// Other keys, which cut no client off.
    fn change(&mut self) {
        let others: Vec<_> = KEYS.into_iter().filter(|keys| *keys != self.keys).collect();
        self.keys = others[self.random.below(others.len())];
        self.write();
        let output = paravane().args(["reload", "--control", &self.control]).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
        let done = text.matches("changed in place").count() + text.matches("its session goes on").count();
        assert!(done == DISKS.len() && !text.contains(": restarted:"), "{text}");
    }

    /// The reload comes first, or the snapshot; what was refused is done again.
    fn snapshot_beside_change(&mut self, disk: usize) {
        let others: Vec<_> = KEYS.into_iter().filter(|keys| *keys != self.keys).collect();
        self.keys = others[self.random.below(others.len())];
        self.write();
        let overlay = self.overlay();
        let child = self.begin("snapshot", disk, &[&overlay]);
        let reload = || paravane().args(["reload", "--control", &self.control]).output().unwrap();
        let first = reload();
        let first = String::from_utf8_lossy(&first.stdout).into_owned();
        let output = child.wait_with_output().unwrap();
        if !self.note(disk, &overlay, &output) {
            let _ = std::fs::remove_file(&overlay);
        }
        self.write();
        let output = paravane().args(["reload", "--control", &self.control]).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
        // No client was cut off.
        assert!(![&*first, &*text].iter().any(|text| text.contains(": restarted:")), "{first}, then {text}");
    }

    fn take_over(&mut self) {
        let mut new = self.spawn(&["--take-over"]);
        new.wait_for("ready");
        let (ended, log) = self.daemon.replace(new).unwrap().wait();
        assert!(ended.success(), "{log:?}");
    }

    fn kill(&mut self) {
        self.wait_until_kept();
        drop(self.daemon.take());
        self.start();
    }

    fn stop(&mut self) {
        self.wait_until_kept();
        let (ended, log) = self.daemon.take().unwrap().end();
        assert!(ended.success(), "{log:?}");
        self.start();
    }

    fn kill_holder(&mut self) {
        drop(self.holder.take());
        self.holder = Some(self.start_holder());
        // It keeps again from here on.
        self.take_over();
    }

    /// Of the two, one is first; the other one is refused, or comes after it.
    fn snapshot_beside_take_over(&mut self, disk: usize) {
        let overlay = self.overlay();
        let child = self.begin("snapshot", disk, &[&overlay]);
        let mut new = self.spawn(&["--take-over"]);
        let took_over = new.find("ready").is_ok();
        let output = child.wait_with_output().unwrap();
        if took_over {
            let (ended, log) = self.daemon.replace(new).unwrap().wait();
            assert!(ended.success(), "{log:?}");
        }
        if !self.note(disk, &overlay, &output) {
            assert!(took_over, "neither of both: {}", String::from_utf8_lossy(&output.stderr));
            let _ = std::fs::remove_file(&overlay);
        }
        self.write();
    }

    /// The daemon dies while it opens all disks again, or before, or after.
    fn kill_beside_change(&mut self) {
        self.wait_until_kept();
        let engine = KEYS[2];
        self.keys = if self.keys == engine { KEYS[0] } else { engine };
        self.write();
        let mut reload = paravane();
        reload.args(["reload", "--control", &self.control]).stdout(Stdio::null()).stderr(Stdio::null());
        let mut reload = reload.spawn().unwrap();
        std::thread::sleep(Duration::from_micros(self.random.below(80_000) as u64));
        drop(self.daemon.take());
        reload.wait().unwrap();
        self.start();
    }

    fn snapshot_beside_kill(&mut self, disk: usize) {
        self.wait_until_kept();
        let overlay = self.overlay();
        let child = self.begin("snapshot", disk, &[&overlay]);
        std::thread::sleep(Duration::from_micros(self.random.below(30_000) as u64));
        drop(self.daemon.take());
        let output = child.wait_with_output().unwrap();
        if !self.note(disk, &overlay, &output) {
            // As the documents say: a marked image is continued by its overlay, which may be empty.
            let marked =
                rustix::fs::getxattr(self.chains[disk].top(), "user.paravane.overlay", &mut [0; 4096][..]);
            match (marked.is_ok(), Path::new(&overlay).exists()) {
                (true, true) => self.chains[disk].0.insert(0, (overlay, "qcow2")),
                (true, false) => panic!("the overlay of a marked image is gone: {output:?}"),
                (false, _) => drop(std::fs::remove_file(&overlay)),
            }
        }
        self.write();
        self.start();
    }

    fn snapshot_beside_reload(&mut self, disk: usize) {
        let overlay = self.overlay();
        let child = self.begin("snapshot", disk, &[&overlay]);
        // The file may be out of date when it is read: then the devices stay as they are.
        self.daemon().signal(Signal::HUP);
        let output = child.wait_with_output().unwrap();
        assert!(self.note(disk, &overlay, &output), "{}", String::from_utf8_lossy(&output.stderr));
        self.write();
        self.reload();
    }

    fn round(&mut self, event: Event, disk: usize) {
        match event {
            Event::Snapshot => self.snapshot(disk),
            Event::Fork => self.fork(disk),
            Event::TwoSnapshots => self.two_snapshots(disk),
            Event::Commit => self.commit(disk),
            Event::CommitServed => self.commit_served(disk),
            Event::Grow => self.grow(disk),
            Event::Reload => self.reload(),
            Event::Change => self.change(),
            Event::SnapshotBesideChange => self.snapshot_beside_change(disk),
            Event::KillBesideChange => self.kill_beside_change(),
            Event::TakeOver => self.take_over(),
            Event::Kill => self.kill(),
            Event::Stop => self.stop(),
            Event::KillHolder => self.kill_holder(),
            Event::SnapshotBesideTakeOver => self.snapshot_beside_take_over(disk),
            Event::SnapshotBesideKill => self.snapshot_beside_kill(disk),
            Event::SnapshotBesideReload => self.snapshot_beside_reload(disk),
        }
    }

    fn next(&mut self, number: usize) {
        // Each once, then at random.
        let event = match EVENTS.get(number - 1) {
            Some(event) => *event,
            None => EVENTS[self.random.below(EVENTS.len())],
        };
        let disk = self.random.below(DISKS.len());
        // A chain must not become too long.
        let event = if self.chains[disk].0.len() > 6 { Event::Commit } else { event };
        eprintln!("round {number}: {event:?} of {}", DISKS[disk]);
        // The daemon refuses a snapshot of the same disk until it has noticed.
        self.stalled.drain(..).for_each(leave);
        if self.random.below(4) == 0 {
            // A client that stalls, of another disk.
            self.stalled.push(stalled(&self.control, DISKS[(disk + 1) % DISKS.len()]));
        }
        self.round(event, disk);
    }
}

fn commit(arguments: &[String]) -> Output {
    paravane().arg("disk").args(arguments).output().unwrap()
}

/// A report without its figures.
fn brief(report: &Value) -> String {
    let devices = report["devices"].as_array().unwrap().iter();
    let device = |device: &Value| {
        ["name", "kept", "not_kept", "connected", "last_error", "failed", "back_end"]
            .map(|key| device[key].clone())
    };
    format!("{:?} {} {}", devices.map(device).collect::<Vec<_>>(), report["failed"], report["waiting"])
}

#[test]
fn clients_notice_nothing_of_what_happens_to_their_images() {
    const TEST: &str = "clients_notice_nothing_of_what_happens_to_their_images";
    if !has_qemu_img(TEST) {
        return;
    }
    let (rounds, seed) = (number(ROUNDS, EVENTS.len() as u64 + 2), number(SEED, 1));
    eprintln!("{rounds} rounds of seed {seed}");
    let mut host = Host::new(seed);
    if !has_marks(&host.folder) {
        return crate::daemon::skip(TEST, "no extended attributes in this folder");
    }
    let (root, control) = (host.folder.root().to_owned(), host.control.clone());
    let models = load::under_load(
        |name| root.join(format!("{name}.sock")),
        rounds as usize,
        |number| host.next(number),
        || brief(&status(&control)),
    );
    host.stalled.clear();
    let (ended, log) = host.daemon.take().unwrap().end();
    assert!(ended.success(), "{log:?}");
    for (chain, (name, model)) in host.chains.iter().zip(&models) {
        check(&host.folder, chain);
        assert!(flat(&host.folder, chain)[..SIZE] == *model, "{name} is not what was written: {chain:?}");
    }
    host.forks.iter().for_each(|fork| check(&host.folder, fork));
}

/// QEMU and this program read the same from a chain, and its images are in order.
fn check(folder: &Folder, chain: &Chain) {
    for (path, format) in &chain.0 {
        if *format == "qcow2" {
            qemu_img(&["check", "-q", path]);
        }
    }
    let (top, format) = &chain.0[0];
    let copy = folder.text("copy.img");
    let (source, target) = (format!("{format}:{top}"), format!("raw:{copy}"));
    let mut arguments: Vec<String> =
        ["convert", "-q", "--force", &source, &target].map(str::to_owned).to_vec();
    arguments.extend(chain.backing());
    let output = commit(&arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    qemu_img(&["compare", "-q", "-f", format, "-F", "raw", top, &copy]);
}

/// The disk of a chain, as QEMU reads it.
fn flat(folder: &Folder, chain: &Chain) -> Vec<u8> {
    let (flat, (top, format)) = (folder.text("flat.img"), &chain.0[0]);
    qemu_img(&["convert", "-f", format, "-O", "raw", top, &flat]);
    std::fs::read(flat).unwrap()
}
