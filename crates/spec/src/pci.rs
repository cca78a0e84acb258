//! Modern virtio over PCI (section 4.1), and the parts of PCI that it needs.
//!
//! These are the configuration space, MSI-X and ECAM.
//!
//! Sources of the PCI numbers: PCI Local Bus Specification 3.0 (chapter 6: configuration space,
//! 6.8.2: MSI-X) and PCI Express Base Specification (7.2.2: ECAM). Offsets are in bytes; everything
//! is little endian.

/// Vendor identifier of all virtio devices (section 4.1.2).
pub const VENDOR: u16 = 0x1af4;
/// PCI device identifier minus virtio device identifier (section 4.1.2.1).
///
/// For modern devices.
pub const DEVICE_BASE: u16 = 0x1040;
/// Smallest revision of a modern device (section 4.1.2.1).
pub const REVISION: u8 = 1;
/// Smallest subsystem identifier of a modern device (section 4.1.2.1).
pub const SUBSYSTEM: u16 = 0x0040;
/// Vendor and device of the host bridge that Paravane presents.
///
/// Red Hat's generic PCI Express host bridge.
pub const HOST_BRIDGE: [u16; 2] = [0x1b36, 0x0008];
/// Value of the vendor field where there is no function.
pub const NO_VENDOR: u16 = 0xffff;

/// Class codes (PCI 3.0, appendix D).
///
/// Base class, subclass, programming interface, from the highest byte down.
pub mod class {
    /// Mass storage, other.
    pub const STORAGE: u32 = 0x01_80_00;
    /// Network controller, Ethernet.
    pub const NETWORK: u32 = 0x02_00_00;
    /// Bridge, host.
    pub const HOST_BRIDGE: u32 = 0x06_00_00;
    /// No other class fits.
    pub const OTHER: u32 = 0xff_00_00;
}

/// Configuration space of a function with a header of type 0 (PCI 3.0, 6.1).
pub mod header {
    /// Vendor, 16 bits (R).
    pub const VENDOR: u16 = 0x00;
    /// Device, 16 bits (R).
    pub const DEVICE: u16 = 0x02;
    /// Command, 16 bits (RW), see [`super::command`].
    pub const COMMAND: u16 = 0x04;
    /// Status, 16 bits (R), see [`STATUS_CAPABILITIES`].
    pub const STATUS: u16 = 0x06;
    /// Bit of [`STATUS`]: the function has a list of capabilities.
    pub const STATUS_CAPABILITIES: u16 = 1 << 4;
    /// Revision, 8 bits (R).
    pub const REVISION: u16 = 0x08;
    /// Class code, 24 bits (R), see [`super::class`].
    pub const CLASS: u16 = 0x09;
    /// Header type, 8 bits (R).
    pub const HEADER_TYPE: u16 = 0x0e;
    /// Bits of [`HEADER_TYPE`] that hold the type.
    ///
    /// The highest bit announces further functions.
    pub const HEADER_TYPE_MASK: u8 = 0x7f;
    /// Base address register 0, 32 bits (RW); five more follow.
    pub const BAR: u16 = 0x10;
    /// Number of base address registers.
    pub const BARS: u8 = 6;
    /// Subsystem vendor, 16 bits (R).
    pub const SUBSYSTEM_VENDOR: u16 = 0x2c;
    /// Subsystem, 16 bits (R).
    pub const SUBSYSTEM: u16 = 0x2e;
    /// Offset of the first capability, 8 bits (R).
    pub const CAPABILITIES: u16 = 0x34;
    /// Interrupt line, 8 bits (RW): set by firmware for the driver.
    pub const INTERRUPT_LINE: u16 = 0x3c;
    /// Interrupt pin, 8 bits (R): 1 is INTA.
    pub const INTERRUPT_PIN: u16 = 0x3d;
    /// End of the header: first possible offset of a capability.
    pub const END: u16 = 0x40;
    /// Size in bytes of the space for capabilities, header included.
    pub const SIZE: u16 = 0x100;
}

/// Bits of the command register (PCI 3.0, 6.2.2).
pub mod command {
    /// The function answers at its memory BARs.
    pub const MEMORY: u16 = 1 << 1;
    /// The function may access memory and send messages.
    pub const BUS_MASTER: u16 = 1 << 2;
    /// The function does not use its wired interrupt.
    pub const INTX_DISABLE: u16 = 1 << 10;
}

/// Bits of a base address register (PCI 3.0, 6.2.5.1).
pub mod bar {
    /// I/O BAR.
    pub const IO: u32 = 1;
    /// Bits that hold the width of a memory BAR.
    pub const WIDTH: u32 = 0b110;
    /// Width of 64 bits: the next register holds the upper half.
    pub const WIDTH_64: u32 = 0b100;
    /// Bits of a memory BAR that are not part of the address.
    pub const FLAGS: u32 = 0xf;
}

/// Capabilities (PCI 3.0, 6.7).
///
/// Each has its identifier at offset 0, and the offset of the next one (0: none) at 1.
pub mod capability {
    /// Vendor-specific: virtio's.
    pub const VENDOR: u8 = 0x09;
    /// MSI-X.
    pub const MSIX: u8 = 0x11;
    /// Valid bits of a pointer to a capability.
    pub const POINTER: u8 = 0xfc;
}

/// MSI-X (PCI 3.0, 6.8.2): the capability, and the table that it points to.
pub mod msix {
    /// Size of the capability in bytes.
    pub const LEN: u8 = 12;
    /// Offset in the capability: message control, 16 bits.
    pub const CONTROL: u16 = 2;
    /// Offset in the capability: table offset, with the BAR in the lowest three bits.
    pub const TABLE: u16 = 4;
    /// Offset in the capability: pending bits' offset, with the BAR in bits 0 to 2.
    pub const PBA: u16 = 8;
    /// Bits of [`TABLE`] and [`PBA`] that select the BAR.
    pub const BIR: u32 = 7;
    /// Bits of [`CONTROL`]: number of vectors minus 1.
    pub const SIZE: u16 = 0x7ff;
    /// Bit of [`CONTROL`]: all vectors are masked.
    pub const FUNCTION_MASK: u16 = 1 << 14;
    /// Bit of [`CONTROL`]: MSI-X is on, and the wired interrupt is off.
    pub const ENABLE: u16 = 1 << 15;
    /// Most vectors of a function.
    pub const MOST: u16 = 2048;

    /// Size of a table entry in bytes.
    pub const ENTRY: u64 = 16;
    /// Offset in an entry: low half of the message address.
    pub const ADDRESS_LOW: u64 = 0;
    /// Offset in an entry: high half of the message address.
    pub const ADDRESS_HIGH: u64 = 4;
    /// Offset in an entry: message data.
    pub const DATA: u64 = 8;
    /// Offset in an entry: vector control.
    pub const VECTOR_CONTROL: u64 = 12;
    /// Bit of [`VECTOR_CONTROL`]: the vector is masked.
    ///
    /// The only defined bit; set after a reset.
    pub const MASKED: u32 = 1;
}

/// Value in place of an MSI-X vector: none (section 4.1.5.1.2).
pub const NO_VECTOR: u16 = 0xffff;

/// Virtio capabilities (section 4.1.4): locations of its structures in the BARs.
pub mod cap {
    /// Size of the capability in bytes, 8 bits.
    pub const LEN: u16 = 2;
    /// Type of the structure, 8 bits: one of the constants below.
    pub const CFG_TYPE: u16 = 3;
    /// BAR of the structure, 8 bits.
    pub const BAR: u16 = 4;
    /// Offset of the structure in the BAR, 32 bits.
    pub const OFFSET: u16 = 8;
    /// Size of the structure in bytes, 32 bits.
    pub const LENGTH: u16 = 12;
    /// Size of a plain capability in bytes.
    pub const SIZE: u8 = 16;
    /// [`NOTIFY`] only: distance in bytes between two notification offsets, 32 bits.
    pub const NOTIFY_OFF_MULTIPLIER: u16 = 16;
    /// [`PCI`] only: data of the window, 32 bits.
    pub const PCI_CFG_DATA: u16 = 16;
    /// Size in bytes of the capabilities of type [`NOTIFY`] and [`PCI`].
    pub const SIZE_LONG: u8 = 20;

    /// Common configuration, see [`super::common`].
    pub const COMMON: u8 = 1;
    /// Notifications.
    pub const NOTIFY: u8 = 2;
    /// ISR status: 8 bits, see [`super::ISR_QUEUE`].
    pub const ISR: u8 = 3;
    /// The device's configuration space.
    pub const DEVICE: u8 = 4;
    /// Window into the BARs, for drivers that cannot access them.
    pub const PCI: u8 = 5;
}

/// Bit of the ISR status (section 4.1.4.5): used buffer notification.
pub const ISR_QUEUE: u8 = 1;
/// Bit of the ISR status (section 4.1.4.5): the configuration space changed.
pub const ISR_CONFIG: u8 = 2;

/// Common configuration (section 4.1.4.3).
///
/// Each field must be accessed with its own width; a 64-bit field may be accessed by halves.
pub mod common {
    /// Selects a word of the device's features, 32 bits (RW).
    pub const DEVICE_FEATURE_SELECT: u64 = 0x00;
    /// Selected word of the device's features (R).
    pub const DEVICE_FEATURE: u64 = 0x04;
    /// Selects a word of the driver's features, 32 bits (RW).
    pub const DRIVER_FEATURE_SELECT: u64 = 0x08;
    /// Selected word of the driver's features (RW).
    pub const DRIVER_FEATURE: u64 = 0x0c;
    /// MSI-X vector of the configuration change, 16 bits (RW).
    pub const CONFIG_MSIX_VECTOR: u64 = 0x10;
    /// Number of queues, 16 bits (R).
    pub const NUM_QUEUES: u64 = 0x12;
    /// Device status, 8 bits (RW). Writing 0 resets the device.
    pub const DEVICE_STATUS: u64 = 0x14;
    /// Changes with the configuration space, 8 bits (R).
    pub const CONFIG_GENERATION: u64 = 0x15;
    /// Selects the queue of the fields below, 16 bits (RW).
    pub const QUEUE_SELECT: u64 = 0x16;
    /// Size of the queue, 16 bits (RW).
    ///
    /// After a reset the maximum, 0 if the queue does not exist.
    pub const QUEUE_SIZE: u64 = 0x18;
    /// MSI-X vector of the queue, 16 bits (RW).
    pub const QUEUE_MSIX_VECTOR: u64 = 0x1a;
    /// Whether the queue is live, 16 bits (RW); only 1 may be written.
    pub const QUEUE_ENABLE: u64 = 0x1c;
    /// Notification offset of the queue, 16 bits (R), in units of the multiplier.
    pub const QUEUE_NOTIFY_OFF: u64 = 0x1e;
    /// Descriptor area, 64 bits (RW).
    pub const QUEUE_DESC: u64 = 0x20;
    /// Driver area, 64 bits (RW).
    pub const QUEUE_DRIVER: u64 = 0x28;
    /// Device area, 64 bits (RW).
    pub const QUEUE_DEVICE: u64 = 0x30;
    /// Value to kick with under NOTIF_CONFIG_DATA, 16 bits (R).
    pub const QUEUE_NOTIF_CONFIG_DATA: u64 = 0x38;
    /// Resets the queue when 1 is written; reads 1 during the reset, 16 bits (RW).
    ///
    /// Needs RING_RESET.
    pub const QUEUE_RESET: u64 = 0x3a;
    /// Size in bytes up to here: the rest belongs to ADMIN_VQ.
    pub const LENGTH: u64 = 0x3c;
    /// Size in bytes that every modern device has: up to the device area.
    pub const LEAST: u64 = 0x38;
}

/// ECAM: configuration spaces of a bus in memory (PCI Express, 7.2.2).
///
/// Sizes are in bytes.
pub mod ecam {
    /// Size of a function's configuration space.
    pub const FUNCTION: u64 = 0x1000;
    /// Number of functions per device.
    pub const FUNCTIONS: u64 = 8;
    /// Number of devices per bus.
    pub const DEVICES: u64 = 32;
    /// Size of a bus.
    pub const BUS: u64 = FUNCTION * FUNCTIONS * DEVICES;
}
