//! Paravane's extension of virtio-mmio.
//!
//! It adds message-signalled interrupts, and a notification address per queue.
//!
//! Source: `docs/reference/virtio-mmio-msi.md`. All of its numbers are here, so that they can move:
//! version 1.4 of the specification reserves the feature bits for future extensions and leaves the
//! registers unassigned.
//!
//! Offsets are in bytes. Every register is 32 bits wide and must be accessed as such.

/// Feature bit, as a mask: every queue has its own notification address.
pub const F_NOTIFICATION: u64 = 1 << 44;
/// Feature bit, as a mask: interrupts can be messages.
pub const F_MSI: u64 = 1 << 45;

/// Offset in bytes of queue 0's notification address from the first register (R).
///
/// Needs [`F_NOTIFICATION`], like [`NOTIFY_MULTIPLIER`].
pub const NOTIFY_BASE: u64 = 0x0c4;
/// Distance in bytes between the notification addresses of two queues (R).
pub const NOTIFY_MULTIPLIER: u64 = 0x0c8;

/// Number of different messages that the device can deliver (R).
///
/// Needs [`F_MSI`], like all `MSI_` registers.
pub const MSI_LIMIT: u64 = 0x0d0;
/// Message address that the next [`command::CONFIGURE`] takes, low 32 bits (W).
pub const MSI_ADDRESS_LOW: u64 = 0x0d4;
/// Message address that the next [`command::CONFIGURE`] takes, high 32 bits (W).
pub const MSI_ADDRESS_HIGH: u64 = 0x0d8;
/// Message data that the next [`command::CONFIGURE`] takes (W).
pub const MSI_DATA: u64 = 0x0dc;
/// Carries out a [`command`] (W).
pub const MSI_COMMAND: u64 = 0x0e0;
/// [`state`] of MSI and of the selected source (R).
pub const MSI_STATE: u64 = 0x0e4;

/// Value of QueueSel that selects the configuration change for the MSI registers.
pub const SELECT_CONFIGURATION: u32 = 0xffff;

/// Values of [`MSI_COMMAND`].
pub mod command {
    /// Turns MSI on, without messages.
    pub const ENABLE: u32 = 1;
    /// Turns MSI off and drops all messages: the wired interrupt is used.
    pub const DISABLE: u32 = 2;
    /// Gives the selected source the staged message.
    pub const CONFIGURE: u32 = 3;
    /// Masks the selected source: it sends nothing, and its interrupts become pending.
    pub const MASK: u32 = 4;
    /// Unmasks the selected source: a pending interrupt is sent at once.
    pub const UNMASK: u32 = 5;
    /// Removes the message of the selected source, and its pending interrupt.
    pub const UNCONFIGURE: u32 = 6;
}

/// Bits of [`MSI_STATE`].
pub mod state {
    /// MSI is on.
    pub const ON: u32 = 1;
    /// The selected source has a message.
    pub const CONFIGURED: u32 = 2;
    /// The selected source is masked.
    pub const MASKED: u32 = 4;
    /// An interrupt of the selected source is pending: it is masked.
    pub const PENDING: u32 = 8;
    /// The last command was refused, and changed nothing.
    pub const REFUSED: u32 = 16;
}

/// Offset of queue 0's notification address on Paravane's devices.
///
/// It is the page after the registers.
pub const NOTIFY_PAGE: u64 = 0x1000;
/// Distance in bytes between notification addresses on Paravane's devices.
pub const NOTIFY_STRIDE: u32 = 4;
/// Size in bytes of the window of a Paravane device with this extension.
///
/// Registers and notification addresses.
pub const WINDOW: u64 = 0x2000;
