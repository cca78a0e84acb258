//! An open device as the daemon sees it while it is served.
use crate::serve::report;
use crate::serve::told::Told;
use paravane_device::blk::Snapshots;
use paravane_export::ExportStatus;
use paravane_store::Store;
use std::any::Any;
use std::sync::Arc;

/// What a kind shows and changes of a device that is served.
///
/// Methods are called while requests are served, and must not wait for storage or network.
pub(crate) trait Observe: Any + Send + Sync {
    /// Fills in what reports have of it, beside the figures of its export.
    fn report(&self, device: &mut report::Device, export: &ExportStatus) {
        let _ = (device, export);
    }

    /// What its guest is told of what is open.
    fn told(&self, told: &mut Told) {
        let _ = told;
    }

    /// Tries again what waits for the host.
    fn retry(&self) {}

    /// Its stores that are no files, top first.
    fn stores(&self) -> &[Arc<dyn Store>] {
        &[]
    }

    /// What takes snapshots of it, until it stops.
    fn snapshots(&self) -> Option<&Arc<Snapshots>> {
        None
    }

    /// Block of a disk in bytes, until it stops.
    fn block(&self) -> Option<u32> {
        None
    }

    /// Gives up what a successor needs, when it begins to stop.
    fn release(&mut self) {}
}

/// A device of which nothing is to be seen.
pub(crate) struct Unobserved;

impl Observe for Unobserved {}
