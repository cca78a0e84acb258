//! Errors of exports and their sessions.
use crate::framing::SessionEnd;
use crate::handover::HandoverError;
use crate::socket::SocketError;
use std::io;
use std::path::PathBuf;
use thiserror::Error;

/// Device that cannot be exported.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ExportError {
    /// Socket path with a live server.
    #[error("{}: another server listens here; stop it or use another path", path.display())]
    InUse {
        /// Path of the socket.
        path: PathBuf,
    },
    /// Socket path with another file.
    #[error("{}: exists and is not a socket; remove it or use another path", path.display())]
    NotASocket {
        /// Path of the file.
        path: PathBuf,
    },
    /// Socket that cannot be made.
    #[error("{}: {source}", path.display())]
    Socket {
        /// Path of the socket.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// Device with more queues than a client can address.
    #[error("the device has {queues} queues; {protocol} addresses at most {max}")]
    Queues {
        /// Number of queues of the device.
        queues: usize,
        /// Name of the protocol.
        protocol: &'static str,
        /// Largest number of queues.
        max: usize,
    },
    /// Thread or eventfd that cannot be made.
    #[error("cannot start a thread: {0}")]
    Thread(#[source] io::Error),
    /// A thread of the export panicked, see [`Export::join`](crate::Export::join).
    #[error("the device has failed: {0}")]
    Failed(String),
    /// Handover that cannot be resumed.
    #[error(transparent)]
    Handover(#[from] HandoverError),
}

/// Why a session ended.
#[derive(Debug, Error)]
pub(super) enum EndCause {
    #[error(transparent)]
    Session(#[from] SessionEnd),
    #[error(transparent)]
    Socket(#[from] SocketError),
    #[error("cannot restore the session: {0}")]
    Restore(#[source] SessionEnd),
    #[error("the client kept its call eventfd full, which blocks the I/O threads of other devices")]
    Floods,
    #[error("device failed")]
    Failed,
}
