//! `paravane bench blk`: `paravane serve blk` beside `qemu-storage-daemon` and SPDK.
//!
//! The servers are other processes. They start once for each storage and are pinned to one CPU. The
//! client, on another CPU, is the crate virtio-driver. It connects anew for each sample:
//!
//! ```text
//! for storage {
//!     images -> servers -> read all images once
//!     for round { for case { for sample { for server {
//!         connect -> warm up -> [ clock ] -> [ instructions ]
//!     } } } }
//! }
//! ```
//! The order of the servers changes with each sample: what one server leaves behind in caches falls
//! on all others alike. `rate-to-other` and its like compare two builds, or two settings, of
//! `paravane` within each round.
//!
//! **Cases**: `STORAGE/LAYOUT/WORK/depthN`, see [`case`]. The client checks all data that it reads.
//! In `blkio/...` it is libblkio's `blkio-bench`.
use crate::daemon::STORAGE_DAEMON;
use crate::error::broken;
use crate::figures::{Collector, Figure, Ratios, RoundSamples, TO_LOCAL, TO_OTHER, TO_QEMU, TO_SPDK, ratios};
use crate::machine::{RealTime, two_cpus};
use crate::meter::{CpuClock, Instructions, SampleLength};
use crate::options::MIN_ROUNDS;
use crate::subject::{OTHER_BUILD, PARAVANE};
use crate::turns::turns;
use crate::{BenchError, Options, Row};
use case::{Case, Present, Storage, Work};
use client::Client;
use contention::{BusyThreads, RunDelay};
use image::Image;
use server::{Server, Subject};
use std::time::Duration;

pub(crate) mod blkio;
mod case;
mod ceph;
mod client;
mod contention;
pub(crate) mod handover;
pub(crate) mod http;
mod image;
mod nbd;
mod qemu_module;
mod server;
pub(crate) mod spdk;

/// Samples of each server in a round.
const SAMPLES: usize = 3;
/// Time between two looks at how much of the image has been read.
const WARM_STEP: Duration = Duration::from_millis(10);

/// The name of this benchmark.
pub(crate) const NAME: &str = "blk";
/// The notes below its table.
pub(crate) const NOTES: &[&str] = &[
    "Each server has a copy of an image of 256 MiB (direct: all use one). tmpfs: in /dev/shm; disk: in the current directory; direct: there, with O_DIRECT; qcow2: in /dev/shm, made by qemu-img.",
    "The servers are pinned to one CPU, the client (the crate virtio-driver: one queue, one thread) to another. The client checks all data that it reads.",
    "read4k, write4k: random offsets. seq-read128k, seq-write128k: sequential. depth: requests in flight.",
    "latency-p50, -p99, -p999: from before a request is submitted until the client has taken it back; median, 99th and 99.9th percentile.",
    "rate-, cpu-, instructions-to-other: relative to paravane/other in the same round. rate-, cpu-to-qemu: relative to qemu-storage-daemon.",
    "cpu: CPU time of the server's process, user and kernel. instructions: the same, in a separate window, because counting slows context switches.",
    "kicks, sleeps: how often the client kicks, and goes to sleep, per request. repeated-kicks: kicks after 50 ms without an answer; virtio-driver 0.6.1 can lose a kick in packed rings.",
    "blkio/...: the client is libblkio's blkio-bench, a second a sample; latency-mean is its own figure, and it checks no data.",
    "--contended: a thread that never sleeps on the CPU of the server, and one on that of the client; all threads are in the ordinary scheduling class. run-delay, run-delay-client: time for which threads of the server, and the client, could run and no CPU ran them, per request.",
    "spdk-vhost: SPDK's vhost, the disk a malloc bdev, in tmpfs/... only. Its reactor polls the CPU without end; it is stopped while others are measured. rate-to-spdk, cpu-to-spdk: relative to it in the same round; 1 / cpu-to-spdk is the rate for each second of CPU time.",
    "nbd/...: the image is behind an NBD server (nbdkit, one process for each subject, on the CPU of the client); nbd-1ms: its answers take a millisecond more; qcow2-over-nbd: it has the bytes of a qcow2 image.",
    "rbd/...: the image is in the Ceph cluster that PARAVANE_CEPH_CONF names (scripts/ceph-one start FOLDER makes one). qemu-storage-daemon needs qemu-block-extra for it.",
    "http-cached/...: the image is in the current directory, behind an HTTP server (nginx, on the CPU of the client), and paravane, which has read it once, has all of it in its cache (--cache) there. paravane/local: the same image as a local file. qemu-storage-daemon keeps nothing and reads from the server (its curl driver, of qemu-block-extra).",
    "rate-, cpu-to-local: relative to paravane/local in the same round. A rate-to-local of 0.91 is 1.1 times the time of a local file.",
    "qemu-storage-daemon has no packed rings. If its rows are missing, install qemu-system-common.",
];

/// Runs the cases that `options` select.
pub(crate) fn run(options: &Options, progress: &mut dyn FnMut(&str)) -> Result<Vec<Row>, BenchError> {
    let filter = options.filter.as_deref().unwrap_or("");
    let cases = if options.contended {
        Case::select_contended(filter)?
    } else {
        let present = Present {
            qcow2: image::can_convert(),
            blkio: blkio::program().is_some(),
            nbd: nbd::is_there(),
            rbd: ceph::is_there(),
            http: http::is_there(),
        };
        Case::select(filter, options.quick, present)?
    };
    let subjects = Subject::all()?;
    let length = match (options.contended, options.quick) {
        (true, false) => case::CONTENDED,
        (false, false) => case::FULL,
        (_, true) => case::QUICK,
    };
    measure(&cases, &subjects, options, length, progress)
}

/// Measures all cases, interleaved.
///
/// A round goes through the cases of a storage. Within a case the servers take turns, in another
/// order for each sample ([`turns`]), and the median sample stands for the round.
fn measure(
    cases: &[Case],
    subjects: &[Subject],
    options: &Options,
    length: SampleLength,
    progress: &mut dyn FnMut(&str),
) -> Result<Vec<Row>, BenchError> {
    let mut collector = Collector::new(NAME);
    let rounds = options.rounds.max(MIN_ROUNDS);
    let (server_cpu, client_cpu) = two_cpus();
    for storage in Storage::ALL {
        let cases: Vec<Case> = cases.iter().copied().filter(|case| case.storage == storage).collect();
        if cases.is_empty() {
            continue;
        }
        progress(&format!("making an image: {}", storage.name()));
        let able = |subject: &&Subject| subject.stores(storage);
        let mut names: Vec<&str> =
            subjects.iter().filter(able).map(|subject| subject.image(storage)).collect();
        names.sort_unstable();
        names.dedup();
        let mut image = Image::new(storage, &names)?;
        // With one CPU, a polling client would keep the server from working. Busy threads compete with
        // the ordinary class only.
        let real_time = client_cpu.filter(|_| !options.contended).and_then(|_| RealTime::enter());
        // A real one has CPUs of its own: at least it takes none of the measured process.
        image.start_servers(storage, &names, client_cpu)?;
        let cpus = [server_cpu, client_cpu].map(|cpu| cpu.unwrap_or(0));
        let mut servers = Vec::new();
        for subject in subjects.iter().filter(able) {
            servers.push(Server::start(subject, storage, &image, server_cpu)?);
        }
        let _pinned = client_cpu.and_then(crate::machine::Pinned::to);
        for server in &mut servers {
            let name = server.subject.name();
            progress(&format!("reading the image: {}: {name}", storage.name()));
            let warmed = running(server, |server| warm(server, storage));
            warmed.map_err(|reason| broken(name, format_args!("{}: {reason}", cases[0])))?;
        }
        let _busy =
            options.contended.then(|| BusyThreads::start(&cpus[..if client_cpu.is_some() { 2 } else { 1 }]));
        for round in 0..rounds as usize {
            for &case in &cases {
                let path = case.to_string();
                let mut able: Vec<(&mut Server, RoundSamples)> = servers
                    .iter_mut()
                    .filter(|server| server.subject.fits(case))
                    .map(|server| (server, RoundSamples::default()))
                    .collect();
                // A sample of blkio-bench is as long as all others together.
                for number in 0..if case.blkio { 1 } else { SAMPLES } {
                    for at in turns(round * SAMPLES + number, able.len()) {
                        let (server, samples) = &mut able[at];
                        let name = server.subject.name();
                        progress(&format!("round {} of {rounds}: {path}: {name}", round + 1));
                        let real_time = real_time.is_some();
                        let figures =
                            running(server, |server| sample(server, case, options, length, real_time))
                                .map_err(|reason| broken(name, format_args!("{path}: {reason}")))?;
                        samples.add(figures);
                    }
                }
                let medians = |(server, samples): (&mut Server, RoundSamples)| {
                    (server.subject.name(), samples.medians().collect::<Vec<_>>())
                };
                let of_round: Vec<(&'static str, Vec<_>)> = able.into_iter().map(medians).collect();
                for (name, figures) in &of_round {
                    // To all but itself; two builds are compared from one side.
                    let counts = |to| to != *name && (to != OTHER_BUILD || *name == PARAVANE);
                    let beside = of_round.iter().filter(|(to, _)| counts(*to));
                    let relative = beside.flat_map(|(to, base)| ratios(figures, base, ratios_to(to)));
                    collector.add(&path, name, client_cpu, figures.iter().cloned().chain(relative));
                }
            }
        }
    }
    Ok(collector.rows())
}

/// The ratios to a server in the same round.
fn ratios_to(name: &str) -> &'static Ratios {
    match name {
        OTHER_BUILD => TO_OTHER,
        spdk::NAME => TO_SPDK,
        server::LOCAL => TO_LOCAL,
        STORAGE_DAEMON => TO_QEMU,
        _ => &[],
    }
}

/// Does something with a server while it runs.
fn running<R>(server: &mut Server, measured: impl FnOnce(&mut Server) -> R) -> R {
    server.resume();
    let result = measured(server);
    server.pause();
    result
}

/// Reads the image once, so that no measured server pays for first accesses.
///
/// # Errors
/// Why the server does not work, in one line.
fn warm(server: &mut Server, storage: Storage) -> Result<(), String> {
    if storage == Storage::Direct {
        return Ok(());
    }
    let work = Work { write: server.subject.begins_empty(), ..Work::WARM };
    let case = Case { storage, packed: false, work, depth: 32, blkio: false };
    let socket = server.socket.clone();
    let mut driver = Client::connect(&socket, case, crate::Client::Event, || server.ended())?;
    let mut bytes = 0;
    while bytes < case::SPAN {
        bytes += driver.run(WARM_STEP)?.requests * work.bytes;
    }
    Ok(())
}

/// Takes one sample of one server.
///
/// # Errors
/// Why there are no figures, in one line.
fn sample(
    server: &mut Server,
    case: Case,
    options: &Options,
    length: SampleLength,
    real_time: bool,
) -> Result<Vec<(Figure, f64)>, String> {
    let pid = server.pid();
    let socket = server.socket.clone();
    let client = options.client;
    if case.blkio {
        return blkio::sample(pid, &socket, case, client, real_time);
    }
    let mut driver = Client::connect(&socket, case, client, || server.ended())?;
    driver.run(length.warm_up)?;
    let delay_before = options.contended.then(|| RunDelay::now(pid)).transpose();
    let delay_before = delay_before.map_err(|error| error.to_string())?;
    let clock = CpuClock::of(pid).map_err(|error| error.to_string())?;
    let before = clock.read().map_err(|error| error.to_string())?;
    let window = driver.run(length.timed)?;
    let cpu = clock.read().map_err(|error| error.to_string())? - before;
    if window.requests == 0 {
        return Err("no request completed".into());
    }
    let count = window.requests as f64;
    let class = match (real_time, options.contended) {
        (true, _) => ", SCHED_FIFO",
        (false, true) => ", busy CPUs",
        (false, false) => "",
    };
    let by = |method: &str| format!("{method}, {} client{class}", client.name());
    let mut figures =
        vec![(Figure::new("rate", "requests/s", by("clock")), count / window.elapsed.as_secs_f64())];
    for (metric, quantile) in [("latency-p50", 0.5), ("latency-p99", 0.99), ("latency-p999", 0.999)] {
        let nanoseconds = window.latencies.value_at_quantile(quantile) as f64;
        figures.push((Figure::new(metric, "us", by("clock")), nanoseconds / 1e3));
    }
    figures.push((Figure::new("cpu", "us/request", by("process clock")), cpu.as_secs_f64() * 1e6 / count));
    let counts =
        [("kicks", window.kicks), ("sleeps", window.sleeps), ("repeated-kicks", window.repeated_kicks)];
    for (metric, number) in counts {
        figures.push((Figure::new(metric, "1/request", by("count")), number as f64 / count));
    }
    if let Some(before) = delay_before {
        let now = RunDelay::now(pid).map_err(|error| error.to_string())?;
        let each = |now: Duration, before: Duration| now.saturating_sub(before).as_secs_f64() * 1e6 / count;
        let delays = [
            ("run-delay", each(now.server, before.server)),
            ("run-delay-client", each(now.client, before.client)),
        ];
        figures.extend(delays.map(|(metric, delay)| (Figure::new(metric, "us/request", by("count")), delay)));
    }
    // Without a counter, there is no row.
    if let Ok(counter) = Instructions::start(pid) {
        let method = counter.method;
        let window = driver.run(length.counted)?;
        if let Ok(Some(number)) = counter.stop() {
            let each = number as f64 / window.requests.max(1) as f64;
            figures.push((Figure::new("instructions", "1/request", by(method)), each));
        }
    }
    Ok(figures)
}

#[cfg(test)]
mod tests;
