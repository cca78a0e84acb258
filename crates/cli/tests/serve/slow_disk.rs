//! A disk is slow: status, top, metrics, trace and slow-request log name it, and the stage.
//!
//! ```text
//!   hold reads of the slow image -> submit one -> the kernel has it -> the quick disk serves 16
//!     -> the status shows all 16 -> hold on, in all ten times as long -> release -> the views
//! ```
//! So the held request takes at least ten times as long as all requests of the quick disk together,
//! on any machine.
use crate::daemon::{Daemon, Folder, paravane, patience, sandbox_usable, skip, status, without_sandbox};
use crate::raw::Ask;
use crate::trace::trace;
use crate::watching::{Client, get};
use nix::sys::fanotify::{
    EventFFlags, Fanotify, FanotifyResponse, InitFlags, MarkFlags, MaskFlags, Response,
};
use serde_json::Value;
use std::fmt::Display;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

/// The least time for which a read is held.
const HELD: Duration = Duration::from_millis(300);
/// The held request takes this many times as long as all others.
const TIMES: u32 = 10;
/// The same as reports show it, whose percentiles are up to 1/8 too high.
const SHOWN_TIMES: u64 = 8;
/// Requests of the quick disk at a time.
const QUICK: usize = 16;
/// Sector of requests that find out whether a trace has begun.
const PROBE: usize = 1;

/// Holds reads of a file while it is told to.
///
/// The file must not be open yet: the kernel tells only of files opened later. A thread that stays
/// until the end of the tests answers the kernel.
struct HeldReads(Arc<(Mutex<Hold>, Condvar)>);

#[derive(Default)]
struct Hold {
    wanted: bool,
    /// A read waits.
    waiting: bool,
}

impl HeldReads {
    /// `None`: this host does not let us (fanotify needs CAP_SYS_ADMIN).
    fn of(file: &Path, test: &str) -> Option<Self> {
        let group = || {
            let group = Fanotify::init(InitFlags::FAN_CLASS_CONTENT, EventFFlags::O_RDONLY)?;
            let (add, reads) = (MarkFlags::FAN_MARK_ADD, MaskFlags::FAN_ACCESS_PERM);
            group.mark(add, reads, nix::fcntl::AT_FDCWD, Some(file))?;
            Ok::<_, nix::Error>(group)
        };
        let group = match group() {
            Ok(group) => group,
            Err(error) => {
                skip(test, format_args!("cannot hold reads by fanotify: {error}"));
                return None;
            }
        };
        let held = Self(Arc::default());
        let shared = held.0.clone();
        std::thread::spawn(move || {
            let (hold, changed) = &*shared;
            while let Ok(events) = group.read_events() {
                let mut hold = hold.lock().unwrap();
                hold.waiting = true;
                changed.notify_all();
                hold = changed.wait_while(hold, |hold| hold.wanted).unwrap();
                hold.waiting = false;
                for event in events {
                    let allow = FanotifyResponse::new(event.fd().unwrap(), Response::FAN_ALLOW);
                    group.write_response(allow).unwrap();
                }
            }
        });
        Some(held)
    }

    /// Holds reads from now on.
    fn hold(&self) {
        self.0.0.lock().unwrap().wanted = true;
    }

    /// Waits until a read is held.
    fn wait(&self) {
        let (hold, changed) = &*self.0;
        let (hold, _) =
            changed.wait_timeout_while(hold.lock().unwrap(), patience(), |hold| !hold.waiting).unwrap();
        let waiting = hold.waiting;
        // A test that fails must not poison it: the reads are released then.
        drop(hold);
        assert!(waiting, "no read of the image");
    }

    fn release(&self) {
        self.0.0.lock().unwrap().wanted = false;
        self.0.1.notify_all();
    }
}

impl Drop for HeldReads {
    fn drop(&mut self) {
        // A test that fails leaves no read behind that cannot end.
        self.release();
    }
}

/// Two disks that one daemon serves in its sandbox.
struct Rig {
    daemon: Daemon,
    folder: Folder,
    control: String,
    metrics: String,
}

impl Rig {
    /// The disks `quick` and `slow`, with `more` lines for the slow one.
    fn start(folder: Folder, more: &str, test: &str) -> Self {
        // On a host without a sandbox the test still runs, and reports it.
        sandbox_usable(test);
        for image in ["quick.img", "slow.img"].into_iter().filter(|image| !folder.path(image).exists()) {
            folder.image(image);
        }
        let disk = |name: &str| {
            format!(
                "[[blk]]\nname = \"{name}\"\nimage = \"{name}.img\"\nsocket = \"{name}\"\nslow = \"300ms\"\n"
            )
        };
        let file = folder.write("d.toml", &(disk("quick") + &disk("slow") + more));
        let control = folder.text("control");
        let arguments = ["serve", "--config", &file, "--control", &control];
        let options = ["--metrics", "127.0.0.1:0", "--log-format", "json"];
        let mut daemon = Daemon::spawn(paravane().args(arguments).args(options).args(without_sandbox()));
        let line: Value = serde_json::from_str(&daemon.wait_for("/metrics")).unwrap();
        daemon.wait_for("ready");
        Self { daemon, folder, control, metrics: line["address"].as_str().unwrap().to_owned() }
    }

    fn client(&self, disk: &str) -> Client {
        Client::connect(&self.folder.path(disk))
    }

    /// Its JSON status, as `paravane status` prints it.
    fn device(&self, disk: &str) -> Value {
        of(&status(&self.control), disk)
    }

    /// The same from the control socket: the time of a program's start is not to be held.
    fn device_now(&self, disk: &str) -> Value {
        let mut text = Vec::new();
        UnixStream::connect(&self.control).unwrap().read_to_end(&mut text).unwrap();
        of(&serde_json::from_slice(&text).unwrap(), disk)
    }

    /// Number of requests in its histograms.
    fn measured(&self, disk: &str) -> u64 {
        let device = self.device_now(disk);
        let operations = device["queues"][0]["operations"].as_array().unwrap();
        operations.iter().map(|operation| number(&operation["latency"]["count"])).sum()
    }

    /// Waits until the status has `count` requests.
    fn wait_measured(&self, disk: &str, count: u64) {
        let end = Instant::now() + patience();
        while self.measured(disk) < count {
            assert!(Instant::now() < end, "{}", self.device_now(disk));
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Has the quick disk serve requests of a new client, until the status shows them.
    fn serve_quick(&self, mut client: Client) {
        let before = self.measured("quick");
        for sector in 32..32 + QUICK {
            assert_eq!(client.ask(Ask::Read, sector), 0);
        }
        self.wait_measured("quick", before + QUICK as u64);
    }

    /// A request of the slow disk is held while the quick disk works, then released.
    fn hold_one(&self, held: &HeldReads) {
        let before = self.measured("slow");
        let (mut slow, quick) = (self.client("slow"), self.client("quick"));
        held.hold();
        let start = Instant::now();
        let slot = slow.submit(Ask::Read, 16..17);
        held.wait();
        let held_since = Instant::now();
        self.serve_quick(quick);
        let least = HELD.max(TIMES * start.elapsed());
        let [quick, waiting] = ["quick", "slow"].map(|disk| self.device_now(disk));
        assert_eq!((in_flight(&quick), in_flight(&waiting)), (0, 1), "{quick} {waiting}");
        std::thread::sleep(least.saturating_sub(held_since.elapsed()));
        held.release();
        assert_eq!(slow.wait(slot), 0);
        self.wait_measured("slow", before + 1);
    }

    /// `paravane top --once --json` over an interval in which both disks end requests by `cycle`.
    ///
    /// Returns the rows of the quick and the slow disk.
    fn top(&self, cycle: impl Fn()) -> [Value; 2] {
        let end = Instant::now() + patience();
        for seconds in 1.. {
            let interval = (2 * seconds).to_string();
            let top = paravane()
                .args(["top", "--once", "--json", "--control", &self.control, "--interval", &interval])
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            cycle();
            let output = top.wait_with_output().unwrap();
            assert!(output.status.success());
            let rows: Value = serde_json::from_slice(&output.stdout).unwrap();
            let row = |name: &str| {
                rows.as_array().unwrap().iter().find(|row| row["device"] == name).unwrap().clone()
            };
            let rows = ["quick", "slow"].map(row);
            // On a busy machine requests may end before the interval begins, or after it.
            if rows.iter().all(|row| row["latency"]["count"].as_u64() > Some(0)) {
                return rows;
            }
            assert!(Instant::now() < end, "{rows:?}");
        }
        unreachable!()
    }

    /// `paravane status` as text, since the devices started.
    fn text(&self, more: &[&str]) -> String {
        let arguments = ["status", "--seconds", "0", "--control", &self.control];
        let output = paravane().args(arguments).args(more).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Lines of the slow-request log so far; waits for one of the slow disk.
    fn slow_log(&mut self) -> Vec<Value> {
        let parse = |line: &String| serde_json::from_str::<Value>(line).unwrap();
        let is_slow = |line: &Value| line["message"] == "slow request";
        loop {
            let line = parse(&self.daemon.wait_for("slow request"));
            if is_slow(&line) && line["device"] == "slow" {
                return self.daemon.seen().iter().map(parse).filter(is_slow).collect();
            }
        }
    }
}

/// A trace that has begun.
struct Traced {
    child: Child,
    lines: Receiver<Value>,
}

impl Traced {
    /// Starts `paravane trace --json` of a disk; sends requests until it shows one.
    fn start(rig: &Rig, disk: &str) -> Self {
        let mut child = trace(&rig.control, &[disk, "--json"]).spawn().unwrap();
        let (sender, lines) = channel();
        let output = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if sender.send(serde_json::from_str(&line).unwrap()).is_err() {
                    break;
                }
            }
        });
        let traced = Self { child, lines };
        let end = Instant::now() + patience();
        loop {
            assert_eq!(rig.client(disk).ask(Ask::Read, PROBE), 0);
            if traced.lines.recv_timeout(Duration::from_millis(50)).is_ok() {
                return traced;
            }
            assert!(Instant::now() < end, "no trace of {disk}");
        }
    }

    /// The next `count` requests for other sectors than [`PROBE`].
    fn take(&self, count: usize) -> Vec<Value> {
        let next = || self.lines.recv_timeout(patience()).expect("another request");
        std::iter::from_fn(|| Some(next())).filter(|line| line["sector"] != PROBE).take(count).collect()
    }
}

impl Drop for Traced {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A stage, and nanoseconds that requests spent there.
type Time = (String, u64);

/// A device of a report.
fn of(report: &Value, disk: &str) -> Value {
    let devices = report["devices"].as_array().unwrap();
    devices.iter().find(|device| device["name"] == disk).unwrap().clone()
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no number"))
}

fn in_flight(device: &Value) -> u64 {
    number(&device["queues"][0]["in_flight"])
}

/// Times of all requests of a device, as its JSON status shows them.
fn reported(device: &Value) -> Vec<Time> {
    let stages = device["queues"][0]["stages"].as_array().unwrap().iter();
    let time =
        |stage: &Value| (stage["stage"].as_str().unwrap().to_owned(), number(&stage["latency"]["sum"]));
    stages.map(time).collect()
}

/// Longest times of single requests, of the table that `paravane status --details` prints.
fn printed(text: &str, disk: &str) -> Vec<Time> {
    let rows = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let table = rows.skip_while(|cells| cells[..] != [disk, "STAGE", "COUNT", "P50", "P99", "P99.9", "MAX"]);
    let rows = table.skip(1).take_while(|cells| cells.len() == 6 && cells[1].parse::<u64>().is_ok());
    rows.map(|cells| (cells[0].to_owned(), nanos(cells[5]))).collect()
}

/// Nanoseconds of a time such as "1.2ms".
fn nanos(text: &str) -> u64 {
    let units = [("ns", 1e0), ("µs", 1e3), ("ms", 1e6), ("s", 1e9)];
    let time = |(unit, nanos)| Some(text.strip_suffix(unit)?.parse::<f64>().ok()? * nanos);
    units.into_iter().find_map(time).unwrap_or_else(|| panic!("{text} is no time")) as u64
}

/// Times of all requests of a disk, as the metrics show them.
fn exposed(metrics: &str, disk: &str) -> Vec<Time> {
    let labels = format!("paravane_device_stage_seconds_sum{{device=\"{disk}\",kind=\"blk\",stage=\"");
    let lines = metrics.lines().filter_map(|line| line.strip_prefix(&labels)?.split_once("\"} "));
    let time = |seconds: &str| (seconds.parse::<f64>().unwrap() * 1e9) as u64;
    lines.map(|(stage, seconds)| (stage.to_owned(), time(seconds))).collect()
}

/// Times of a request in a line of the slow-request log or a trace: fields with this ending.
fn fields(line: &Value, ending: &str, unit: u64) -> Vec<Time> {
    let stages = ["ring", "throttled", "host", "interrupt"];
    stages.map(|stage| (stage.to_owned(), number(&line[format!("{stage}_{ending}")]) * unit)).to_vec()
}

/// A disk that is slow in one stage.
struct Slow<'a> {
    stage: &'a str,
    /// Has both disks serve requests. Returns the number of those of the slow disk.
    serve: &'a dyn Fn(&Rig) -> usize,
    /// Whether a time of the slow disk in the stage exceeds one of the quick disk.
    exceeds: fn(u64, u64) -> bool,
}

impl Slow<'_> {
    /// Checks what each view says of the disks of a new daemon.
    fn check(&self, mut rig: Rig) {
        (self.serve)(&rig);
        let (slow, quick) = (rig.device("slow"), rig.device("quick"));
        self.check_times(&reported(&slow), &reported(&quick), format_args!("{slow} {quick}"));
        let text = rig.text(&["--details"]);
        self.check_times(&printed(&text, "slow"), &printed(&text, "quick"), &text);
        let metrics = get(&rig.metrics);
        self.check_times(&exposed(&metrics, "slow"), &exposed(&metrics, "quick"), &metrics);
        self.check_slow_log(&rig.slow_log());
        self.check_trace(&rig);
        self.check_top(&rig);
        let (ended, log) = rig.daemon.end();
        assert!(ended.success(), "{log:?}");
    }

    /// The slow disk spends its time in the stage, and the quick disk does not.
    fn check_times(&self, slow: &[Time], quick: &[Time], view: impl Display) {
        let (stage, time) = slow.iter().max_by_key(|(_, time)| time).expect("it has stages");
        assert_eq!(stage, self.stage, "{view}");
        assert!(!quick.is_empty(), "{view}");
        let all = quick.iter().map(|(_, time)| time).sum();
        assert!((self.exceeds)(*time, all), "{time} ns, quick disk {all} ns: {view}");
        let is_throttled =
            |times: &[Time]| times.iter().any(|(stage, time)| stage == "throttled" && *time > 0);
        assert!(!is_throttled(quick), "{view}");
        assert_eq!(is_throttled(slow), self.stage == "throttled", "{view}");
    }

    /// A busy machine may make requests of the quick disk slow as well.
    fn check_slow_log(&self, log: &[Value]) {
        let (slow, quick): (Vec<_>, Vec<_>) = log.iter().partition(|line| line["device"] == "slow");
        let line = slow[0];
        assert_eq!((&line["stage"], &line["operation"]), (&self.stage.into(), &"read".into()), "{line}");
        assert_eq!((&line["queue"], &line["bytes"]), (&0.into(), &512.into()), "{line}");
        let none = vec![("host".to_owned(), 0)];
        let quick = quick.into_iter().map(|line| fields(line, "us", 1000));
        for quick in std::iter::once(none).chain(quick) {
            self.check_times(&fields(line, "us", 1000), &quick, format_args!("{log:?}"));
        }
    }

    fn check_trace(&self, rig: &Rig) {
        let [slow, quick] = ["slow", "quick"].map(|disk| Traced::start(rig, disk));
        let count = (self.serve)(rig);
        let (slow, quick) = (slow.take(count), quick.take(QUICK));
        let longest = slow.iter().max_by_key(|line| number(&line["total_ns"])).unwrap();
        assert_eq!((&longest["device"], &longest["operation"]), (&"slow".into(), &"read".into()));
        for line in quick {
            assert_eq!(line["device"], "quick", "{line}");
            let (slow, quick) = (fields(longest, "ns", 1), fields(&line, "ns", 1));
            self.check_times(&slow, &quick, format_args!("{longest} {line}"));
        }
    }

    fn check_top(&self, rig: &Rig) {
        let [quick, slow] = rig.top(|| _ = (self.serve)(rig));
        assert_eq!(slow["stage"], self.stage, "{slow}");
        assert!(slow["stage_share"].as_f64() > Some(0.5), "{slow}");
        assert_ne!(quick["stage"], "throttled", "{quick}");
        let longest = |row: &Value| number(&row["latency"]["p999_ns"]);
        assert!((self.exceeds)(longest(&slow), longest(&quick)), "{slow} {quick}");
    }
}

#[test]
fn storage_that_is_slow_is_named_by_each_view() {
    const TEST: &str = "storage_that_is_slow_is_named_by_each_view";
    let folder = Folder::new();
    let image = folder.image("slow.img");
    let Some(held) = HeldReads::of(Path::new(&image), TEST) else { return };
    let rig = Rig::start(folder, "engine = \"threads\"\n", TEST);
    let serve = |rig: &Rig| {
        rig.hold_one(&held);
        1
    };
    let exceeds = |slow: u64, quick: u64| {
        u128::from(slow) >= HELD.as_nanos() && slow >= SHOWN_TIMES.saturating_mul(quick)
    };
    Slow { stage: "host", serve: &serve, exceeds }.check(rig);
}

#[test]
fn a_rate_limit_that_slows_a_disk_is_named_by_each_view() {
    const TEST: &str = "a_rate_limit_that_slows_a_disk_is_named_by_each_view";
    // 4 requests together: the second and each later one wait 500 ms.
    let rig = Rig::start(Folder::new(), "ops-per-second = 2\nburst-ops = 1\n", TEST);
    let serve = |rig: &Rig| {
        let before = rig.measured("slow");
        let mut slow = rig.client("slow");
        let last = slow.submit(Ask::Read, 16..20);
        rig.serve_quick(rig.client("quick"));
        assert_eq!(slow.wait(last), 0);
        rig.wait_measured("slow", before + 4);
        4
    };
    // However late the thread wakes, the limit holds some request for a part of its time.
    Slow { stage: "throttled", serve: &serve, exceeds: |slow, _| slow >= 100_000_000 }.check(rig);
}
