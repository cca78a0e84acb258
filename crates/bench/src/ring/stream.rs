//! Two threads on two CPUs: a driver streams buffers to a device.
//!
//! ```text
//! driver, on one CPU                              device, on another
//! while fewer than `outstanding`: add, publish    while available: take, complete, publish
//! take back what is used; nothing: wait           nothing: wait
//! ```
//!
//! The work is that of Linux's `tools/virtio/ringtest`: a ring of 256, one descriptor per buffer,
//! no notifications, no data. A **stream** keeps as many buffers outstanding as the ring holds, and
//! publishes each batch. A **round trip** has one outstanding. An operation is a buffer that is
//! added, used and taken back. Its time is wall time from the first buffer added to the last one
//! taken back.
//!
//! A side waits by spinning; with one CPU, by yielding. ringtest cannot yield, so it is omitted
//! then. A run that takes longer than ten seconds is an error.
use crate::machine::ThreadPlacement;
use crate::spread::Spread;
use crate::{BenchError, Row};
use std::time::Duration;

mod case;
pub(crate) mod ends;
#[cfg(feature = "peers")]
mod peer_ends;
pub(crate) mod ringtest;
mod run;
mod subjects;

pub(crate) use case::{Case, Flow};
pub(crate) use run::{DeviceEnd, DriverEnd, Pair, RunTimes, Wait};

/// Intended length of a run: long beside the start of two threads.
const RUN_TIME: Duration = Duration::from_millis(25);
/// Runs in one round of one subject; the median run stands for the round.
const RUNS: usize = 5;
/// A way to run a case.
enum Runner {
    /// Both sides in this process.
    Inside(Box<Pair>),
    /// A program of ringtest.
    Ringtest(ringtest::Program),
}

/// A subject of a case with its samples.
pub(crate) struct Entry {
    pub(crate) case: Case,
    pub(crate) name: String,
    runner: Runner,
    total: u64,
    samples: Vec<Sample>,
}

/// One round of one subject, per operation.
#[derive(Clone, Copy, Debug)]
struct Sample {
    time: f64,
    cpu: f64,
    /// Of subjects in this process.
    spins: Option<f64>,
}

/// The subjects of `case`, `paravane` first.
pub(crate) fn entries(case: Case, placement: &ThreadPlacement) -> Result<Vec<Entry>, BenchError> {
    let mut runners: Vec<(String, Runner)> = Vec::new();
    for name in subjects::names(case) {
        runners.push((name.to_owned(), Runner::Inside(subjects::pair(case, name)?)));
    }
    if let Some(cpus) = placement.cpus {
        for program in ringtest::programs(case, cpus) {
            runners.push((program.name().to_owned(), Runner::Ringtest(program)));
        }
    }
    runners.into_iter().map(|(name, runner)| Entry::new(case, name, runner, placement)).collect()
}

impl Entry {
    /// Makes a subject and finds the number of operations that fill a run.
    fn new(
        case: Case,
        name: String,
        runner: Runner,
        placement: &ThreadPlacement,
    ) -> Result<Self, BenchError> {
        let mut entry = Self { case, name, runner, total: 1 << 12, samples: Vec::new() };
        loop {
            let took = entry.run_once(placement)?.time;
            if took >= RUN_TIME / 4 || entry.total >= 1 << 26 {
                let scale = RUN_TIME.as_secs_f64() / took.as_secs_f64().max(1e-6);
                entry.total = ((entry.total as f64 * scale) as u64).clamp(1 << 10, 1 << 26);
                return Ok(entry);
            }
            entry.total *= 4;
        }
    }

    fn run_once(&mut self, placement: &ThreadPlacement) -> Result<RunTimes, BenchError> {
        match &mut self.runner {
            Runner::Inside(pair) => pair.run_once(self.case, placement, self.total),
            Runner::Ringtest(program) => program.run_once(placement, self.total),
        }
    }

    /// Measures one round: its median run.
    pub(crate) fn sample(&mut self, placement: &ThreadPlacement) -> Result<(), BenchError> {
        let runs: Result<Vec<RunTimes>, _> = (0..RUNS).map(|_| self.run_once(placement)).collect();
        let runs = runs?;
        let total = self.total as f64;
        let middle = |of: fn(&RunTimes) -> f64| {
            let values: Vec<f64> = runs.iter().map(|run| of(run) / total).collect();
            Spread::of(&values).map_or(0.0, |spread| spread.median)
        };
        self.samples.push(Sample {
            time: middle(|run| run.time.as_nanos() as f64),
            cpu: middle(|run| run.cpu.as_nanos() as f64),
            spins: matches!(self.runner, Runner::Inside(_)).then(|| middle(|run| run.spins as f64)),
        });
        Ok(())
    }

    /// The rows of all rounds. The pinned CPU is the driver's.
    pub(crate) fn rows(&self, placement: &ThreadPlacement, load: [Option<f64>; 2]) -> Vec<Row> {
        let row = |metric: &str, unit: &str, method: &str, of: fn(&Sample) -> Option<f64>| {
            let values: Option<Vec<f64>> = self.samples.iter().map(of).collect();
            let values = values?;
            let spread = Spread::of(&values)?;
            Some(Row {
                bench: "ring".to_owned(),
                case: self.case.to_string(),
                subject: self.name.clone(),
                metric: metric.to_owned(),
                unit: unit.to_owned(),
                median: spread.median,
                min: spread.min,
                max: spread.max,
                rounds: values.len() as u32,
                values,
                method: method.to_owned(),
                pinned_cpu: placement.cpus.map(|cpus| cpus[0]),
                load,
            })
        };
        let cpu = match &self.runner {
            Runner::Inside(_) => "thread clock",
            Runner::Ringtest(_) => "process clock",
        };
        [
            row("rate", "ops/s", placement.method(), |sample| Some(1e9 / sample.time)),
            row("time", "ns/op", placement.method(), |sample| Some(sample.time)),
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

    /// Every buffer of every pair comes back, on two CPUs and on one.
    #[test]
    fn every_pair_moves_every_buffer() {
        let mut placements = vec![ThreadPlacement { cpus: None, real_time: false }];
        // Two spinning threads need two CPUs. Real time would block other tests.
        placements.extend(
            ThreadPlacement::choose().cpus.map(|cpus| ThreadPlacement { cpus: Some(cpus), real_time: false }),
        );
        for placement in &placements {
            for case in Case::all() {
                for name in subjects::names(case) {
                    let mut pair = subjects::pair(case, name).unwrap();
                    // No multiple of the batch, and more than a lap of the ring.
                    for total in [1, 1_003] {
                        pair.run_once(case, placement, total)
                            .unwrap_or_else(|error| panic!("{case} {name}: {error}"));
                    }
                }
            }
        }
    }
}
