//! Errors of handovers.
use std::io;
use thiserror::Error;

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
    /// The endpoint differs from the one in the record.
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
