//! Errors that end a session.
use crate::memory::TableError;
use crate::message::MessageError;
use paravane_device::{StartError, StateError};
use paravane_dma::LogError;
use paravane_export::HandoverError;
use paravane_io::InFlightError;
use paravane_notify::NotifyError;
use paravane_spec::queue::MAX_SIZE;
use std::io;
use thiserror::Error;

/// Error that ends a session.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SessionError {
    /// Malformed message.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// Memory table, or a change of it, that cannot be used.
    #[error("guest memory: {0}")]
    Table(#[from] TableError),
    /// SET_FEATURES or SET_PROTOCOL_FEATURES with bits outside of the offer.
    #[error("client accepted feature bits {0:#x} that were not offered")]
    NotOffered(u64),
    /// SET_PROTOCOL_FEATURES that changes GPA_ADDRESSES while memory is shared.
    #[error("SET_PROTOCOL_FEATURES: cannot change GPA_ADDRESSES while memory is shared; send it first")]
    Addresses,
    /// Request of a protocol feature that is off.
    #[error("{request}: needs a protocol feature that the client did not accept")]
    NotAccepted {
        /// Name of the request.
        request: &'static str,
    },
    /// Queue index out of range.
    #[error("queue {0} does not exist")]
    Queue(u32),
    /// Request that needs a stopped queue.
    #[error("{request}: not allowed while queue {queue} is live; stop it first (GET_VRING_BASE)")]
    Live {
        /// Index of the queue.
        queue: u32,
        /// Name of the request.
        request: &'static str,
    },
    /// SET_VRING_NUM with an invalid queue size.
    #[error("SET_VRING_NUM: invalid size {size} of queue {queue}: need 1 to {MAX_SIZE}")]
    Size {
        /// Index of the queue.
        queue: u32,
        /// Number of descriptors.
        size: u32,
    },
    /// SET_VRING_ENABLE with an invalid value.
    #[error("SET_VRING_ENABLE: invalid value {value} for queue {queue}: need 0 or 1")]
    Enable {
        /// Index of the queue.
        queue: u32,
        /// Neither 0 nor 1.
        value: u32,
    },
    /// SET_VRING_ADDR with an address outside of the memory table.
    #[error(
        "queue {queue}: ring address {addr:#x} is not in the client's memory; \
         every memory backend of the VMM must be shared (share=on)"
    )]
    NoMemory {
        /// Index of the queue.
        queue: u32,
        /// User address of an area of the ring.
        addr: u64,
    },
    /// SET_VRING_ADDR of a client that shares no memory.
    #[error(
        "queue {queue}: the client shares no memory: start the VMM with shared memory \
         (QEMU: memory-backend-memfd with share=on; libvirt: access mode='shared'; \
         Cloud Hypervisor: --memory shared=on)"
    )]
    NothingShared {
        /// Index of the queue.
        queue: u32,
    },
    /// Queue start without VIRTIO_F_VERSION_1 on a big-endian host.
    #[error(
        "queue {0}: legacy driver: VIRTIO_F_VERSION_1 was not accepted; use a virtio 1.0 driver \
         (QEMU: disable-legacy=on)"
    )]
    Legacy(u32),
    /// Ring that cannot be started.
    #[error("cannot start queue {queue}: {source}")]
    Start {
        /// Index of the queue.
        queue: u32,
        /// Cause.
        source: StartError,
    },
    /// SET_VRING_BASE with an invalid position.
    #[error("invalid position of queue {queue}: {source}")]
    Position {
        /// Index of the queue.
        queue: u32,
        /// Cause.
        source: StateError,
    },
    /// Failure of the device or of its I/O thread.
    #[error("cannot serve queue {queue}: {source}")]
    Handler {
        /// Index of the queue.
        queue: u32,
        /// Cause.
        source: io::Error,
    },
    /// File descriptor that cannot be used.
    #[error("{request}: unusable file descriptor: {source}")]
    Fd {
        /// Name of the request.
        request: &'static str,
        /// Cause.
        source: io::Error,
    },
    /// IOTLB message that is neither an update nor an invalidation.
    #[error("IOTLB_MSG: unsupported type {0}: need 2 (update) or 3 (invalidate)")]
    Iotlb(u8),
    /// SET_STATUS with more than 8 bits.
    #[error("SET_STATUS: invalid device status {0:#x}: need 8 bits")]
    Status(u64),
    /// SET_DEVICE_STATE_FD with an unknown direction or phase.
    #[error(
        "SET_DEVICE_STATE_FD: unsupported direction {direction}, phase {phase}: need direction 0 or 1, phase 0"
    )]
    Transfer {
        /// Direction; 0 (save) and 1 (load) are supported.
        direction: u32,
        /// Phase; 0 (stopped) is supported.
        phase: u32,
    },
    /// Dirty log that cannot be used.
    #[error("dirty log: {0}")]
    Log(#[from] LogError),
    /// In-flight region that cannot be used.
    #[error("in-flight region: {0}")]
    Inflight(&'static str),
    /// In-flight region without room for a queue.
    #[error("in-flight region: {0}")]
    InflightRoom(#[from] InFlightError),
    /// Handover whose counts of memory regions do not fit its messages.
    #[error("handover record: the counts of memory regions do not fit the regions")]
    RegionTimes,
    /// Access to a page behind the new end of a truncated file.
    #[error("shared memory is lost: the client truncated its file")]
    MemoryLost,
    /// The host refuses memory for a session or a queue.
    #[error("not enough memory for {what}: {source}")]
    OutOfMemory {
        /// What the memory was for.
        what: String,
        /// Cause.
        source: io::Error,
    },
    /// Section of a handover record that cannot be used.
    #[error(transparent)]
    Saved(#[from] HandoverError),
    /// Failure to make an eventfd.
    #[error(transparent)]
    Host(#[from] NotifyError),
}
