//! Observation of a device while it is served.
use crate::serve::report;
use crate::serve::told::Told;
use paravane_device::blk::Snapshots;
use paravane_export::ExportStatus;
use paravane_store::Store;
use std::any::Any;
use std::sync::Arc;

/// Reports of an open device, and controls beyond its queues.
///
/// Methods must not wait for storage or network.
pub(crate) trait Observe: Any + Send + Sync {
    /// Fills in the figures of its kind.
    fn report(&self, device: &mut report::Device, export: &ExportStatus) {
        let _ = (device, export);
    }

    /// Adds the facts that its guest reads and only the open device knows.
    fn told(&self, told: &mut Told) {
        let _ = told;
    }

    /// Retries requests that wait for space on the host.
    fn retry(&self) {}

    /// Its stores that are no files, top first.
    fn stores(&self) -> &[Arc<dyn Store>] {
        &[]
    }

    /// Takes snapshots of a disk, until it stops.
    fn snapshots(&self) -> Option<&Arc<Snapshots>> {
        None
    }

    /// Releases what a successor needs. Called when the device begins to stop.
    fn release(&mut self) {}
}

/// Observer of a device without figures.
pub(crate) struct Unobserved;

impl Observe for Unobserved {}
