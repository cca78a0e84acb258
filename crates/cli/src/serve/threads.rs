//! Threads that devices share.
//!
//! ```text
//!   Threads::start --> io: --io-threads threads and their watcher    for devices without --workers
//!                  '-> protocol: as many as there is work, two at rest
//! ```
use super::args::DaemonArgs;
use super::process::IoThread;
use super::report;
use super::spec::DeviceSpec;
use anyhow::{Context, anyhow};
use paravane_vhost::{ExportConfig, IoPool, ProtocolThreads};
use std::sync::Arc;
use std::thread::available_parallelism;
use std::time::Duration;

/// Most I/O threads.
const MAX: u16 = 256;
/// Most I/O threads by default.
const MAX_DEFAULT: usize = 8;

/// Threads that devices share.
pub(crate) struct Threads {
    pub(crate) io: Arc<IoPool>,
    pub(crate) protocol: ProtocolThreads,
    /// Figures of the I/O threads.
    figures: Vec<IoThread>,
}

/// Number of I/O threads.
///
/// # Errors
/// The option is out of range.
pub(crate) fn count(daemon: &DaemonArgs) -> Result<usize, anyhow::Error> {
    match daemon.io_threads {
        None => Ok(available_parallelism().map_or(1, |cpus| cpus.get().min(MAX_DEFAULT))),
        Some(count @ 1..=MAX) => Ok(count.into()),
        Some(count) => Err(anyhow!("--io-threads: {count} is out of range: use 1 to {MAX}")),
    }
}

impl Threads {
    /// Starts `count` I/O threads.
    ///
    /// # Errors
    /// The host refuses threads or descriptors.
    pub(crate) fn start(count: usize) -> Result<Self, anyhow::Error> {
        // Devices say how long their queues are polled.
        let io = IoPool::shared(count, Duration::ZERO).context("cannot start the I/O threads")?;
        let protocol = ProtocolThreads::new().context("cannot start a thread")?;
        let open = |(index, number)| IoThread::open(index, number);
        let figures = io.ids().into_iter().enumerate().map(open).collect();
        Ok(Self { io: Arc::new(io), protocol, figures })
    }

    /// Has an export use them.
    pub(crate) fn share(&self, spec: &DeviceSpec, config: &mut ExportConfig) {
        config.protocol_threads = Some(self.protocol.clone());
        config.io_pool = spec.workers.is_none().then(|| Arc::clone(&self.io));
    }

    /// Figures of the I/O threads.
    pub(crate) fn report(&self) -> Vec<report::Thread> {
        self.figures.iter().filter_map(IoThread::report).collect()
    }
}
