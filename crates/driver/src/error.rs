//! Errors of the drivers.
use paravane_ring::{ConfigError, QueueError};
use thiserror::Error;

/// Reason why a driver cannot use its device, or refuses a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DriverError {
    /// There is no virtio-mmio device at this address (section 4.2.2.1).
    #[error("no virtio device: the magic value is {0:#x}")]
    Magic(u32),
    /// Versions 2 and 3 are supported; version 1 is the legacy interface.
    #[error("version {0} of virtio-mmio is not supported")]
    Version(u32),
    /// The PCI function is of another vendor, or a legacy device (section 4.1.2).
    #[error("PCI function {vendor:04x}:{device:04x} is not a modern virtio device")]
    Function {
        /// Vendor identifier.
        vendor: u16,
        /// Device identifier.
        device: u16,
    },
    /// The PCI capability list is malformed.
    #[error("the PCI capability list loops or leaves configuration space at {0:#x}")]
    Capabilities(u16),
    /// A mandatory virtio capability is unusable (section 4.1.4).
    #[error("the virtio structure of type {0} is missing, too short, or outside the PCI window")]
    Structure(u8),
    /// The device lacks the resources for an MSI-X vector (section 4.1.5.1.2).
    #[error("the device mapped an interrupt to vector {got:#x}, not to {wanted}")]
    Vector {
        /// Vector that the driver wrote.
        wanted: u16,
        /// Vector that it read back.
        got: u16,
    },
    /// An MSI message was refused while the device was in use.
    #[error("the device refuses the message of interrupt {0}")]
    Message(u32),
    /// The device has another type than the driver.
    #[error("the device has type {found}; the driver needs {wanted}")]
    DeviceId {
        /// Type that the driver is for.
        wanted: u32,
        /// Type of the device.
        found: u32,
    },
    /// A required feature is not offered, or was not negotiated.
    #[error("the device lacks feature bits {0:#x}")]
    Features(u64),
    /// The device did not keep FEATURES_OK (section 3.1.1).
    #[error("the device did not accept the features")]
    FeaturesRefused,
    /// The status register did not return to 0 (section 2.4).
    #[error("the device did not finish its reset")]
    Reset,
    /// A queue reset did not end (section 2.6.1).
    #[error("the device did not finish the reset of queue {0}")]
    QueueReset(u16),
    /// A queue is missing, too small, or enabled already.
    #[error("queue {0} does not exist or is already in use")]
    Queue(u16),
    /// The [`Pool`](crate::Pool) is exhausted.
    #[error("the pool has {free} bytes left; {needed} are needed")]
    Memory {
        /// Bytes needed.
        needed: usize,
        /// Bytes left.
        free: usize,
    },
    /// The device has set DEVICE_NEEDS_RESET (section 2.1).
    #[error("the device needs a reset")]
    NeedsReset,
    /// The queue cannot be laid out.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The device broke the ring protocol; the queue has latched.
    #[error(transparent)]
    Ring(#[from] QueueError),
    /// No consistent reading of the configuration space (section 2.5.1).
    #[error("the configuration space kept changing while it was read")]
    ConfigUnstable,
    /// A merged frame claims an impossible number of buffers (section 5.1.6.4).
    #[error("the device claims {buffers} buffers for one frame; the queue has {most}")]
    Buffers {
        /// Number that the device claims.
        buffers: usize,
        /// Buffers of the receive queue.
        most: usize,
    },
    /// The caller asks for something that the device cannot do.
    #[error("the request is not possible: {0}")]
    Request(&'static str),
    /// The used length contradicts the status of a request.
    #[error("the device reports success but wrote {len} of {expected} bytes")]
    ShortAnswer {
        /// Bytes that the request lets the device write.
        expected: u32,
        /// Bytes that it says it has written.
        len: u32,
    },
}
