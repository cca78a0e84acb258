//! What an export is doing, for those who look on.
use crate::notifiers::ClientNotifiers;
use paravane_dma::MappingQuota;
use paravane_io::QueueWork;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// One queue.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct QueueStatus {
    /// It is being served.
    pub live: bool,
    /// The client has enabled it.
    pub enabled: bool,
    /// Number of descriptors; 0: the client has not said.
    pub size: u16,
    /// Where it stood when it was last started or stopped, as vhost-user tells positions.
    pub position: u32,
    /// Kicks seen. Several that come at once are one.
    pub kicks: u64,
    /// Chains taken.
    pub taken: u64,
    /// Chains completed.
    pub completed: u64,
    /// Chains taken that are neither completed nor forgotten.
    pub in_flight: u64,
    /// Interrupts that the driver wanted.
    pub interrupts: u64,
    /// Why it was stopped, if its driver or the host broke it.
    pub error: Option<String>,
}

/// An export.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExportStatus {
    /// Its name.
    pub name: String,
    /// A client is connected.
    pub connected: bool,
    /// Clients so far, this one included.
    pub sessions: u64,
    /// Virtio features that this client has accepted.
    pub features: u64,
    /// Protocol features that it has accepted.
    pub protocol_features: u64,
    /// Bytes mapped for the client: its memory, in-flight memory and dirty log.
    pub memory: u64,
    /// Most bytes that may be mapped for a client.
    pub max_memory: u64,
    /// By index. What is counted goes on from client to client.
    pub queues: Vec<QueueStatus>,
    /// Translations that clients have told and that were not taken: not of whole pages of their memory.
    pub refused_translations: u64,
    /// Connections that could not be accepted.
    pub refused_connections: u64,
    /// Sessions that ended with an error.
    pub protocol_errors: u64,
    /// The last of those.
    pub last_error: Option<String>,
    /// A thread of it has panicked, with these words: it is served no more.
    pub failed: Option<String>,
    /// The client has memory in which it is written down what is in flight.
    pub tracked: bool,
}

/// Where a session says what it does.
#[derive(Debug)]
pub struct SharedStatus {
    status: Mutex<ExportStatus>,
    pub(crate) notifiers: Arc<ClientNotifiers>,
    pub(crate) work: Vec<Arc<QueueWork>>,
    /// What clients may have mapped.
    pub(crate) quota: MappingQuota,
    /// Queues are to end what is in flight early.
    pub(crate) cut: Arc<AtomicBool>,
}

impl SharedStatus {
    /// Of a device with so many queues, whose clients may have `quota` mapped.
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

    /// To write on. Not held while anything else is done.
    pub(crate) fn write(&self) -> MutexGuard<'_, ExportStatus> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A look at it.
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
            queue.error = self.notifiers.failure(index);
            queue.live &= queue.error.is_none();
        }
        status
    }
}
