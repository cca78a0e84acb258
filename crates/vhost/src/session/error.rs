//! What ends a session.
use crate::memory::TableError;
use crate::message::MessageError;
use paravane_device::{StartError, StateError};
use paravane_dma::LogError;
use paravane_notify::NotifyError;
use std::io;
use thiserror::Error;

/// Why a session cannot go on.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SessionError {
    /// {0}
    #[error(transparent)]
    Message(#[from] MessageError),
    /// the memory: {0}
    #[error("the memory: {0}")]
    Table(#[from] TableError),
    /// feature bits {0:#x} were accepted that are not offered
    #[error("feature bits {0:#x} were accepted that are not offered")]
    NotOffered(u64),
    /// {request} needs a protocol feature that was not accepted
    #[error("{request} needs a protocol feature that was not accepted")]
    NotAccepted {
        /// Which.
        request: &'static str,
    },
    /// there is no queue {0}
    #[error("there is no queue {0}")]
    Queue(u32),
    /// {request} while queue {queue} is live
    #[error("{request} while queue {queue} is live")]
    Live {
        /// Which queue.
        queue: u32,
        /// What was asked.
        request: &'static str,
    },
    /// queue {queue} is to have {size} descriptors
    #[error("queue {queue} is to have {size} descriptors")]
    Size {
        /// Which.
        queue: u32,
        /// So many.
        size: u32,
    },
    /// queue {queue} is to be enabled by {value}
    #[error("queue {queue} is to be enabled by {value}")]
    Enable {
        /// Which.
        queue: u32,
        /// Neither 0 nor 1.
        value: u32,
    },
    /// address {addr:#x} of queue {queue} is not in the client's memory
    #[error("address {addr:#x} of queue {queue} is not in the client's memory")]
    NoMemory {
        /// Which queue.
        queue: u32,
        /// Where an area of it should be.
        addr: u64,
    },
    /// the driver of queue {0} does not follow version 1 of the specification
    #[error("the driver of queue {0} does not follow version 1 of the specification")]
    Legacy(u32),
    /// queue {queue} does not start: {source}
    #[error("queue {queue} does not start: {source}")]
    Start {
        /// Which.
        queue: u32,
        /// Why.
        source: StartError,
    },
    /// the position of queue {queue}: {source}
    #[error("the position of queue {queue}: {source}")]
    Position {
        /// Which.
        queue: u32,
        /// What is wrong.
        source: StateError,
    },
    /// the device cannot serve queue {queue}: {source}
    #[error("the device cannot serve queue {queue}: {source}")]
    Handler {
        /// Which.
        queue: u32,
        /// Why.
        source: io::Error,
    },
    /// the descriptor of {request}: {source}
    #[error("the descriptor of {request}: {source}")]
    Fd {
        /// Which.
        request: &'static str,
        /// What is wrong with it.
        source: io::Error,
    },
    /// a translation of kind {0}, which is none for us
    #[error("a translation of kind {0}, which is none for us")]
    Iotlb(u8),
    /// the device status is to be {0:#x}
    #[error("the device status is to be {0:#x}")]
    Status(u64),
    /// device state is to be carried in direction {direction}, phase {phase}
    #[error("device state is to be carried in direction {direction}, phase {phase}")]
    Transfer {
        /// 0 and 1 are known.
        direction: u32,
        /// 0 is known.
        phase: u32,
    },
    /// the log: {0}
    #[error("the log: {0}")]
    Log(#[from] LogError),
    /// the in-flight memory: {0}
    #[error("the in-flight memory: {0}")]
    Inflight(&'static str),
    /// memory that the client has shared is gone: its file was made shorter
    #[error("memory that the client has shared is gone: its file was made shorter")]
    MemoryLost,
    /// The host has no memory for what the client asks for.
    #[error("no memory for {what}: {source}")]
    OutOfMemory {
        /// A session or a queue.
        what: String,
        /// Why not.
        source: io::Error,
    },
    /// {0}
    #[error(transparent)]
    Host(#[from] NotifyError),
}
