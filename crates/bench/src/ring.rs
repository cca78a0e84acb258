//! `paravane bench ring`: cost of a descriptor chain on either side of a queue.
//!
//! Cases with **one thread** ([`Case`]): a layout, a side, descriptors per chain (1 or 4, one
//! buffer of 64 bytes; or those of a request that drivers send), direct or indirect, in order or
//! not, and a batch. One thread plays both
//! sides: the subject, and a script ([`scripted`]). The same rounds measure the script alone; its
//! cost is subtracted. Cases with **two threads** ([`stream`]) have a whole driver and a whole
//! device.
//!
//! One operation of one thread, for every subject:
//!
//! * Device side: take the chain with all descriptors (an indirect table through the subject's
//!   guest memory), read each address and length, and complete it with the bytes written. Per
//!   batch, publish and ask whether the driver wants an interrupt.
//! * Driver side: add the buffer. Per batch, publish, ask whether the device wants a kick, and take
//!   back buffers until none is used.
//!
//! Not included: the bytes of the buffers, notifications, refreshing the map of guest memory, and
//! cache misses between CPUs (both sides run on one CPU).
//!
//! [`Subject::run`] returns a sum. Device side: all addresses and lengths, plus one per wanted
//! interrupt. Driver side: all used lengths, plus one per wanted kick.
use crate::clock::thread_clock;
use crate::instructions::Counter;
use crate::machine::{Pinned, ThreadPlacement, load_average};
use crate::options::MIN_ROUNDS;
use crate::spread::Spread;
use crate::subject::Subject;
use crate::{BenchError, Options, Row};
use std::hint::black_box;
use std::time::{Duration, Instant};

mod case;
mod device_side;
mod driver_side;
mod scripted;
pub(crate) mod stream;
mod subjects;
#[cfg(feature = "peers")]
mod virtio_driver;
#[cfg(feature = "peers")]
mod virtio_drivers;
#[cfg(feature = "peers")]
mod virtio_queue;

pub(crate) use case::{BUFFER, Case, QUEUE_SIZE, Shape, Side};
pub(crate) use scripted::{SCRIPT, ScriptedDevice};
pub(crate) use subjects::make;

/// The name of this benchmark.
pub(crate) const NAME: &str = "ring";
/// The notes below its table.
pub(crate) const NOTES: &[&str] = &[
    "A chain is one buffer of 64 bytes; blk: a disk's read of 4 KiB (16 B, 4 KiB, 1 B); net: a frame with its header apart (12 B, 1514 B); tso: 64 KiB to send in 18 segments. device, driver: the side of the queue that is measured. A script plays the other side on the same thread; its cost is subtracted.",
    "device: take the chain, read its descriptors, complete it; per batch, publish and decide on an interrupt.",
    "driver: add the buffer and take it back; per batch, publish and decide on a kick.",
    "Not included: the bytes of the buffers, notifications, cache misses between CPUs.",
    "A round is the median of 41 slices of 0.6 ms, so that preempted slices do not count.",
    "stream, roundtrip: driver and device spin on two CPUs; a ring of 256, no notifications. A peer plays its own side, paravane the other; ringtest plays both. spins: how often the driver found nothing used. cpu: of both sides.",
    "ringtest publishes each buffer, whatever the batch, and never asks whether to notify. paravane asks at each publication.",
];

/// Slices in one round of one subject.
///
/// The median slice stands for the round, so that preempted slices do not count.
const SLICES: u16 = 41;
/// Length of a slice: much less than a time slice of the scheduler.
const SLICE: Duration = Duration::from_micros(600);

/// A subject with its samples.
struct Entry {
    name: &'static str,
    subject: Box<dyn Subject>,
    batches: u32,
    samples: Vec<Sample>,
}

/// One round of one subject, per chain, script included.
#[derive(Clone, Copy, Debug, Default)]
struct Sample {
    time: f64,
    cpu: f64,
    instructions: Option<f64>,
}

impl Entry {
    /// Makes the subject and finds the number of batches that fill a slice.
    fn new(case: Case, name: &'static str, slice: Duration) -> Result<Self, BenchError> {
        let mut subject = make(case, name)?
            .ok_or_else(|| BenchError::Subject { subject: name, reason: format!("no case {case}") })?;
        let mut batches = 64u32;
        loop {
            let start = thread_clock()?;
            black_box(subject.run(black_box(batches))?);
            let took = thread_clock()?.saturating_sub(start);
            // Long enough to extrapolate.
            if took >= slice / 8 || batches >= 1 << 28 {
                let scale = slice.as_secs_f64() / took.as_secs_f64().max(1e-9);
                batches = ((f64::from(batches) * scale) as u32).max(1);
                return Ok(Self { name, subject, batches, samples: Vec::new() });
            }
            batches *= 2;
        }
    }

    /// Measures one round: the median slice, and the instructions of all slices.
    fn sample(&mut self, case: Case, counter: &mut Counter) -> Result<(), BenchError> {
        let Self { subject, batches, .. } = self;
        let before = subject.position();
        let mut times = [0.0; SLICES as usize];
        let mut cpus = [0.0; SLICES as usize];
        let chains = f64::from(*batches) * f64::from(case.batch);
        let ((), count) = counter.around(|| {
            for (time, cpu) in times.iter_mut().zip(&mut cpus) {
                let cpu_start = thread_clock()?;
                let start = Instant::now();
                black_box(subject.run(black_box(*batches))?);
                let took = start.elapsed();
                *time = took.as_nanos() as f64 / chains;
                *cpu = thread_clock()?.saturating_sub(cpu_start).as_nanos() as f64 / chains;
            }
            Ok(())
        })?;
        // Indices are modulo 2^16.
        let moved = (*batches as u16).wrapping_mul(SLICES).wrapping_mul(case.batch);
        if subject.position().wrapping_sub(before) != moved {
            return Err(BenchError::Subject {
                subject: self.name,
                reason: "its ring index has an unexpected value".to_owned(),
            });
        }
        let instructions = match count {
            Some(count) => Some(count as f64 / (chains * f64::from(SLICES))),
            None => counter.stepped(&case.to_string(), case.batch, self.name)?,
        };
        let middle = |values: &[f64]| Spread::of(values).map_or(0.0, |spread| spread.median);
        self.samples.push(Sample { time: middle(&times), cpu: middle(&cpus), instructions });
        Ok(())
    }
}

/// Runs the cases that `options` select.
pub(crate) fn run(options: &Options, progress: &mut dyn FnMut(&str)) -> Result<Vec<Row>, BenchError> {
    let (cases, streams) = selected(options)?;
    measure(&cases, &streams, options.rounds.max(MIN_ROUNDS), SLICE, progress)
}

/// Selects the cases with one thread and with two whose path contains the filter.
fn selected(options: &Options) -> Result<(Vec<Case>, Vec<stream::Case>), BenchError> {
    let filter = options.filter.as_deref().unwrap_or("");
    let cases: Vec<Case> = Case::all().into_iter().filter(|case| case.to_string().contains(filter)).collect();
    let streams: Vec<stream::Case> =
        stream::Case::all().into_iter().filter(|case| case.to_string().contains(filter)).collect();
    if cases.is_empty() && streams.is_empty() {
        return Err(BenchError::NoCase(filter.to_owned()));
    }
    Ok((cases, streams))
}

/// Measures `cases` and `streams`, interleaved.
///
/// Each round goes through all cases and their subjects.
fn measure(
    cases: &[Case],
    streams: &[stream::Case],
    rounds: u32,
    slice: Duration,
    progress: &mut dyn FnMut(&str),
) -> Result<Vec<Row>, BenchError> {
    let load_start = load_average();
    // Must precede pinning this thread to one CPU.
    let placement = ThreadPlacement::choose();
    if !streams.is_empty() && placement.cpus.is_none() {
        progress("one CPU: two threads yield to each other; ringtest is omitted");
    }
    let mut streaming = Vec::new();
    for &case in streams {
        progress(&format!("{case}: calibrating"));
        streaming.push(stream::entries(case, &placement)?);
    }
    let pinned = Pinned::here();
    let mut counter = Counter::choose(progress);
    let mut entries = Vec::new();
    for &case in cases {
        progress(&format!("{case}: calibrating"));
        let names = std::iter::once(SCRIPT).chain(subjects::names(case));
        let of_case: Result<Vec<Entry>, _> = names.map(|name| Entry::new(case, name, slice)).collect();
        entries.push((case, of_case?));
    }
    for number in 0..rounds {
        for (case, of_case) in &mut entries {
            let subjects = of_case.len();
            // The first subject after another case rotates.
            for turn in 0..subjects {
                let entry = &mut of_case[(turn + number as usize) % subjects];
                progress(&format!("round {} of {rounds}: {case}: {}", number + 1, entry.name));
                entry.sample(*case, &mut counter)?;
            }
        }
        for of_case in &mut streaming {
            let subjects = of_case.len();
            for turn in 0..subjects {
                let entry = &mut of_case[(turn + number as usize) % subjects];
                progress(&format!("round {} of {rounds}: {}: {}", number + 1, entry.case, entry.name));
                entry.sample(&placement)?;
            }
        }
    }
    let load = [load_start, load_average()];
    let pinned = pinned.as_ref().map(Pinned::cpu);
    let mut rows = Vec::new();
    for (case, of_case) in &entries {
        let [script, subjects @ ..] = of_case.as_slice() else { continue };
        for entry in subjects {
            let row = |metric: &str, unit: &str, method: &str, of: fn(&Sample) -> Option<f64>| {
                let values: Option<Vec<f64>> = entry
                    .samples
                    .iter()
                    .zip(&script.samples)
                    .map(|(subject, script)| Some(of(subject)? - of(script)?))
                    .collect();
                let values = values?;
                let spread = Spread::of(&values)?;
                Some(Row {
                    bench: NAME.to_owned(),
                    case: case.to_string(),
                    subject: entry.name.to_owned(),
                    metric: metric.to_owned(),
                    unit: unit.to_owned(),
                    median: spread.median,
                    min: spread.min,
                    max: spread.max,
                    rounds,
                    values,
                    method: method.to_owned(),
                    pinned_cpu: pinned,
                    load,
                })
            };
            rows.extend(row("time", "ns/chain", "clock", |sample| Some(sample.time)));
            rows.extend(row("instructions", "instr/chain", counter.method(), |sample| sample.instructions));
            rows.extend(row("cpu", "ns/chain", "thread clock", |sample| Some(sample.cpu)));
        }
    }
    rows.extend(streaming.iter().flatten().flat_map(|entry| entry.rows(&placement, load)));
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All subjects of a case move every chain and see the same values.
    #[test]
    fn every_subject_moves_every_chain() {
        for case in Case::all() {
            // More than two laps of the ring, and no multiple of a lap.
            let batches = 2 * u32::from(QUEUE_SIZE / case.batch) + 3;
            let mut sums = Vec::new();
            for name in subjects::names(case) {
                let mut subject = make(case, name).unwrap().unwrap();
                assert_eq!(subject.position(), 0, "{case} {name}");
                sums.push(subject.run(batches).unwrap());
                let moved = batches * u32::from(case.batch);
                assert_eq!(u32::from(subject.position()), moved, "{case} {name}");
                sums.push(subject.run(0).unwrap());
            }
            let expected = sums[0];
            for pair in sums.chunks(2) {
                assert_eq!(pair, [expected, 0], "{case}");
            }
            assert!(expected >= u64::from(batches) * u64::from(case.written()), "{case}");
        }
    }

    /// The script alone moves its index as far as with a subject.
    #[test]
    fn the_script_alone_does_the_same_work() {
        for case in Case::all() {
            let mut script = make(case, SCRIPT).unwrap().unwrap();
            script.run(7).unwrap();
            assert_eq!(script.position(), 7 * case.batch, "{case}");
        }
    }

    #[test]
    fn a_filter_selects_by_part_of_the_path() {
        let options = |filter: &str| Options {
            rounds: 1,
            filter: Some(filter.to_owned()),
            quick: false,
            ..Options::default()
        };
        let (device, streams) = selected(&options("split/device")).unwrap();
        assert_eq!((device.len(), streams.len()), (18, 0));
        assert_eq!(selected(&options("split/device/1desc/batch32")).unwrap().0.len(), 1);
        let (none, streams) = selected(&options("packed/stream/batch")).unwrap();
        assert_eq!((none.len(), streams.len()), (0, 2));
        assert!(
            matches!(selected(&options("triple")), Err(BenchError::NoCase(filter)) if filter == "triple")
        );
        let (all, streams) =
            selected(&Options { rounds: 1, filter: None, quick: false, ..Options::default() }).unwrap();
        assert_eq!((all.len(), streams.len()), (Case::all().len(), stream::Case::all().len()));
    }

    #[test]
    fn a_measurement_has_a_row_for_every_subject_and_metric() {
        let cases = [Case::parse("split/device/1desc/batch32").unwrap()];
        let rows = measure(&cases, &[], 2, Duration::from_micros(20), &mut |_| {}).unwrap();
        for name in subjects::names(cases[0]) {
            for metric in ["time", "cpu"] {
                let row = rows.iter().find(|row| row.subject == name && row.metric == metric).unwrap();
                assert_eq!((row.rounds, row.case.as_str()), (2, "split/device/1desc/batch32"));
                assert!(row.min <= row.median && row.median <= row.max);
            }
        }
        assert!(rows.iter().all(|row| row.subject != SCRIPT));
    }
}
