//! One thread or two, in one address space or two.
//!
//! `threadsT/spacesS/WORK`: each thread has a handle, sixteen ranges and a CPU. The rate is that of
//! all threads, the time that of one access of one thread. Each round allocates new memory, and the
//! threads swap halves: the pages that a thread gets decide on conflicts in the caches.
//!
//! Runs of one thread and of two alternate. `scaling` is the rate of two relative to one in the
//! same round.
use super::fixture::Fixture;
use super::ops::{Ops, PAGE, Work, works};
use super::shape::{IOVA, Shape};
use super::subjects::{subject, translated};
use super::timing::{BATCH, Origin};
use crate::clock::thread_clock;
use crate::error::broken;
use crate::machine::ThreadPlacement;
use crate::machine::{Pinned, RealTime};
use crate::spread::Spread;
use crate::subject::{PARAVANE, Subject};
use crate::{BenchError, Row};
use std::fmt;
use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

/// Intended length of a run: long beside the start of the threads.
pub(super) const RUN_TIME: Duration = Duration::from_millis(4);
/// Runs in one round of one subject; the median run stands for the round.
const RUNS: usize = 9;
/// Shape of each address space.
const SHAPE: Shape = Shape { regions: 1, mappings: 256 };

/// Number of threads and address spaces, and the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Case {
    threads: usize,
    spaces: usize,
    work: Work,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "threads{}/spaces{}/{}", self.threads, self.spaces, self.work)
    }
}

impl Case {
    /// Every combination.
    pub(super) fn all() -> Vec<Self> {
        works()
            .flat_map(|work| [(1, 1), (2, 1), (2, 2)].map(|(threads, spaces)| Self { threads, spaces, work }))
            .collect()
    }

    /// Whether a run without a filter includes it.
    pub(super) fn default(self) -> bool {
        matches!(self.work, Work::Read(64) | Work::Write(64) | Work::Write(4096) | Work::Mix)
    }

    /// The subjects. `memcpy` shows how much the two CPUs slow each other down.
    fn subjects() -> Vec<&'static str> {
        let mut names = vec!["memcpy", PARAVANE, "paravane/iova+log", "paravane/mutex", "paravane/rwlock"];
        if cfg!(feature = "peers") {
            names.extend(["vm-memory/bitmap", "vm-memory/iommu"]);
        }
        names
    }

    /// The accesses of one thread, in the first or second half of the addresses.
    fn ops(self, name: &str, half: usize) -> Ops {
        let first = if translated(name) { IOVA } else { 0 };
        let size = SHAPE.span() / 2;
        debug_assert!(size >= self.work.longest() as u64 + PAGE);
        Ops::new(self.work, false, first + half as u64 * size, size)
    }
}

/// A subject of one kind of work, with its cases.
pub(super) struct Group {
    pub(super) work: Work,
    pub(super) name: &'static str,
    entries: Vec<Entry>,
}

/// A subject of a case, and what the rounds have found.
struct Entry {
    case: Case,
    name: &'static str,
    members: Vec<Box<dyn Subject + Send>>,
    batches: u32,
    /// Time and CPU time of the runs of this round.
    runs: Vec<[Duration; 2]>,
    samples: Vec<[f64; 3]>,
}

/// The address spaces of one round.
pub(super) struct Fixtures([Fixture; 2]);

impl Fixtures {
    pub(super) fn new() -> Result<Self, BenchError> {
        Ok(Self([Fixture::touched(SHAPE)?, Fixture::touched(SHAPE)?]))
    }
}

/// The subjects of `cases`, by kind of work.
pub(super) fn groups(
    cases: &[Case],
    placement: &ThreadPlacement,
    run: Duration,
    progress: &mut dyn FnMut(&str),
) -> Result<Vec<Vec<Group>>, BenchError> {
    if cases.is_empty() {
        return Ok(Vec::new());
    }
    if placement.cpus.is_none() {
        progress("one CPU: cases with two threads are omitted");
    }
    let fixtures = Fixtures::new()?;
    let can = |case: &&Case| case.threads == 1 || placement.cpus.is_some();
    let mut works: Vec<Work> = cases.iter().filter(can).map(|case| case.work).collect();
    works.dedup();
    let group = |work: Work, name| {
        let of_work = cases.iter().filter(can).filter(|case| case.work == work);
        let entries = of_work.map(|&case| Entry::new(case, name, &fixtures, placement, run));
        Ok(Group { work, name, entries: entries.collect::<Result<_, BenchError>>()? })
    };
    works
        .into_iter()
        .map(|work| {
            progress(&format!("{work}: calibrating"));
            Case::subjects().into_iter().map(|name| group(work, name)).collect()
        })
        .collect()
}

impl Group {
    /// Switches to the memory of round `number`.
    pub(super) fn enter(&mut self, fixtures: &Fixtures, number: usize) -> Result<(), BenchError> {
        self.entries.iter_mut().try_for_each(|entry| entry.enter(fixtures, number))
    }

    /// Measures one round.
    pub(super) fn sample(&mut self, placement: &ThreadPlacement) -> Result<(), BenchError> {
        for _ in 0..RUNS {
            for entry in &mut self.entries {
                let run = entry.run_once(placement)?;
                entry.runs.push(run);
            }
        }
        self.entries.iter_mut().for_each(Entry::end_round);
        Ok(())
    }

    /// The rows of all rounds.
    pub(super) fn rows(&self, placement: &ThreadPlacement, origin: &Origin<'_>) -> Vec<Row> {
        let one = self.entries.iter().find(|entry| entry.case.threads == 1);
        let scaling = |entry: &Entry| {
            let one = one.filter(|_| entry.case.threads > 1)?;
            let rates: Vec<f64> =
                entry.samples.iter().zip(&one.samples).map(|(two, one)| two[0] / one[0]).collect();
            origin.row(
                &entry.case.to_string(),
                self.name,
                ("scaling", "times one thread", placement.method()),
                &rates,
            )
        };
        self.entries
            .iter()
            .flat_map(|entry| entry.rows(placement, origin).into_iter().chain(scaling(entry)))
            .collect()
    }
}

impl Entry {
    fn new(
        case: Case,
        name: &'static str,
        fixtures: &Fixtures,
        placement: &ThreadPlacement,
        run: Duration,
    ) -> Result<Self, BenchError> {
        let mut entry =
            Self { case, name, members: Vec::new(), batches: 4, runs: Vec::new(), samples: Vec::new() };
        entry.enter(fixtures, 0)?;
        loop {
            let [took, _] = entry.run_once(placement)?;
            if took >= run / 4 || entry.batches >= 1 << 24 {
                let scale = run.as_secs_f64() / took.as_secs_f64().max(1e-6);
                entry.batches = ((f64::from(entry.batches) * scale) as u32).max(1);
                return Ok(entry);
            }
            entry.batches *= 4;
        }
    }

    /// Switches to the memory of round `number`.
    fn enter(&mut self, fixtures: &Fixtures, number: usize) -> Result<(), BenchError> {
        let case = self.case;
        let members: Result<Vec<_>, _> = (0..case.threads)
            .map(|thread| {
                let fixture = &fixtures.0[thread % case.spaces];
                subject(self.name, fixture, case.ops(self.name, (thread + number) % 2), case.work.longest())
            })
            .collect();
        self.members = members?;
        Ok(())
    }

    /// Runs all threads at once: the time of the slowest one, and the sum of CPU times.
    fn run_once(&mut self, placement: &ThreadPlacement) -> Result<[Duration; 2], BenchError> {
        let start = Barrier::new(self.members.len());
        let batches = self.batches;
        let run = |subject: &mut dyn Subject, thread: usize| -> Result<[Duration; 2], BenchError> {
            let pinned = placement.cpus.map(|cpus| Pinned::to(cpus[thread]));
            let held = if placement.real_time { RealTime::enter() } else { None };
            start.wait();
            if matches!(pinned, Some(None)) {
                return Err(broken(PARAVANE, "the system refused a CPU"));
            }
            let (began, cpu) = (Instant::now(), thread_clock()?);
            black_box(subject.run(black_box(batches))?);
            let took = [began.elapsed(), thread_clock()?.saturating_sub(cpu)];
            drop(held);
            Ok(took)
        };
        let results: Vec<Result<[Duration; 2], BenchError>> = std::thread::scope(|scope| {
            let run = &run;
            let threads: Vec<_> = (self.members.iter_mut().enumerate())
                .map(|(thread, subject)| scope.spawn(move || run(&mut **subject, thread)))
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|_| Err(broken(PARAVANE, "a thread panicked"))))
                .collect()
        });
        let mut most = [Duration::ZERO; 2];
        for result in results {
            let [took, cpu] = result?;
            most = [most[0].max(took), most[1] + cpu];
        }
        Ok(most)
    }

    /// Ends a round: its median run stands for it.
    fn end_round(&mut self) {
        let runs = std::mem::take(&mut self.runs);
        let (threads, accesses) = (self.case.threads as f64, f64::from(self.batches) * f64::from(BATCH));
        let middle = |of: &dyn Fn(&[Duration; 2]) -> f64| {
            let values: Vec<f64> = runs.iter().map(of).collect();
            Spread::of(&values).map_or(0.0, |spread| spread.median)
        };
        let time = middle(&|[took, _]| took.as_nanos() as f64 / accesses);
        let cpu = middle(&|[_, cpu]| cpu.as_nanos() as f64 / (accesses * threads));
        self.samples.push([threads * 1e9 / time, time, cpu]);
    }

    /// The rows of all rounds, loop included.
    fn rows(&self, placement: &ThreadPlacement, origin: &Origin<'_>) -> Vec<Row> {
        let case = self.case.to_string();
        let row = |index: usize, metric, unit, method| {
            let values: Vec<f64> = self.samples.iter().map(|sample| sample[index]).collect();
            origin.row(&case, self.name, (metric, unit, method), &values)
        };
        [
            row(0, "rate", "accesses/s", placement.method()),
            row(1, "time", "ns/access", placement.method()),
            row(2, "cpu", "ns/access", "thread clock"),
        ]
        .into_iter()
        .flatten()
        .collect()
    }
}
