//! Images that are made, filled and merged without a guest.
//!
//! A state of an image that is being made is no image, or a whole one. A state of a base that an overlay
//! is being merged into reads through the overlay as before, and the merge can be done again.
use super::check::check;
use super::kind::{Base, Extra, Format, Kind};
use super::log::{Clock, Event};
use super::make::{Made, make};
use super::stamp::SECTOR;
use super::store::{Behaviour, RecordedStore};
use paravane_device::blk::images::{self, Content, Disk, NewImage, NewQcow2, Use};
use paravane_device::blk::{self, Layer, LayerSource};
use paravane_test_support::Random;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

/// Bytes of the disks.
const SIZE: u64 = 1 << 20;

/// What is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    /// An empty image is made.
    Create,
    /// An image is made, and a disk is copied to it.
    Convert,
    /// An overlay is merged into a base of this format.
    Commit(Base),
}

/// A job, and the bytes of the image that it works on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Job {
    pub(super) name: String,
    work: Work,
    cluster: u64,
}

/// All jobs.
pub(super) fn jobs() -> Vec<Job> {
    let mut jobs = Vec::new();
    for cluster in [512, 4 << 10, 64 << 10] {
        let named = |what: &str, work| Job { name: format!("{what}-{cluster}"), work, cluster };
        jobs.push(named("create-qcow2", Work::Create));
        jobs.push(named("convert-qcow2", Work::Convert));
        jobs.push(named("commit-qcow2-to-raw", Work::Commit(Base::Raw)));
        jobs.push(named("commit-qcow2-to-qcow2", Work::Commit(Base::Qcow2)));
    }
    jobs
}

/// A job that was done.
pub(super) struct Done {
    pub(super) start: Vec<u8>,
    pub(super) events: Vec<Event>,
    /// Ticks from which on its result is durable, and the image is closed.
    pub(super) end: u64,
    pub(super) closed: u64,
    /// What was in the store is an image of another disk.
    is_over_image: bool,
    job: Job,
    made: Made,
    behaviour: Behaviour,
}

fn behaviour(random: &mut Random, grows: bool) -> Behaviour {
    Behaviour {
        grows,
        zeroes: !random.once_in(4),
        discard: !random.once_in(4),
        garbage: random.once_in(2),
        block: [1, 512][random.below(2)],
        read_only: false,
        forgets_flushes: false,
        seed: random.u64(),
    }
}

impl Job {
    /// Does the job.
    ///
    /// # Errors
    /// The host lacks something. The inner error: the job failed.
    pub(super) fn run(
        &self,
        random: &mut Random,
        folder: &Path,
        forgets_flushes: bool,
    ) -> Result<Result<Done, String>, String> {
        let base = if let Work::Commit(base) = self.work { base } else { Base::None };
        // The overlay of a merge, or the disk to copy.
        let format = match self.work {
            Work::Commit(_) => Format::Qcow2 { version: 3, cluster: self.cluster, refcount_bits: 16 },
            _ => Format::Raw,
        };
        let kind =
            Kind { name: self.name.clone(), format, base, extra: Extra::Nothing, size: SIZE, filled: 30 };
        let made = make(&kind, random.u64(), folder)?;
        let grows = random.once_in(2);
        let behaviour = Behaviour { forgets_flushes, ..behaviour(random, grows) };
        let is_over_image = !matches!(self.work, Work::Commit(_)) && !grows && random.once_in(2);
        let start = match self.work {
            _ if is_over_image => self.old_image(behaviour)?,
            Work::Commit(_) => {
                let mut base = made.base.clone().unwrap_or_default();
                let room = if base.len() < SIZE as usize || !grows { 2 * SIZE as usize } else { 0 };
                if matches!(self.work, Work::Commit(Base::Qcow2)) {
                    base.resize(base.len() + room, 0);
                } else {
                    // A raw base grows to the overlay's size, or has it.
                    base.resize(if grows { base.len() } else { SIZE as usize }, 0);
                }
                base
            }
            // A store of a fixed size may hold anything.
            _ if grows => Vec::new(),
            _ => vec![if random.once_in(2) { 0 } else { 0xa7 }; 4 * SIZE as usize],
        };
        let clock = Clock::default();
        clock.tick();
        let store = RecordedStore::new("image", start.clone(), behaviour, clock.clone());
        let done = self.work(&store, &made, behaviour, &clock);
        let (job, closed, events) = (self.clone(), clock.tick(), store.events());
        Ok(done.map(|end| Done { start, events, end, closed, is_over_image, job, made, behaviour }))
    }

    /// An image with a longer L1 table than that of the new one, in the store before.
    fn old_image(&self, behaviour: Behaviour) -> Result<Vec<u8>, String> {
        let behaviour = Behaviour { grows: false, zeroes: true, ..behaviour };
        let bytes = vec![0; 4 * SIZE as usize];
        let store = RecordedStore::new("old", bytes, behaviour, Clock::default());
        let table = self.cluster / 8;
        let size = 3 * table * table * self.cluster;
        let new = NewQcow2 { size, cluster_size: self.cluster as u32, backing: None };
        images::create(&LayerSource::Store(store.clone()), &NewImage::Qcow2(new))
            .map_err(|error| error.to_string())?;
        Ok(store.bytes())
    }

    /// Returns the tick from which on the result is durable.
    fn work(
        &self,
        store: &Arc<RecordedStore>,
        made: &Made,
        behaviour: Behaviour,
        clock: &Clock,
    ) -> Result<u64, String> {
        let place = LayerSource::Store(store.clone());
        let text = |error: &dyn std::fmt::Display| format!("the job fails: {error}");
        let on = &mut |_| ControlFlow::Continue(());
        if let Work::Commit(base) = self.work {
            return merge((&place, clock), base, &made.image, behaviour);
        }
        let new = NewQcow2 { size: SIZE, cluster_size: self.cluster as u32, backing: None };
        images::create(&place, &NewImage::Qcow2(new)).map_err(|error| text(&error))?;
        if self.work == Work::Create {
            return Ok(clock.tick());
        }
        let from = still(made.disk.to_vec(), behaviour);
        let from = Disk::open(&from, blk::Format::Raw, &[], Use::Read).map_err(|error| text(&error))?;
        let to = Disk::open(&place, blk::Format::Qcow2, &[], Use::Write).map_err(|error| text(&error))?;
        images::copy(&from, &to, Content::Zeroes, on).map_err(|error| text(&error))?;
        Ok(clock.tick())
    }
}

/// A store that is only read.
fn still(bytes: Vec<u8>, behaviour: Behaviour) -> LayerSource {
    let behaviour = Behaviour { read_only: true, block: 1, ..behaviour };
    LayerSource::Store(RecordedStore::new("still", bytes, behaviour, Clock::default()))
}

fn format_of(base: Base) -> blk::Format {
    if base == Base::Raw { blk::Format::Raw } else { blk::Format::Qcow2 }
}

/// Returns the tick from which on the result is durable.
fn merge(
    (base, clock): (&LayerSource, &Clock),
    format: Base,
    overlay: &[u8],
    behaviour: Behaviour,
) -> Result<u64, String> {
    let text = |error: &dyn std::fmt::Display| format!("the merge fails: {error}");
    let overlay = still(overlay.to_vec(), behaviour);
    let overlay = Disk::open_alone(&overlay).map_err(|error| text(&error))?;
    let base =
        Disk::open_base(base, format_of(format), &[], Path::new("overlay")).map_err(|error| text(&error))?;
    images::merge(&overlay, &base, &mut |_| ControlFlow::Continue(())).map_err(|error| text(&error))?;
    Ok(clock.tick())
}

fn read(disk: &Disk) -> Result<Vec<u8>, String> {
    let mut all = vec![0; disk.size() as usize];
    disk.read(&mut all, 0).map_err(|error| error.to_string())?;
    Ok(all)
}

impl Done {
    /// Checks a state of the image. With `is_whole`, the job was done before.
    ///
    /// # Errors
    /// What is wrong.
    pub(super) fn verify(&self, state: &[u8], is_whole: bool) -> Result<(), String> {
        match self.job.work {
            Work::Commit(base) => self.verify_base(state, base, is_whole),
            _ => self.verify_new(state, is_whole),
        }
    }

    fn verify_new(&self, state: &[u8], is_whole: bool) -> Result<(), String> {
        let place = still(state.to_vec(), self.behaviour);
        let disk = match Disk::open(&place, blk::Format::Qcow2, &[], Use::Read) {
            // No image.
            Err(_) if !is_whole => return Ok(()),
            opened => opened.map_err(|error| format!("does not open: {error}"))?,
        };
        if let Some(error) = check(state)?.error {
            return Err(format!("the refcounts are wrong: {error}"));
        }
        if disk.size() != SIZE {
            return match self.is_over_image && !is_whole {
                // The old image.
                true => Ok(()),
                false => Err(format!("size is wrong: {} bytes", disk.size())),
            };
        }
        let found = read(&disk)?;
        let wanted = match self.job.work {
            Work::Create => &vec![0; SIZE as usize],
            // What a copy holds before its end is not promised.
            _ if !is_whole => return Ok(()),
            _ => &*self.made.disk,
        };
        let wrong =
            found.chunks(SECTOR).zip(wanted.chunks(SECTOR)).position(|(found, wanted)| found != wanted);
        wrong.map_or(Ok(()), |sector| Err(format!("the image holds other data: sector {sector}")))
    }

    fn verify_base(&self, state: &[u8], base: Base, is_whole: bool) -> Result<(), String> {
        if base == Base::Qcow2
            && let Some(error) = check(state)?.error
        {
            return Err(format!("the refcounts are wrong: {error}"));
        }
        let clock = Clock::default();
        let store = RecordedStore::new("base", state.to_vec(), self.behaviour, clock.clone());
        let layer = Layer { source: LayerSource::Store(store.clone()), format: format_of(base) };
        let overlay = still(self.made.image.clone(), self.behaviour);
        let chain = Disk::open(&overlay, blk::Format::Qcow2, &[layer], Use::Read);
        let found = read(&chain.map_err(|error| format!("does not open: {error}"))?)?;
        if found != **self.made.disk {
            return Err("the overlay reads other data than before".into());
        }
        let place = LayerSource::Store(store);
        if !is_whole {
            merge((&place, &clock), base, &self.made.image, self.behaviour)?;
        }
        let alone = Disk::open(&place, format_of(base), &[], Use::Read);
        let found = read(&alone.map_err(|error| format!("does not open: {error}"))?)?;
        match found.get(..self.made.disk.len()) == Some(&self.made.disk) {
            true => Ok(()),
            false => Err("the merged base reads other data than the overlay".into()),
        }
    }
}
