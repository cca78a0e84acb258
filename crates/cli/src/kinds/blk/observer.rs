//! A disk while it is served.
use super::args::Blk;
use super::told;
use crate::kinds::observe::Observe;
use crate::serve::report;
use crate::serve::told::Told;
use paravane_device::Limiter;
use paravane_device::blk::{self, Full, Resizer, Snapshots, StorageErrors};
use paravane_export::ExportStatus;
use paravane_store::Store;
use std::sync::Arc;

pub(super) struct DiskObserver {
    errors: Arc<StorageErrors>,
    full: Arc<Full>,
    limiter: Arc<Limiter>,
    /// Stores that are no files, top first.
    stores: Vec<Arc<dyn Store>>,
    open: Option<OpenImage>,
}

/// What keeps the image open, until the disk stops.
struct OpenImage {
    /// Reports the size.
    resizer: Resizer,
    snapshots: Arc<Snapshots>,
}

impl DiskObserver {
    pub(super) fn new(device: &blk::Blk, limiter: Arc<Limiter>, stores: Vec<Arc<dyn Store>>) -> Self {
        let open = OpenImage { resizer: device.resizer(), snapshots: Arc::new(device.snapshots()) };
        Self { errors: device.errors(), full: device.full(), limiter, stores, open: Some(open) }
    }

    /// Applies settings that change in place.
    pub(super) fn change(&self, disk: &Blk) {
        self.limiter.set(disk.limit.rates());
        self.full.set_policy(disk.on_full);
    }
}

impl Observe for DiskObserver {
    fn report(&self, device: &mut report::Device, _: &ExportStatus) {
        let errors = self.errors.totals();
        for (queue, count) in device.queues.iter_mut().zip(&errors.queues) {
            queue.storage_errors = *count;
        }
        device.storage_errors = Some(report::StorageErrors::new(&errors));
        device.rejected_requests = Some(errors.rejected);
        device.full = self.full.status().map(|full| report::Full::new(&full));
        device.full_times = Some(self.full.times());
        device.throttled = self.limiter.times_held();
        device.stores = self.stores.iter().map(|store| store.status().into()).collect();
        let Some(OpenImage { resizer, snapshots }) = &self.open else { return };
        device.size = Some(resizer.size());
        device.serial = Some(snapshots.serial());
        device.size_error = resizer.error();
        device.image_deleted = resizer.is_deleted();
    }

    fn told(&self, told: &mut Told) {
        if let Some(open) = &self.open {
            told::geometry(open.resizer.geometry(), told);
        }
    }

    fn retry(&self) {
        self.full.retry();
    }

    fn stores(&self) -> &[Arc<dyn Store>] {
        &self.stores
    }

    fn snapshots(&self) -> Option<&Arc<Snapshots>> {
        Some(&self.open.as_ref()?.snapshots)
    }

    fn release(&mut self) {
        self.open = None;
        self.stores.clear();
    }
}
