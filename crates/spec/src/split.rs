//! Memory layout of the split virtqueue (section 2.7).
//!
//! Offsets and sizes are in bytes.

/// Size of one descriptor in bytes.
///
/// Address u64, length u32, flags u16, next u16.
pub const DESC_SIZE: usize = 16;
/// Alignment of the descriptor table.
pub const DESC_ALIGN: u64 = 16;
/// Offset of the address of a descriptor's buffer.
pub const DESC_ADDR: usize = 0;
/// Offset of its length.
pub const DESC_LEN: usize = 8;
/// Offset of the flags.
pub const DESC_FLAGS: usize = 12;
/// Offset of the index of the next descriptor.
pub const DESC_NEXT: usize = 14;
/// Alignment of the available ring.
pub const AVAIL_ALIGN: u64 = 2;
/// Alignment of the used ring.
pub const USED_ALIGN: u64 = 4;

/// Descriptor flag: the chain continues at `next`.
pub const DESC_F_NEXT: u16 = 1;
/// Descriptor flag: the device writes this buffer (otherwise it reads it).
pub const DESC_F_WRITE: u16 = 2;
/// Descriptor flag: the buffer holds a table of descriptors.
pub const DESC_F_INDIRECT: u16 = 4;

/// `flags` in the available ring.
pub const AVAIL_FLAGS: usize = 0;
/// `idx` in the available ring.
pub const AVAIL_IDX: usize = 2;
/// First entry (u16) of the available ring; `used_event` follows the last.
pub const AVAIL_RING: usize = 4;
/// Size of an available ring entry.
pub const AVAIL_ENTRY: usize = 2;
/// Available ring flag: the driver wants no used buffer notification.
pub const AVAIL_F_NO_INTERRUPT: u16 = 1;

/// `flags` in the used ring.
pub const USED_FLAGS: usize = 0;
/// `idx` in the used ring.
pub const USED_IDX: usize = 2;
/// First entry (id u32, len u32) of the used ring; `avail_event` follows the last.
pub const USED_RING: usize = 4;
/// Size of a used ring entry.
pub const USED_ENTRY: usize = 8;
/// Used ring flag: the device wants no available buffer notification.
pub const USED_F_NO_NOTIFY: u16 = 1;
