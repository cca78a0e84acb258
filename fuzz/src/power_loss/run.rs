//! One run of a kind of disk, or of a job.
use super::check::{Checked, check, compare_snapshot};
use super::crash::State;
use super::explore::{Finding, Row, Run};
use super::job::Job;
use super::kind::{Extra, Format, Kind};
use super::life::{Beginning, Life, Setting};
use super::log::{Action, Event};
use super::make::{Made, make, qemu_check};
use super::record;

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
        self.states(&done.events, (self.left, false), &mut |run, state| {
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

    /// Tries states of a life, until the run has had its share.
    fn crashes(&mut self, setting: &Setting<'_>, life: &Life, depth: u32) -> Result<(), String> {
        let most = if depth == 1 { self.left } else { 3 };
        self.states(&life.events, (most, depth > 1), &mut |run, state| {
            let image = state.bytes(&life.start, &life.events);
            if let Err(what) = run.state(setting, life, state, (&image, depth))? {
                run.keep(&life.start, &life.events, &image)?;
                let life_of = if depth > 1 { format!(" of life {depth}") } else { String::new() };
                run.found(format!("{what}\n  after a {}{life_of}", state.describe(&life.events)));
            }
            Ok(())
        })
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
        if let Err(what) = self.image((kind, setting.made), image, life)? {
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
        life: &Life,
    ) -> Result<Result<(), String>, String> {
        let checked = checked((kind, made), image, life, true);
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

/// How errors begin that `qemu-img check` finds, too.
const REFCOUNTS: &str = "the refcounts are wrong";

/// Checks an image that was closed.
fn closed(kind: &Kind, made: &Made, life: &Life) -> Result<(), String> {
    checked((kind, made), &life.end, life, false).map_err(|what| format!("after it was closed, {what}"))
}

fn checked((kind, made): (&Kind, &Made), image: &[u8], life: &Life, is_crashed: bool) -> Result<(), String> {
    if kind.format == Format::Raw {
        return Ok(());
    }
    let Checked { error, is_dirty, has_valid_bitmaps } = check(image)?;
    match error {
        // What QEMU has left to repair.
        Some(_) if is_dirty && is_crashed && kind.extra == Extra::LazyRefcounts => {}
        Some(error) => return Err(format!("{REFCOUNTS}: {error}")),
        // After a crash, the mark tells the next writer of it.
        None if is_dirty && !is_crashed => return Err("the image is marked dirty".into()),
        None => {}
    }
    let writes = |event: &Event| matches!(event.action, Action::Change { .. });
    if has_valid_bitmaps && image != life.start && life.events.iter().any(writes) {
        return Err("the bitmaps claim to be valid, and the disk has changed".into());
    }
    match kind.extra {
        Extra::Snapshot => compare_snapshot(image, &made.base_disk, &made.disk),
        _ => Ok(()),
    }
}
