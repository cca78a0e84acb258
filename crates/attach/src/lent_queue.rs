//! A queue on loan: its back end, and what we keep for it.
use crate::backend::{QueueBackend, Relay};
use paravane_dma::Lent;
use paravane_io::RestingQueue;

/// A queue while a back end has it.
///
/// Fields are in the order in which things end: first nobody serves any more, then nobody calls,
/// then the memory may go.
pub(crate) struct LentQueue {
    pub(crate) backend: Box<dyn QueueBackend>,
    pub(crate) relay: Relay,
    pub(crate) resting: RestingQueue,
    pub(crate) _memory: Lent,
}

impl LentQueue {
    /// Ends the loan for good: the driver has reset the queue, or the device stops.
    ///
    /// What the back end had in flight is completed.
    pub(crate) fn stop(mut self) {
        if let Err(error) = self.backend.stop() {
            tracing::debug!("a stopped back end does not report its position: {error}");
        }
    }
}
