//! Handover: the state of an export, for another process.
//!
//! ```text
//!  old: begin_hand_over --> last message handled --> queues drained ---------------------> Handover
//!                                                                                             |
//!  new: serves  <-- queues started, each signalled once <-- messages replayed <-- resume <----'
//! ```
//! A record has the state of the export and the sections that its session wrote
//! ([`Session::save`](crate::protocol::Session::save)), which mean something to its protocol only.
//!
//! The descriptors of a disk image do not go along: the new process opens and locks it anew, so the
//! old one has finished all its requests by then. It drops its device meanwhile.
pub(crate) mod record;

use std::io;
use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;
use thiserror::Error;

/// Tags of sections that belong to a session. A reader skips those that it does not know.
pub const SECTION_TAGS: RangeInclusive<u32> = 3..=8;
/// Set in the tags of sections that a reader must know.
///
/// 1 and from 4 on are those of sessions; 2 and 3 are those of exports.
pub const REQUIRED: u32 = 1 << 30;

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

    /// The sections of the session in the record, with their tags: those in [`SECTION_TAGS`].
    ///
    /// # Errors
    /// The record is damaged, invalid or of another version.
    pub fn session_sections(&self) -> Result<Vec<(u32, &[u8])>, HandoverError> {
        record::session_sections(&self.record)
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
    /// Session with a transfer of this kind of state.
    #[error("the client is transferring {0}; hand over when it has migrated")]
    Transfer(&'static str),
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
    /// Record of another protocol.
    #[error(
        "handover record is of protocol {recorded}, this export's is {own}; correct the configuration or start a new export"
    )]
    Protocol {
        /// Number of the protocol in the record.
        recorded: u32,
        /// Number of the export's protocol.
        own: u32,
    },
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
