//! bpftrace looks at the requests of a daemon in its sandbox, with the commands of the book.
use crate::daemon::{Daemon, Folder, is_root, patience, skip};
use crate::driver::{Driver, Random, Wish};
use rustix::process::{Pid, Signal, kill_process};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError, channel};
use std::time::{Duration, Instant};

/// Whether bpftrace works here; if not, `test` is skipped.
fn works(test: &str) -> bool {
    if !is_root() {
        skip(test, "bpftrace needs root");
        return false;
    }
    if !Path::new("/sys/bus/event_source/devices/uprobe").exists() {
        skip(test, "this kernel has no uprobes");
        return false;
    }
    let why = match Command::new("bpftrace").args(["-e", "BEGIN { exit() }"]).output() {
        Ok(output) if output.status.success() => return true,
        Ok(output) => format!("bpftrace fails: {}", String::from_utf8_lossy(&output.stderr)),
        Err(error) => format!("cannot run bpftrace: {error}"),
    };
    skip(test, why);
    false
}

/// Programs for bpftrace on the page: the argument of `-e`.
fn documented() -> Vec<String> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/howto/bpftrace.md");
    let page = std::fs::read_to_string(page).unwrap();
    let blocks = page.split("```sh\nbpftrace -e '").skip(1);
    blocks.map(|block| block.split("'\n```").next().unwrap().to_owned()).collect()
}

/// A disk "vm0", and a client that uses it.
struct Disk {
    _daemon: Daemon,
    driver: Driver,
    content: Vec<u8>,
    random: Random,
    pid: u32,
    _folder: Folder,
}

impl Disk {
    fn new(more: &[&str]) -> Self {
        let folder = Folder::new();
        let (image, socket) = (folder.image("vm.img"), folder.text("s"));
        let arguments = ["blk", "--name", "vm0", "--image", &image, "--socket", &socket, "--control", "off"];
        let daemon = Daemon::start(&[&arguments[..], more].concat());
        let wish = Wish { packed: false, event_idx: true, queues: 1, depth: 4 };
        let driver = Driver::connect(&folder.path("s"), wish).unwrap();
        let (content, pid) = (std::fs::read(&image).unwrap(), daemon.pid());
        Self { _daemon: daemon, driver, content, random: Random::new(8), pid, _folder: folder }
    }

    fn use_it(&mut self, requests: usize) {
        self.driver.exercise(&mut self.content, requests, &mut self.random);
    }
}

/// bpftrace at work, killed if a test fails.
struct Tracer {
    child: Child,
    lines: Receiver<String>,
}

impl Tracer {
    /// Attaches to the process. `program` names the installed file.
    fn start(program: &str, pid: u32) -> Self {
        let program = program.replace("/usr/bin/paravane", env!("CARGO_BIN_EXE_paravane"));
        let mut child = Command::new("bpftrace")
            .args(["-p", &pid.to_string(), "-e", &program])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let stdout = child.stdout.take().unwrap();
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        Self { child, lines }
    }

    /// Has the disk used until bpftrace prints enough: `done` is given each line.
    fn until(&self, disk: &mut Disk, mut done: impl FnMut(&str) -> bool) {
        let start = Instant::now();
        let mut kinds = BTreeMap::<String, u32>::new();
        loop {
            disk.use_it(20);
            loop {
                match self.lines.try_recv() {
                    Ok(line) if done(&line) => return,
                    Ok(line) => {
                        *kinds.entry(line.split(' ').next().unwrap_or_default().to_owned()).or_default() += 1;
                    }
                    Err(TryRecvError::Empty) => break,
                    // `Tracer::end` tells why.
                    Err(TryRecvError::Disconnected) => return,
                }
            }
            assert!(
                start.elapsed() < patience(),
                "bpftrace does not see all; first words of its lines: {kinds:?}"
            );
            // A queue that polls, or that its rate limit holds, needs no kick: let it come to rest.
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Ends it as Ctrl-C does, and returns the lines that were not received yet.
    fn end(mut self) -> Vec<String> {
        // It may have ended by itself.
        let interrupt = || kill_process(Pid::from_child(&self.child), Signal::INT);
        let _ = interrupt();
        let (mut lines, end) = (Vec::new(), Instant::now() + patience());
        loop {
            match self.lines.recv_timeout(Duration::from_secs(1)) {
                Ok(line) => lines.push(line),
                Err(RecvTimeoutError::Disconnected) => break,
                // bpftrace 0.17 loses one at times.
                Err(RecvTimeoutError::Timeout) => {
                    assert!(Instant::now() < end, "bpftrace does not end");
                    let _ = interrupt();
                }
            }
        }
        let mut errors = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
        assert!(self.child.wait().unwrap().success(), "{errors}");
        lines
    }
}

impl Drop for Tracer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Prints the arguments of the probes of a disk; `%s` is a string.
const PROBES: [(&str, &str); 12] = [
    ("kick", "%s %d"),
    ("throttle__begin", "%s %d"),
    ("throttle__end", "%s %d %d"),
    ("batch__taken", "%s %d %d %d"),
    ("request__taken", "%s %d %d %s %d %d"),
    ("request__started", "%s %d %d %s %d %d"),
    ("request__done", "%s %d %d %s %d %d"),
    ("interrupt", "%s %d"),
    ("request__ended", "%s %d %d %s %d %d"),
    ("request__stage", "%s %d %d %s %s %d"),
    ("batch__ended", "%s %d %s %d %d"),
    ("batch__stage", "%s %d %s %d %s %d"),
];

fn print_all() -> String {
    let print = |(probe, format): &(&str, &str)| {
        let argument = |(at, format): (usize, &str)| match format {
            "%s" => format!("str(arg{at})"),
            _ => format!("arg{at}"),
        };
        let arguments: Vec<_> = format.split(' ').enumerate().map(argument).collect();
        let arguments = arguments.join(", ");
        format!("usdt:/usr/bin/paravane:paravane:{probe} {{ printf(\"{probe} {format}\\n\", {arguments}); }}")
    };
    PROBES.iter().map(print).collect::<Vec<_>>().join("\n")
}

#[test]
fn bpftrace_sees_each_stage_of_a_disks_requests() {
    if !works("bpftrace_sees_each_stage_of_a_disks_requests") {
        return;
    }
    // The limit holds some of the requests that come together, however busy the host is.
    let mut disk = Disk::new(&["--ops-per-second", "100", "--burst-ops", "1"]);
    let sectors = (disk.content.len() / 512) as i64;
    let tracer = Tracer::start(&print_all(), disk.pid);
    let mut seen = BTreeMap::<String, u32>::new();
    let mut operations = BTreeMap::<String, u32>::new();
    let all = ["discard", "flush", "read", "write", "write_zeroes"];
    tracer.until(&mut disk, |line| {
        let words: Vec<_> = line.split(' ').collect();
        let &[probe, device, queue, ref rest @ ..] = words.as_slice() else { return false };
        // bpftrace itself talks, too.
        if !PROBES.iter().any(|(name, _)| *name == probe) {
            return false;
        }
        assert_eq!((device, queue), ("vm0", "0"), "{line}");
        let number = |at: usize| rest[at].parse::<i64>().unwrap();
        match probe {
            "request__taken" | "request__started" => {
                *operations.entry(rest[1].to_owned()).or_default() += 1;
                let (sector, bytes) = (number(2), number(3));
                match rest[1] {
                    "flush" => assert_eq!((sector, bytes), (-1, 0), "{line}"),
                    _ => assert!((0..sectors).contains(&sector) && bytes > 0 && bytes % 512 == 0, "{line}"),
                }
            }
            "request__done" | "request__ended" => assert!(number(2) == 0 && number(3) >= 0, "{line}"),
            "request__stage" | "batch__stage" => {
                assert!(
                    ["ring", "throttled", "host", "interrupt"].contains(&rest[2]) && number(3) >= 0,
                    "{line}"
                );
            }
            "throttle__end" => assert!(number(0) >= 0, "{line}"),
            "batch__ended" => assert!(number(1) > 0 && number(2) >= 0, "{line}"),
            "batch__taken" => assert!(number(0) > 0 && number(1) >= number(0), "{line}"),
            _ => assert!(rest.is_empty(), "{line}"),
        }
        *seen.entry(probe.to_owned()).or_default() += 1;
        seen.len() == PROBES.len() && all.iter().all(|operation| operations.contains_key(*operation))
    });
    tracer.end();
    assert!(operations.keys().all(|name| name != "other"), "{operations:?}");
    assert_eq!(seen.len(), PROBES.len(), "{seen:?}");
}

#[test]
fn the_commands_of_the_book_show_the_disk() {
    if !works("the_commands_of_the_book_show_the_disk") {
        return;
    }
    let programs = documented();
    assert_eq!(programs.len(), 4);
    let mut disk = Disk::new(&[]);
    for program in programs {
        let end = Instant::now() + patience();
        loop {
            // Fast requests, too.
            let program = program.replace("arg5 > 10000000", "arg5 > 0");
            let more = "usdt:/usr/bin/paravane:paravane:request__ended { printf(\"seen\\n\"); }";
            let tracer = Tracer::start(&format!("{program}\n{more}"), disk.pid);
            let mut lines = Vec::new();
            tracer.until(&mut disk, |line| {
                lines.push(line.to_owned());
                line == "seen"
            });
            // Its probes are not attached at one instant.
            disk.use_it(100);
            lines.extend(tracer.end());
            if lines.iter().any(|line| line.contains("vm0")) {
                break;
            }
            assert!(Instant::now() < end, "no device in the output of {program}:\n{}", lines.join("\n"));
        }
    }
}
