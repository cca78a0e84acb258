//! Queue parameters that all layouts and transports share (section 2.6).

/// Largest queue size that the specification allows (section 2.6).
pub const MAX_SIZE: u16 = 32768;

/// Queue configuration from the driver, unchecked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueAddresses {
    /// Number of descriptors.
    pub size: u16,
    /// Address of the descriptor area, in the device's address space.
    pub desc: u64,
    /// Address of the driver area (split: the available ring).
    pub driver: u64,
    /// Address of the device area (split: the used ring).
    pub device: u64,
}

/// Contiguous piece of a buffer, in the device's address space.
///
/// A descriptor without its flags.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Segment {
    /// First byte.
    pub addr: u64,
    /// Number of bytes.
    pub len: u32,
}
