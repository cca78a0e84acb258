//! Errors of attaching a device.
use paravane_notify::NotifyError;
use paravane_transport::RestoreError;
use thiserror::Error;

/// Why a device was not attached.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum AttachError {
    /// The host has no interrupts left.
    #[error(transparent)]
    Interrupts(#[from] NotifyError),
    /// The device was given no threads, and its own does not start.
    #[error("cannot start the device's I/O thread: {0}")]
    Thread(#[source] std::io::Error),
    /// The saved device is another one, or no device.
    #[error(transparent)]
    Restore(#[from] RestoreError),
    /// A queue of the saved device cannot go on.
    #[error("queue {queue} of the saved device cannot go on: {reason}")]
    Queue {
        /// Queue index.
        queue: u16,
        /// The reason.
        reason: String,
    },
}
