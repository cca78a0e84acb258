//! Runs, states and findings.
use super::check::{Checked, check};
use super::crash::{self, Bounds, State};
use super::kind::{Extra, Format, Kind, kinds};
use super::life::{Beginning, Life, Setting};
use super::log::Action;
use super::make::{Made, make, qemu_check, write};
use super::model::Crash;
use paravane_test_support::Random;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// What is explored.
#[derive(Clone, Debug)]
pub struct Options {
    /// A part of a kind's name, or the whole of one [all].
    pub filter: String,
    /// Seed of the first run of each kind.
    pub seed: u64,
    /// Ends after this many states.
    pub states: Option<u64>,
    /// Ends after this time.
    pub time: Option<Duration>,
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
    /// States that are wrong.
    pub wrong: u64,
    /// Those that `qemu-img` has looked at.
    pub qemu: u64,
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
            let Row { kind, runs, power, kill, wrong, qemu } = row;
            writeln!(f, "{kind:<34} {runs:>6} {power:>9} {kill:>9} {qemu:>7} {wrong:>7}")
        };
        writeln!(
            f,
            "{:<34} {:>6} {:>9} {:>9} {:>7} {:>7}",
            "kind", "runs", "power", "kill", "qemu", "wrong"
        )?;
        let mut sum = Row { kind: "all".into(), ..Row::default() };
        for row in &self.rows {
            line(f, row)?;
            sum.runs += row.runs;
            sum.power += row.power;
            sum.kill += row.kill;
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
    let all = kinds();
    let exact = all.iter().any(|kind| kind.name == options.filter);
    let chosen: Vec<_> = all
        .into_iter()
        .filter(|kind| if exact { kind.name == options.filter } else { kind.name.contains(&options.filter) })
        .collect();
    if chosen.is_empty() {
        return Err(format!("no kind has {:?} in its name", options.filter));
    }
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let mut report = Report::default();
    report.rows.extend(chosen.iter().map(|kind| Row { kind: kind.name.clone(), ..Row::default() }));
    let start = Instant::now();
    let is_over = |report: &Report| {
        options.states.is_some_and(|states| report.states() >= states)
            || options.time.is_some_and(|time| start.elapsed() >= time)
    };
    for run in 0.. {
        if options.runs.is_some_and(|runs| run >= runs) {
            break;
        }
        for (place, kind) in chosen.iter().enumerate() {
            if is_over(&report) {
                return Ok(report);
            }
            let seed = options.seed + run;
            let (row, findings) = Run::new(kind, seed, options, folder.path()).run()?;
            let total = &mut report.rows[place];
            total.runs += 1;
            total.power += row.power;
            total.kill += row.kill;
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

/// The sort of a finding: its text up to the first colon, without numbers.
fn sort(what: &str) -> String {
    what.split(':').next().unwrap_or_default().chars().filter(|one| !one.is_ascii_digit()).collect()
}

/// One run: a guest's life, and states after it.
struct Run<'a> {
    kind: &'a Kind,
    seed: u64,
    options: &'a Options,
    folder: &'a Path,
    random: Random,
    row: Row,
    findings: Vec<Finding>,
    left: usize,
}

impl<'a> Run<'a> {
    fn new(kind: &'a Kind, seed: u64, options: &'a Options, folder: &'a Path) -> Self {
        let name = kind.name.bytes().fold(seed, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
        let (row, findings) = (Row::default(), Vec::new());
        Self {
            kind,
            seed,
            options,
            folder,
            random: Random::new(name),
            row,
            findings,
            left: options.states_of_run,
        }
    }

    fn run(mut self) -> Result<(Row, Vec<Finding>), String> {
        let made: Made = make(self.kind, self.random.u64(), self.folder)?;
        let mut setting = Setting::new(self.kind, &made, &mut self.random);
        setting.behaviour.forgets_flushes = self.options.forgets_flushes;
        let batches = 4 + self.random.below(28);
        let beginning =
            Beginning { image: setting.image(), before: None, stamp: 16, batches, seed: self.random.u64() };
        match setting.live(beginning) {
            Ok(life) => {
                if let Err(what) = self.closed(&life) {
                    self.found(what);
                }
                self.crashes(&setting, &life, 1)?;
            }
            Err(what) => self.found(what),
        }
        Ok((self.row, self.findings))
    }

    fn found(&mut self, what: String) {
        self.row.wrong += 1;
        let state = self.row.power + self.row.kill;
        self.findings.push(Finding { kind: self.kind.name.clone(), seed: self.seed, state, what });
    }

    /// Tries states of a life, until the run has had its share.
    fn crashes(&mut self, setting: &Setting<'_>, life: &Life, depth: u32) -> Result<(), String> {
        let end = life.events.last().map_or(0, |event| event.at + 2);
        let bounds = Bounds { all_of: self.options.bound, random: 6 };
        let mut left = if depth == 1 { self.left } else { 3 };
        while left > 0 && self.left > 0 {
            let at = 1 + self.random.below(end as usize) as u64;
            let mut states = match self.random.below(4) {
                0 => crash::kill(&life.events, at, &mut self.random),
                _ => crash::power(&life.events, at, bounds, &mut self.random),
            };
            while !states.is_empty() && left > 0 && self.left > 0 {
                let state = states.swap_remove(self.random.below(states.len()));
                (left, self.left) = (left - 1, self.left - 1);
                match state.crash {
                    Crash::Power => self.row.power += 1,
                    Crash::Kill => self.row.kill += 1,
                }
                self.state(setting, life, &state, depth)?;
            }
        }
        Ok(())
    }

    fn state(&mut self, setting: &Setting<'_>, life: &Life, state: &State, depth: u32) -> Result<(), String> {
        let image = state.bytes(&life.start, &life.events);
        let looked = self.random.once_in(self.options.qemu);
        if let Err(what) = self.try_state(setting, life, state, (&image, looked, depth))? {
            if let Some(folder) = &self.options.keep {
                let name = format!("{}-{}-{}", self.kind.name, self.seed, self.row.power + self.row.kill);
                std::fs::create_dir_all(folder).map_err(|error| error.to_string())?;
                write(folder, &format!("{name}.before"), &life.start)?;
                write(folder, &format!("{name}.crashed"), &image)?;
                write(folder, &format!("{name}.log"), log(life).as_bytes())?;
            }
            let life_of = if depth > 1 { format!(" of life {depth}") } else { String::new() };
            self.found(format!("{what}\n  after a {}{life_of}", state.describe(&life.events)));
        }
        Ok(())
    }

    /// Checks a state. The inner error is what is wrong with it.
    fn try_state(
        &mut self,
        setting: &Setting<'_>,
        life: &Life,
        state: &State,
        (image, looked, depth): (&[u8], bool, u32),
    ) -> Result<Result<(), String>, String> {
        if let Err(what) = self.checked(image, life, true) {
            return Ok(Err(what));
        }
        if looked && self.kind.format != Format::Raw {
            self.row.qemu += 1;
            if let Some(errors) = qemu_check(self.folder, image)?
                && self.kind.extra != Extra::LazyRefcounts
            {
                return Ok(Err(format!("qemu-img check finds errors: {errors}")));
            }
        }
        let moment = life.model.crash(state.at, state.crash);
        let beginning = Beginning {
            image: image.to_vec(),
            before: Some((&life.model, moment)),
            stamp: life.stamp + 1000,
            batches: 1 + self.random.below(8),
            seed: self.random.u64(),
        };
        let next = match setting.live(beginning) {
            Ok(next) => next,
            Err(what) => return Ok(Err(what)),
        };
        if let Err(what) = self.closed(&next) {
            return Ok(Err(format!("in the next life, {what}")));
        }
        if depth < 3 && self.random.once_in(4) {
            self.crashes(setting, &next, depth + 1)?;
        }
        Ok(Ok(()))
    }

    /// Checks an image that was closed.
    fn closed(&self, life: &Life) -> Result<(), String> {
        self.checked(&life.end, life, false).map_err(|what| format!("after it was closed, {what}"))
    }

    fn checked(&self, image: &[u8], life: &Life, is_crashed: bool) -> Result<(), String> {
        if self.kind.format == Format::Raw {
            return Ok(());
        }
        let Checked { error, is_dirty, has_valid_bitmaps } = check(image)?;
        let may_be_dirty = is_crashed && self.kind.extra == Extra::LazyRefcounts;
        match error {
            Some(_) if is_dirty && may_be_dirty => {}
            Some(error) => return Err(format!("the refcounts are wrong: {error}")),
            None if is_dirty && !may_be_dirty => return Err("the image is marked dirty".into()),
            None => {}
        }
        let writes = |event: &super::log::Event| matches!(event.action, Action::Change { .. });
        if has_valid_bitmaps && image != life.start && life.events.iter().any(writes) {
            return Err("the bitmaps claim to be valid, and the disk has changed".into());
        }
        Ok(())
    }
}

/// The log of a life, for a reader.
fn log(life: &Life) -> String {
    let mut text = String::new();
    for (number, event) in life.events.iter().enumerate() {
        let what = match &event.action {
            Action::Change { change, durable: true } => format!("{change}, durable"),
            Action::Change { change, .. } => change.to_string(),
            Action::Flush { begun } => format!("flush, asked for at {begun}"),
        };
        text += &format!("{number}: tick {}: {what}\n", event.at);
    }
    text
}
