//! Device status bits (section 2.1).

/// The driver has noticed the device.
pub const ACKNOWLEDGE: u32 = 1;
/// The driver knows how to drive it.
pub const DRIVER: u32 = 2;
/// The driver is ready; from here on the device may use its queues.
pub const DRIVER_OK: u32 = 4;
/// The driver has acknowledged the features that it understands.
pub const FEATURES_OK: u32 = 8;
/// The device is suspended (version 1.4).
pub const SUSPEND: u32 = 16;
/// The device has met an error that only a reset ends.
pub const DEVICE_NEEDS_RESET: u32 = 64;
/// The driver has given up.
pub const FAILED: u32 = 128;
