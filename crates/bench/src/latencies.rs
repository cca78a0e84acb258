//! `paravane bench latencies`: what recording the latencies of requests costs.
//!
//! One thread plays driver and I/O thread ([`path`]); the whole path of a device is measured with
//! latencies on and off, in slices that alternate. The difference is paired: on of a slice less off
//! of its neighbour.
//!
//! | subject | |
//! |---|---|
//! | `off` | the path without latencies |
//! | `on` | the path with latencies |
//! | `recorder` | on less off |
//! | `clock` | one reading of the cycle counter |
//!
//! Instructions and readings of the clock are counted exactly, by single steps of a child process.
use crate::dma::timing::{Origin, cycles};
use crate::instructions::single_step::{self, Counts};
use crate::machine::{Pinned, load_average};
use crate::spread::Spread;
use crate::subject::Subject;
use crate::{BenchError, Options, Row};
use case::Case;
use path::{DevicePath, OFF, ON};
use std::hint::black_box;
use std::time::{Duration, Instant};

mod case;
mod path;

/// The name of this benchmark.
pub(crate) const NAME: &str = "latencies";
/// The notes below its table.
pub(crate) const NOTES: &[&str] = &[
    "off, on: the whole path of a device, from the available ring to the used ring, without latencies and with them. recorder: on less off, in pairs.",
    "disk: reads of 4 KiB from an image in memory. frames-out, frames-in: frames of 64 bytes to and from a generator. One thread, no notification, no system call.",
    "busy: the next batch is available when one is done. polled: polling finds each batch, and the queue runs dry after it.",
    "At 1 000 000 requests a second, 10 ns a request are 1 % of a CPU.",
    "instructions, clock-reads: counted by single steps. clock: one reading of the cycle counter.",
];

/// The difference of the subjects.
const RECORDER: &str = "recorder";
/// The fewest rounds.
const ROUNDS: u32 = 9;
/// Slices of each subject in one round. The median counts.
const SLICES: usize = 21;
/// Length of a slice.
const SLICE: Duration = Duration::from_micros(300);
/// Readings of the clock in a slice.
const READINGS: u32 = 10_000;

/// Requests in a batch of the case with this path; `None` if there is no such case.
pub(crate) fn batch(path: &str) -> Option<u16> {
    Case::parse(path).map(|case| case.batch)
}

/// Makes a subject.
///
/// # Errors
/// No such case or subject exists, or it cannot be set up.
pub(crate) fn make(path: &str, name: &str) -> Result<Box<dyn Subject>, BenchError> {
    let case = Case::parse(path).ok_or_else(|| BenchError::NoCase(path.to_owned()))?;
    let mut device = DevicePath::new(case)?;
    device.record(name == ON);
    Ok(Box::new(device))
}

/// A case with its samples.
struct Entry {
    case: Case,
    path: DevicePath,
    batches: u32,
    /// Nanoseconds per request off, on, and of the recorder: a value for each round.
    times: [Vec<f64>; 3],
    /// Off and on.
    counts: Option<[Counts; 2]>,
}

impl Entry {
    /// Finds the number of batches that fill a slice.
    fn new(case: Case, slice: Duration) -> Result<Self, BenchError> {
        let mut path = DevicePath::new(case)?;
        let mut batches = 16;
        loop {
            let start = Instant::now();
            black_box(path.run(batches)?);
            let took = start.elapsed();
            if took >= slice / 8 || batches >= 1 << 20 {
                let scale = slice.as_secs_f64() / took.as_secs_f64().max(1e-9);
                let batches = ((f64::from(batches) * scale) as u32).max(1);
                return Ok(Self { case, path, batches, times: Default::default(), counts: None });
            }
            batches *= 2;
        }
    }

    /// Nanoseconds per request of one slice.
    fn slice(&mut self, on: bool) -> Result<f64, BenchError> {
        self.path.record(on);
        let start = Instant::now();
        black_box(self.path.run(black_box(self.batches))?);
        let took = start.elapsed();
        Ok(took.as_nanos() as f64 / (f64::from(self.batches) * f64::from(self.case.batch)))
    }

    /// Measures one round: the median slice of each, and the median difference of neighbours.
    fn sample(&mut self) -> Result<(), BenchError> {
        let mut slices: [Vec<f64>; 3] = Default::default();
        for number in 0..SLICES {
            // The first one alternates.
            let first = number % 2 == 0;
            let mut pair = [0.0; 2];
            for on in [first, !first] {
                pair[usize::from(on)] = self.slice(on)?;
            }
            let [off, on] = pair;
            slices.iter_mut().zip([off, on, on - off]).for_each(|(values, value)| values.push(value));
        }
        for (times, slices) in self.times.iter_mut().zip(&slices) {
            times.extend(Spread::of(slices).map(|spread| spread.median));
        }
        Ok(())
    }

    fn rows(&self, origin: &Origin<'_>) -> Vec<Row> {
        let path = self.case.to_string();
        let mut rows = Vec::new();
        for (at, name) in [OFF, ON, RECORDER].into_iter().enumerate() {
            rows.extend(origin.row(&path, name, ("time", "ns/request", "clock"), &self.times[at]));
            let Some([off, on]) = self.counts else { continue };
            let of = |value: fn(&Counts) -> f64| match name {
                OFF => value(&off),
                ON => value(&on),
                _ => value(&on) - value(&off),
            };
            for (metric, unit, value) in [
                ("instructions", "instr/request", of(|counts| counts.instructions)),
                ("clock-reads", "reads/request", of(|counts| counts.clock_reads)),
            ] {
                rows.extend(origin.row(&path, name, (metric, unit, "single-step"), &[value]));
            }
        }
        rows
    }
}

/// Runs the cases that `options` select.
pub(crate) fn run(options: &Options, progress: &mut dyn FnMut(&str)) -> Result<Vec<Row>, BenchError> {
    let filter = options.filter.as_deref().unwrap_or("");
    let cases: Vec<Case> = Case::all().into_iter().filter(|case| case.to_string().contains(filter)).collect();
    if cases.is_empty() {
        return Err(BenchError::NoCase(filter.to_owned()));
    }
    measure(&cases, options.rounds.max(ROUNDS), SLICE, progress)
}

fn measure(
    cases: &[Case],
    rounds: u32,
    slice: Duration,
    progress: &mut dyn FnMut(&str),
) -> Result<Vec<Row>, BenchError> {
    let load_start = load_average();
    let pinned = Pinned::here();
    let mut entries = Vec::new();
    let mut counts = true;
    for &case in cases {
        progress(&format!("{case}: counting instructions"));
        let mut entry = Entry::new(case, slice)?;
        let path = case.to_string();
        let count = |name| single_step::counts(&path, case.batch, name);
        if counts {
            match count(OFF).and_then(|off| Ok([off, count(ON)?])) {
                Ok(both) => entry.counts = Some(both),
                Err(error) => {
                    progress(&format!("no single steps ({error}); instructions are not counted"));
                    counts = false;
                }
            }
        }
        entries.push(entry);
    }
    let mut readings = Vec::new();
    for number in 1..=rounds {
        for entry in &mut entries {
            progress(&format!("round {number} of {rounds}: {}", entry.case));
            entry.sample()?;
        }
        readings.extend(reading());
    }
    for entry in &entries {
        entry.path.check()?;
    }
    let origin = Origin {
        bench: NAME,
        counter: "single-step",
        pinned_cpu: pinned.as_ref().map(Pinned::cpu),
        load: [load_start, load_average()],
    };
    let mut rows: Vec<Row> = entries.iter().flat_map(|entry| entry.rows(&origin)).collect();
    rows.extend(origin.row("clock", "clock", ("time", "ns/reading", "clock"), &readings));
    Ok(rows)
}

/// Nanoseconds of one reading of the cycle counter; `None` if it is not known.
fn reading() -> Option<f64> {
    if cycles() == 0 {
        return None;
    }
    let slices: Vec<f64> = (0..SLICES)
        .map(|_| {
            let start = Instant::now();
            (0..READINGS).for_each(|_| {
                black_box(cycles());
            });
            start.elapsed().as_nanos() as f64 / f64::from(READINGS)
        })
        .collect();
    Spread::of(&slices).map(|spread| spread.median)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_moves_and_records_every_request() {
        for case in Case::all() {
            let mut path = DevicePath::new(case).unwrap();
            // More than two laps of the ring.
            let batches = 600 / u32::from(case.batch) + 1;
            let moved = batches * u32::from(case.batch);
            assert_eq!(path.run(batches).unwrap(), u64::from(moved), "{case}");
            path.check().unwrap();
            path.record(true);
            assert_eq!(path.run(batches).unwrap(), u64::from(moved), "{case}");
            assert_eq!(u32::from(path.position()), 2 * moved, "{case}");
            path.check().unwrap();
            assert_eq!(Case::parse(&case.to_string()), Some(case));
        }
        assert!(make("disk/busy/batch2", ON).is_err());
    }

    #[test]
    fn a_measurement_has_its_rows() {
        let case = Case::parse("disk/polled/batch8").unwrap();
        let rows = measure(&[case], 2, Duration::from_micros(20), &mut |_| {}).unwrap();
        let subjects: Vec<&str> = rows
            .iter()
            .filter(|row| row.case == case.to_string() && row.metric == "time")
            .map(|row| row.subject.as_str())
            .collect();
        assert_eq!(subjects, [OFF, ON, RECORDER]);
        assert!(rows.iter().all(|row| row.metric != "time" || row.rounds == 2));
    }
}
