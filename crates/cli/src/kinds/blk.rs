//! Disks.
pub(crate) mod args;
mod checks;
pub(super) mod disk;
mod doctor;
mod metrics;
mod next_start;
mod observer;
mod open;
pub(crate) mod spec;
mod texts;
mod told;

use super::changes::{Change, Effect, differences};
use super::checked::{OptionError, real_location};
use super::endpoint::EndpointArgs;
use super::kind::{Arguments, Claim, Descriptors, IoUring, Kind, POLL_US, Resource, Spec};
use super::observe::Observe;
use super::opening::{Earlier, LinkEnds, OpenContext, Opening};
use crate::choices::name;
use crate::doctor::finding::Finding;
use crate::doctor::negotiated::QueueUse;
use crate::engine::may_be_io_uring;
use crate::images::Backing;
use crate::serve::report::Settings;
use crate::serve::sandbox::paths::{AllowedPaths, ImageAccess};
use crate::serve::snapshot::messages::NextStart;
use crate::serve::take_over::image::OfferedImage;
use crate::serve::told::{QUEUES, Told};
use args::Blk;
use observer::DiskObserver;
use paravane_device::blk::{EngineChoice, Format, most_segments};
use paravane_store::Location;
use rustix::thread::CapabilitySet;
use spec::STORE_FDS;
use std::any::Any;
use std::path::Path;
use std::sync::Arc;
use told::{READ_ONLY, SEGMENTS};

/// For an image in Ceph: threads of librbd need the processor that polling would take.
const POLL_US_CEPH: u32 = 0;

pub(crate) static BLK: Kind = Kind {
    device_type: "block",
    capabilities: &["read-only", "blk-file"],
    recorded: told::recorded,
    checks: checks::CHECKS,
    metrics: metrics::METRICS,
    queue_use: QueueUse::Queues,
    ..Kind::new::<Blk>("blk", texts::TEXTS, texts::FEATURES)
};

impl Arguments for Blk {
    fn check(&self, _: &str, endpoint: &EndpointArgs) -> Result<Arc<dyn Spec>, OptionError> {
        Ok(Arc::new(self.checked(endpoint)?))
    }
}

impl Spec for Blk {
    fn kind(&self) -> &'static Kind {
        &BLK
    }

    fn is(&self, other: &dyn Spec) -> bool {
        (other as &dyn Any).downcast_ref() == Some(self)
    }

    fn default_poll(&self) -> u32 {
        if matches!(self.image, Location::Rbd(_)) { POLL_US_CEPH } else { POLL_US }
    }

    fn resolved(&self, base: &Path) -> Option<Arc<dyn Spec>> {
        let mut disk = self.clone();
        disk.image.resolve(base);
        disk.backing.iter_mut().for_each(|layer| layer.location.resolve(base));
        Some(Arc::new(disk))
    }

    fn claims(&self) -> Vec<Claim> {
        let claim = |option, location: &Location, shares, writes| Claim {
            option,
            resource: Resource::Image(location.clone()),
            shares,
            writes,
        };
        let image = claim("image", &self.image, self.read_only || self.no_lock, !self.read_only);
        let layers = self.backing.iter().map(|layer| claim("backing", &layer.location, true, false));
        std::iter::once(image).chain(layers).collect()
    }

    fn locations(&self) -> Vec<&Location> {
        self.layers()
    }

    fn allow(&self, allowed: &mut AllowedPaths, beside: bool) {
        let access = match (self.read_only, self.format) {
            (true, _) => ImageAccess::Read,
            (false, Format::Raw) => ImageAccess::Write,
            (false, Format::Qcow2) => ImageAccess::Grow,
        };
        let layers = self.backing.iter().map(|layer| (&layer.location, ImageAccess::Read));
        for (location, access) in std::iter::once((&self.image, access)).chain(layers) {
            match location {
                Location::Rbd(rbd) => allowed.ceph(rbd.conf.as_deref()),
                location => location.path().into_iter().for_each(|path| allowed.image(path, access, beside)),
            }
        }
    }

    fn capabilities(&self, _: bool) -> CapabilitySet {
        match may_be_io_uring(self.engine) {
            true => CapabilitySet::IPC_LOCK,
            false => CapabilitySet::empty(),
        }
    }

    fn descriptors(&self) -> Descriptors {
        let queues = u64::from(self.queues);
        let files = self.layers().into_iter().filter_map(Location::path).count() as u64;
        let connections = if self.image.path().is_none() { STORE_FDS * queues } else { 0 };
        // One for requests, one that says that the daemon lives.
        Descriptors { own: 2 * files + connections, queues }
    }

    fn io_uring(&self) -> IoUring {
        match self.engine {
            EngineChoice::IoUring => IoUring::Only,
            engine if may_be_io_uring(engine) => IoUring::Maybe,
            _ => IoUring::No,
        }
    }

    fn examine(&self) -> Vec<Finding> {
        doctor::memlock(self).into_iter().collect()
    }

    fn open(
        &self,
        name: &str,
        context: &OpenContext,
        _: &mut LinkEnds,
        earlier: Earlier,
    ) -> Result<Opening, anyhow::Error> {
        open::disk(name, self, context, &earlier.told)
    }

    fn prepare(&self, name: &str, context: &OpenContext) -> Result<Option<Opening>, anyhow::Error> {
        open::prepare(name, self, context).map(Some)
    }

    fn without_servers(&self, name: &str, changes_user: bool) -> Result<Option<Opening>, anyhow::Error> {
        open::without_servers(name, self, changes_user)
    }

    fn told(&self, told: &mut Told) {
        told.put(READ_ONLY, self.read_only);
        told.put(QUEUES, self.queues);
        told.put(SEGMENTS, most_segments(self.queue_size));
    }

    fn changes(&self, wanted: &dyn Spec, all: &mut Change) {
        let Some(wanted) = (wanted as &dyn Any).downcast_ref() else { return };
        let (served, wanted) = &self.comparable(wanted);
        differences!(
            all, Blk, served, wanted,
            image "image" Session,
            format "format" Session,
            backing "backing" Session,
            force_layers "force-layers" Restart,
            read_only "read-only" Restart,
            no_lock "no-lock" Restart,
            direct "direct" Restart,
            block_size "block-size" Restart,
            registered_buffers "registered-buffers" Restart,
            store_timeout "store-timeout" Restart,
            queues "queues" Restart,
            queue_size "queue-size" Restart,
            engine "engine" Restart,
            on_full "on-full" InPlace,
            slow "slow" InPlace;
            but polls serial told_serial limit
        );
        // Threads of a connection to a server poll, too, or never do.
        let remote = served.layers().iter().any(|location| location.path().is_none());
        let effect = if remote { Effect::Restart } else { Effect::InPlace };
        all.add("poll-us", effect, served.polls != wanted.polls);
        let serial = |blk: &Self| (blk.serial.clone(), blk.told_serial.clone());
        all.add("serial", Effect::Restart, serial(served) != serial(wanted));
        all.limit(served.limit.rates(), wanted.limit.rates());
    }

    fn with_settings(&self, wanted: &dyn Spec) -> Option<Arc<dyn Spec>> {
        let &Self { slow, on_full, limit, polls, .. } = (wanted as &dyn Any).downcast_ref()?;
        Some(Arc::new(Self { slow, on_full, limit, polls, ..self.clone() }))
    }

    fn apply(&self, observer: &dyn Observe) {
        if let Some(disk) = (observer as &dyn Any).downcast_ref::<DiskObserver>() {
            disk.change(self);
        }
    }

    fn settings(&self, settings: &mut Settings) {
        settings.limit(self.limit.rates());
        settings.slow_us = self.slow.map(|slow| u64::try_from(slow.as_micros()).unwrap_or(u64::MAX));
        settings.on_full = Some(name(args::ON_FULL, &self.on_full).to_owned());
    }

    fn disk(&self) -> Option<&Blk> {
        Some(self)
    }
}

/// A disk, as snapshots and take-overs use it.
impl Blk {
    /// The image without the numbers of its file.
    pub(crate) fn offered_image(&self) -> OfferedImage {
        let format = self.format.name().to_owned();
        OfferedImage { location: self.image.to_string(), format, file: None }
    }

    /// The image that it writes to, with a canonical path.
    pub(crate) fn writable_image(&self) -> Option<Location> {
        (!self.read_only).then(|| real_location(&self.image))
    }

    /// The disk after a snapshot: its image is `overlay`, on the old one.
    ///
    /// Its guest keeps `serial` and the facts that it was `told`.
    pub(crate) fn on_overlay(&self, overlay: &Path, serial: &str, told: &Told) -> Arc<dyn Spec> {
        let mut disk = self.keeping_block(told::block(told));
        disk.told_serial = disk.serial.is_none().then(|| serial.to_owned());
        let old = std::mem::replace(&mut disk.image, overlay.to_owned().into());
        disk.backing.insert(0, Backing { format: disk.format, location: old });
        disk.format = Format::Qcow2;
        (disk.direct, disk.registered_buffers) = (false, false);
        Arc::new(disk)
    }

    /// Images and options that start it again for a guest that was `told` these facts.
    ///
    /// # Errors
    /// A path is not UTF-8, as qcow2 and JSON demand.
    pub(crate) fn next_start(&self, told: &Told) -> Result<NextStart, String> {
        next_start::of(&self.keeping_block(told::block(told)))
    }
}
