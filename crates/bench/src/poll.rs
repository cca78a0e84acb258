//! `paravane bench poll`: the cost of poll tokens that do not repeat.
//!
//! A driver that polls compares a token with the ring. A bare ring index repeats after 65,536
//! buffers, and polling at that moment misses them. "Introduce optional VirtIO ring wrap counters"
//! (Cristian Marussi, Linux, 2022) adds a wrap counter to the token and measures it with a program
//! that mostly spins. This benchmark measures the same and reports spins apart. The subjects are
//! four variants of the driver:
//!
//! | subject | token |
//! |---|---|
//! | `no-counter` | the ring index; no counter is compiled in |
//! | `counter-off` | the ring index; the wrap counter is compiled in and off |
//! | `wrap-counter` | 16 bits of ring index, 16 bits of wrap counter |
//! | `position` | a 64-bit position (the default) |
//!
//! Cases, for split and packed rings:
//!
//! * `get-used`: one thread takes back the 256 used buffers of a full ring, one per call.
//!   Only these calls are measured. `get-used/batch32` takes 32 per call.
//! * `stream/batch1`, `stream/batch32`: driver and device on two CPUs, as in
//!   [`crate::ring::stream`]. A driver that finds nothing used takes a token and polls with it.
//!   Spins are reported apart.
use crate::error::{broken, miscounted};
use crate::instructions::Counter;
use crate::machine::ThreadPlacement;
use crate::machine::{Pinned, load_average};
use crate::memory::Pages;
use crate::options::MIN_ROUNDS;
use crate::ring::stream::ends::{ParavaneDevice, layout};
use crate::ring::stream::{self, DriverEnd, Flow, Pair, Wait};
use crate::ring::{BUFFER, Case, QUEUE_SIZE, ScriptedDevice, Shape, Side};
use crate::spread::Spread;
use crate::subject::Subject;
use crate::{BenchError, Options, Row, published};
use paravane_ring::driver::poll::{Counting, NoCount, Poller, Position, WrapCount};
use paravane_ring::driver::{BufferId, DriverConfig, Queue, Used};
use paravane_ring::{DmaArea, QueueError, Segment, Smp};
use std::hint::black_box;
use std::time::{Duration, Instant};

/// The name of this benchmark.
pub(crate) const NAME: &str = "poll";
/// The variants, the one without a counter first.
pub(crate) const VARIANTS: [&str; 4] = ["no-counter", "counter-off", "wrap-counter", "position"];
/// The notes below its table.
pub(crate) const NOTES: &[&str] = &[
    "no-counter: the token is the ring index. counter-off: the same, with the wrap counter compiled in. wrap-counter: index and wrap counter, 16 bits each. position: 64 bits, the default.",
    "get-used: one thread takes back the 256 used buffers of a full ring. Nothing else is measured.",
    "stream: a driver and a device on two CPUs. spins: polls that found nothing.",
    "published: perf stat of virtio_test with a vhost thread, in an x86 guest; 'unconditional' is from the RFC of 1 February 2022. Most of it is spinning: do not compare.",
];

/// Laps of the ring in a round of `get-used`; the median lap counts.
const LAPS: usize = 2001;
/// Laps that a hardware counter counts.
const COUNTED_LAPS: u32 = 64;

/// The paths of the cases with one thread.
const SINGLE: [&str; 4] =
    ["split/get-used", "split/get-used/batch32", "packed/get-used", "packed/get-used/batch32"];

/// Whether this is the path of a case with one thread.
pub(crate) fn is_single(path: &str) -> bool {
    SINGLE.contains(&path)
}

/// Makes a subject of a case with one thread.
///
/// # Errors
/// No such variant exists, or the subject cannot be set up.
pub(crate) fn make(path: &str, variant: &str) -> Result<Box<dyn Subject>, BenchError> {
    Ok(match variant {
        "no-counter" => Box::new(GetUsed::<NoCount>::new(path, false)?),
        "counter-off" => Box::new(GetUsed::<WrapCount>::new(path, false)?),
        "wrap-counter" => Box::new(GetUsed::<WrapCount>::new(path, true)?),
        "position" => Box::new(GetUsed::<Position>::new(path, true)?),
        _ => return Err(broken("paravane", format_args!("no variant {variant}"))),
    })
}

/// A driver that takes back used buffers.
struct GetUsed<C: Counting> {
    queue: Queue<Smp, C>,
    /// The poller, if the variant counts.
    _poller: Option<Poller<Smp, C>>,
    script: ScriptedDevice,
    filled: bool,
    batched: bool,
    _pages: Pages,
}

impl<C: Counting> GetUsed<C> {
    fn new(path: &str, asked: bool) -> Result<Self, BenchError> {
        let (packed, batched) = (path.starts_with("packed"), path.ends_with("batch32"));
        let case = Case {
            packed,
            in_order: false,
            side: Side::Driver,
            shape: Shape::One,
            indirect: false,
            batch: QUEUE_SIZE,
        };
        let layout =
            DriverConfig::new(QUEUE_SIZE, 0, case.features()).map_err(|error| broken("paravane", error))?;
        let pages = Pages::new(layout.memory());
        let memory = DmaArea { area: pages.shared().area(), addr: pages.address() };
        let (mut queue, addresses) =
            Queue::<Smp, C>::lay_out(layout, memory).map_err(|error| broken("paravane", error))?;
        let poller =
            if asked { Some(queue.poller().map_err(|error| broken("paravane", error))?) } else { None };
        let script = ScriptedDevice::at(case, pages.shared(), pages.address(), addresses);
        Ok(Self { queue, _poller: poller, script, filled: false, batched, _pages: pages })
    }
}

/// Takes back one buffer; never inlined, so that all variants have the same loop.
#[inline(never)]
fn get_used<C: Counting>(queue: &mut Queue<Smp, C>) -> Result<Option<Used>, QueueError> {
    queue.pop_used()
}

/// Takes back a batch; see [`get_used`].
#[inline(never)]
fn get_batch<C: Counting>(queue: &mut Queue<Smp, C>, out: &mut [Used; 32]) -> Result<usize, QueueError> {
    queue.take_used(out)
}

impl<C: Counting> Subject for GetUsed<C> {
    fn run(&mut self, batches: u32) -> Result<u64, BenchError> {
        let mut sum = 0u64;
        for _ in 0..batches {
            self.ready()?;
            self.filled = false;
            let mut count = 0;
            if self.batched {
                let mut batch = [Used { id: BufferId(0), len: 0 }; 32];
                for _ in 0..QUEUE_SIZE / 32 {
                    let taken =
                        get_batch(&mut self.queue, &mut batch).map_err(|error| broken("paravane", error))?;
                    for used in &batch[..taken] {
                        sum = sum.wrapping_add(used.len.into());
                    }
                    count += taken;
                }
            } else {
                for _ in 0..QUEUE_SIZE {
                    let used = get_used(&mut self.queue).map_err(|error| broken("paravane", error))?;
                    let Some(used) = used else { break };
                    sum = sum.wrapping_add(used.len.into());
                    count += 1;
                }
            }
            if count != usize::from(QUEUE_SIZE) {
                return Err(miscounted("paravane", count, QUEUE_SIZE));
            }
        }
        Ok(sum)
    }

    fn ready(&mut self) -> Result<(), BenchError> {
        if !self.filled {
            for _ in 0..QUEUE_SIZE {
                let buffer = [Segment { addr: 0x10_0000, len: BUFFER as u32 }];
                self.queue.add(&[], &buffer).map_err(|error| broken("paravane", error))?;
            }
            self.queue.publish();
            self.script.serve();
            self.filled = true;
        }
        Ok(())
    }

    fn position(&self) -> u16 {
        self.script.available()
    }
}

/// A driver of a stream that polls with tokens, alone on its cache lines.
#[repr(align(128))]
struct PollingDriver<C: Counting> {
    queue: Queue<Smp, C>,
    _poller: Option<Poller<Smp, C>>,
}

/// Makes the ends of a stream.
fn pair(case: stream::Case, variant: &str) -> Result<Box<Pair>, BenchError> {
    match variant {
        "no-counter" => pair_of::<NoCount>(case, false),
        "counter-off" => pair_of::<WrapCount>(case, false),
        "wrap-counter" => pair_of::<WrapCount>(case, true),
        _ => pair_of::<Position>(case, true),
    }
}

fn pair_of<C: Counting>(case: stream::Case, asked: bool) -> Result<Box<Pair>, BenchError> {
    let layout = layout(case)?;
    let pages = Pages::new(layout.memory());
    let area = pages.shared().area();
    let (mut queue, addresses) = Queue::<Smp, C>::lay_out(layout, DmaArea { area, addr: 0 })
        .map_err(|error| broken("paravane", error))?;
    let poller = if asked { Some(queue.poller().map_err(|error| broken("paravane", error))?) } else { None };
    let device = ParavaneDevice::new(case, addresses, 0, area)?;
    Ok(Pair::new(PollingDriver { queue, _poller: poller }, device, pages))
}

impl<C: Counting> DriverEnd for PollingDriver<C> {
    fn drive(&mut self, total: u64, case: stream::Case, wait: Wait<'_>) -> Result<u64, BenchError> {
        let queue = &mut self.queue;
        let (batch, outstanding) = (u64::from(case.batch()), u64::from(case.outstanding()));
        let buffer = [Segment { addr: 0x10_0000, len: BUFFER as u32 }];
        let (mut added, mut taken, mut spins) = (0u64, 0u64, 0u64);
        while taken < total {
            let next = batch.min(total - added);
            let full = next == 0 || added - taken + next > outstanding;
            if !full {
                for _ in 0..next {
                    queue.add(&[], &buffer).map_err(|error| broken("paravane", error))?;
                }
                black_box(queue.publish());
                added += next;
            }
            let before = taken;
            for _ in 0..batch {
                let Some(used) = queue.pop_used().map_err(|error| broken("paravane", error))? else { break };
                black_box(used);
                taken += 1;
            }
            if full && taken == before {
                let token = queue.enable_interrupts();
                spins += wait.until(|| Ok(queue.poll(token)))?;
            }
        }
        Ok(spins)
    }
}

/// One figure over all rounds.
struct Figure {
    case: String,
    variant: &'static str,
    metric: &'static str,
    unit: &'static str,
    method: &'static str,
    pinned_cpu: Option<usize>,
    values: Vec<f64>,
}

impl Figure {
    fn row(&self, rounds: u32, load: [Option<f64>; 2]) -> Option<Row> {
        // A figure that is missing in a round is omitted.
        let spread = Spread::of(&self.values).filter(|_| self.values.len() == rounds as usize)?;
        Some(Row {
            bench: NAME.to_owned(),
            case: self.case.clone(),
            subject: self.variant.to_owned(),
            metric: self.metric.to_owned(),
            unit: self.unit.to_owned(),
            median: spread.median,
            min: spread.min,
            max: spread.max,
            rounds,
            values: self.values.clone(),
            method: self.method.to_owned(),
            pinned_cpu: self.pinned_cpu,
            load,
        })
    }
}

/// Runs the cases that `options` select.
pub(crate) fn run(options: &Options, progress: &mut dyn FnMut(&str)) -> Result<Vec<Row>, BenchError> {
    let filter = options.filter.as_deref().unwrap_or("");
    let singles: Vec<&str> = SINGLE.into_iter().filter(|path| path.contains(filter)).collect();
    let streams: Vec<stream::Case> = stream::Case::all()
        .into_iter()
        .filter(|case| !case.in_order && case.flow != Flow::RoundTrip && case.to_string().contains(filter))
        .collect();
    let mut published = published::wrap_counters::rows();
    published.retain(|row| row.case.contains(filter));
    if singles.is_empty() && streams.is_empty() && published.is_empty() {
        return Err(BenchError::NoCase(filter.to_owned()));
    }
    let rounds = options.rounds.max(MIN_ROUNDS);
    let mut rows = measure(&singles, &streams, rounds, LAPS, 200_000, progress)?;
    rows.extend(published);
    Ok(rows)
}

/// Measures all cases and variants, interleaved.
///
/// A run of a stream moves `total` buffers.
fn measure(
    singles: &[&str],
    streams: &[stream::Case],
    rounds: u32,
    laps: usize,
    total: u64,
    progress: &mut dyn FnMut(&str),
) -> Result<Vec<Row>, BenchError> {
    let load_start = load_average();
    // Must precede pinning this thread to one CPU.
    let placement = ThreadPlacement::choose();
    let pinned = Pinned::here();
    let pinned_cpu = pinned.as_ref().map(Pinned::cpu);
    let mut counter = Counter::choose(progress);
    let mut figures: Vec<Figure> = Vec::new();
    let mut note = |case: &str, variant, (metric, unit, method), pinned_cpu, value: f64| match figures
        .iter_mut()
        .find(|f| f.case == case && f.variant == variant && f.metric == metric)
    {
        Some(figure) => figure.values.push(value),
        None => figures.push(Figure {
            case: case.to_owned(),
            variant,
            metric,
            unit,
            method,
            pinned_cpu,
            values: vec![value],
        }),
    };
    let mut stepped: Vec<((&str, &str), f64)> = Vec::new();
    let mut alone = Vec::new();
    for &path in singles {
        for variant in VARIANTS {
            alone.push((path, variant, make(path, variant)?));
        }
    }
    let mut pairs = Vec::new();
    for &case in streams {
        for variant in VARIANTS {
            pairs.push((case, variant, pair(case, variant)?));
        }
    }
    for number in 1..=rounds {
        for turn in 0..alone.len() {
            // The first variant of a case rotates.
            let turn = turn / VARIANTS.len() * VARIANTS.len() + (turn + number as usize) % VARIANTS.len();
            let (path, variant, subject) = &mut alone[turn];
            progress(&format!("round {number} of {rounds}: {path}: {variant}"));
            let time = lap_time(&mut **subject, laps)?;
            note(path, variant, ("time", "ns/buffer", "clock"), pinned_cpu, time);
            // Single steps are slow and repeat exactly: count them once.
            let key = (*path, *variant);
            let count = match stepped.iter().find(|(known, _)| *known == key) {
                Some((_, count)) => Some(*count),
                None => instructions(&mut **subject, &mut counter, path, variant)?,
            };
            if let Some(count) = count {
                note(path, variant, ("instructions", "instr/buffer", counter.method()), pinned_cpu, count);
                if matches!(counter, Counter::SingleStep) && number == 1 {
                    stepped.push((key, count));
                }
            }
        }
        for turn in 0..pairs.len() {
            let turn = turn / VARIANTS.len() * VARIANTS.len() + (turn + number as usize) % VARIANTS.len();
            let (case, variant, pair) = &mut pairs[turn];
            progress(&format!("round {number} of {rounds}: {case}: {variant}"));
            let runs: Result<Vec<_>, _> = (0..5).map(|_| pair.run_once(*case, &placement, total)).collect();
            let mut runs = runs?;
            runs.sort_by_key(|run| run.time);
            let run = runs[runs.len() / 2];
            let path = case.to_string();
            let cpu = placement.cpus.map(|cpus| cpus[0]);
            let nanos = |time: Duration| time.as_nanos() as f64 / total as f64;
            note(&path, variant, ("time", "ns/buffer", placement.method()), cpu, nanos(run.time));
            note(&path, variant, ("cpu", "ns/buffer", "thread clock"), cpu, nanos(run.cpu));
            note(&path, variant, ("spins", "spins/buffer", "count"), cpu, run.spins as f64 / total as f64);
        }
    }
    let load = [load_start, load_average()];
    // Sort by case and variant, not by the order of the first round.
    let order = |figure: &Figure| VARIANTS.iter().position(|variant| *variant == figure.variant);
    let mut rows = Vec::new();
    let paths = singles.iter().map(|path| (*path).to_owned()).chain(streams.iter().map(ToString::to_string));
    for path in paths {
        let mut of_case: Vec<&Figure> = figures.iter().filter(|figure| figure.case == path).collect();
        of_case.sort_by_key(|figure| order(figure));
        rows.extend(of_case.iter().filter_map(|figure| figure.row(rounds, load)));
    }
    Ok(rows)
}

/// The median lap, in nanoseconds per buffer, without reading the clock.
fn lap_time(subject: &mut dyn Subject, laps: usize) -> Result<f64, BenchError> {
    let mut times = Vec::with_capacity(laps);
    let mut empty = Vec::with_capacity(laps);
    for _ in 0..laps {
        subject.ready()?;
        let start = Instant::now();
        black_box(subject.run(black_box(1))?);
        times.push(start.elapsed().as_nanos() as f64);
        let start = Instant::now();
        black_box(());
        empty.push(start.elapsed().as_nanos() as f64);
    }
    let middle = |values: &[f64]| Spread::of(values).map_or(0.0, |spread| spread.median);
    Ok((middle(&times) - middle(&empty)) / f64::from(QUEUE_SIZE))
}

/// Instructions per buffer that is taken back.
fn instructions(
    subject: &mut dyn Subject,
    counter: &mut Counter,
    path: &str,
    variant: &str,
) -> Result<Option<f64>, BenchError> {
    let mut total = 0;
    for _ in 0..COUNTED_LAPS {
        subject.ready()?;
        match counter.around(|| subject.run(black_box(1)))? {
            (_, Some(count)) => total += count,
            (_, None) => return counter.stepped(path, QUEUE_SIZE, variant),
        }
    }
    Ok(Some(total as f64 / f64::from(COUNTED_LAPS * u32::from(QUEUE_SIZE))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_variant_takes_back_every_buffer() {
        for path in SINGLE {
            let sums = VARIANTS.map(|variant| {
                let mut subject = make(path, variant).unwrap();
                subject.ready().unwrap();
                let sum = subject.run(3).unwrap();
                assert_eq!(subject.position(), 3 * QUEUE_SIZE, "{path} {variant}");
                sum
            });
            assert_eq!(sums, [3 * u64::from(QUEUE_SIZE) * BUFFER as u64; 4], "{path}");
        }
        assert!(make(SINGLE[0], "none").is_err());
    }

    #[test]
    fn every_polling_stream_moves_every_buffer() {
        let yielding = ThreadPlacement { cpus: None, real_time: false };
        for case in stream::Case::all().into_iter().filter(|case| !case.in_order) {
            for variant in VARIANTS {
                let mut pair = pair(case, variant).unwrap();
                for total in [1, 1_003] {
                    pair.run_once(case, &yielding, total)
                        .unwrap_or_else(|error| panic!("{case} {variant}: {error}"));
                }
            }
        }
    }

    #[test]
    fn a_measurement_has_its_rows() {
        let streams = [stream::Case { packed: true, in_order: false, flow: Flow::Stream(32) }];
        let rows = measure(&["split/get-used"], &streams, 2, 3, 500, &mut |_| {}).unwrap();
        for (case, metric) in [
            ("split/get-used", "time"),
            ("packed/stream/batch32", "time"),
            ("packed/stream/batch32", "spins"),
        ] {
            let variants: Vec<&str> = rows
                .iter()
                .filter(|row| row.case == case && row.metric == metric)
                .map(|row| row.subject.as_str())
                .collect();
            assert_eq!(variants, VARIANTS, "{case} {metric}");
        }
    }
}
