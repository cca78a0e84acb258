//! Stopping daemons and devices with slow requests in flight.
use crate::daemon::{Daemon, Folder, is_root, patience, skip, status};
use crate::raw::{Ask, Machine, Raw};
use paravane_spec::vhost_user::request;
use rustix::event::{EventfdFlags, eventfd};
use rustix::process::Signal;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

fn disk(name: &str, more: &str) -> String {
    format!("[[blk]]\nname = \"{name}\"\nimage = \"{name}.img\"\nsocket = \"{name}.sock\"\n{more}")
}

/// A client that writes to a disk.
fn client(socket: &Path, depth: usize) -> (Raw, Machine) {
    let mut machine = Machine::new(0, 256, depth);
    let raw = Raw::connect(socket);
    machine.attach(&raw, 0, false);
    (raw, machine)
}

fn write(machine: &mut Machine, slots: std::ops::Range<usize>) {
    for slot in slots {
        machine.ask(slot, Ask::Write(7), slot * 512, 512);
    }
    machine.kick();
}

/// Waits until some requests of the machine are done; returns their number.
fn some_done(machine: &mut Machine) -> usize {
    let (end, mut model) = (Instant::now() + patience(), vec![0; 1 << 20]);
    loop {
        match machine.reap(&mut model) {
            0 => assert!(Instant::now() < end, "no request is done"),
            done => return done,
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits until the daemon's first queue has `requests` in flight.
///
/// What is still in the ring when a device stops stays there.
fn wait_until_taken(control: &str, requests: u64) {
    let end = Instant::now() + patience();
    while status(control)["devices"][0]["queues"][0]["in_flight"] != requests {
        assert!(Instant::now() < end, "{}", status(control));
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Rate-limited requests have not begun: they stay in the ring for the next daemon.
#[test]
fn what_a_rate_limit_holds_is_not_waited_for() {
    let folder = Folder::new();
    folder.image("a.img");
    folder.image("b.img");
    // An hour for all of them.
    let limited = disk("a", "ops-per-second = 1\nburst-ops = 1\n");
    let file = folder.write("d.toml", &(limited.clone() + &disk("b", "")));
    let mut daemon = Daemon::start(&["--config", &file, "--control", "off"]);
    let (_raw, mut machine) = client(&folder.path("a.sock"), 64);
    write(&mut machine, 0..64);
    let done = some_done(&mut machine);
    folder.write("d.toml", &disk("b", ""));
    daemon.signal(Signal::HUP);
    let line = daemon.wait_for("unchanged");
    assert!(line.contains("1 removed") && !line.contains("still"), "{line}, {done} done before");
    assert!(machine.in_flight() > 32);
    folder.write("d.toml", &(limited + &disk("b", "")));
    daemon.signal(Signal::HUP);
    daemon.wait_for("1 added");
    let (_raw, mut machine) = client(&folder.path("a.sock"), 64);
    write(&mut machine, 0..64);
    some_done(&mut machine);
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
    assert!(machine.in_flight() > 32);
}

/// A client whose eventfd is full blocks neither SIGHUP nor SIGTERM.
#[test]
fn an_eventfd_that_is_full_delays_no_signal() {
    let folder = Folder::new();
    folder.image("a.img");
    folder.image("b.img");
    // With shared threads the clients would be disconnected.
    let own = |name| disk(name, "workers = 1\n");
    let file = folder.write("d.toml", &(own("a") + &own("b")));
    let mut daemon = Daemon::start(&["--config", &file, "--control", "off"]);
    let full = || -> OwnedFd {
        let full = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        full
    };
    let clients = ["a.sock", "b.sock"].map(|socket| {
        let (raw, mut machine) = client(&folder.path(socket), 4);
        raw.say(request::SET_VRING_CALL, &0_u64, &[full().as_fd()]);
        write(&mut machine, 0..4);
        some_done(&mut machine);
        (raw, machine)
    });
    folder.write("d.toml", &own("b"));
    daemon.signal(Signal::HUP);
    daemon.wait_for("1 removed");
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
    drop(clients);
}

/// A file system whose writes wait while it is frozen.
struct Frozen<'a> {
    folder: &'a Folder,
    frozen: bool,
}

impl<'a> Frozen<'a> {
    /// `None`: not possible on this host; `test` is skipped.
    fn mount(folder: &'a Folder, test: &str) -> Option<Self> {
        if !is_root() {
            skip(test, "a file system is mounted by root only");
            return None;
        }
        let (image, at) = (folder.text("ext4.img"), folder.text("mnt"));
        std::fs::create_dir(&at).unwrap();
        std::fs::File::create(&image).unwrap().set_len(64 << 20).unwrap();
        for command in [["mkfs.ext4", "-q", "-F", &image].as_slice(), &["mount", "-o", "loop", &image, &at]] {
            let output = Command::new(command[0]).args(&command[1..]).output();
            if let Some(why) = match output {
                Err(error) => Some(error.to_string()),
                Ok(output) if !output.status.success() => {
                    Some(String::from_utf8_lossy(&output.stderr).trim().to_owned())
                }
                Ok(_) => None,
            } {
                skip(test, format!("{}: {why}", command[0]));
                return None;
            }
        }
        let frozen = Self { folder, frozen: false };
        std::fs::File::create(frozen.folder.path("mnt/a.img")).unwrap().set_len(1 << 20).unwrap();
        Some(frozen)
    }

    fn command(&self, command: &[&str]) -> bool {
        let at = self.folder.text("mnt");
        Command::new(command[0]).args(&command[1..]).arg(at).status().is_ok_and(|status| status.success())
    }

    fn freeze(&mut self) {
        assert!(self.command(&["fsfreeze", "-f"]));
        self.frozen = true;
    }

    fn thaw(&mut self) {
        if std::mem::take(&mut self.frozen) {
            assert!(self.command(&["fsfreeze", "-u"]));
        }
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        if self.frozen {
            self.command(&["fsfreeze", "-u"]);
        }
        self.command(&["umount", "-l"]);
    }
}

fn frozen_disk() -> String {
    "[[blk]]\nname = \"a\"\nimage = \"mnt/a.img\"\nsocket = \"a.sock\"\n".to_owned()
}

#[test]
fn storage_that_hangs_delays_its_own_device_alone() {
    const TEST: &str = "storage_that_hangs_delays_its_own_device_alone";
    let folder = Folder::new();
    let Some(mut storage) = Frozen::mount(&folder, TEST) else { return };
    folder.image("b.img");
    folder.image("c.img");
    let file = folder.write("d.toml", &(frozen_disk() + &disk("b", "")));
    let control = folder.text("control");
    let mut daemon = Daemon::start(&["--config", &file, "--control", &control]);
    let (_raw, mut machine) = client(&folder.path("a.sock"), 4);
    let (_raw_b, mut machine_b) = client(&folder.path("b.sock"), 4);
    storage.freeze();
    write(&mut machine, 0..4);

    // The changed device must stop; the new one starts at once.
    let moved = frozen_disk().replace("a.sock", "moved.sock");
    folder.write("d.toml", &(moved + &disk("b", "") + &disk("c", "")));
    daemon.signal(Signal::HUP);
    let line = daemon.wait_for("unchanged");
    let outcome = "1 unchanged, 0 removed, 1 added, 0 failed, 1 still stopping, 1 not started yet";
    assert!(line.contains(outcome), "{line}");
    assert!(folder.path("c.sock").exists() && !folder.path("a.sock").exists());
    let json = status(&control);
    let stopping = json["devices"].as_array().unwrap().iter().find(|device| device["name"] == "a").unwrap();
    assert_eq!(stopping["stopping"]["in_flight"], 4, "{json}");
    assert_eq!(json["waiting"][0]["name"], "a", "{json}");
    write(&mut machine_b, 0..4);
    some_done(&mut machine_b);

    // The changed device starts when its predecessor has ended.
    storage.thaw();
    let end = Instant::now() + patience();
    while !folder.path("moved.sock").exists() {
        assert!(Instant::now() < end, "{}", status(&control));
        std::thread::sleep(Duration::from_millis(10));
    }
    daemon.wait_for("stopped");
    machine.reap(&mut vec![0; 1 << 20]);
    assert_eq!(machine.in_flight(), 0, "what was in flight was finished");
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
}

/// SIGTERM has a deadline and logs unfinished requests.
///
/// A second signal ends the wait.
#[test]
fn storage_that_hangs_does_not_keep_a_daemon() {
    const TEST: &str = "storage_that_hangs_does_not_keep_a_daemon";
    for (timeout, signals, code, why) in
        [("1", 1, 1, "requests in flight not finished within 1 s"), ("3600", 2, 130, "second signal")]
    {
        let folder = Folder::new();
        let Some(mut storage) = Frozen::mount(&folder, TEST) else { return };
        folder.image("b.img");
        let file = folder.write("d.toml", &(frozen_disk() + &disk("b", "")));
        let control = folder.text("control");
        let arguments = ["--config", &file, "--control", &control, "--stop-timeout", timeout];
        let mut daemon = Daemon::start(&arguments);
        let (_raw, mut machine) = client(&folder.path("a.sock"), 4);
        storage.freeze();
        write(&mut machine, 0..4);
        wait_until_taken(&control, 4);
        daemon.signal(Signal::TERM);
        daemon.wait_for("stopping");
        if signals == 2 {
            // Sockets are removed before the wait.
            let end = Instant::now() + patience();
            while folder.path("b.sock").exists() {
                assert!(Instant::now() < end);
                std::thread::sleep(Duration::from_millis(1));
            }
            daemon.signal(Signal::INT);
        }
        daemon.wait_for(why);
        let line = daemon.wait_for("requests=4");
        assert!(line.contains("lost to the guest"), "{line}");
        // The kernel keeps the process while the file system is frozen.
        storage.thaw();
        let (ended, log) = daemon.end();
        assert_eq!(ended.code(), Some(code), "{log:?}");
        assert!(!folder.path("a.sock").exists() && !folder.path("b.sock").exists());
    }
}

/// Requests in the kernel outlive the daemon.
///
/// The next daemon waits until they are done, as they could overwrite its data.
#[test]
fn an_image_stays_locked_until_the_kernel_is_done_with_it() {
    const TEST: &str = "an_image_stays_locked_until_the_kernel_is_done_with_it";
    let folder = Folder::new();
    let Some(mut storage) = Frozen::mount(&folder, TEST) else { return };
    let Some(device) = Loop::attach(&folder.text("mnt/a.img"), TEST) else { return };
    let control = folder.text("control");
    let arguments = ["blk", "--image", &device.0, "--direct", "--control", &control, "--socket"];
    let (first, second) = (folder.text("first"), folder.text("second"));
    for kill in [false, true] {
        let mut daemon = Daemon::start(&[&arguments[..], &[&first]].concat());
        let (_raw, mut machine) = client(&folder.path("first"), 4);
        storage.freeze();
        // Blocks of any device.
        for slot in 0..4 {
            machine.ask(slot, Ask::Write(7), slot * 4096, 4096);
        }
        machine.kick();
        // Those that are counted are the kernel's.
        wait_until_taken(&control, 4);
        if kill {
            daemon.signal(Signal::KILL);
        } else {
            daemon.signal(Signal::TERM);
            daemon.wait_for("stopping");
            daemon.signal(Signal::TERM);
            daemon.wait_for("requests=4");
        }
        let (ended, log) = daemon.end();
        assert_eq!(ended.code(), if kill { None } else { Some(130) }, "{log:?}");
        let mut next = crate::daemon::paravane();
        let more = crate::daemon::without_sandbox();
        let mut next = Daemon::spawn(next.arg("serve").args(arguments).arg(&second).args(more));
        next.wait_for("waiting for the lock of its image: a dead process has requests in flight");
        assert!(!folder.path("second").exists(), "the device is served");
        storage.thaw();
        next.wait_for("ready");
        let (ended, log) = next.end();
        assert!(ended.success(), "{log:?}");
    }
}

/// A loop device.
struct Loop(String);

impl Loop {
    /// `None`: not possible on this host; `test` is skipped.
    fn attach(file: &str, test: &str) -> Option<Self> {
        match Command::new("losetup").args(["-f", "--show", file]).output() {
            Ok(output) if output.status.success() => {
                Some(Self(String::from_utf8_lossy(&output.stdout).trim().to_owned()))
            }
            output => {
                skip(test, format!("losetup: {output:?}"));
                None
            }
        }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["-d", &self.0]).status();
    }
}
