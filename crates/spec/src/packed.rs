//! Memory layout of the packed virtqueue (section 2.8).
//!
//! Offsets and sizes are in bytes.

/// Size of one descriptor in bytes.
///
/// Address u64, length u32, buffer identifier u16, flags u16.
pub const DESC_SIZE: usize = 16;
/// Alignment of the descriptor ring.
pub const DESC_ALIGN: u64 = 16;
/// Offset of the address in a descriptor.
pub const DESC_ADDR: usize = 0;
/// Offset of the length in a descriptor.
pub const DESC_LEN: usize = 8;
/// Offset of the buffer identifier in a descriptor.
pub const DESC_ID: usize = 12;
/// Offset of the flags in a descriptor.
pub const DESC_FLAGS: usize = 14;

/// Descriptor flag: the buffer continues in the next descriptor.
pub const DESC_F_NEXT: u16 = 1;
/// Descriptor flag: the device writes this buffer.
///
/// In a used descriptor: it has written to it.
pub const DESC_F_WRITE: u16 = 2;
/// Descriptor flag: the buffer holds a table of descriptors.
pub const DESC_F_INDIRECT: u16 = 4;
/// Descriptor flag: equals the driver's wrap counter when made available.
pub const DESC_F_AVAIL: u16 = 1 << 7;
/// Descriptor flag: equal to the device's wrap counter when used, else its inverse.
pub const DESC_F_USED: u16 = 1 << 15;

/// Size of an event suppression structure in bytes (section 2.8.14).
///
/// Offset and wrap counter u16, flags u16.
pub const EVENT_SIZE: usize = 4;
/// Alignment of an event suppression structure.
pub const EVENT_ALIGN: u64 = 4;
/// Offset of the descriptor event: offset (bits 0 to 14), wrap counter (bit 15).
pub const EVENT_OFF_WRAP: usize = 0;
/// Offset of the flags.
pub const EVENT_FLAGS: usize = 2;
/// The wrap counter in [`EVENT_OFF_WRAP`].
pub const EVENT_WRAP: u16 = 1 << 15;
/// Event flags: notifications on.
pub const EVENT_F_ENABLE: u16 = 0;
/// Event flags: notifications off.
pub const EVENT_F_DISABLE: u16 = 1;
/// Event flags: notify at the descriptor [`EVENT_OFF_WRAP`] (needs EVENT_IDX).
pub const EVENT_F_DESC: u16 = 2;
