//! What all served devices share.
use super::super::inspector::InspectorProcess;
use super::super::shelf::Shelf;
use super::super::sockets::Sockets;
use super::super::threads::Threads;
use crate::kinds::opening::OpenContext;
use paravane_dma::MappingPool;
use std::sync::Arc;
use std::time::Duration;

/// Resources that devices share.
pub(crate) struct ExportContext {
    pub(crate) sockets: Sockets,
    pub(crate) opening: OpenContext,
    /// Maximum time that a device takes to stop.
    pub(crate) stop_timeout: Duration,
    /// Limits on memory mapped for VMMs.
    pub(crate) pool: Arc<MappingPool>,
    /// Keeps sessions for the next daemon, if one shall.
    pub(crate) shelf: Option<Shelf>,
    pub(crate) threads: Threads,
    /// Looks at the descriptors of VMMs; `None`: all are taken.
    pub(crate) inspector: Option<Arc<InspectorProcess>>,
}
