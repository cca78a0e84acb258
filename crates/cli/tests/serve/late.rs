//! Writes of a killed daemon must not land after newer writes of the next one.
//!
//! io_uring requests outlive their process: a direct write is a dead process's until the storage
//! has done it. The storage here does a write when the test lets it.
use crate::daemon::{Daemon, Folder, assert_refused, paravane, patience, status, without_sandbox};
use crate::raw::{Ask, Machine, Raw};
use crate::stalled::{Held, SIZE, Stalled};
use paravane_spec::vhost_user::{VringState, request};
use rustix::process::Signal;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// Bytes of a write: a block of any device.
const LEN: usize = 4096;

/// A disk on storage that stalls.
struct Disk {
    folder: Folder,
    storage: Stalled,
    options: &'static [&'static str],
    /// What was written and completed.
    model: Vec<u8>,
}

impl Disk {
    /// `None`: not possible on this host; `test` is skipped.
    fn new(options: &'static [&'static str], test: &str) -> Option<Self> {
        if let Err(why) = paravane_device::blk::io_uring_available() {
            crate::daemon::skip(test, why.to_string());
            return None;
        }
        let folder = Folder::new();
        let storage = Stalled::mount(&folder, test)?;
        Some(Self { folder, storage, options, model: vec![0; SIZE] })
    }

    fn arguments(&self) -> Vec<String> {
        self.arguments_of("s", "control")
    }

    fn arguments_of(&self, socket: &str, control: &str) -> Vec<String> {
        let [image, socket, control] = ["mnt/a.img", socket, control].map(|name| self.folder.text(name));
        let fixed = ["serve", "blk", "--image", &image, "--socket", &socket, "--control", &control];
        fixed.iter().chain(self.options).copied().chain(without_sandbox()).map(str::to_owned).collect()
    }

    /// Starts a daemon, which need not become ready.
    fn spawn(&self) -> Daemon {
        Daemon::spawn(paravane().args(self.arguments()))
    }

    fn serve(&self) -> Daemon {
        let mut daemon = self.spawn();
        daemon.wait_for("ready");
        daemon
    }

    /// Kills `daemon` while the storage has a write of it. Returns the write.
    fn kill_with_a_write(&self, daemon: &Daemon, machine: &mut Machine) -> Vec<Held> {
        let raw = Raw::connect(&self.folder.path("s"));
        machine.attach(&raw, 0, true);
        self.storage.hold();
        machine.ask(0, Ask::Write(1), 0, LEN);
        machine.kick();
        let held = self.storage.take(1);
        daemon.signal(Signal::KILL);
        held
    }

    /// Does what was in flight, and writes something newer to the same place.
    fn write_again(&mut self, machine: &mut Machine) {
        self.write_again_by("s", machine);
    }

    /// The same by the daemon with this socket.
    fn write_again_by(&mut self, socket: &str, machine: &mut Machine) {
        // The kernel lets go of a dead process's requests some time after they are done, and a daemon
        // refuses to start a queue before that.
        let end = Instant::now() + patience();
        let _session = loop {
            let raw = Raw::connect(&self.folder.path(socket));
            if machine.try_attach(&raw, 0, true) {
                break raw;
            }
            assert!(Instant::now() < end, "the queue is not started");
        };
        machine.finish(&mut self.model);
        machine.ask(0, Ask::Write(2), 0, LEN);
        machine.kick();
        machine.finish(&mut self.model);
    }

    /// Waits until the daemon's only device that is not served is `name`, waiting for its image.
    fn wait_until_it_waits(&self, name: &str) {
        let end = Instant::now() + patience();
        loop {
            if UnixStream::connect(self.folder.path("control")).is_ok() {
                let json = status(&self.folder.text("control"));
                let waiting = &json["waiting"][0];
                let why = waiting["why"].as_str().unwrap_or_default();
                if waiting["name"] == name && why.contains("a dead process has requests in flight") {
                    return;
                }
                assert!(Instant::now() < end, "{json}");
            }
            assert!(Instant::now() < end, "no daemon answers");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// A disk, and a machine whose write its storage has when the daemon dies.
fn killed(options: &'static [&'static str], test: &str) -> Option<(Disk, Machine, Vec<Held>)> {
    let disk = Disk::new(options, test)?;
    let mut machine = Machine::new(0, 64, 4);
    let daemon = disk.serve();
    let held = disk.kill_with_a_write(&daemon, &mut machine);
    // It is gone, and its write is not done.
    let (ended, log) = daemon.end();
    assert_eq!(ended.code(), None, "{log:?}");
    assert!(disk.storage.content() == vec![0; SIZE]);
    Some((disk, machine, held))
}

fn the_next_daemon_waits(options: &'static [&'static str], test: &str) {
    let Some((mut disk, mut machine, held)) = killed(options, test) else { return };
    let mut next = disk.spawn();
    next.wait_for("waiting for the lock of its image: a dead process has requests in flight");
    disk.wait_until_it_waits("blk");
    assert!(UnixStream::connect(disk.folder.path("s")).is_err(), "the device is served");
    assert!(disk.storage.content() == vec![0; SIZE]);

    disk.storage.let_go(held);
    next.wait_for("image locked after");
    next.wait_for("ready");
    assert_eq!(status(&disk.folder.text("control"))["waiting"].as_array().map(Vec::len), Some(0));
    disk.write_again(&mut machine);
    assert!(disk.storage.content() == disk.model, "an old write landed late");
    let (ended, log) = next.end();
    assert!(ended.success(), "{log:?}");
}

#[test]
fn the_next_daemon_of_a_locked_image_waits_for_the_writes_of_a_killed_one() {
    const TEST: &str = "the_next_daemon_of_a_locked_image_waits_for_the_writes_of_a_killed_one";
    the_next_daemon_waits(&["--direct", "--engine", "io_uring"], TEST);
}

#[test]
fn the_next_daemon_of_an_unlocked_image_waits_for_the_writes_of_a_killed_one() {
    const TEST: &str = "the_next_daemon_of_an_unlocked_image_waits_for_the_writes_of_a_killed_one";
    the_next_daemon_waits(&["--direct", "--engine", "io_uring", "--no-lock"], TEST);
}

#[test]
fn registered_buffers_are_waited_for_too() {
    const TEST: &str = "registered_buffers_are_waited_for_too";
    the_next_daemon_waits(&["--direct", "--engine", "io_uring", "--registered-buffers"], TEST);
}

/// What the wait prevents: the same without it.
///
/// A lock of another program on the whole file, as Cloud Hypervisor's, hides the dead process.
#[test]
fn without_the_wait_an_old_write_lands_after_a_newer_one() {
    const TEST: &str = "without_the_wait_an_old_write_lands_after_a_newer_one";
    let Some(mut disk) = Disk::new(&["--direct", "--engine", "io_uring", "--no-lock"], TEST) else { return };
    let other = File::options().read(true).write(true).open(disk.folder.path("mnt/a.img")).unwrap();
    // SAFETY: `flock` is plain data, for which all zeroes are valid.
    let mut whole: libc::flock = unsafe { std::mem::zeroed() };
    whole.l_type = libc::F_WRLCK as libc::c_short;
    // SAFETY: the descriptor is open, and the kernel only reads the structure.
    assert_eq!(unsafe { libc::fcntl(other.as_raw_fd(), libc::F_OFD_SETLK, &raw const whole) }, 0);

    let mut machine = Machine::new(0, 64, 4);
    let daemon = disk.serve();
    let held = disk.kill_with_a_write(&daemon, &mut machine);
    daemon.end();
    let next = disk.serve();
    disk.write_again(&mut machine);
    assert!(disk.storage.content() == disk.model);
    disk.storage.let_go(held);
    assert!(disk.storage.content() != disk.model, "the old write has not landed");
    let (ended, log) = next.end();
    assert!(ended.success(), "{log:?}");
}

#[test]
fn a_signal_ends_the_wait_for_a_dead_daemon() {
    const TEST: &str = "a_signal_ends_the_wait_for_a_dead_daemon";
    let Some((disk, _machine, held)) = killed(&["--direct", "--engine", "io_uring"], TEST) else { return };
    let next = disk.spawn();
    disk.wait_until_it_waits("blk");
    let (ended, log) = next.end();
    assert!(ended.success(), "{log:?}");
    assert!(!log.iter().any(|line| line.contains("ready")), "{log:?}");
    drop(held);
}

#[test]
fn the_service_manager_gives_the_wait_for_a_dead_daemon_its_time() {
    const TEST: &str = "the_service_manager_gives_the_wait_for_a_dead_daemon_its_time";
    let Some((disk, _machine, held)) = killed(&["--direct", "--engine", "io_uring"], TEST) else { return };
    let manager = UnixDatagram::bind(disk.folder.path("notify")).unwrap();
    manager.set_read_timeout(Some(patience())).unwrap();
    let receive = || {
        let mut message = [0; 256];
        let len = manager.recv(&mut message).unwrap();
        String::from_utf8(message[..len].to_vec()).unwrap()
    };
    let mut command = paravane();
    let next = Daemon::spawn(command.args(disk.arguments()).env("NOTIFY_SOCKET", disk.folder.path("notify")));
    let first = receive();
    assert!(first.starts_with("STATUS=waiting for the lock of an image"), "{first}");
    assert!(first.contains("\nEXTEND_TIMEOUT_USEC="), "{first}");
    disk.storage.let_go(held);
    let mut last = receive();
    while last.starts_with("STATUS=waiting") {
        last = receive();
    }
    assert_eq!(last, "READY=1\nSTATUS=\n");
    let (ended, log) = next.end();
    assert!(ended.success(), "{log:?}");
}

/// The other devices of the daemon are served at once, and the one that waits can be removed.
#[test]
fn a_device_that_waits_for_a_dead_daemon_delays_itself_alone() {
    const TEST: &str = "a_device_that_waits_for_a_dead_daemon_delays_itself_alone";
    let Some((mut disk, mut machine, held)) = killed(&["--direct", "--engine", "io_uring"], TEST) else {
        return;
    };
    let folder = &disk.folder;
    folder.image("b.img");
    let waits = "[[blk]]\nname = \"a\"\nimage = \"mnt/a.img\"\nsocket = \"s\"\ndirect = true\n";
    let other = "[[blk]]\nname = \"b\"\nimage = \"b.img\"\nsocket = \"b.sock\"\n";
    let file = folder.write("d.toml", &(waits.to_owned() + other));
    let control = folder.text("control");
    let mut daemon = Daemon::start(&["--config", &file, "--control", &control]);
    disk.wait_until_it_waits("a");
    let write = |seed| {
        let mut machine = Machine::new(0, 64, 4);
        let raw = Raw::connect(&folder.path("b.sock"));
        machine.attach(&raw, 0, false);
        machine.ask(0, Ask::Write(seed), 0, LEN);
        machine.kick();
        machine.finish(&mut vec![0; SIZE]);
    };
    write(3);

    folder.write("d.toml", other);
    daemon.signal(Signal::HUP);
    daemon.wait_for("1 unchanged");
    let end = Instant::now() + patience();
    while status(&control)["waiting"].as_array().map(Vec::len) != Some(0) {
        assert!(Instant::now() < end, "{}", status(&control));
        std::thread::sleep(Duration::from_millis(5));
    }
    folder.write("d.toml", &(waits.to_owned() + other));
    daemon.signal(Signal::HUP);
    disk.wait_until_it_waits("a");
    write(4);

    disk.storage.let_go(held);
    daemon.wait_for("kind=\"blk\"");
    disk.write_again(&mut machine);
    assert!(disk.storage.content() == disk.model, "an old write landed late");
    let (ended, log) = daemon.end();
    assert!(ended.success(), "{log:?}");
}

/// The source of a migration is killed when its target has opened the image already.
#[test]
fn a_target_starts_no_queue_before_the_writes_of_a_killed_source_are_done() {
    const TEST: &str = "a_target_starts_no_queue_before_the_writes_of_a_killed_source_are_done";
    let Some(mut disk) = Disk::new(&["--direct", "--engine", "io_uring", "--no-lock"], TEST) else { return };
    let mut machine = Machine::new(0, 64, 4);
    let source = disk.serve();
    let mut target = Daemon::spawn(paravane().args(disk.arguments_of("target", "other")));
    target.wait_for("ready");
    let held = disk.kill_with_a_write(&source, &mut machine);
    source.end();

    let raw = Raw::connect(&disk.folder.path("target"));
    raw.begin(machine.features);
    let (inflight, fd) = machine.inflight.as_ref().unwrap();
    raw.say(request::SET_INFLIGHT_FD, inflight, &[fd.as_fd()]);
    machine.share(&raw);
    let state = |num| VringState { index: 0, num };
    let queue = 0_u64;
    raw.say(request::SET_VRING_NUM, &state(machine.addresses.size.into()), &[]);
    raw.say(request::SET_VRING_BASE, &state(0), &[]);
    raw.say(request::SET_VRING_ADDR, &machine.vring_addr(), &[]);
    // The queue starts with one of these: the session ends.
    for (request, payload, fd) in [
        (request::SET_VRING_CALL, queue.as_bytes(), Some(machine.call.as_fd())),
        (request::SET_VRING_KICK, queue.as_bytes(), Some(machine.kick.as_fd())),
        (request::SET_VRING_ENABLE, state(1).as_bytes(), None),
    ] {
        let _ = raw.send(request, payload, fd.as_slice());
    }
    assert!(raw.is_closed());
    target.wait_for("requests of a process that is gone are in flight for the image");
    assert!(disk.storage.content() == disk.model);

    disk.storage.let_go(held);
    disk.write_again_by("target", &mut machine);
    assert!(disk.storage.content() == disk.model, "an old write landed late");
    let (ended, log) = target.end();
    assert!(ended.success(), "{log:?}");
}

/// What protects a migration whose source lives: its answer comes after its last write.
#[test]
fn a_source_gives_its_queue_away_when_its_writes_are_done() {
    const TEST: &str = "a_source_gives_its_queue_away_when_its_writes_are_done";
    for options in [&["--direct", "--no-lock"][..], &["--engine", "threads", "--no-lock"]] {
        let Some(mut disk) = Disk::new(options, TEST) else { return };
        let mut machine = Machine::new(0, 64, 4);
        let source = disk.serve();
        let raw = Raw::connect(&disk.folder.path("s"));
        machine.attach(&raw, 0, true);
        disk.storage.hold();
        machine.ask(0, Ask::Write(1), 0, LEN);
        machine.kick();
        let held = disk.storage.take(1);
        raw.send(request::GET_VRING_BASE, VringState { index: 0, num: 0 }.as_bytes(), &[]).unwrap();
        raw.socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        assert!(raw.receive().is_err(), "{options:?}: answered before its write is done");
        raw.socket.set_read_timeout(Some(patience())).unwrap();
        disk.storage.let_go(held);
        raw.receive().unwrap();
        assert_eq!(machine.reap(&mut disk.model), 1);
        assert!(disk.storage.content() == disk.model, "{options:?}");
        let (ended, log) = source.end();
        assert!(ended.success(), "{log:?}");
    }
}

/// A process whose threads are in the storage's hands cannot be reaped, and keeps all its locks.
#[test]
fn a_killed_daemon_that_is_not_gone_counts_as_alive() {
    const TEST: &str = "a_killed_daemon_that_is_not_gone_counts_as_alive";
    for options in [
        &["--engine", "threads"][..],
        &["--engine", "threads", "--direct"],
        &["--engine", "io_uring"],
        &["--engine", "immediate"],
    ] {
        let Some(mut disk) = Disk::new(options, TEST) else { return };
        let mut machine = Machine::new(0, 64, 4);
        let daemon = disk.serve();
        let held = disk.kill_with_a_write(&daemon, &mut machine);
        // Its sockets are held, too.
        let next = paravane().args(disk.arguments_of("other", "other-control")).output().unwrap();
        assert_refused(&next, "in use by another process");
        let pid = rustix::process::Pid::from_raw(daemon.pid() as i32);
        let state = rustix::process::waitpid(pid, rustix::process::WaitOptions::NOHANG).unwrap();
        assert!(state.is_none(), "{options:?}: it is gone");
        disk.storage.let_go(held);
        daemon.end();
        let next = disk.serve();
        disk.write_again(&mut machine);
        let (ended, log) = next.end();
        assert!(ended.success(), "{log:?}");
        assert!(disk.storage.content() == disk.model, "{options:?}: an old write landed late");
    }
}
