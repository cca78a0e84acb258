//! `paravane bench handover`: how long the requests of a client wait while its disk changes daemons.
//!
//! A client keeps writes in flight, checks that each completes once, and never reconnects. For each handover a new
//! `paravane serve blk --take-over` takes its session:
//!
//! ```text
//!   client   ... requests ............| gap |............ requests ...
//!   old      serves ------------------'     exits (status 0)
//!   new            starts, opens, asks      '------------------ serves, is the old one of the next
//!            |<------------------- window ------------------->|
//! ```
//! The outage of a handover is the longest time without a completion in its window. A window of the
//! same length without a handover, of subject [`UNDISTURBED`], shows how much of it is the machine.
//!
//! Then the daemon is killed, with `paravane hold` beside it, and started again:
//!
//! ```text
//!   client   ... requests ...|<------ outage ------>|... requests ...
//!   old      serves ---------' SIGKILL, waited for
//!   new                         starts, finds the session -- serves
//!   restart                  |<-------------->| the same kill of a daemon without a client, until it is ready
//! ```
//!
//! **Cases**: `LAYOUT/depthN`, and `nbd/LAYOUT/depthN` with the image behind an NBD server, handed over only.
use super::case::{self, Storage, Work};
use super::client::Client;
use super::image::Image;
use super::nbd;
use crate::builds::Build;
use crate::daemon::Daemon;
use crate::disk_connection::BLOCK;
use crate::error::broken;
use crate::machine::load_average;
use crate::options::MIN_ROUNDS;
use crate::spread::percentile;
use crate::{BenchError, Options, Row};
use nix::sys::signal::{Signal, kill};
use std::fmt;
use std::io;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The name of this benchmark.
pub(crate) const NAME: &str = "handover";
/// The notes below its table.
pub(crate) const NOTES: &[&str] = &[
    "planned: a new daemon takes the session of a disk from the running one (`paravane serve blk --take-over`), while a client (the crate virtio-driver: one queue, random writes of 4 KiB to an image in /dev/shm) keeps requests in flight. It never reconnects, and checks that each request completes once, without an error.",
    "undisturbed: the same client for as long, without a handover.",
    "nbd/...: the image is behind an NBD server (nbdkit), and stays there.",
    "outage: the longest time without a completion; one value for each handover. outage-p99: its 99th percentile over all handovers.",
    "crash: the daemon is killed (SIGKILL) and started again when it has ended; `paravane hold` keeps its session (`--holder`).",
    "restart: the same daemon with another image and no client. restart-time: from the kill until the new process is ready. What the outage of a crash has beyond that is the cost of the session.",
    "handover-time: from the start of the new process until the old one has exited. Requests complete meanwhile.",
    "repeated-kicks: kicks after 50 ms without an answer, per handover.",
    "No process is pinned to a CPU. All compete as on any machine.",
];

/// The subject with a planned handover.
const PLANNED: &str = "planned";
/// The subject with a killed daemon.
const CRASH: &str = "crash";
/// The subject with a killed daemon that has no client.
const RESTART: &str = "restart";
/// The subject without a handover.
const UNDISTURBED: &str = "undisturbed";
/// Handovers in a round.
const HANDOVERS: usize = 20;
/// The same with `--quick`.
const QUICK_HANDOVERS: usize = 4;
/// Window before and after a handover.
const MARGIN: Duration = Duration::from_millis(5);
/// Longest handover.
const LONGEST: Duration = Duration::from_secs(30);

const IMAGE: &str = "image";
const SOCKET: &str = "disk.sock";
const CONTROL: &str = "control.sock";
const HOLDER: &str = "holder.sock";
/// Where the daemon says that it is ready.
const NOTIFY: &str = "notify.sock";
/// Prefix of the names of the daemon without a client.
const IDLE: &str = "idle-";

/// Where the image is, layout of the ring, and requests in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Case {
    /// Behind an NBD server.
    remote: bool,
    packed: bool,
    depth: usize,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let server = if self.remote { "nbd/" } else { "" };
        write!(f, "{server}{}/depth{}", if self.packed { "packed" } else { "split" }, self.depth)
    }
}

impl Case {
    fn all() -> Vec<Self> {
        let of = |remote, packed| [1, 32].map(|depth| Self { remote, packed, depth });
        [of(false, false), of(false, true), of(true, false)].concat()
    }

    /// Selects the cases whose path contains `filter` and whose programs are there.
    ///
    /// # Errors
    /// No case matches.
    fn select(filter: &str) -> Result<Vec<Self>, BenchError> {
        let mut all = Self::all();
        all.retain(|case| !case.remote || nbd::is_there());
        crate::options::select(all, filter)
    }
}

/// What a client saw in a window.
struct Seen {
    outage: Duration,
    repeated_kicks: u64,
}

/// Figures of a case: a value for each handover.
#[derive(Default)]
struct Figures {
    planned: Vec<f64>,
    undisturbed: Vec<f64>,
    times: Vec<f64>,
    repeated_kicks: Vec<f64>,
    crash: Vec<f64>,
    restart: Vec<f64>,
}

/// Runs the cases that `options` select.
pub(crate) fn run(options: &Options, progress: &mut dyn FnMut(&str)) -> Result<Vec<Row>, BenchError> {
    let cases = Case::select(options.filter.as_deref().unwrap_or(""))?;
    let handovers = if options.quick { QUICK_HANDOVERS } else { HANDOVERS };
    measure(&cases, options.rounds.max(MIN_ROUNDS), handovers, progress)
}

/// Measures all cases, interleaved; a round has `handovers` of each.
fn measure(
    cases: &[Case],
    rounds: u32,
    handovers: usize,
    progress: &mut dyn FnMut(&str),
) -> Result<Vec<Row>, BenchError> {
    let load_start = load_average();
    let build = Build::all()?.swap_remove(0);
    progress("making an image: tmpfs");
    let idle = format!("{IDLE}{IMAGE}");
    let image = Image::new(Storage::Tmpfs, &[IMAGE, &idle])?;
    let remote = if cases.iter().any(|case| case.remote) {
        let mut image = Image::new(Storage::Nbd, &[IMAGE])?;
        image.start_servers(Storage::Nbd, &[IMAGE], None)?;
        Some(image)
    } else {
        None
    };
    let mut figures: Vec<Figures> = cases.iter().map(|_| Figures::default()).collect();
    for round in 1..=rounds {
        for (case, figures) in cases.iter().zip(&mut figures) {
            progress(&format!("round {round} of {rounds}: {case}"));
            let on = remote.as_ref().filter(|_| case.remote).unwrap_or(&image);
            sample(*case, &build, on, handovers, figures)
                .map_err(|reason| broken(PLANNED, format_args!("{case}: {reason}")))?;
            if case.remote {
                continue;
            }
            crash(*case, &build, image.folder(), handovers, figures)
                .map_err(|reason| broken(CRASH, format_args!("{case}: {reason}")))?;
        }
    }
    let origin = crate::dma::timing::Origin {
        bench: NAME,
        counter: "",
        pinned_cpu: None,
        load: [load_start, load_average()],
    };
    let mut rows = Vec::new();
    for (case, figures) in cases.iter().zip(&figures) {
        let Figures { planned, undisturbed, times, repeated_kicks, crash, restart } = figures;
        let case = case.to_string();
        let mut row = |subject, metric, unit, values: &[f64]| {
            rows.extend(origin.row(&case, subject, (metric, unit, "clock"), values))
        };
        let outages = [(PLANNED, planned), (UNDISTURBED, undisturbed), (CRASH, crash)];
        for (subject, outages) in outages.into_iter().filter(|(_, outages)| !outages.is_empty()) {
            row(subject, "outage", "ms", outages);
            row(subject, "outage-p99", "ms", percentile(outages, 99).as_slice());
        }
        row(PLANNED, "handover-time", "ms", times);
        row(PLANNED, "repeated-kicks", "kicks/handover", repeated_kicks);
        if crash.is_empty() {
            continue;
        }
        row(RESTART, "restart-time", "ms", restart);
        let beyond =
            percentile(crash, 99).zip(percentile(restart, 50)).map(|(crash, restart)| crash - restart);
        row(CRASH, "outage-p99-beyond-restart", "ms", beyond.as_slice());
    }
    Ok(rows)
}

/// Hands the session of one client over, a number of times.
///
/// # Errors
/// What went wrong, in one line.
fn sample(
    case: Case,
    build: &Build,
    image: &Image,
    handovers: usize,
    figures: &mut Figures,
) -> Result<(), String> {
    let folder = image.folder();
    let location = match case.remote {
        true => format!("nbd+unix:///?socket={}", image.socket(IMAGE).display()).into(),
        false => image.path(IMAGE),
    };
    let start = |take_over: bool| {
        Daemon::start(command(build, &location, folder, take_over), PLANNED, None)
            .map_err(|error| error.to_string())
    };
    let mut daemon = start(false)?;
    let Case { packed, depth, .. } = case;
    let work = Work { write: true, sequential: false, bytes: BLOCK };
    let of_client = case::Case { storage: Storage::Tmpfs, packed, work, depth, blkio: false };
    let socket = folder.join(SOCKET);
    let mut client = Client::connect(&socket, of_client, crate::Client::Event, || daemon.ended())?;
    client.run(MARGIN * 4)?;
    for _ in 0..handovers {
        let begin = Instant::now();
        let mut next = start(true)?;
        let mut took = None;
        let seen = watch(&mut client, || {
            if took.is_none() && daemon.ended().is_some() {
                took = Some(begin.elapsed());
            }
            if let Some(ended) = next.ended() {
                return Err(ended);
            }
            if begin.elapsed() > LONGEST {
                return Err(format!("no handover within {LONGEST:?}"));
            }
            Ok(took.is_some_and(|took| begin.elapsed() >= took + MARGIN))
        })?;
        let length = begin.elapsed();
        if !daemon.succeeded() {
            return Err("the old daemon has failed".to_owned());
        }
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        figures.planned.push(ms(seen.outage));
        figures.times.push(ms(took.unwrap_or(length)));
        figures.repeated_kicks.push(seen.repeated_kicks as f64);
        daemon = next;
        let begin = Instant::now();
        let seen = watch(&mut client, || Ok(begin.elapsed() >= length))?;
        figures.undisturbed.push(ms(seen.outage));
    }
    Ok(())
}

/// Kills the daemon of one client, a number of times, and that of none.
///
/// # Errors
/// What went wrong, in one line.
fn crash(
    case: Case,
    build: &Build,
    folder: &Path,
    kills: usize,
    figures: &mut Figures,
) -> Result<(), String> {
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let mut served = Kept::new(build, folder, "")?;
    let mut idle = Kept::new(build, folder, IDLE)?;
    let Case { packed, depth, .. } = case;
    let work = Work { write: true, sequential: false, bytes: BLOCK };
    let of_client = case::Case { storage: Storage::Tmpfs, packed, work, depth, blkio: false };
    let socket = folder.join(SOCKET);
    let mut client = Client::connect(&socket, of_client, crate::Client::Event, || served.daemon.ended())?;
    client.run(MARGIN * 4)?;
    for _ in 0..kills {
        let killed = served.kill()?;
        // Nothing completes meanwhile, and the client does not look.
        let before = killed.elapsed();
        let mut ready = None;
        let seen = watch(&mut client, || {
            if ready.is_none() && served.is_ready()? {
                ready = Some(Instant::now());
            }
            if killed.elapsed() > LONGEST {
                return Err(format!("the daemon is not back within {LONGEST:?}"));
            }
            Ok(ready.is_some_and(|ready| ready.elapsed() >= MARGIN))
        })?;
        figures.crash.push(ms(before + seen.outage));
        let killed = idle.kill()?;
        while !idle.is_ready()? {
            client.run(Duration::from_millis(1))?;
            if killed.elapsed() > LONGEST {
                return Err(format!("the daemon without a client is not back within {LONGEST:?}"));
            }
        }
        figures.restart.push(ms(killed.elapsed()));
    }
    Ok(())
}

/// A daemon whose sessions are kept by a holder.
struct Kept<'a> {
    daemon: Daemon,
    _holder: Daemon,
    notify: UnixDatagram,
    build: &'a Build,
    folder: &'a Path,
    prefix: &'static str,
}

impl<'a> Kept<'a> {
    fn new(build: &'a Build, folder: &'a Path, prefix: &'static str) -> Result<Self, String> {
        let path = |name: &str| folder.join(format!("{prefix}{name}"));
        let text = |error: io::Error| error.to_string();
        let start = |command| Daemon::start(command, CRASH, None).map_err(|error| error.to_string());
        let _ = std::fs::remove_file(path(NOTIFY));
        let notify = UnixDatagram::bind(path(NOTIFY)).map_err(text)?;
        notify.set_nonblocking(true).map_err(text)?;
        let mut hold = Command::new(&build.program);
        hold.args(["hold", "--socket"]).arg(path(HOLDER)).args(&build.extra_args);
        let holder = start(quiet(hold))?;
        let begin = Instant::now();
        while !path(HOLDER).exists() {
            if begin.elapsed() > LONGEST {
                return Err("the holder does not listen".to_owned());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let daemon = start(kept_command(build, folder, prefix))?;
        let mut kept = Self { daemon, _holder: holder, notify, build, folder, prefix };
        while !kept.is_ready()? {
            if begin.elapsed() > LONGEST {
                return Err("the daemon is not ready".to_owned());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(kept)
    }

    /// Kills the daemon, and starts the next one when it has ended. Returns the time of the kill.
    fn kill(&mut self) -> Result<Instant, String> {
        let begin = Instant::now();
        kill(self.daemon.pid(), Signal::SIGKILL).map_err(|error| error.to_string())?;
        while self.daemon.ended().is_none() {
            std::thread::sleep(Duration::from_micros(50));
        }
        let command = kept_command(self.build, self.folder, self.prefix);
        self.daemon = Daemon::start(command, CRASH, None).map_err(|error| error.to_string())?;
        Ok(begin)
    }

    /// Whether the daemon has said that it is ready, once.
    fn is_ready(&mut self) -> Result<bool, String> {
        let mut message = [0; 4096];
        let len = self.notify.recv(&mut message).unwrap_or(0);
        match self.daemon.ended() {
            Some(ended) => Err(ended),
            None => Ok(String::from_utf8_lossy(&message[..len]).contains("READY=1")),
        }
    }
}

/// `paravane serve` with a holder.
fn kept_command(build: &Build, folder: &Path, prefix: &str) -> Command {
    let path = |name: &str| folder.join(format!("{prefix}{name}"));
    let mut command = Command::new(&build.program);
    command.args(["serve", "blk", "--format", "raw", "--image"]).arg(path(IMAGE));
    command.arg("--socket").arg(path(SOCKET)).arg("--control").arg(path(CONTROL));
    command.arg("--holder").arg(path(HOLDER)).args(&build.extra_args);
    command.env("NOTIFY_SOCKET", path(NOTIFY));
    quiet(command)
}

/// Has a command log and print little.
fn quiet(mut command: Command) -> Command {
    // Log lines of each handover would mix with the table.
    if std::env::var_os("RUST_LOG").is_none() {
        command.env("RUST_LOG", "error");
    }
    command.stdin(Stdio::null()).stdout(Stdio::null());
    command
}

/// Runs the client until `done`.
fn watch(client: &mut Client, mut done: impl FnMut() -> Result<bool, String>) -> Result<Seen, String> {
    let mut seen = Seen { outage: Duration::ZERO, repeated_kicks: 0 };
    while !done()? {
        let window = client.run(Duration::from_millis(1))?;
        seen.outage = seen.outage.max(window.longest_gap);
        seen.repeated_kicks += window.repeated_kicks;
    }
    Ok(seen)
}

fn command(build: &Build, location: &Path, folder: &Path, take_over: bool) -> Command {
    let mut command = Command::new(&build.program);
    command.args(["serve", "blk", "--format", "raw", "--image"]).arg(location);
    command.arg("--socket").arg(folder.join(SOCKET)).arg("--control").arg(folder.join(CONTROL));
    command.args(take_over.then_some("--take-over")).args(&build.extra_args);
    // Log lines of each handover would mix with the table.
    if std::env::var_os("RUST_LOG").is_none() {
        command.env("RUST_LOG", "warn");
    }
    command.stdin(Stdio::null()).stdout(Stdio::null());
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_cases_are_stable() {
        let names: Vec<String> = Case::all().iter().map(Case::to_string).collect();
        let local = ["split/depth1", "split/depth32", "packed/depth1", "packed/depth32"];
        assert_eq!(names, [&local[..], &["nbd/split/depth1", "nbd/split/depth32"]].concat());
    }
}
