//! State shared by an export's task and its owner.
use super::endpoint::SocketFile;
use super::host_watch::{HostState, Look};
use super::note::Note;
use super::orders::{Order, Orders};
use super::outcome::Outcome;
use crate::handover::record::ExportState;
use crate::handover::{Handover, HandoverError};
use crate::keeper::Keeping;
use crate::status::SharedStatus;
use paravane_device::Device;
use paravane_notify::Notifier;
use parking_lot::Mutex;
use std::any::Any;
use std::sync::Arc;

/// See the module.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) shared_status: Arc<SharedStatus>,
    pub(super) orders: Orders,
    pub(super) outcome: Outcome,
    /// See [`ExportConfig::ended`](crate::ExportConfig::ended).
    pub(super) tell_ended: Option<Arc<Notifier>>,
    /// File of the socket, until the export stops.
    pub(super) file: Mutex<Option<SocketFile>>,
    pub(super) handed: Mutex<Handed>,
    pub(super) host: Mutex<HostState>,
    pub(super) note: Arc<Note>,
    /// What is left of an export that was handed over, and takes long to give up.
    pub(super) remains: Mutex<Vec<Box<dyn Any + Send>>>,
}

/// What an export leaves to its successor.
#[derive(Debug, Default)]
pub(super) struct Handed {
    /// State to hand over, or why there is none. Set before the device is dropped.
    pub(super) state: Option<Result<Handover, HandoverError>>,
    /// What is kept, if the successor is in this process.
    pub(super) left: Option<Keeping>,
}

impl Shared {
    pub(super) fn new(
        shared_status: SharedStatus,
        file: Option<SocketFile>,
        note: Arc<Note>,
        tell_ended: Option<Arc<Notifier>>,
    ) -> Self {
        Self {
            shared_status: Arc::new(shared_status),
            orders: Orders::new(Order::Keep),
            outcome: Outcome::default(),
            tell_ended,
            file: Mutex::new(file),
            handed: Mutex::default(),
            host: Mutex::default(),
            note,
            remains: Mutex::new(Vec::new()),
        }
    }

    /// Number of buffers returned to clients so far.
    pub(super) fn completed(&self) -> u64 {
        self.shared_status.work.iter().fold(0, |sum, work| sum.wrapping_add(work.completed()))
    }

    /// Records that a thread panicked with this message.
    pub(super) fn fail(&self, message: &str) {
        let name = {
            let mut status = self.shared_status.write();
            status.failed.get_or_insert_with(|| message.to_owned());
            status.name.clone()
        };
        tracing::error!(
            device = name,
            "device failed: a thread panicked: {message}; restart to serve it again"
        );
        self.orders.give(&[Order::Fail]);
    }

    pub(super) fn has_failed(&self) -> bool {
        self.orders.has(Order::Fail)
    }

    pub(super) fn is_handing_over(&self) -> bool {
        self.orders.has(Order::HandOver)
    }

    /// Records the outcome of a handover; `None`: the export ended before.
    ///
    /// Removes the socket if there is no state to hand over. `keeping`: of an exchange.
    pub(super) fn finish_hand_over(
        &self,
        state: Option<Result<ExportState, HandoverError>>,
        keeping: Option<Keeping>,
    ) {
        let handed = match state {
            Some(state) => state.and_then(ExportState::encode),
            None if self.has_failed() => Err(HandoverError::Failed),
            None => Err(HandoverError::Stopped),
        };
        if handed.is_err() {
            self.remove_file();
        }
        let left = match handed {
            Ok(_) => keeping,
            Err(_) => {
                keeping.into_iter().for_each(Keeping::end);
                None
            }
        };
        let mut given = self.handed.lock();
        // What an earlier call has left stays for the owner, who ends it.
        given.left = left.or(given.left.take());
        given.state = Some(handed);
    }

    /// Tells the owner that the export's state is there, or that it has ended.
    pub(super) fn signal_ended(&self) {
        if let Some(ended) = &self.tell_ended {
            ended.signal();
        }
    }

    /// Removes the socket, so that no client can connect.
    pub(super) fn remove_file(&self) {
        drop(self.file.lock().take());
    }

    /// See [`HostState::look`].
    pub(super) fn look(&self, name: &str, device: &mut dyn Device) -> Look {
        let is_asked = self.orders.take(Order::Look);
        let mut host = self.host.lock();
        host.look(is_asked, &self.shared_status, name, device)
    }
}
