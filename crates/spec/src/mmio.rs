//! Registers of virtio-mmio, versions 2 and 3 (section 4.2.2).
//!
//! Offsets are in bytes. Every register except the configuration space is 32 bits wide and must be
//! accessed as such.

/// "virt" in little endian (R).
pub const MAGIC_VALUE: u64 = 0x000;
/// Value of [`MAGIC_VALUE`].
pub const MAGIC: u32 = 0x7472_6976;
/// Device version (R).
pub const VERSION: u64 = 0x004;
/// Value of [`VERSION`]: a reset is done when the write of 0 to [`STATUS`] is.
pub const VERSION_2: u32 = 2;
/// Value of [`VERSION`]: a reset is done when [`STATUS`] reads 0 (virtio 1.5).
pub const VERSION_3: u32 = 3;
/// Device type (R), see [`crate::device_id`].
pub const DEVICE_ID: u64 = 0x008;
/// Vendor (R).
pub const VENDOR_ID: u64 = 0x00c;
/// "PARA": value of [`VENDOR_ID`] on Paravane's devices.
pub const VENDOR: u32 = 0x4152_4150;
/// The 32 feature bits that [`DEVICE_FEATURES_SEL`] selects (R).
pub const DEVICE_FEATURES: u64 = 0x010;
/// Selects a word of the device's features (W).
pub const DEVICE_FEATURES_SEL: u64 = 0x014;
/// The 32 feature bits that the driver accepts (W).
pub const DRIVER_FEATURES: u64 = 0x020;
/// Selects a word of the driver's features (W).
pub const DRIVER_FEATURES_SEL: u64 = 0x024;
/// Selects the queue of the queue registers (W).
pub const QUEUE_SEL: u64 = 0x030;
/// Maximum size of the selected queue, 0 if it does not exist (R).
///
/// Called QueueNumMax before 1.4.
pub const QUEUE_SIZE_MAX: u64 = 0x034;
/// Size of the selected queue (W). Called QueueNum before 1.4.
pub const QUEUE_SIZE: u64 = 0x038;
/// Whether the selected queue is live (RW).
pub const QUEUE_READY: u64 = 0x044;
/// Available buffer notification (W).
pub const QUEUE_NOTIFY: u64 = 0x050;
/// Pending interrupt causes (R).
pub const INTERRUPT_STATUS: u64 = 0x060;
/// Clears interrupt causes (W).
pub const INTERRUPT_ACK: u64 = 0x064;
/// Device status (RW), see [`crate::status`]. Writing 0 resets the device.
pub const STATUS: u64 = 0x070;
/// Descriptor area, low 32 bits (W).
pub const QUEUE_DESC_LOW: u64 = 0x080;
/// Descriptor area, high 32 bits (W).
pub const QUEUE_DESC_HIGH: u64 = 0x084;
/// Driver area (available ring), low 32 bits (W).
pub const QUEUE_DRIVER_LOW: u64 = 0x090;
/// Driver area, high 32 bits (W).
pub const QUEUE_DRIVER_HIGH: u64 = 0x094;
/// Device area (used ring), low 32 bits (W).
pub const QUEUE_DEVICE_LOW: u64 = 0x0a0;
/// Device area, high 32 bits (W).
pub const QUEUE_DEVICE_HIGH: u64 = 0x0a4;
/// Selects a shared memory region (W).
pub const SHM_SEL: u64 = 0x0ac;
/// Length of the selected region, low 32 bits, all ones if there is none (R).
pub const SHM_LEN_LOW: u64 = 0x0b0;
/// Length of the selected region, high 32 bits (R).
pub const SHM_LEN_HIGH: u64 = 0x0b4;
/// Base of the selected region, low 32 bits (R).
pub const SHM_BASE_LOW: u64 = 0x0b8;
/// Base of the selected region, high 32 bits (R).
pub const SHM_BASE_HIGH: u64 = 0x0bc;
/// Resets the selected queue when 1 is written; reads 1 during the reset (RW).
///
/// Needs RING_RESET.
pub const QUEUE_RESET: u64 = 0x0c0;
/// Changes with the configuration space (R).
pub const CONFIG_GENERATION: u64 = 0x0fc;
/// Start of the device's configuration space.
pub const CONFIG: u64 = 0x100;
/// Size of a device's window in bytes: registers and configuration space.
pub const WINDOW: u64 = 0x1000;

/// Bit of [`INTERRUPT_STATUS`]: used buffer notification.
pub const INT_USED_BUFFER: u32 = 1;
/// Bit of [`INTERRUPT_STATUS`]: the configuration space changed.
pub const INT_CONFIG_CHANGE: u32 = 2;
