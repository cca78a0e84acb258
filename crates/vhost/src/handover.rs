//! Handover: the state of an export, for another process.
//!
//! ```text
//!  old: begin_hand_over --> last message handled --> queues drained ---------------------> Handover
//!                                                                                             |
//!  new: serves  <-- queues started, each signalled once <-- messages replayed <-- resume <----'
//! ```
//! The record of a session is the list of vhost-user messages that make it again, each with its
//! descriptors. To resume is to handle them as if a client sent them: there is no second parser
//! to trust, and every check applies. A few facts that no message carries stand beside them.
//!
//! The descriptors of a disk image do not go along: the new process opens and locks it anew, so the
//! old one has finished all its requests by then. It drops its device meanwhile.
pub(crate) mod record;

use std::io;
use std::os::fd::OwnedFd;
use thiserror::Error;

/// State of an export that another process resumes.
///
/// Send both parts to it: the bytes as they are, the descriptors in this order.
#[derive(Debug)]
#[must_use]
pub struct Handover {
    /// Record of the state, in the format of `docs/reference/handover-record.md`.
    pub record: Vec<u8>,
    /// Descriptors in the order in which the record names them.
    ///
    /// First the listening socket and the connection, where there are such.
    pub fds: Vec<OwnedFd>,
}

/// What a driver knows of its device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KnownToDriver {
    /// Configuration space as the driver has seen it.
    pub config: Vec<u8>,
    /// Features that the driver has accepted; 0: none yet.
    pub features: u64,
}

impl Handover {
    /// A copy, whose descriptors keep the client connected.
    ///
    /// Resume one of them only.
    ///
    /// # Errors
    /// The process has no file descriptors left.
    pub fn try_clone(&self) -> std::io::Result<Self> {
        let fds = self.fds.iter().map(OwnedFd::try_clone).collect::<Result<_, _>>()?;
        Ok(Self { record: self.record.clone(), fds })
    }

    /// What the driver of the session knows of its device. `None`: there is no session.
    ///
    /// # Errors
    /// The record is damaged, invalid or of another version.
    pub fn known_to_driver(&self) -> Result<Option<KnownToDriver>, HandoverError> {
        record::known_to_driver(&self.record)
    }
}

/// Export that cannot be handed over, or handover that cannot be resumed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum HandoverError {
    /// Export that was stopped.
    #[error("the export stopped before it was handed over; start a new one")]
    Stopped,
    /// Device that failed.
    #[error("the device failed before it was handed over; start a new export")]
    Failed,
    /// Session with a device-state transfer.
    #[error("the client is transferring device state (SET_DEVICE_STATE_FD); hand over when it has migrated")]
    Transfer,
    /// Queue without a known position.
    #[error("queue {0}: its position is unknown; the client must reconnect")]
    Position(u32),
    /// Descriptor that cannot be duplicated.
    #[error("cannot duplicate a descriptor of the client: {0}")]
    Fd(#[source] io::Error),
    /// Descriptor that the keeper does not take.
    #[error("cannot keep a descriptor: {0}")]
    Keep(#[source] io::Error),
    /// State that does not fit in a record.
    #[error("the state is larger than a handover record can be; the client must reconnect")]
    TooLarge,
    /// Record of another version.
    #[error("handover record of version {0}: this version reads 1; start a new export")]
    Version(u32),
    /// Record with a section that this version does not know and must.
    #[error("handover record needs section {0:#x}, which this version does not know; start a new export")]
    Section(u32),
    /// Record that is damaged, or is none.
    #[error("invalid handover record: {0}; start a new export")]
    Record(&'static str),
    /// Endpoint that is not that of the record.
    #[error(
        "handover record: the endpoint is {recorded}, not the one of the configuration; correct the configuration or start a new export"
    )]
    Endpoint {
        /// Endpoint in the record.
        recorded: String,
    },
    /// [`Endpoint::Handover`](crate::Endpoint::Handover) without a handover.
    #[error("there is no handover to take the endpoint from; give a socket or a path")]
    Missing,
}
