//! Status of an export.
use crate::notifiers::ClientNotifiers;
use paravane_device::latency::{LatencySnapshot, QueueLatency};
use paravane_dma::MappingQuota;
use paravane_io::QueueWork;
use parking_lot::{Mutex, MutexGuard};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Status of one queue.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct QueueStatus {
    /// Whether it is served.
    pub live: bool,
    /// Whether the client enabled it.
    pub enabled: bool,
    /// Number of descriptors; 0 if the client has not set it.
    pub size: u16,
    /// Position at its last start or stop, in the encoding of GET_VRING_BASE.
    pub position: u32,
    /// Number of kicks seen. Kicks that arrive together count once.
    pub kicks: u64,
    /// Number of chains taken.
    pub taken: u64,
    /// Number of chains completed.
    pub completed: u64,
    /// Number of chains that are taken and neither completed nor dropped.
    pub in_flight: u64,
    /// Number of interrupts that the driver requested.
    pub interrupts: u64,
    /// Time for which shared I/O threads served it, in nanoseconds; 0 if it has its own.
    pub busy_ns: u64,
    /// Error that stopped it, caused by the driver or the host.
    pub error: Option<String>,
}

/// Status of an export.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExportStatus {
    /// Name of the export.
    pub name: String,
    /// Whether a client is connected.
    pub connected: bool,
    /// Whether a later process can continue the export if this one dies ([`crate::keeper`]).
    pub kept: bool,
    /// Number of clients so far, the current one included.
    pub sessions: u64,
    /// Virtio features that the current client accepted.
    pub features: u64,
    /// Protocol features that the current client accepted.
    pub protocol_features: u64,
    /// Bytes mapped for the client: its memory, in-flight region and dirty log.
    pub memory: u64,
    /// Limit of `memory` in bytes.
    pub max_memory: u64,
    /// Queues by index. Their counters span all clients.
    pub queues: Vec<QueueStatus>,
    /// Number of translations refused.
    ///
    /// They did not map whole pages of the client's memory.
    pub refused_translations: u64,
    /// Number of connections that could not be accepted.
    pub refused_connections: u64,
    /// Number of sessions that ended with an error.
    pub protocol_errors: u64,
    /// Most recent of these errors.
    pub last_error: Option<String>,
    /// What of the host's side of the device is gone, and the way out.
    pub host_error: Option<String>,
    /// Whether the guest's link is up; `None` for other devices than network cards.
    pub link_is_up: Option<bool>,
    /// Panic message of a thread; set once the export has failed.
    pub failed: Option<String>,
    /// Whether the client keeps an in-flight region.
    pub tracked: bool,
    /// Numbers of its I/O threads below /proc/self/task; of those that it shares, the ones that serve
    /// it.
    pub threads: Vec<i32>,
}

/// Status that a session writes and its owner reads.
#[derive(Debug)]
#[non_exhaustive]
pub struct SharedStatus {
    status: Mutex<ExportStatus>,
    /// Notifiers of the client.
    pub notifiers: Arc<ClientNotifiers>,
    /// Counters of the queues.
    pub work: Vec<Arc<QueueWork>>,
    /// Quota of the clients' mappings.
    pub quota: MappingQuota,
    /// Set when queues must not continue multi-step requests.
    pub cut: Arc<AtomicBool>,
}

impl SharedStatus {
    /// Makes the status of a device with this number of queues.
    ///
    /// `quota` limits its clients' mappings.
    #[must_use]
    pub fn new(name: &str, queues: usize, quota: MappingQuota) -> Self {
        let status = ExportStatus {
            name: name.to_owned(),
            queues: vec![QueueStatus::default(); queues],
            ..ExportStatus::default()
        };
        let work = std::iter::repeat_with(Arc::default).take(queues).collect();
        let notifiers = Arc::new(ClientNotifiers::new(name, queues));
        Self { status: Mutex::new(status), notifiers, work, quota, cut: Arc::default() }
    }

    /// Measures no latencies [they are measured].
    #[must_use]
    pub fn without_latencies(mut self) -> Self {
        self.work.fill_with(|| Arc::new(QueueWork::without_latencies()));
        self
    }

    /// Returns the latencies of all queues by index; see [`Export::latencies`](crate::Export::latencies).
    #[must_use]
    pub fn latencies(&self) -> Vec<LatencySnapshot> {
        let of = |work: &Arc<QueueWork>| work.latency().map(|latency| latency.snapshot());
        self.work.iter().map(|work| of(work).unwrap_or_default()).collect()
    }

    /// Returns what measures each queue; see [`Export::queue_latencies`](crate::Export::queue_latencies).
    #[must_use]
    pub fn queue_latencies(&self) -> Vec<Arc<QueueLatency>> {
        // All queues measure, or none.
        self.work.iter().filter_map(|work| work.latency().cloned()).collect()
    }

    /// Locks the status for writing. Hold the lock for nothing else.
    pub fn write(&self) -> MutexGuard<'_, ExportStatus> {
        self.status.lock()
    }

    /// Number of clients so far.
    pub(crate) fn sessions(&self) -> u64 {
        self.write().sessions
    }

    /// Returns a snapshot.
    #[must_use]
    pub fn read(&self) -> ExportStatus {
        let mut status = self.write().clone();
        status.memory = self.quota.mapped();
        status.max_memory = self.quota.limits().max_client_memory;
        for ((index, queue), work) in (0..).zip(&mut status.queues).zip(&self.work) {
            queue.kicks = self.notifiers.kicks(index);
            queue.taken = work.taken();
            queue.completed = work.completed();
            queue.in_flight = work.in_flight();
            queue.interrupts = work.interrupts();
            queue.busy_ns = work.busy_ns();
            queue.error = self.notifiers.failure(index);
            queue.live &= queue.error.is_none();
        }
        status
    }
}
