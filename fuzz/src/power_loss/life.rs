//! One life of a disk: opened, used by a guest, closed.
use super::guest::{Guest, Habits};
use super::kind::{Base, Extra, Format, Kind};
use super::log::{Clock, Event, resize};
use super::machine::Machine;
use super::make::Made;
use super::model::{Model, Moment};
use super::stamp::SECTOR;
use super::store::{Behaviour, RecordedStore};
use paravane_device::blk::{self, Blk, BlkConfig, Layer, LayerSource};
use paravane_test_support::Random;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// What is the same in all lives of a run.
#[derive(Debug)]
pub(super) struct Setting<'a> {
    pub(super) kind: &'a Kind,
    pub(super) made: &'a Made,
    pub(super) behaviour: Behaviour,
    pub(super) write_through: bool,
    pub(super) habits: Habits,
}

/// What has come of a life.
#[derive(Debug)]
pub(super) struct Life {
    /// Bytes of the store at its start, and what was done to them.
    pub(super) start: Vec<u8>,
    pub(super) events: Vec<Event>,
    /// The disk as the guest knows it.
    pub(super) model: Model,
    /// Bytes of the store at its end.
    pub(super) end: Vec<u8>,
    /// Ticks at which the disk began to close, and was closed.
    pub(super) closing: u64,
    pub(super) closed: u64,
    /// Number of the last write.
    pub(super) stamp: u64,
}

/// How a life begins.
#[derive(Debug)]
pub(super) struct Beginning<'a> {
    pub(super) image: Vec<u8>,
    /// What was before: the disk as it may be read now. `None`: the image is new.
    pub(super) before: Option<(&'a Model, Moment)>,
    /// Number of the last write.
    pub(super) stamp: u64,
    pub(super) batches: usize,
    pub(super) seed: u64,
}

impl Setting<'_> {
    /// The behaviours of a run, by its seed.
    pub(super) fn new<'a>(kind: &'a Kind, made: &'a Made, random: &mut Random) -> Setting<'a> {
        let in_sectors = |bytes: u64| bytes / SECTOR as u64;
        let sizes = kind.sizes().map(|sizes| (in_sectors(*sizes.start()), in_sectors(*sizes.end())));
        let grows = sizes.is_some() || random.once_in(2);
        let behaviour = Behaviour {
            grows,
            zeroes: !random.once_in(4),
            discard: !random.once_in(4),
            garbage: random.once_in(2),
            block: if !grows && random.once_in(4) { 4096 } else { [1, 512][random.below(2)] },
            read_only: false,
            forgets_flushes: false,
            seed: random.u64(),
        };
        // The disk of a raw image has the block of its store.
        let block = if kind.format == Format::Raw { behaviour.block.min(512) } else { behaviour.block };
        let depth = [1, 1, 4, super::machine::DEPTH][random.below(4)];
        // Each request costs a cluster or more; a disk that is large is read as a whole.
        let batches = if kind.cluster() >= 1 << 20 || kind.size >= 32 << 20 { 8 } else { 32 };
        let storms = kind.extra == Extra::Scattered;
        let habits = Habits { cluster: in_sectors(kind.cluster()), depth, batches, sizes, storms };
        let write_through = sizes.is_none() && random.once_in(5);
        Setting { kind, made, behaviour: Behaviour { block, ..behaviour }, write_through, habits }
    }

    /// The image at the start, in a store of its size.
    pub(super) fn image(&self) -> Vec<u8> {
        let mut image = self.made.image.clone();
        let is_qcow2 = self.kind.format != Format::Raw;
        if is_qcow2 && !self.behaviour.grows {
            // Room for all clusters once more, and for tables.
            let room = image.len() as u64 + self.kind.size + 2 * self.kind.cluster() + (1 << 20);
            resize(&mut image, room as usize);
        }
        let block = (self.behaviour.block as usize).max(SECTOR);
        let len = image.len().next_multiple_of(block);
        resize(&mut image, len);
        image
    }

    fn open(&self, store: Arc<RecordedStore>) -> Result<Machine, String> {
        let (format, base) = match (self.kind.format, self.kind.base) {
            (Format::Raw, _) => (blk::Format::Raw, None),
            (_, Base::None) => (blk::Format::Qcow2, None),
            (_, Base::Raw) => (blk::Format::Qcow2, Some(blk::Format::Raw)),
            (_, Base::Qcow2) => (blk::Format::Qcow2, Some(blk::Format::Qcow2)),
        };
        let layer = |format| {
            let bytes = self.made.base.clone().unwrap_or_default();
            let behaviour = Behaviour { read_only: true, block: 1, ..self.behaviour };
            let source = LayerSource::Store(RecordedStore::new("base", bytes, behaviour, Clock::default()));
            Layer { source, format }
        };
        let backing = base.map(layer).into_iter().collect();
        // The base is a store, not the file that the image names.
        let config = BlkConfig { format, backing, force_layers: true, ..BlkConfig::new("") };
        let disk = Blk::over(store, config).map_err(|error| format!("does not open: {error}"))?;
        Machine::start(disk, self.write_through).map_err(|error| format!("does not start: {error}"))
    }

    /// Lives.
    ///
    /// # Errors
    /// What is wrong: the image does not open, or the guest finds what it has not written.
    pub(super) fn live(&self, beginning: Beginning<'_>) -> Result<Life, String> {
        let run = AssertUnwindSafe(|| self.try_live(beginning));
        catch_unwind(run).unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
            Err(format!("panics: {}", text.unwrap_or_default()))
        })
    }

    fn try_live(&self, beginning: Beginning<'_>) -> Result<Life, String> {
        let Beginning { image, before, stamp, batches, seed } = beginning;
        let clock = Clock::default();
        // Tick 0 is that of the start.
        clock.tick();
        let store = RecordedStore::new("image", image.clone(), self.behaviour, clock.clone());
        let mut machine = self.open(store.clone())?;
        let found = machine.read_all()?;
        let mut model = match before {
            Some((model, moment)) => {
                model.check(&found, moment)?;
                model.next(found, self.write_through)
            }
            None => {
                let loose = self.kind.format == Format::Raw;
                let disk = self.made.disk.to_vec();
                let model = Model::new(disk, self.made.base_disk.clone(), self.write_through, loose);
                model.check(&found, model.now())?;
                model
            }
        };
        let is_again = before.is_some();
        let later = |error| if is_again { format!("in the next life, {error}") } else { error };
        let random = Random::new(seed);
        let mut guest = Guest { machine, model: &mut model, random, clock, habits: self.habits, stamp };
        guest.live(batches).map_err(later)?;
        // What is not flushed yet is for the close to see to.
        if guest.random.once_in(2) {
            guest.flush().map_err(later)?;
        }
        let found = guest.machine.read_all().map_err(later)?;
        guest.model.check(&found, guest.model.now()).map_err(later)?;
        let (stamp, closing, clock) = (guest.stamp, guest.clock.tick(), guest.clock.clone());
        guest.machine.stop();
        let closed = clock.tick();
        let (events, end) = (store.events(), store.bytes());
        Ok(Life { start: image, events, model, end, closing, closed, stamp })
    }
}
