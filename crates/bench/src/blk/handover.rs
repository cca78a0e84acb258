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
//! **Cases**: `LAYOUT/depthN`.
use super::case::{self, Storage, Work};
use super::client::Client;
use super::image::Image;
use crate::builds::Build;
use crate::daemon::Daemon;
use crate::error::broken;
use crate::machine::load_average;
use crate::options::MIN_ROUNDS;
use crate::spread::percentile;
use crate::{BenchError, Options, Row};
use std::fmt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The name of this benchmark.
pub(crate) const NAME: &str = "handover";
/// The notes below its table.
pub(crate) const NOTES: &[&str] = &[
    "planned: a new daemon takes the session of a disk from the running one (`paravane serve blk --take-over`), while a client (the crate virtio-driver: one queue, random writes of 4 KiB to an image in /dev/shm) keeps requests in flight. It never reconnects, and checks that each request completes once, without an error.",
    "undisturbed: the same client for as long, without a handover.",
    "outage: the longest time without a completion; one value for each handover. outage-p99: its 99th percentile over all handovers.",
    "handover-time: from the start of the new process until the old one has exited. Requests complete meanwhile.",
    "repeated-kicks: kicks after 50 ms without an answer, per handover.",
    "No process is pinned to a CPU. All compete as on any machine.",
];

/// The subject with a planned handover.
const PLANNED: &str = "planned";
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

/// Layout of the ring, and requests in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Case {
    packed: bool,
    depth: usize,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/depth{}", if self.packed { "packed" } else { "split" }, self.depth)
    }
}

impl Case {
    fn all() -> Vec<Self> {
        let of = |packed| [1, 32].map(|depth| Self { packed, depth });
        [of(false), of(true)].concat()
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
}

/// Runs the cases that `options` select.
pub(crate) fn run(options: &Options, progress: &mut dyn FnMut(&str)) -> Result<Vec<Row>, BenchError> {
    let cases = crate::options::select(Case::all(), options.filter.as_deref().unwrap_or(""))?;
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
    let image = Image::new(Storage::Tmpfs, &[IMAGE])?;
    let mut figures: Vec<Figures> = cases.iter().map(|_| Figures::default()).collect();
    for round in 1..=rounds {
        for (case, figures) in cases.iter().zip(&mut figures) {
            progress(&format!("round {round} of {rounds}: {case}"));
            sample(*case, &build, image.folder(), handovers, figures)
                .map_err(|reason| broken(PLANNED, format_args!("{case}: {reason}")))?;
        }
    }
    let origin = crate::dma::timing::Origin {
        bench: NAME,
        counter: "",
        pinned_cpu: None,
        load: [load_start, load_average()],
    };
    let mut rows = Vec::new();
    for (case, Figures { planned, undisturbed, times, repeated_kicks }) in cases.iter().zip(&figures) {
        let case = case.to_string();
        let mut row = |subject, metric, unit, values: &[f64]| {
            rows.extend(origin.row(&case, subject, (metric, unit, "clock"), values))
        };
        for (subject, outages) in [(PLANNED, planned), (UNDISTURBED, undisturbed)] {
            row(subject, "outage", "ms", outages);
            row(subject, "outage-p99", "ms", percentile(outages, 99).as_slice());
        }
        row(PLANNED, "handover-time", "ms", times);
        row(PLANNED, "repeated-kicks", "kicks/handover", repeated_kicks);
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
    folder: &Path,
    handovers: usize,
    figures: &mut Figures,
) -> Result<(), String> {
    let start = |take_over: bool| {
        Daemon::start(command(build, folder, take_over), PLANNED, None).map_err(|error| error.to_string())
    };
    let mut daemon = start(false)?;
    let Case { packed, depth } = case;
    let work = Work { write: true, sequential: false, bytes: case::BLOCK };
    let of_client = case::Case { storage: Storage::Tmpfs, packed, work, depth };
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

fn command(build: &Build, folder: &Path, take_over: bool) -> Command {
    let mut command = Command::new(&build.program);
    command.args(["serve", "blk", "--format", "raw", "--image"]).arg(folder.join(IMAGE));
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
        assert_eq!(names, ["split/depth1", "split/depth32", "packed/depth1", "packed/depth32"]);
    }
}
