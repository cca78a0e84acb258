//! `paravane bench density`: one daemon with up to 1000 disks, beside `qemu-storage-daemon`.
//!
//! A server is another process, which serves all disks of a case. Each round starts it anew:
//!
//! ```text
//! for round { for count { for server {
//!     start [ start-time ] -> sleep [ idle/N ] -> connect -> sleep [ connected/N ] -> load [ load/N ]
//! } } ; for hog { for server {
//!     start -> connect a quiet disk, and the hog -> load of the quiet one [ beside/HOG ]
//! } } }
//! ```
//! The client of all disks is one thread ([`load`]), which sends the same rate to one disk as to a
//! thousand. It has a CPU to itself; the server has all others, in the ordinary scheduling class:
//! how it shares its CPU between devices is part of what is measured.
//!
//! **Cases**: see [`case::Case`].
use crate::error::broken;
use crate::figures::{Collector, Figure};
use crate::machine::{Pinned, RealTime, cpus};
use crate::meter::CpuClock;
use crate::options::MIN_ROUNDS;
use crate::turns::turns;
use crate::{BenchError, Options, Row};
use case::{Case, Cases, Hog, Lengths};
use disks::Disks;
use hog::HogClient;
use load::Clients;
use process::Held;
use server::{Server, Subject};
use std::path::PathBuf;
use std::time::{Duration, Instant};

mod case;
mod disks;
mod hog;
mod load;
mod process;
mod server;

/// Requests per second of all disks together.
const RATE: u32 = 10_000;
/// Requests per second of a quiet disk.
const QUIET_RATE: u32 = 1000;

/// The name of this benchmark.
pub(crate) const NAME: &str = "density";
/// The notes below its table.
pub(crate) const NOTES: &[&str] = &[
    "One daemon serves N disks of 1 MiB in /dev/shm: paravane serve --config, or qemu-storage-daemon with an I/O thread. A round starts it anew for each N.",
    "idle/N: no client. connected/N: each disk has a client that asks for nothing. load/N: 10 000 reads of 4 KiB a second, to the disks in turn. The client of all disks (the crate virtio-driver) is one thread with a CPU to itself; the server has the other CPUs.",
    "beside/HOG: a quiet disk with 1000 reads of 4 KiB a second, one in flight, beside a disk of the same daemon that does nothing (idle), or reads 128 KiB or 1 MiB without a pause, 32 in flight.",
    "start-time: from the start of the process until it says that it is ready. rss, private: resident memory; the part of it that no file backs.",
    "idle-cpu: CPU time of the process in a second without requests. cpu: CPU time of the process per request. sleeps: how often its threads go to sleep, per request.",
    "-each: the figure divided by N. Growth is linear or better if it does not rise with N.",
    "cpu-to-one: cpu relative to load/1 in the same round. p99-to-idle: latency-p99 of the quiet disk relative to beside/idle in the same round.",
];
/// The note if the peer was not measured.
pub(crate) const MISSING: &str =
    "qemu-storage-daemon: not found; its rows are missing. Install qemu-system-common.";

/// Runs the cases that `options` select.
pub(crate) fn run(options: &Options, progress: &mut dyn FnMut(&str)) -> Result<Vec<Row>, BenchError> {
    let cases = Cases::select(options.filter.as_deref().unwrap_or(""), options.quick)?;
    let lengths = if options.quick { case::QUICK } else { case::FULL };
    measure(&cases, &Subject::all()?, options, lengths, progress)
}

/// The figures of one subject in one round.
#[derive(Default)]
struct Round {
    /// CPU time per request of one disk.
    one: Option<f64>,
    /// 99th percentile of a quiet disk beside an idle one.
    alone: Option<f64>,
}

/// What a session of a server needs.
struct Context<'a> {
    cases: &'a Cases,
    disks: &'a Disks,
    lengths: Lengths,
    client: crate::Client,
    /// The CPU of the client; the server has `server_cpus`.
    client_cpu: Option<usize>,
    server_cpus: Vec<usize>,
}

/// Figures with the path of their case.
type Figures = Vec<(String, Vec<(Figure, f64)>)>;

/// Measures all cases, interleaved: in a round, the servers take turns for each number of disks.
fn measure(
    cases: &Cases,
    subjects: &[Subject],
    options: &Options,
    lengths: Lengths,
    progress: &mut dyn FnMut(&str),
) -> Result<Vec<Row>, BenchError> {
    let counts = cases.counts();
    let most = counts.last().copied().unwrap_or(0).max(2);
    disks::raise_limit(most)?;
    progress("making images");
    let disks = Disks::new(most, cases.hogs().next().is_some())?;
    let mut server_cpus = cpus();
    // With one CPU, all share it.
    let client_cpu = if server_cpus.len() > 1 { server_cpus.pop() } else { None };
    let context = Context { cases, disks: &disks, lengths, client: options.client, client_cpu, server_cpus };
    let mut collector = Collector::new(NAME);
    let rounds = options.rounds.max(MIN_ROUNDS);
    for round in 0..rounds as usize {
        let mut of_round: Vec<Round> = subjects.iter().map(|_| Round::default()).collect();
        let mut show = |what: &str, subject: &Subject| {
            progress(&format!("round {} of {rounds}: {what}: {}", round + 1, subject.name()));
        };
        for &count in &counts {
            for at in turns(round, subjects.len()) {
                let subject = &subjects[at];
                show(&format!("{count} disks"), subject);
                for (case, figures) in context.many(subject, count, &mut of_round[at])? {
                    collector.add(&case, subject.name(), client_cpu, figures);
                }
            }
        }
        for hog in cases.hogs() {
            for at in turns(round, subjects.len()) {
                let subject = &subjects[at];
                let case = Case::Beside(hog).to_string();
                show(&case, subject);
                let figures = context.beside(subject, hog, &mut of_round[at])?;
                collector.add(&case, subject.name(), client_cpu, figures);
            }
        }
    }
    Ok(collector.rows())
}

impl Context<'_> {
    fn start(&self, subject: &Subject, images: &[PathBuf]) -> Result<Server, BenchError> {
        let _pinned = Pinned::among(&self.server_cpus);
        Server::start(subject, self.disks, images)
    }

    /// Measures `count` disks: idle, connected, under load.
    fn many(&self, subject: &Subject, count: usize, round: &mut Round) -> Result<Figures, BenchError> {
        let images: Vec<PathBuf> = (0..count).map(|disk| self.disks.image(disk)).collect();
        let mut server = self.start(subject, &images)?;
        let mut all = Figures::new();
        let case = Case::Idle(count);
        if self.cases.contains(case) {
            let start = (Figure::new("start-time", "ms", "clock"), server.start_time.as_secs_f64() * 1e3);
            let each = server.start_time.as_secs_f64() * 1e6 / count as f64;
            let each = (Figure::new("start-time-each", "us", "clock"), each);
            let figures = [start, each].into_iter().chain(self.at_rest(&server, count)?);
            all.push((case.to_string(), figures.collect()));
        }
        let (connected, load) = (Case::Connected(count), Case::Load(count));
        if !self.cases.contains(connected) && !self.cases.contains(load) {
            return Ok(all);
        }
        let failed = |reason: String| broken(subject.name(), format_args!("{count} disks: {reason}"));
        // The client works before ordinary threads on its CPU.
        let _pinned = self.client_cpu.and_then(Pinned::to);
        let real_time = self.client_cpu.and_then(|_| RealTime::enter());
        let begin = Instant::now();
        let clients = Clients::connect(self.disks, count, None, self.client, || server.ended());
        let mut clients = clients.map_err(failed)?;
        if self.cases.contains(connected) {
            let time = begin.elapsed().as_secs_f64() * 1e3;
            let time = (Figure::new("connect-time", "ms", "clock"), time);
            let figures = std::iter::once(time).chain(self.at_rest(&server, count)?);
            all.push((connected.to_string(), figures.collect()));
        }
        if self.cases.contains(load) {
            // Each disk is asked at least once before anything is measured.
            let once = Duration::from_secs(1) / RATE * 2 * count as u32;
            clients.run(RATE, self.lengths.warm_up.max(once)).map_err(failed)?;
            let mut figures = self.under_load(&server, &mut clients, RATE, real_time.is_some())?;
            let held = held(&server)?;
            figures.push((Figure::new("rss", "MiB", "count"), held.rss as f64 / 1024.0));
            figures.push((Figure::new("private", "MiB", "count"), held.private as f64 / 1024.0));
            let cpu = value(&figures, "cpu");
            if count == 1 {
                round.one = cpu;
            } else if let Some((cpu, one)) = cpu.zip(round.one) {
                figures.push((Figure::new("cpu-to-one", "1", "process clock"), cpu / one));
            }
            all.push((load.to_string(), figures));
        }
        Ok(all)
    }

    /// What a server without requests holds, and its idle CPU time.
    fn at_rest(&self, server: &Server, count: usize) -> Result<Vec<(Figure, f64)>, BenchError> {
        let clock = CpuClock::of(server.pid())?;
        let (before, begin) = (clock.read()?, Instant::now());
        std::thread::sleep(self.lengths.idle);
        let cpu = (clock.read()? - before).as_secs_f64() * 1e6 / begin.elapsed().as_secs_f64();
        let held = held(server)?;
        let count = count as f64;
        Ok(vec![
            (Figure::new("rss", "MiB", "count"), held.rss as f64 / 1024.0),
            (Figure::new("rss-each", "KiB", "count"), held.rss as f64 / count),
            (Figure::new("private", "MiB", "count"), held.private as f64 / 1024.0),
            (Figure::new("threads", "1", "count"), held.threads as f64),
            (Figure::new("descriptors", "1", "count"), held.descriptors as f64),
            (Figure::new("descriptors-each", "1", "count"), held.descriptors as f64 / count),
            (Figure::new("idle-cpu", "us/s", "process clock"), cpu),
            (Figure::new("idle-cpu-each", "us/s", "process clock"), cpu / count),
        ])
    }

    /// Rate, latency and cost of a window.
    fn under_load(
        &self,
        server: &Server,
        clients: &mut Clients,
        rate: u32,
        real_time: bool,
    ) -> Result<Vec<(Figure, f64)>, BenchError> {
        let failed = |reason: String| broken(NAME, reason);
        let clock = CpuClock::of(server.pid())?;
        let sleeps = || process::sleeps(server.pid()).map_err(gone);
        let (before, sleeps_before) = (clock.read()?, sleeps()?);
        let window = clients.run(rate, self.lengths.load).map_err(failed)?;
        let (cpu, slept) = (clock.read()? - before, sleeps()?.saturating_sub(sleeps_before));
        if window.requests == 0 {
            return Err(broken(NAME, "no request completed"));
        }
        let count = window.requests as f64;
        let class = if real_time { ", SCHED_FIFO" } else { "" };
        let by = |method: &str| format!("{method}, {} client{class}", self.client.name());
        let mut figures =
            vec![(Figure::new("rate", "requests/s", by("clock")), count / window.elapsed.as_secs_f64())];
        for (metric, quantile) in [("latency-p50", 0.5), ("latency-p99", 0.99)] {
            let nanoseconds = window.latencies.value_at_quantile(quantile) as f64;
            figures.push((Figure::new(metric, "us", by("clock")), nanoseconds / 1e3));
        }
        let each = cpu.as_secs_f64() * 1e6 / count;
        figures.push((Figure::new("cpu", "us/request", by("process clock")), each));
        figures.push((Figure::new("sleeps", "1/request", by("count")), slept as f64 / count));
        Ok(figures)
    }

    /// Measures a quiet disk beside another one.
    fn beside(
        &self,
        subject: &Subject,
        hog: Hog,
        round: &mut Round,
    ) -> Result<Vec<(Figure, f64)>, BenchError> {
        let failed = |reason: String| broken(subject.name(), format_args!("{}: {reason}", Case::Beside(hog)));
        let mut server = self.start(subject, &[self.disks.image(0), self.disks.large()])?;
        let _pinned = self.client_cpu.and_then(Pinned::to);
        let real_time = self.client_cpu.and_then(|_| RealTime::enter());
        let clients = Clients::connect(self.disks, 1, Some(1), self.client, || server.ended());
        let mut clients = clients.map_err(failed)?;
        let start = |bytes| HogClient::start(self.disks.socket(1), bytes);
        let busy = hog.bytes().map(start).transpose().map_err(failed)?;
        if let Some(class) = &real_time {
            // The quiet client never waits for the other one.
            class.raise();
        }
        clients.run(QUIET_RATE, self.lengths.warm_up).map_err(failed)?;
        let begin = Instant::now();
        let requests = || busy.as_ref().map_or(Ok(0), HogClient::requests).map_err(failed);
        let before = requests()?;
        let quiet = self.under_load(&server, &mut clients, QUIET_RATE, real_time.is_some())?;
        // CPU time and sleeps are mostly those of the hog.
        let mut figures: Vec<_> = quiet
            .into_iter()
            .filter(|(figure, _)| figure.metric == "rate" || figure.metric.starts_with("latency"))
            .collect();
        let p99 = value(&figures, "latency-p99");
        if hog == Hog::Idle {
            round.alone = p99;
        } else if let Some((p99, alone)) = p99.zip(round.alone) {
            figures.push((Figure::new("p99-to-idle", "1", "clock"), p99 / alone));
        }
        if let Some(bytes) = hog.bytes() {
            let bytes = (requests()? - before) * bytes;
            let rate = bytes as f64 / f64::from(1 << 20) / begin.elapsed().as_secs_f64();
            figures.push((Figure::new("hog-rate", "MiB/s", "clock"), rate));
        }
        Ok(figures)
    }
}

fn held(server: &Server) -> Result<Held, BenchError> {
    Held::by(server.pid()).map_err(gone)
}

fn gone(source: std::io::Error) -> BenchError {
    BenchError::Os { what: "read what the server holds in /proc", source }
}

/// The value of a metric.
fn value(figures: &[(Figure, f64)], metric: &str) -> Option<f64> {
    figures.iter().find(|(figure, _)| figure.metric == metric).map(|(_, value)| *value)
}

#[cfg(test)]
mod tests;
