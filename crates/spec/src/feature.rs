//! Feature bits that are independent of the device type (section 6), as masks.

/// Indirect descriptor tables may be used.
pub const INDIRECT_DESC: u64 = 1 << 28;
/// `used_event` and `avail_event` replace the suppression flags (section 2.7.10).
pub const EVENT_IDX: u64 = 1 << 29;
/// The device follows version 1 of the specification.
///
/// Drivers without it are refused.
pub const VERSION_1: u64 = 1 << 32;
/// The platform translates and restricts the device's memory accesses (an IOMMU).
pub const ACCESS_PLATFORM: u64 = 1 << 33;
/// Packed virtqueue layout.
pub const RING_PACKED: u64 = 1 << 34;
/// Buffers are used in the order in which they were made available.
pub const IN_ORDER: u64 = 1 << 35;
/// Memory accesses need the platform's ordering, not only SMP ordering.
pub const ORDER_PLATFORM: u64 = 1 << 36;
/// A kick carries the ring position.
pub const NOTIFICATION_DATA: u64 = 1 << 38;
/// The driver kicks with a value from the device instead of the queue index.
pub const NOTIF_CONFIG_DATA: u64 = 1 << 39;
/// The driver may reset one queue at a time.
pub const RING_RESET: u64 = 1 << 40;
/// The device has administration virtqueues.
pub const ADMIN_VQ: u64 = 1 << 41;
/// The device can be suspended (new in version 1.4).
pub const SUSPEND: u64 = 1 << 43;
