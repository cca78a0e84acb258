//! `paravane bench net`: `paravane serve net` beside DPDK's vhost driver.
//!
//! The client of both is DPDK's virtio-user driver. All are processes: the device on one CPU, its
//! driver on another.
//!
//! ```text
//! for case { for round {
//!     for subject { device -> driver }
//!     for sample { for subject {
//!         start traffic -> first packet -> warm up -> [ clock ] -> [ instructions ] -> stop traffic
//!     } }
//! } }
//! ```
//! Each round starts all processes anew: the place of their memory changes a rate by some percent.
//! Within a round the subjects take turns in short samples, in another order each time, and the
//! median sample stands for the round: the time that a cache line takes between two CPUs may change
//! within seconds. `rate-to-other` compares two builds of `paravane` within each round.
//!
//! **Cases**: `LAYOUT/BUFFERS/DIRECTION/BYTES`, see [`case`].
use crate::error::broken;
use crate::figures::{Collector, Figure, RoundSamples, TO_OTHER, ratio, ratios};
use crate::machine::two_cpus;
use crate::meter::{CpuClock, Instructions, SampleLength};
use crate::options::MIN_ROUNDS;
use crate::subject::{OTHER_BUILD, PARAVANE};
use crate::turns::turns;
use crate::{BenchError, Options, Row};
use case::{Case, Direction};
use device::{Device, Subject};
use std::path::Path;
use std::time::{Duration, Instant};
use testpmd::{Counts, Side, Testpmd};

mod case;
mod device;
pub(crate) mod testpmd;

/// Time limit for the first packet.
const FIRST_PACKET: Duration = Duration::from_secs(30);
/// Most windows of a sample: in one, a busy host may not have run either side.
const WINDOWS: usize = 20;
/// Time for a burst to come back before another one is sent.
const BURST: Duration = Duration::from_secs(1);
/// Samples of each subject in a round.
const SAMPLES: usize = 7;

/// The name of this benchmark.
pub(crate) const NAME: &str = "net";
/// The notes below its table.
pub(crate) const NOTES: &[&str] = &[
    "driver: DPDK's virtio-user in dpdk-testpmd; one pair of queues of 256, ordinary pages, busy polling. device: paravane serve net (--sink, --source or --echo), or DPDK's vhost driver in dpdk-testpmd. Each has one CPU.",
    "transmit: the driver sends, the device copies and discards. receive: the device sends. forward: both send what they receive; paravane swaps the addresses, testpmd does not.",
    "mergeable: receive buffers with MRG_RXBUF. single: each receive buffer holds a whole packet.",
    "rate: packets that the driver sends (transmit) or receives (receive, forward). rate-to-dpdk: relative to DPDK's vhost driver in the same round. rate-to-other-dpdk: relative to the version of it that scripts/debian-dpdk unpacked, if there is one.",
    "rate-, cpu-, instructions-to-other: relative to paravane/other in the same round.",
    "cpu: CPU time of the device's process per packet, user and kernel; a polling device uses a whole CPU. instructions: the same, in a separate window.",
];

/// Runs the cases that `options` select.
pub(crate) fn run(options: &Options, progress: &mut dyn FnMut(&str)) -> Result<Vec<Row>, BenchError> {
    let cases = Case::select(options.filter.as_deref().unwrap_or(""), options.quick)?;
    if !testpmd::is_there() {
        let reason = "dpdk-testpmd is not installed; install dpdk-dev, librte-net-vhost23, librte-net-virtio23 and librte-mempool-ring23";
        return Err(broken("client", reason));
    }
    let subjects = Subject::all()?;
    let length = if options.quick { case::QUICK } else { case::FULL };
    let mut collector = Collector::new(NAME);
    let rounds = options.rounds.max(MIN_ROUNDS);
    let (device_cpu, driver_cpu) = two_cpus();
    for case in cases {
        let path = case.to_string();
        let failed = |source| BenchError::Os { what: "make a folder for sockets", source };
        let folder = tempfile::Builder::new().prefix("paravane-bench-").tempdir().map_err(failed)?;
        for round in 0..rounds as usize {
            let mut pairs = Vec::new();
            for subject in &subjects {
                let name = subject.name();
                progress(&format!("round {} of {rounds}: {path}: starting {name}", round + 1));
                let socket = format!("{round}-{}.sock", name.replace('/', "-"));
                let socket = folder.path().join(socket);
                let device = Device::start(subject, case, &socket, device_cpu)?;
                let mut driver = Testpmd::start(
                    Path::new(testpmd::PROGRAM),
                    Side::Driver(case),
                    name,
                    &socket,
                    driver_cpu,
                )?;
                driver.set(Side::Driver(case), case)?;
                pairs.push((name, device, driver, RoundSamples::default()));
            }
            for number in 0..SAMPLES {
                for at in turns(round * SAMPLES + number, pairs.len()) {
                    let (name, device, driver, samples) = &mut pairs[at];
                    progress(&format!("round {} of {rounds}: {path}: {name}", round + 1));
                    samples.add(sample(name, device, driver, case, length)?);
                }
            }
            let medians = |(name, _, _, samples): (_, _, _, RoundSamples)| {
                (name, samples.medians().collect::<Vec<_>>())
            };
            let of_round: Vec<(&'static str, Vec<_>)> = pairs.into_iter().map(medians).collect();
            let subject = |wanted| of_round.iter().find(|(name, _)| *name == wanted);
            let peers = [("dpdk-vhost", "rate-to-dpdk"), ("dpdk-vhost/other", "rate-to-other-dpdk")];
            let other = subject(OTHER_BUILD);
            for (name, figures) in &of_round {
                let relative = peers.into_iter().filter_map(|(peer, metric)| {
                    let (_, theirs) = subject(peer).filter(|(peer, _)| peer != name)?;
                    ratio(figures, theirs, metric)
                });
                let other = other.filter(|_| *name == PARAVANE);
                let to_other = other.map(|(_, other)| ratios(figures, other, TO_OTHER)).into_iter().flatten();
                let figures = figures.iter().cloned().chain(relative).chain(to_other);
                collector.add(&path, name, driver_cpu, figures);
            }
        }
    }
    Ok(collector.rows())
}

/// Takes one sample of one pair.
fn sample(
    name: &'static str,
    device: &mut Device,
    driver: &mut Testpmd,
    case: Case,
    length: SampleLength,
) -> Result<Vec<(Figure, f64)>, BenchError> {
    device.start_traffic()?;
    wait_for_traffic(name, driver, case)?;
    std::thread::sleep(length.warm_up);
    let clock = CpuClock::of(device.pid())?;
    let mut window = || -> Result<_, BenchError> {
        let (before, cpu_before) = (driver.counts()?, clock.read()?);
        std::thread::sleep(length.timed);
        let (after, cpu_after) = (driver.counts()?, clock.read()?);
        let (elapsed, cpu) = ((after.at - before.at).as_secs_f64(), (cpu_after - cpu_before).as_secs_f64());
        Ok((packets(case, before, after) as f64, elapsed, cpu))
    };
    let mut measured = window()?;
    for _ in 1..WINDOWS {
        if measured.0 > 0.0 {
            break;
        }
        measured = window()?;
    }
    let (count, elapsed, cpu) = measured;
    if count == 0.0 {
        let timed = length.timed;
        let reason =
            format!("{case}: no packet passed in {WINDOWS} windows of {timed:?} after the first one");
        return Err(broken(name, reason));
    }
    let mut figures = vec![
        (Figure::new("rate", "Mpackets/s", "clock"), count / elapsed / 1e6),
        (Figure::new("cpu", "ns/packet", "process clock"), cpu * 1e9 / count),
    ];
    // Without a counter, there is no row.
    if let Ok(counter) = Instructions::start(device.pid()) {
        let method = counter.method;
        let before = driver.counts()?;
        std::thread::sleep(length.counted);
        let after = driver.counts()?;
        if let Ok(Some(number)) = counter.stop() {
            let each = number as f64 / packets(case, before, after).max(1) as f64;
            figures.push((Figure::new("instructions", "1/packet", method), each));
        }
    }
    driver.stop_traffic()?;
    device.stop_traffic()?;
    Ok(figures)
}

/// Packets of the direction that the case counts.
fn packets(case: Case, from: Counts, to: Counts) -> u64 {
    match case.direction {
        Direction::Transmit => to.transmitted - from.transmitted,
        Direction::Receive | Direction::Forward => to.received - from.received,
    }
}

/// Starts the driver's traffic and waits for the first packet.
///
/// The two sides may not be ready at once, in particular on busy CPUs. A first burst that the device
/// was not ready for is lost, and sent again.
fn wait_for_traffic(name: &'static str, driver: &mut Testpmd, case: Case) -> Result<(), BenchError> {
    let injects = case.direction == Direction::Forward;
    let end = Instant::now() + FIRST_PACKET;
    while Instant::now() < end {
        driver.start_traffic(injects)?;
        let before = driver.counts()?;
        let again = if injects { (Instant::now() + BURST).min(end) } else { end };
        while Instant::now() < again {
            std::thread::sleep(Duration::from_millis(2));
            if packets(case, before, driver.counts()?) > 0 {
                return Ok(());
            }
        }
        driver.stop_traffic()?;
    }
    Err(broken(name, format_args!("{case}: waited {FIRST_PACKET:?} for the first packet, and none passed")))
}
