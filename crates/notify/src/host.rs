//! The host notifier of one queue: who gets its kicks.
//!
//! ```text
//!            assign (ioeventfd)                grab
//! Deassigned -----------------> Assigned -----------------> OffLimits (counted)
//!            <----------------- (our loop)  <-------------- (a vhost back end owns it)
//!             deassign, refusal              release: signalled once
//! ```
use crate::{IoEventFds, Notifier, NotifyError};
use std::sync::Arc;

/// Who owns a queue's kicks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotifierState {
    /// Kicks exit and are served by whoever handles the exit.
    Deassigned,
    /// Kicks signal the notifier; our event loop owns it.
    Assigned,
    /// A vhost back end owns the notifier.
    OffLimits,
}

/// What became of a kick that came by an exit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kick {
    /// It was passed to the owner of the eventfd.
    Forwarded,
}

/// One queue's notifier, its address and its state. The eventfd always exists and an event loop always
/// waits on it: without an ioeventfd the exit path writes it, so the queue has one owner either way.
pub struct HostNotifier {
    _private: Arc<dyn IoEventFds>,
}

impl HostNotifier {
    /// A deassigned notifier, born signalled, for writes of `datamatch` to guest-physical `addr`.
    ///
    /// # Errors
    /// The process has no file descriptors left.
    pub fn new(fds: Arc<dyn IoEventFds>, addr: u64, datamatch: Option<u32>) -> Result<Self, NotifyError> {
        let _ = (fds, addr, datamatch);
        todo!()
    }

    /// The eventfd, for the owner to wait on.
    #[must_use]
    pub fn notifier(&self) -> &Notifier {
        todo!()
    }

    /// Registers the ioeventfd and signals once. On refusal the state stays `Deassigned` and kicks exit.
    ///
    /// # Errors
    /// The host refuses, or the notifier is not deassigned.
    pub fn assign(&self) -> Result<(), NotifyError> {
        todo!()
    }

    /// Removes the ioeventfd. The caller has taken its handler off before, and afterwards tests the notifier
    /// once more: a kick may have come in between.
    ///
    /// # Errors
    /// The notifier is not assigned.
    pub fn deassign(&self) -> Result<(), NotifyError> {
        todo!()
    }

    /// Present state.
    #[must_use]
    pub fn state(&self) -> NotifierState {
        todo!()
    }

    /// A kick that came by an exit: hands it to the owner. Counted.
    pub fn kick(&self) -> Kick {
        todo!()
    }

    /// Kicks that came by an exit.
    #[must_use]
    pub fn exit_kicks(&self) -> u64 {
        todo!()
    }
}
