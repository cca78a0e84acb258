//! What can go wrong between a driver and its device.
use paravane_ring::{ConfigError, QueueError};
use thiserror::Error;

/// Why a driver cannot use its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum DriverError {
    /// no virtio device: the magic value reads {0:#x}
    #[error("no virtio device: the magic value reads {0:#x}")]
    Magic(u32),
    /// version {0} of virtio-mmio is not supported
    #[error("version {0} of virtio-mmio is not supported")]
    Version(u32),
    /// PCI function {vendor:04x}:{device:04x} is no modern virtio device
    #[error("PCI function {vendor:04x}:{device:04x} is no modern virtio device")]
    Function {
        /// Vendor identifier.
        vendor: u16,
        /// Device identifier.
        device: u16,
    },
    /// the list of PCI capabilities does not end, or leaves its space, at {0:#x}
    #[error("the list of PCI capabilities does not end, or leaves its space, at {0:#x}")]
    Capabilities(u16),
    /// the virtio structure of type {0} is missing, too short, or not where a device may be
    #[error("the virtio structure of type {0} is missing, too short, or not where a device may be")]
    Structure(u8),
    /// the device mapped an interrupt to vector {got:#x}, not to {wanted}
    #[error("the device mapped an interrupt to vector {got:#x}, not to {wanted}")]
    Vector {
        /// What the driver wrote.
        wanted: u16,
        /// What it read back.
        got: u16,
    },
    /// the device refuses the message of interrupt {0}
    #[error("the device refuses the message of interrupt {0}")]
    Message(u32),
    /// device type {found}, not {wanted}
    #[error("device type {found}, not {wanted}")]
    DeviceId {
        /// What the driver drives.
        wanted: u32,
        /// What is there.
        found: u32,
    },
    /// the device lacks feature bits {0:#x}
    #[error("the device lacks feature bits {0:#x}")]
    Features(u64),
    /// the device did not accept the features
    #[error("the device did not accept the features")]
    FeaturesRefused,
    /// the device did not finish its reset
    #[error("the device did not finish its reset")]
    Reset,
    /// the device did not finish the reset of queue {0}
    #[error("the device did not finish the reset of queue {0}")]
    QueueReset(u16),
    /// queue {0} does not exist or is already in use
    #[error("queue {0} does not exist or is already in use")]
    Queue(u16),
    /// the pool has {free} bytes left and {needed} are needed
    #[error("the pool has {free} bytes left and {needed} are needed")]
    Memory {
        /// Bytes needed.
        needed: usize,
        /// Bytes left.
        free: usize,
    },
    /// the device asks to be reset
    #[error("the device asks to be reset")]
    NeedsReset,
    /// {0}
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// {0}
    #[error(transparent)]
    Ring(#[from] QueueError),
    /// the configuration space kept changing while it was read
    #[error("the configuration space kept changing while it was read")]
    ConfigUnstable,
    /// a frame is said to lie in {buffers} buffers, and there are {most}
    #[error("a frame is said to lie in {buffers} buffers, and there are {most}")]
    Buffers {
        /// What the device says.
        buffers: usize,
        /// Buffers that it has.
        most: usize,
    },
    /// the request is not possible: {0}
    #[error("the request is not possible: {0}")]
    Request(&'static str),
    /// the device says that a request went well and that it wrote {len} of {expected} bytes
    #[error("the device says that a request went well and that it wrote {len} of {expected} bytes")]
    ShortAnswer {
        /// Bytes that the request lets the device write.
        expected: u32,
        /// Bytes that it says it has written.
        len: u32,
    },
}
