//! Two threads, two CPUs: a driver streams buffers to a device, as Linux's `tools/virtio/ringtest` does.
//!
//! ```text
//! driver, on one CPU                              device, on another
//! while fewer than `outstanding`: add, publish    while something is available: take, complete, publish
//! take back what is used; nothing: wait           nothing: wait
//! ```
//!
//! The work is ringtest's: a ring of 256, one descriptor a buffer, no notifications, no data. A **stream**
//! keeps as many buffers outstanding as the ring holds and publishes each batch; a **round trip** has one
//! outstanding. An operation is a buffer that was added, used and taken back; its time is wall time from
//! the first one added to the last one taken back.
//!
//! Waiting is spinning. With one CPU, or two threads that may not be pinned apart, it is yielding instead,
//! and ringtest, which cannot yield, is left out. A shot that takes longer than [`PATIENCE`] is an error.
use super::case::ring_features;
use super::subject::{OURS, broken};
use crate::machine::{Pinned, RealTime, cpus};
use crate::spread::Spread;
use crate::{BenchError, Row};
use ends::{DeviceEnd, DriverEnd};
use paravane_spec::feature;
use std::fmt;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

pub(crate) mod ends;
#[cfg(feature = "peers")]
mod peer_ends;
pub(crate) mod ringtest;

/// How long a shot may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a shot should take: long enough for the start of two threads not to count.
const SHOT: Duration = Duration::from_millis(25);
/// Shots in one round of one subject; the median shot stands for the round.
const SHOTS: usize = 5;
/// What a side says that waited for one that is gone.
const ENDED: &str = "the other side ended early";
/// Spins between two looks at the clock or at the other thread's end.
const SPINS_A_LOOK: u32 = 1 << 12;

/// One case with two threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Case {
    /// The ring's layout.
    pub(crate) packed: bool,
    /// Whether IN_ORDER is negotiated.
    pub(crate) in_order: bool,
    /// How the buffers flow.
    pub(crate) flow: Flow,
}

/// How the buffers flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flow {
    /// As many buffers outstanding as the ring holds, published in batches of this many.
    Stream(u16),
    /// One buffer outstanding.
    RoundTrip,
}

impl Case {
    /// Every case.
    pub(crate) fn all() -> Vec<Self> {
        let mut cases = Vec::new();
        for packed in [false, true] {
            for flow in [Flow::Stream(1), Flow::Stream(32), Flow::RoundTrip] {
                for in_order in [false, true] {
                    if !(in_order && flow == Flow::RoundTrip) {
                        cases.push(Self { packed, in_order, flow });
                    }
                }
            }
        }
        cases
    }

    /// The negotiated features. EVENT_IDX is among them as in ringtest: the question whether to notify then
    /// reads a field that the other side leaves alone, and not the cache line of the index that it stores.
    pub(crate) fn features(self) -> u64 {
        ring_features(self.packed, self.in_order) | feature::EVENT_IDX
    }

    /// Buffers between two publications.
    pub(crate) fn batch(self) -> u16 {
        match self.flow {
            Flow::Stream(batch) => batch,
            Flow::RoundTrip => 1,
        }
    }

    /// Most buffers on their way.
    pub(crate) fn outstanding(self) -> u16 {
        match self.flow {
            Flow::Stream(_) => super::QUEUE_SIZE,
            Flow::RoundTrip => 1,
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let layout = if self.packed { "packed" } else { "split" };
        let in_order = if self.in_order { "/in-order" } else { "" };
        match self.flow {
            Flow::Stream(batch) => write!(f, "{layout}/stream{in_order}/batch{batch}"),
            Flow::RoundTrip => write!(f, "{layout}/roundtrip{in_order}"),
        }
    }
}

/// Where and how the two threads run.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    /// CPU of the driver and of the device, if there are two.
    pub(crate) cpus: Option<[usize; 2]>,
    /// Whether real-time scheduling is to be asked for.
    pub(crate) real_time: bool,
}

impl Place {
    /// The first two CPUs that there are.
    pub(crate) fn choose() -> Self {
        match cpus().as_slice() {
            &[first, second, ..] => {
                // Only where both threads have a CPU of their own: one that spins would keep out the other.
                Self { cpus: Some([second, first]), real_time: RealTime::enter().is_some() }
            }
            _ => Self { cpus: None, real_time: false },
        }
    }

    /// What this is called in results.
    pub(crate) fn method(&self) -> &'static str {
        match (self.cpus, self.real_time) {
            (Some(_), true) => "clock, SCHED_FIFO",
            (Some(_), false) => "clock",
            (None, _) => "clock, one CPU, yielding",
        }
    }
}

/// What one shot has found.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shot {
    /// Wall time.
    pub(crate) time: Duration,
    /// CPU time of both sides.
    pub(crate) cpu: Duration,
    /// Times that the driver found nothing used, and waited.
    pub(crate) spins: u64,
}

/// Streams `total` buffers from `driver` to `device` and back.
///
/// # Errors
/// A side failed, or it took too long, or a pinned thread was refused its CPU.
pub(crate) fn shoot(
    driver: &mut dyn DriverEnd,
    device: &mut dyn DeviceEnd,
    case: Case,
    place: &Place,
    total: u64,
) -> Result<Shot, BenchError> {
    let start = Barrier::new(2);
    let over = AtomicBool::new(false);
    let wait = Wait { yields: place.cpus.is_none(), over: &over };
    let side = |index: usize| -> Result<(Option<Pinned>, Option<RealTime>), BenchError> {
        let pinned = match place.cpus {
            Some(cpus) => Some(Pinned::to(cpus[index]).ok_or_else(|| broken(OURS, "a CPU was refused"))?),
            None => None,
        };
        Ok((pinned, if place.real_time { RealTime::enter() } else { None }))
    };
    let (served, driven) = std::thread::scope(|scope| {
        let device = scope.spawn(|| {
            let ready = side(1);
            start.wait();
            let _stop = Stop(&over);
            let _held = ready?;
            let cpu = super::thread_clock()?;
            device.serve(total, wait)?;
            Ok::<_, BenchError>(super::thread_clock()?.saturating_sub(cpu))
        });
        let driver = scope.spawn(|| {
            let ready = side(0);
            start.wait();
            let _stop = Stop(&over);
            let _held = ready?;
            let cpu = super::thread_clock()?;
            let began = Instant::now();
            let spins = driver.drive(total, case, wait)?;
            let time = began.elapsed();
            Ok::<_, BenchError>((time, super::thread_clock()?.saturating_sub(cpu), spins))
        });
        (join(device.join()), join(driver.join()))
    });
    let ((time, cpu, spins), device_cpu) = match (driven, served) {
        (Ok(driven), Ok(served)) => (driven, served),
        // One that merely saw the other end says less than why that one ended.
        (Err(error), Err(other)) => {
            let merely = matches!(&error, BenchError::Subject { reason, .. } if reason == ENDED);
            return Err(if merely { other } else { error });
        }
        (Err(error), _) | (_, Err(error)) => return Err(error),
    };
    Ok(Shot { time, cpu: cpu + device_cpu, spins })
}

/// The result of a side, or that it panicked.
fn join<T>(result: std::thread::Result<Result<T, BenchError>>) -> Result<T, BenchError> {
    result.unwrap_or_else(|_| Err(broken(OURS, "a side panicked")))
}

/// Tells the other side that this one has come to its end, however it came to it.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        // Relaxed: nothing else is read because of it.
        self.0.store(true, Ordering::Relaxed);
    }
}

/// How a side waits for the other.
#[derive(Clone, Copy)]
pub(crate) struct Wait<'a> {
    yields: bool,
    over: &'a AtomicBool,
}

impl Wait<'_> {
    /// Waits until `ready` says yes, and returns how often it said no.
    ///
    /// # Errors
    /// `ready` failed, or it took too long, or the other side has ended and `ready` still says no.
    #[inline(always)]
    pub(crate) fn until(
        self,
        mut ready: impl FnMut() -> Result<bool, BenchError>,
    ) -> Result<u64, BenchError> {
        let mut spins = 0u64;
        let mut looked: Option<Instant> = None;
        loop {
            // Read first: what the other side did before its end is seen by the `ready` that follows.
            let due = spins % u64::from(SPINS_A_LOOK) == u64::from(SPINS_A_LOOK) - 1;
            let over = due && self.over.load(Ordering::Acquire);
            if ready()? {
                return Ok(spins);
            }
            spins += 1;
            if due {
                if over {
                    return Err(broken(OURS, ENDED));
                }
                if looked.get_or_insert_with(Instant::now).elapsed() > PATIENCE {
                    return Err(broken(OURS, "the other side does not answer"));
                }
            }
            if self.yields {
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
        }
    }
}

/// Someone who can run a case.
enum Runner {
    /// Both sides in this process.
    Inside(Box<ends::Pair>),
    /// A program of ringtest.
    Ringtest(ringtest::Program),
}

/// A subject of a case, and what the rounds have found.
pub(crate) struct Entry {
    pub(crate) case: Case,
    pub(crate) name: String,
    runner: Runner,
    total: u64,
    samples: Vec<Sample>,
}

/// One round of one subject, an operation.
#[derive(Clone, Copy, Debug)]
struct Sample {
    time: f64,
    cpu: f64,
    /// Of ours and the peers in this process.
    spins: Option<f64>,
}

/// The subjects of `case`, ours first.
pub(crate) fn entries(case: Case, place: &Place) -> Result<Vec<Entry>, BenchError> {
    let mut runners: Vec<(String, Runner)> = Vec::new();
    for name in ends::names(case) {
        runners.push((name.to_owned(), Runner::Inside(ends::pair(case, name)?)));
    }
    if let Some(cpus) = place.cpus {
        for program in ringtest::programs(case, cpus) {
            runners.push((program.name().to_owned(), Runner::Ringtest(program)));
        }
    }
    runners.into_iter().map(|(name, runner)| Entry::new(case, name, runner, place)).collect()
}

impl Entry {
    /// Finds how many operations fill a shot.
    fn new(case: Case, name: String, runner: Runner, place: &Place) -> Result<Self, BenchError> {
        let mut entry = Self { case, name, runner, total: 1 << 12, samples: Vec::new() };
        loop {
            let took = entry.shoot(place)?.time;
            if took >= SHOT / 4 || entry.total >= 1 << 26 {
                let scale = SHOT.as_secs_f64() / took.as_secs_f64().max(1e-6);
                entry.total = ((entry.total as f64 * scale) as u64).clamp(1 << 10, 1 << 26);
                return Ok(entry);
            }
            entry.total *= 4;
        }
    }

    fn shoot(&mut self, place: &Place) -> Result<Shot, BenchError> {
        match &mut self.runner {
            Runner::Inside(pair) => pair.shoot(self.case, place, self.total),
            Runner::Ringtest(program) => program.shoot(place, self.total),
        }
    }

    /// Measures one round: its median shot.
    pub(crate) fn sample(&mut self, place: &Place) -> Result<(), BenchError> {
        let shots: Result<Vec<Shot>, _> = (0..SHOTS).map(|_| self.shoot(place)).collect();
        let shots = shots?;
        let total = self.total as f64;
        let middle = |of: fn(&Shot) -> f64| {
            let values: Vec<f64> = shots.iter().map(|shot| of(shot) / total).collect();
            Spread::of(&values).map_or(0.0, |spread| spread.median)
        };
        self.samples.push(Sample {
            time: middle(|shot| shot.time.as_nanos() as f64),
            cpu: middle(|shot| shot.cpu.as_nanos() as f64),
            spins: matches!(self.runner, Runner::Inside(_)).then(|| middle(|shot| shot.spins as f64)),
        });
        Ok(())
    }

    /// The rows of all rounds. The pinned CPU is the driver's.
    pub(crate) fn rows(&self, place: &Place, load: [Option<f64>; 2]) -> Vec<Row> {
        let row = |metric: &str, unit: &str, method: &str, of: fn(&Sample) -> Option<f64>| {
            let values: Option<Vec<f64>> = self.samples.iter().map(of).collect();
            let values = values?;
            let spread = Spread::of(&values)?;
            Some(Row {
                bench: super::NAME.to_owned(),
                case: self.case.to_string(),
                subject: self.name.clone(),
                metric: metric.to_owned(),
                unit: unit.to_owned(),
                median: spread.median,
                min: spread.min,
                max: spread.max,
                rounds: values.len() as u32,
                method: method.to_owned(),
                pinned_cpu: place.cpus.map(|cpus| cpus[0]),
                load,
            })
        };
        let cpu = match &self.runner {
            Runner::Inside(_) => "thread clock",
            Runner::Ringtest(_) => "process clock",
        };
        [
            row("rate", "ops/s", place.method(), |sample| Some(1e9 / sample.time)),
            row("time", "ns/op", place.method(), |sample| Some(sample.time)),
            row("cpu", "ns/op", cpu, |sample| Some(sample.cpu)),
            row("spins", "spins/op", "count", |sample| sample.spins),
        ]
        .into_iter()
        .flatten()
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_distinct() {
        let mut paths: Vec<String> = Case::all().iter().map(Case::to_string).collect();
        assert!(
            ["split/stream/batch1", "split/stream/batch32", "split/roundtrip"]
                .iter()
                .all(|path| paths.iter().any(|other| other == path))
        );
        let before = paths.len();
        paths.sort();
        paths.dedup();
        assert_eq!(paths.len(), before);
    }

    /// Every buffer of every pair comes back: the driver counts them, and both ends check what they see. On one
    /// CPU too.
    #[test]
    fn every_pair_moves_every_buffer() {
        let mut places = vec![Place { cpus: None, real_time: false }];
        // Two spinning threads need two CPUs; not real time, which other tests would pay for.
        places.extend(Place::choose().cpus.map(|cpus| Place { cpus: Some(cpus), real_time: false }));
        for place in &places {
            for case in Case::all() {
                for name in ends::names(case) {
                    let mut pair = ends::pair(case, name).unwrap();
                    // Not a multiple of the batch, and around the ring more than once.
                    for total in [1, 1_003] {
                        pair.shoot(case, place, total)
                            .unwrap_or_else(|error| panic!("{case} {name}: {error}"));
                    }
                }
            }
        }
    }

    #[test]
    fn a_side_that_fails_ends_the_other() {
        struct Fails;
        impl DeviceEnd for Fails {
            fn serve(&mut self, _total: u64, _wait: Wait<'_>) -> Result<(), BenchError> {
                Err(broken("nobody", "it does not want to"))
            }
        }
        struct Waits;
        impl DriverEnd for Waits {
            fn drive(&mut self, _total: u64, _case: Case, wait: Wait<'_>) -> Result<u64, BenchError> {
                wait.until(|| Ok(false))
            }
        }
        let place = Place { cpus: None, real_time: false };
        let error = shoot(&mut Waits, &mut Fails, Case::all()[0], &place, 1).unwrap_err();
        assert!(matches!(error, BenchError::Subject { subject: "nobody", .. }), "{error}");
    }
}
