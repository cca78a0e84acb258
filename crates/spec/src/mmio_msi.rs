//! Our extension of virtio over MMIO: message-signalled interrupts, and a notification address for every queue
//! (docs/reference/virtio-mmio-msi.md). All of its numbers are here, so that they can move: the specification reserves the
//! feature bits for future extensions and leaves the registers unassigned (version 1.4).
//!
//! Offsets are in bytes; every register is 32 bits wide and must be accessed as such.

/// Feature bit, as a mask: every queue has a notification address of its own.
pub const F_NOTIFICATION: u64 = 1 << 44;
/// Feature bit, as a mask: interrupts can be messages.
pub const F_MSI: u64 = 1 << 45;

/// Distance of queue 0's notification address from the device's first register, in bytes (R). Needs
/// [`F_NOTIFICATION`], as the next does.
pub const NOTIFY_BASE: u64 = 0x0c4;
/// Distance of one queue's notification address from the next one's, in bytes (R).
pub const NOTIFY_MULTIPLIER: u64 = 0x0c8;

/// How many different messages the device can deliver (R). Needs [`F_MSI`], as all that follow do.
pub const MSI_LIMIT: u64 = 0x0d0;
/// Low 32 bits of the address that the next [`command::CONFIGURE`] takes (W).
pub const MSI_ADDRESS_LOW: u64 = 0x0d4;
/// High 32 bits of the same (W).
pub const MSI_ADDRESS_HIGH: u64 = 0x0d8;
/// The data that the next [`command::CONFIGURE`] takes (W).
pub const MSI_DATA: u64 = 0x0dc;
/// Carries out one of the [`command`]s (W).
pub const MSI_COMMAND: u64 = 0x0e0;
/// The [`state`] of MSI and of the selected source (R).
pub const MSI_STATE: u64 = 0x0e4;

/// Value of QueueSel that selects the configuration change as the source that MSI registers speak of.
pub const SELECT_CONFIGURATION: u32 = 0xffff;

/// Values of [`MSI_COMMAND`].
pub mod command {
    /// Turns MSI on: no source has a message yet.
    pub const ENABLE: u32 = 1;
    /// Turns MSI off and forgets all messages: the wired interrupt is used.
    pub const DISABLE: u32 = 2;
    /// The selected source sends the staged message from now on.
    pub const CONFIGURE: u32 = 3;
    /// The selected source sends nothing, but remembers that it would have.
    pub const MASK: u32 = 4;
    /// The selected source sends again, at once if it would have.
    pub const UNMASK: u32 = 5;
    /// The selected source has no message from now on, and so sends none and remembers nothing.
    pub const UNCONFIGURE: u32 = 6;
}

/// Bits of [`MSI_STATE`].
pub mod state {
    /// MSI is on.
    pub const ON: u32 = 1;
    /// The selected source has a message.
    pub const CONFIGURED: u32 = 2;
    /// It is masked.
    pub const MASKED: u32 = 4;
    /// It would have sent its message, and is masked.
    pub const PENDING: u32 = 8;
    /// The last command was not carried out, and changed nothing.
    pub const REFUSED: u32 = 16;
}

/// Where our devices put queue 0's notification address: a page after the registers' own.
pub const NOTIFY_PAGE: u64 = 0x1000;
/// Bytes between the notification addresses of our devices.
pub const NOTIFY_STRIDE: u32 = 4;
/// Bytes that one of our devices occupies with this extension: registers and notification addresses.
pub const WINDOW: u64 = 0x2000;
