//! `--holder`: a daemon that is killed at each step of a control message.
//!
//! The test traces the thread that handles messages, and kills the daemon before its first system
//! call after the message, then before its second one, and so on until it waits for the next message.
//! Nothing but system calls can be seen from outside, so these are all steps that there are. Requests
//! are in flight meanwhile. The next daemon must answer exactly once, and finish the requests.
use crate::daemon::{Daemon, skip};
use crate::driver::Random;
use crate::kill::Kept;
use crate::raw::{MEMORY, Machine, Raw};
use nix::sys::ptrace;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use paravane_spec::feature::{EVENT_IDX, INDIRECT_DESC, RING_PACKED};
use paravane_spec::vhost_user::{
    ConfigAccess, F_PROTOCOL_FEATURES, Inflight, LOG_PAGE, LogArea, SingleRegion, VringState, request,
};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::Signal;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use zerocopy::{FromBytes, IntoBytes};

/// Bytes of the disk.
const SIZE: usize = 1 << 20;

/// A system call that is about to be made.
#[derive(Clone, Copy)]
struct Call {
    number: i64,
    /// Second argument.
    operation: u64,
}

impl Call {
    /// Whether it is the first of a message: it reads it.
    ///
    /// What is before may belong to the message before, whose reply the client has already.
    fn is_first(self) -> bool {
        self.number == libc::SYS_recvmsg
    }

    /// Whether it ends a step: the worker has the poller wait for the descriptors of the task.
    fn is_after(self) -> bool {
        self.number == libc::SYS_epoll_ctl && self.operation == libc::EPOLL_CTL_ADD as u64
    }
}

/// The traced thread of a daemon. It ends with it.
struct Traced {
    thread: Pid,
    /// It is not stopped.
    runs: bool,
    is_reaped: bool,
}

impl Traced {
    /// Stops the thread with this name.
    fn stop(daemon: &Daemon, name: &str) -> nix::Result<Self> {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", daemon.pid())).unwrap();
        let mut tasks = tasks.map(|task| task.unwrap());
        let is_named = |task: &std::fs::DirEntry| {
            std::fs::read_to_string(task.path().join("comm")).is_ok_and(|comm| comm.trim_end() == name)
        };
        let task = tasks.find(is_named).expect("the thread is there");
        let thread = Pid::from_raw(task.file_name().to_str().unwrap().parse().unwrap());
        ptrace::seize(thread, ptrace::Options::PTRACE_O_TRACESYSGOOD)?;
        let traced = Self { thread, runs: false, is_reaped: false };
        ptrace::interrupt(thread)?;
        waitpid(thread, Some(WaitPidFlag::__WALL))?;
        Ok(traced)
    }

    /// Goes on until the message is read that `client` has sent, and returns that call.
    ///
    /// `None`: another worker has answered. One is started if this one, which stops at each call, takes
    /// a millisecond to begin.
    fn first_call(&mut self, client: &Raw) -> Option<Call> {
        loop {
            let call = self.next_call(Some(client))?;
            if call.is_first() {
                return Some(call);
            }
        }
    }

    /// Goes on to the next system call, and returns it.
    ///
    /// `None`: the thread has ended; or `client` has a reply, and the thread runs.
    fn next_call(&mut self, client: Option<&Raw>) -> Option<Call> {
        loop {
            ptrace::syscall(self.thread, None).unwrap();
            match self.stopped(client)? {
                WaitStatus::PtraceSyscall(_) => {
                    let info = ptrace::syscall_info(self.thread).unwrap();
                    if info.op == libc::PTRACE_SYSCALL_INFO_ENTRY {
                        // SAFETY: `op` says which field was filled in.
                        let entry = unsafe { info.u.entry };
                        return Some(Call { number: entry.nr.cast_signed(), operation: entry.args[1] });
                    }
                }
                WaitStatus::Signaled(..) | WaitStatus::Exited(..) => {
                    self.is_reaped = true;
                    return None;
                }
                _ => {}
            }
        }
    }

    /// Waits until the thread stops. `None`: `client` has a reply before.
    fn stopped(&mut self, client: Option<&Raw>) -> Option<WaitStatus> {
        let Some(client) = client else {
            return Some(waitpid(self.thread, Some(WaitPidFlag::__WALL)).unwrap());
        };
        loop {
            match waitpid(self.thread, Some(WaitPidFlag::__WALL | WaitPidFlag::WNOHANG)).unwrap() {
                WaitStatus::StillAlive if has_reply(client) => {
                    self.runs = true;
                    return None;
                }
                WaitStatus::StillAlive => std::thread::sleep(std::time::Duration::from_millis(1)),
                status => return Some(status),
            }
        }
    }

    /// Kills the daemon, and waits until it has ended.
    fn kill(mut self, daemon: Daemon) {
        daemon.signal(Signal::KILL);
        self.reap();
        daemon.wait();
    }

    fn reap(&mut self) {
        while !self.is_reaped {
            match waitpid(self.thread, Some(WaitPidFlag::__WALL)) {
                Ok(WaitStatus::Signaled(..) | WaitStatus::Exited(..)) | Err(_) => self.is_reaped = true,
                Ok(_) => {}
            }
        }
    }
}

/// Whether the daemon has answered.
fn has_reply(client: &Raw) -> bool {
    let mut fds = [PollFd::new(&client.socket, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|count| count > 0)
}

impl Drop for Traced {
    fn drop(&mut self) {
        // A traced thread that is not waited for keeps its process from ending.
        if !self.is_reaped {
            if self.runs && ptrace::interrupt(self.thread).is_ok() {
                let _ = waitpid(self.thread, Some(WaitPidFlag::__WALL));
            }
            let _ = ptrace::detach(self.thread, None);
        }
    }
}

/// A message with its descriptors.
struct Message {
    name: &'static str,
    request: u32,
    payload: Vec<u8>,
    fds: Vec<OwnedFd>,
}

/// One client, whose daemon is killed again and again.
struct Client {
    kept: Kept,
    raw: Raw,
    machine: Machine,
    model: Vec<u8>,
    random: Random,
    /// Memory that comes and goes.
    second: Machine,
    log: File,
    /// Position from the last GET_VRING_BASE.
    base: u32,
}

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

impl Client {
    fn new(features: u64) -> (Self, Daemon) {
        let kept = Kept::new(&["d"]);
        let daemon = kept.start();
        let raw = Raw::connect(&kept.socket("d"));
        let mut machine = Machine::new(features, 64, 16);
        machine.attach(&raw, machine.first_base(), false);
        let second = Machine::with_index(1, features, 64, 16);
        let log = File::from(memfd_create("log", MemfdFlags::CLOEXEC).unwrap());
        log.set_len(1 << 20).unwrap();
        let (model, random, base) = (vec![0; SIZE], Random::new(3), 0);
        (Self { kept, raw, machine, model, random, second, log, base }, daemon)
    }

    /// A message; each may come any number of times before the next one.
    fn message(&mut self, name: &'static str) -> Message {
        let state = |num: u32| VringState { index: 0, num }.as_bytes().to_vec();
        let index = 0_u64.as_bytes().to_vec();
        let region = |machine: &Machine| SingleRegion { padding: 0, region: machine.region() };
        let accepted = self.machine.features | F_PROTOCOL_FEATURES;
        let area = LogArea { size: (crate::raw::GPA + MEMORY) / LOG_PAGE / 8 + 8, offset: 0 };
        let config = ConfigAccess { offset: 0, size: 8, flags: 0 };
        let (request, payload, fds) = match name {
            "GET_FEATURES" => (request::GET_FEATURES, vec![], vec![]),
            "SET_FEATURES" => (request::SET_FEATURES, accepted.as_bytes().to_vec(), vec![]),
            "SET_OWNER" => (request::SET_OWNER, vec![], vec![]),
            "GET_QUEUE_NUM" => (request::GET_QUEUE_NUM, vec![], vec![]),
            "GET_CONFIG" => (request::GET_CONFIG, [config.as_bytes(), &[0; 8]].concat(), vec![]),
            "GET_INFLIGHT_FD" => {
                let wanted = Inflight { queues: 1, queue_size: 64, ..Inflight::default() };
                (request::GET_INFLIGHT_FD, wanted.as_bytes().to_vec(), vec![])
            }
            "SET_LOG_BASE" => {
                (request::SET_LOG_BASE, area.as_bytes().to_vec(), vec![self.log.try_clone().unwrap().into()])
            }
            "SET_VRING_CALL" => {
                let call = event();
                self.machine.call = call.try_clone().unwrap();
                (request::SET_VRING_CALL, index, vec![call])
            }
            "SET_VRING_ERR" => (request::SET_VRING_ERR, index, vec![event()]),
            "SET_VRING_KICK" => {
                let kick = event();
                self.machine.kick = kick.try_clone().unwrap();
                (request::SET_VRING_KICK, index, vec![kick])
            }
            "SET_VRING_ENABLE 0" => (request::SET_VRING_ENABLE, state(0), vec![]),
            "SET_VRING_ENABLE 1" => (request::SET_VRING_ENABLE, state(1), vec![]),
            "SET_VRING_ADDR" => {
                (request::SET_VRING_ADDR, self.machine.vring_addr().as_bytes().to_vec(), vec![])
            }
            "GET_VRING_BASE" => (request::GET_VRING_BASE, state(0), vec![]),
            "SET_VRING_BASE" => (request::SET_VRING_BASE, state(self.base), vec![]),
            "SET_MEM_TABLE" => {
                let table = [&[1_u8, 0, 0, 0, 0, 0, 0, 0][..], self.machine.region().as_bytes()].concat();
                (
                    request::SET_MEM_TABLE,
                    table,
                    vec![self.machine.memory.fd().unwrap().try_clone_to_owned().unwrap()],
                )
            }
            "ADD_MEM_REG" => (
                request::ADD_MEM_REG,
                region(&self.second).as_bytes().to_vec(),
                vec![self.second.memory.fd().unwrap().try_clone_to_owned().unwrap()],
            ),
            "REM_MEM_REG" => (request::REM_MEM_REG, region(&self.second).as_bytes().to_vec(), vec![]),
            other => panic!("no message {other}"),
        };
        Message { name, request, payload, fds }
    }

    /// Makes requests available and kicks.
    fn load(&mut self) {
        self.machine.fill(SIZE, &mut self.random);
    }

    /// Takes the reply, which must be the only one.
    fn expect_reply(&mut self, message: &Message, step: usize) {
        let at = format!("{} at step {step}", message.name);
        let (header, payload, _) = self.raw.receive().unwrap_or_else(|error| panic!("{at}: {error}"));
        assert_eq!(header.request, message.request, "{at}");
        if message.request == request::GET_VRING_BASE {
            self.base = VringState::read_from_bytes(&payload).unwrap().num;
        }
        assert_eq!(self.raw.ask_number(request::GET_QUEUE_NUM), 2, "{at}: another reply");
    }
}

/// Kills a daemon before each system call of a message. Returns the number of calls.
fn kill_at_each_step(client: &mut Client, name: &'static str, mut daemon: Daemon) -> (usize, Daemon) {
    // Messages that undo themselves at each step: what one adds, another one removes.
    let undo = match name {
        "ADD_MEM_REG" => Some("REM_MEM_REG"),
        "REM_MEM_REG" => Some("ADD_MEM_REG"),
        _ => None,
    };
    // A queue that is stopped finishes nothing.
    let runs = |name: &str| !matches!(name, "SET_VRING_ENABLE 0" | "GET_VRING_BASE" | "SET_VRING_BASE");
    let undone = |client: &mut Client| {
        if let Some(undo) = undo {
            let Message { request, payload, fds, .. } = client.message(undo);
            client.raw.say(request, &*payload, &fds.iter().map(AsFd::as_fd).collect::<Vec<_>>());
        }
    };
    let (mut step, mut is_loaded) = (0, false);
    loop {
        if runs(name) || !is_loaded && name != "SET_VRING_BASE" {
            client.load();
        }
        is_loaded = true;
        let message = client.message(name);
        let mut traced = Traced::stop(&daemon, "protocol").unwrap();
        let fds: Vec<BorrowedFd<'_>> = message.fds.iter().map(AsFd::as_fd).collect();
        client.raw.send(message.request, &message.payload, &fds).unwrap();
        let Some(mut call) = traced.first_call(&client.raw) else {
            drop(traced);
            client.expect_reply(&message, step);
            if runs(name) {
                client.machine.finish(&mut client.model);
            }
            undone(client);
            continue;
        };
        for _ in 0..step {
            if call.is_after() {
                break;
            }
            call = traced.next_call(None).unwrap();
        }
        let is_over = call.is_after();
        traced.kill(daemon);
        daemon = client.kept.start();
        client.expect_reply(&message, step);
        if runs(name) {
            client.machine.finish(&mut client.model);
        }
        if is_over {
            return (step, daemon);
        }
        undone(client);
        step += 1;
    }
}

/// In this order: some stop the queue, and others start it again.
const MESSAGES: [&str; 18] = [
    "GET_FEATURES",
    "SET_OWNER",
    "SET_FEATURES",
    "GET_QUEUE_NUM",
    "GET_CONFIG",
    "GET_INFLIGHT_FD",
    "SET_LOG_BASE",
    "SET_VRING_CALL",
    "SET_VRING_ERR",
    "SET_VRING_KICK",
    "SET_VRING_ADDR",
    "ADD_MEM_REG",
    "SET_MEM_TABLE",
    "SET_VRING_ENABLE 0",
    "SET_VRING_ENABLE 1",
    "GET_VRING_BASE",
    "SET_VRING_BASE",
    "SET_VRING_KICK",
];

fn at_each_step(test: &str, features: u64) {
    if let Err(why) = paravane_device::blk::io_uring_available() {
        return skip(test, format!("without io_uring a message and its answer are two steps: {why}"));
    }
    let (mut client, mut daemon) = Client::new(features);
    match Traced::stop(&daemon, "protocol") {
        Ok(traced) => drop(traced),
        Err(error) => return skip(test, format!("cannot trace a process: {error}")),
    }
    let mut total = 0;
    for name in MESSAGES {
        let (steps, next) = kill_at_each_step(&mut client, name, daemon);
        assert!(steps >= 4, "{name} took {steps} system calls: the thread was not seen");
        (total, daemon) = (total + steps, next);
        // SET_MEM_TABLE has taken the second one away.
        if name == "SET_MEM_TABLE" {
            client.load();
            client.machine.finish(&mut client.model);
        }
    }
    client.load();
    client.machine.finish(&mut client.model);
    let report = crate::daemon::status(&client.kept.control);
    let disk = &report["devices"][1];
    assert_eq!(
        (&disk["sessions"], &disk["protocol_errors"], &disk["kept"]),
        (&1.into(), &0.into(), &true.into())
    );
    eprintln!("{total} kills");
    drop(daemon);
    let content = std::fs::read(client.kept.folder.path("d.img")).unwrap();
    assert!(content == client.model);
}

#[test]
fn a_kill_at_each_step_of_a_message_loses_and_repeats_none() {
    at_each_step("a_kill_at_each_step_of_a_message_loses_and_repeats_none", INDIRECT_DESC | EVENT_IDX);
}

#[test]
fn a_kill_at_each_step_of_a_message_to_packed_queues_loses_and_repeats_none() {
    let test = "a_kill_at_each_step_of_a_message_to_packed_queues_loses_and_repeats_none";
    at_each_step(test, RING_PACKED | INDIRECT_DESC | EVENT_IDX);
}
