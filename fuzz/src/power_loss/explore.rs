//! Runs, states and findings.
use super::cache;
use super::crash::{self, Bounds, Often, State};
use super::job::{Job, jobs};
use super::kind::{Kind, kinds};
use super::log::{self, Event};
use super::make::write;
use super::model::Crash;
use super::record;
use paravane_test_support::Random;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// What is explored.
#[derive(Clone, Debug)]
pub struct Options {
    /// Names of kinds, or parts of names, with commas between them \[all\].
    pub filter: String,
    /// Seed of the first run of each kind.
    pub seed: u64,
    /// Ends after this many states.
    pub states: Option<u64>,
    /// Ends after this time.
    pub time: Option<Duration>,
    /// Ends with the first finding.
    pub first: bool,
    /// Ends after this many runs of each kind.
    pub runs: Option<u64>,
    /// States of a run, with those of the lives after it.
    pub states_of_run: usize,
    /// All subsets of so many unflushed changes are tried; random ones of more.
    pub bound: usize,
    /// `qemu-img` checks one state in so many; 0: none.
    pub qemu: u32,
    /// The store forgets flushes: what a test of the explorer wants.
    pub forgets_flushes: bool,
    /// Folder for the images of findings.
    pub keep: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            filter: String::new(),
            seed: 1,
            states: None,
            time: None,
            first: false,
            runs: None,
            states_of_run: 60,
            bound: 4,
            qemu: 50,
            forgets_flushes: false,
            keep: None,
        }
    }
}

/// A state that is wrong.
#[derive(Clone, Debug)]
pub struct Finding {
    /// Name of the kind.
    pub kind: String,
    /// Seed of the run.
    pub seed: u64,
    /// Number of the state in its run; 0: the guest's first life.
    pub state: u64,
    /// What is wrong, with the crash.
    pub what: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, seed, state, what } = self;
        write!(
            f,
            "{kind}, state {state}: {what}\n  replay: cargo run -p paravane-fuzz --bin power-loss -- \
             --filter {kind} --seed {seed} --runs 1"
        )
    }
}

/// What was found of one kind.
#[derive(Clone, Debug, Default)]
pub struct Row {
    /// Name of the kind.
    pub kind: String,
    /// Runs of a guest.
    pub runs: u64,
    /// States after a power loss.
    pub power: u64,
    /// States after a SIGKILL.
    pub kill: u64,
    /// More states, of which only the refcounts were checked.
    pub checked: u64,
    /// States that are wrong.
    pub wrong: u64,
    /// Those that `qemu-img` has looked at.
    pub qemu: u64,
}

/// What is explored.
#[derive(Clone, Debug)]
enum Subject {
    Disk(Kind),
    Job(Job),
    /// The record file of a holder.
    Record,
    /// The cache of an HTTP object.
    Cache,
}

impl Subject {
    fn all() -> Vec<Self> {
        let disks = kinds().into_iter().map(Self::Disk);
        disks.chain(jobs().into_iter().map(Self::Job)).chain([Self::Record, Self::Cache]).collect()
    }

    fn name(&self) -> &str {
        match self {
            Self::Disk(kind) => &kind.name,
            Self::Job(job) => &job.name,
            Self::Record => record::NAME,
            Self::Cache => cache::NAME,
        }
    }
}

/// Names of all kinds of disks, jobs and files.
#[must_use]
pub fn names() -> Vec<String> {
    Subject::all().iter().map(|subject| subject.name().to_owned()).collect()
}

/// What was found.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Each kind.
    pub rows: Vec<Row>,
    /// The first finding of each kind and sort.
    pub findings: Vec<Finding>,
}

impl Report {
    /// States that were tried.
    #[must_use]
    pub fn states(&self) -> u64 {
        self.rows.iter().map(|row| row.power + row.kill).sum()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let line = |f: &mut fmt::Formatter<'_>, row: &Row| {
            let Row { kind, runs, power, kill, checked, wrong, qemu } = row;
            writeln!(f, "{kind:<34} {runs:>6} {power:>9} {kill:>9} {checked:>9} {qemu:>7} {wrong:>7}")
        };
        writeln!(
            f,
            "{:<34} {:>6} {:>9} {:>9} {:>9} {:>7} {:>7}",
            "kind", "runs", "power", "kill", "checked", "qemu", "wrong"
        )?;
        let mut sum = Row { kind: "all".into(), ..Row::default() };
        for row in &self.rows {
            line(f, row)?;
            sum.runs += row.runs;
            sum.power += row.power;
            sum.kill += row.kill;
            sum.checked += row.checked;
            sum.qemu += row.qemu;
            sum.wrong += row.wrong;
        }
        line(f, &sum)
    }
}

/// Explores. Tells `progress` the report after each run.
///
/// # Errors
/// The host lacks `qemu-img`, or room for temporary files.
pub fn explore(options: &Options, progress: &mut dyn FnMut(&Report)) -> Result<Report, String> {
    let all = Subject::all();
    let names: Vec<String> = all.iter().map(|subject| subject.name().to_owned()).collect();
    let chosen: Vec<_> =
        all.into_iter().filter(|subject| is_chosen(subject.name(), &options.filter, &names)).collect();
    if chosen.is_empty() {
        return Err(format!("no kind has {:?} in its name", options.filter));
    }
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let mut report = Report::default();
    report.rows.extend(chosen.iter().map(|one| Row { kind: one.name().to_owned(), ..Row::default() }));
    let start = Instant::now();
    let is_over = |report: &Report| {
        options.first && !report.findings.is_empty()
            || options.states.is_some_and(|states| report.states() >= states)
            || options.time.is_some_and(|time| start.elapsed() >= time)
    };
    for run in 0.. {
        if options.runs.is_some_and(|runs| run >= runs) {
            break;
        }
        for (place, subject) in chosen.iter().enumerate() {
            if is_over(&report) {
                return Ok(report);
            }
            let seed = options.seed + run;
            let run = Run::new(subject.name(), seed, options, folder.path());
            let (row, findings) = match subject {
                Subject::Disk(kind) => run.disk(kind)?,
                Subject::Job(job) => run.job(job)?,
                Subject::Record => run.record(),
                Subject::Cache => run.cache(),
            };
            let total = &mut report.rows[place];
            total.runs += 1;
            total.power += row.power;
            total.kill += row.kill;
            total.checked += row.checked;
            total.wrong += row.wrong;
            total.qemu += row.qemu;
            for finding in findings {
                let is_known =
                    |one: &Finding| one.kind == finding.kind && sort(&one.what) == sort(&finding.what);
                if !report.findings.iter().any(is_known) {
                    report.findings.push(finding);
                }
            }
            progress(&report);
        }
    }
    Ok(report)
}

/// Whether a name is one of those in `filter`, with commas between them, or has one in it.
fn is_chosen(name: &str, filter: &str, all: &[String]) -> bool {
    filter.split(',').any(|part| match all.iter().any(|one| one == part) {
        true => name == part,
        false => name.contains(part),
    })
}

/// The sort of a finding: its text up to the first colon or the end of the line, without numbers.
fn sort(what: &str) -> String {
    what.split([':', '\n']).next().unwrap_or_default().chars().filter(|one| !one.is_ascii_digit()).collect()
}

/// One run: a guest's life or a job, and states after it.
pub(super) struct Run<'a> {
    pub(super) name: &'a str,
    pub(super) seed: u64,
    pub(super) options: &'a Options,
    pub(super) folder: &'a Path,
    pub(super) random: Random,
    pub(super) row: Row,
    pub(super) findings: Vec<Finding>,
    /// States that are left to try.
    pub(super) left: usize,
}

impl<'a> Run<'a> {
    fn new(name: &'a str, seed: u64, options: &'a Options, folder: &'a Path) -> Self {
        let mixed = name.bytes().fold(seed, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
        Self {
            name,
            seed,
            options,
            folder,
            random: Random::new(mixed),
            row: Row::default(),
            findings: Vec::new(),
            left: options.states_of_run,
        }
    }

    pub(super) fn found(&mut self, what: String) {
        self.row.wrong += 1;
        let state = self.row.power + self.row.kill;
        self.findings.push(Finding { kind: self.name.to_owned(), seed: self.seed, state, what });
    }

    /// Saves the images of a finding, if they are to be kept.
    pub(super) fn keep(&self, start: &[u8], events: &[Event], crashed: &[u8]) -> Result<(), String> {
        let Some(folder) = &self.options.keep else { return Ok(()) };
        let name = format!("{}-{}-{}", self.name, self.seed, self.row.power + self.row.kill);
        std::fs::create_dir_all(folder).map_err(|error| error.to_string())?;
        write(folder, &format!("{name}.before"), start)?;
        write(folder, &format!("{name}.crashed"), crashed)?;
        write(folder, &format!("{name}.log"), log::text(events).as_bytes())
    }

    /// Calls `each` with states that a crash at random moments can leave: at most `most`.
    ///
    /// `often`: see [`crash::moment`].
    pub(super) fn states(
        &mut self,
        events: &[Event],
        (most, often): (usize, &Often),
        each: &mut dyn FnMut(&mut Self, &State) -> Result<(), String>,
    ) -> Result<(), String> {
        let bounds = Bounds { all_of: self.options.bound, random: 6 };
        let mut left = most;
        while left > 0 && self.left > 0 {
            let at = crash::moment(events, often, &mut self.random);
            let mut states = match self.random.below(4) {
                0 => crash::kill(events, at, &mut self.random),
                _ => crash::power(events, at, bounds, &mut self.random),
            };
            while !states.is_empty() && left > 0 && self.left > 0 {
                let state = states.swap_remove(self.random.below(states.len()));
                (left, self.left) = (left - 1, self.left - 1);
                match state.crash {
                    Crash::Power => self.row.power += 1,
                    Crash::Kill => self.row.kill += 1,
                }
                each(self, &state)?;
            }
        }
        Ok(())
    }
}
