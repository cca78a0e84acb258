//! One run of a kind of disk, or of a job.
use super::cache;
use super::check::{Checked, check, compare_snapshot};
use super::crash::{Often, START, State};
use super::explore::{Finding, Row, Run};
use super::job::Job;
use super::kind::{Extra, Format, Kind};
use super::life::{Beginning, Life, Setting};
use super::log::{Action, Change, Event};
use super::make::{Made, make, qemu_check};
use super::record;
use std::ops::Range;

/// Offset of the incompatible features in the header, which have the dirty mark at their end.
const INCOMPATIBLE: u64 = 72;

type Ran = Result<(Row, Vec<Finding>), String>;

impl Run<'_> {
    /// A guest uses a disk.
    pub(super) fn disk(mut self, kind: &Kind) -> Ran {
        let made = make(kind, self.random.u64(), self.folder)?;
        let mut setting = Setting::new(kind, &made, &mut self.random);
        setting.behaviour.forgets_flushes = self.options.forgets_flushes;
        let batches = 3 + self.random.below(setting.habits.batches);
        let beginning =
            Beginning { image: setting.image(), before: None, stamp: 16, batches, seed: self.random.u64() };
        match setting.live(beginning) {
            Ok(life) => {
                if let Err(what) = closed(kind, &made, &life) {
                    self.found(what);
                }
                self.crashes(&setting, &life, 1)?;
                self.glances(&setting, &life)?;
            }
            Err(what) => self.found(what),
        }
        Ok((self.row, self.findings))
    }

    /// A job without a guest.
    pub(super) fn job(mut self, job: &Job) -> Ran {
        let done = match job.run(&mut self.random, self.folder, self.options.forgets_flushes)? {
            Ok(done) => done,
            Err(what) => {
                self.found(what);
                return Ok((self.row, self.findings));
            }
        };
        let ranges = vec![done.end..done.end + 2, done.closed..done.closed + 1];
        let often = Often { ranges, odds: 6 };
        self.states(&done.events, (self.left, &often), &mut |run, state| {
            let image = state.bytes(&done.start, &done.events);
            if let Err(what) = done.verify(&image, state.at >= done.end) {
                run.keep(&done.start, &done.events, &image)?;
                run.found(format!("{what}\n  after a {}", state.describe(&done.events)));
            }
            Ok(())
        })?;
        Ok((self.row, self.findings))
    }

    /// The writer of a record file is killed.
    pub(super) fn record(mut self) -> (Row, Vec<Finding>) {
        let (kills, found) = match record::run(&mut self.random, self.left) {
            Ok(kills) => (kills, None),
            Err((kills, what)) => (kills, Some(what)),
        };
        self.row.kill += kills as u64;
        found.into_iter().for_each(|what| self.found(what));
        (self.row, self.findings)
    }

    /// A host with a cache loses its power.
    pub(super) fn cache(mut self) -> (Row, Vec<Finding>) {
        let (crashes, found) = match cache::run(&mut self.random, self.left) {
            Ok(crashes) => (crashes, None),
            Err((crashes, what)) => (crashes, Some(what)),
        };
        self.row.power += crashes as u64;
        found.into_iter().for_each(|what| self.found(what));
        (self.row, self.findings)
    }

    /// Tries states of a life, until the run has had its share.
    fn crashes(&mut self, setting: &Setting<'_>, life: &Life, depth: u32) -> Result<(), String> {
        let often = often(setting.kind, life, depth);
        let most = if depth == 1 { self.left } else { 3 };
        self.states(&life.events, (most, &often), &mut |run, state| {
            let image = state.bytes(&life.start, &life.events);
            if let Err(what) = run.state(setting, life, state, (&image, depth))? {
                run.keep(&life.start, &life.events, &image)?;
                let life_of = if depth > 1 { format!(" of life {depth}") } else { String::new() };
                run.found(format!("{what}\n  after a {}{life_of}", state.describe(&life.events)));
            }
            Ok(())
        })
    }

    /// Checks the image in more states, without a life after them.
    fn glances(&mut self, setting: &Setting<'_>, life: &Life) -> Result<(), String> {
        let (kind, made) = (setting.kind, setting.made);
        if kind.format == Format::Raw {
            return Ok(());
        }
        let (row, often) = (self.row.clone(), often(kind, life, 1));
        self.left = self.options.states_of_run * if kind.extra == Extra::LongL1 { 10 } else { 1 };
        self.states(&life.events, (self.left, &often), &mut |run, state| {
            let image = state.bytes(&life.start, &life.events);
            if let Err(what) = checked((kind, made), &image, life, &Left::Crash(state)) {
                run.keep(&life.start, &life.events, &image)?;
                run.found(format!("{what}\n  after a {}", state.describe(&life.events)));
            }
            Ok(())
        })?;
        let (power, kill) = (self.row.power - row.power, self.row.kill - row.kill);
        self.row = Row { checked: power + kill, wrong: self.row.wrong, ..row };
        Ok(())
    }

    /// Checks a state, and lives on. The inner error is what is wrong with it.
    fn state(
        &mut self,
        setting: &Setting<'_>,
        life: &Life,
        state: &State,
        (image, depth): (&[u8], u32),
    ) -> Result<Result<(), String>, String> {
        let kind = setting.kind;
        let left = Left::Crash(state);
        if let Err(what) = self.image((kind, setting.made), image, (life, &left))? {
            return Ok(Err(what));
        }
        let moment = life.model.crash(state.at, state.crash);
        let beginning = Beginning {
            image: image.to_vec(),
            before: Some((&life.model, moment)),
            stamp: life.stamp + 1000,
            batches: 1 + self.random.below(setting.habits.batches / 4),
            seed: self.random.u64(),
        };
        let next = match setting.live(beginning) {
            Ok(next) => next,
            Err(what) => return Ok(Err(what)),
        };
        if let Err(what) = closed(kind, setting.made, &next) {
            return Ok(Err(format!("in the next life, {what}")));
        }
        if depth < 3 && self.random.once_in(4) {
            self.crashes(setting, &next, depth + 1)?;
        }
        Ok(Ok(()))
    }

    /// Checks an image after a crash; some of them by `qemu-img`, too.
    fn image(
        &mut self,
        (kind, made): (&Kind, &Made),
        image: &[u8],
        (life, left): (&Life, &Left<'_>),
    ) -> Result<Result<(), String>, String> {
        let checked = checked((kind, made), image, life, left);
        if kind.format == Format::Raw || !self.random.once_in(self.options.qemu) {
            return Ok(checked);
        }
        self.row.qemu += 1;
        let found = qemu_check(self.folder, image)?;
        Ok(match (checked, found) {
            (Ok(()), Some(errors)) if kind.extra != Extra::LazyRefcounts => {
                Err(format!("qemu-img check finds errors: {errors}"))
            }
            (Err(what), None) if what.starts_with(REFCOUNTS) => {
                Err(format!("the explorer finds errors that qemu-img check does not: {what}"))
            }
            (checked, _) => checked,
        })
    }
}

/// When a life is likely to crash: at what happens once in it.
fn often(kind: &Kind, life: &Life, depth: u32) -> Often {
    let (mut ranges, is_long) = (Vec::new(), kind.extra == Extra::LongL1);
    let mut add = |range: Range<u64>, times| ranges.extend((0..times).map(|_| range.clone()));
    add(life.closing..life.closed + 2, 1);
    // A life after a crash begins with repairs.
    add(START, if depth == 1 { 1 } else { 3 });
    for resize in life.model.resizes() {
        // The other kinds try the rest, at less cost.
        add(resize.clone(), if is_long { 6 } else { 1 });
        add(resize.end..resize.end + 16, 1);
    }
    let odds = match (depth, kind.sizes()) {
        _ if is_long => 1,
        (1, None) => 4,
        _ => 2,
    };
    Often { ranges, odds }
}

/// How errors begin that `qemu-img check` finds, too.
const REFCOUNTS: &str = "the refcounts are wrong";

/// How a life ended.
enum Left<'a> {
    Closed,
    Crash(&'a State),
}

/// Checks an image that was closed.
fn closed(kind: &Kind, made: &Made, life: &Life) -> Result<(), String> {
    checked((kind, made), &life.end, life, &Left::Closed)
        .map_err(|what| format!("after it was closed, {what}"))
}

fn checked((kind, made): (&Kind, &Made), image: &[u8], life: &Life, left: &Left<'_>) -> Result<(), String> {
    if kind.format == Format::Raw {
        return Ok(());
    }
    let found = check(image)?;
    let was_crashed = matches!(left, Left::Crash(state) if state.at < life.closed);
    match &found.error {
        // What QEMU has left to repair.
        Some(_) if found.is_dirty && was_crashed && kind.extra == Extra::LazyRefcounts => {}
        Some(error) => return Err(format!("{REFCOUNTS}: {error}")),
        // After a crash, the mark tells the next writer of it.
        None if found.is_dirty && !was_crashed => return Err("the image is marked dirty".into()),
        None => leaks(kind, &found, life, left)?,
    }
    let writes = |event: &Event| matches!(event.action, Action::Change { .. });
    if found.has_valid_bitmaps && image != life.start && life.events.iter().any(writes) {
        return Err("the bitmaps claim to be valid, and the disk has changed".into());
    }
    match kind.extra {
        Extra::Snapshot => compare_snapshot(image, &made.base_disk, &made.disk),
        _ => Ok(()),
    }
}

/// Checks that an image leaks nothing that the next start would not find.
///
/// A closed image leaks no more than before, and neither does one whose dirty mark is removed. After a
/// power loss, version 2, which has no mark, may: each start looks for that.
fn leaks(kind: &Kind, found: &Checked, life: &Life, left: &Left<'_>) -> Result<(), String> {
    let has_mark = !matches!(kind.format, Format::Qcow2 { version: 2, .. });
    let is_whole = match left {
        Left::Closed => true,
        Left::Crash(state) => {
            has_mark && (state.at >= life.closed || !found.is_dirty && is_unmarked(life, state))
        }
    };
    // The clusters of bitmaps that are not valid any more leak until the next repair. A repair leaves a
    // cluster with several compressed ones a count that is too high.
    if !is_whole || matches!(kind.extra, Extra::Bitmap | Extra::Compressed) {
        return Ok(());
    }
    let before = check(&life.start)?;
    let is_repaired = before.is_dirty || !has_mark;
    let most = if is_repaired { 0 } else { before.leaks };
    match found.leaks <= most {
        true => Ok(()),
        false => Err(format!("the image leaks {} clusters and is not marked; most: {most}", found.leaks)),
    }
}

/// Whether the write that removes the mark, the last one of a life, has reached the storage.
fn is_unmarked(life: &Life, state: &State) -> bool {
    let is_of_header = |event: &Event| match &event.action {
        Action::Change { change: Change::Write { offset, data }, .. } => {
            *offset <= INCOMPATIBLE && *offset + data.len() as u64 > INCOMPATIBLE
        }
        _ => false,
    };
    let last = life.events.iter().rposition(is_of_header);
    last.is_some_and(|last| life.events[last].at > life.closing && state.has(last, &life.events))
}
