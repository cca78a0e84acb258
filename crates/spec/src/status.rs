//! Device status bits (section 2.1).

/// The guest has found the device.
pub const ACKNOWLEDGE: u32 = 1;
/// The guest has a driver for the device.
pub const DRIVER: u32 = 2;
/// The driver is ready; from here on the device may use its queues.
pub const DRIVER_OK: u32 = 4;
/// The driver has acknowledged the features that it understands.
pub const FEATURES_OK: u32 = 8;
/// The device is suspended (version 1.4).
pub const SUSPEND: u32 = 16;
/// The device has an error that only a reset clears.
pub const DEVICE_NEEDS_RESET: u32 = 64;
/// The driver has failed.
pub const FAILED: u32 = 128;
