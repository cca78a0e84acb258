//! In-flight region of vhost-user.
//!
//! A back end tracks chains in it, so that they survive the back end.
//!
//! Source: vhost-user specification, "Inflight I/O tracking". One region per queue. Offsets and
//! sizes are in bytes.

/// Offset of the region's features (u64), none of which is defined.
pub const FEATURES: usize = 0;
/// Offset of its version (u16).
pub const VERSION: usize = 8;
/// Version of an unused region.
pub const VERSION_NONE: u16 = 0;
/// The only version.
pub const VERSION_1: u16 = 1;
/// Offset of the number of descriptor states (u16): the queue's size.
pub const DESC_NUM: usize = 10;

/// Region of a split queue.
pub mod split {
    /// Offset of the head of the list of the last batch of used descriptors (u16).
    pub const LAST_BATCH_HEAD: usize = 12;
    /// Offset of the used ring's index (u16), as far as the region has followed.
    pub const USED_IDX: usize = 14;
    /// Offset of the first descriptor state.
    pub const DESC: usize = 16;

    /// Size of a descriptor state.
    pub const DESC_SIZE: usize = 16;
    /// Offset of its in-flight mark (u8, a byte of padding after it).
    pub const DESC_INFLIGHT: usize = 0;
    /// Offset of the next one in the list of the last batch (u16).
    pub const DESC_NEXT: usize = 6;
    /// Offset of its number in the order of taking (u64).
    pub const DESC_COUNTER: usize = 8;
}

/// Region of a packed queue.
pub mod packed {
    /// Offset of the head of the list of free descriptor states (u16).
    pub const FREE_HEAD: usize = 12;
    /// Offset of its committed value (u16).
    pub const OLD_FREE_HEAD: usize = 14;
    /// Offset of the used position in the ring (u16).
    pub const USED_IDX: usize = 16;
    /// Offset of its committed value (u16).
    pub const OLD_USED_IDX: usize = 18;
    /// Offset of the used position's wrap counter (u8).
    pub const USED_WRAP: usize = 20;
    /// Offset of its committed value (u8). Seven bytes of padding follow.
    pub const OLD_USED_WRAP: usize = 21;
    /// Offset of the first descriptor state, on a multiple of 8.
    pub const DESC: usize = 32;

    /// Size of a descriptor state.
    pub const DESC_SIZE: usize = 32;
    /// Offset of its in-flight mark (u8, a byte of padding after it).
    pub const DESC_INFLIGHT: usize = 0;
    /// Offset of the next one, in its chain or in the list of free ones (u16).
    pub const DESC_NEXT: usize = 2;
    /// Offset of the last one of its chain (u16).
    pub const DESC_LAST: usize = 4;
    /// Offset of the number of descriptors in its chain (u16).
    pub const DESC_NUM: usize = 6;
    /// Offset of its number in the order of taking (u64).
    pub const DESC_COUNTER: usize = 8;
    /// Offset of the buffer identifier (u16).
    pub const DESC_ID: usize = 16;
    /// Offset of the descriptor's flags (u16).
    pub const DESC_FLAGS: usize = 18;
    /// Offset of the descriptor's length (u32).
    pub const DESC_LEN: usize = 20;
    /// Offset of the descriptor's address (u64).
    pub const DESC_ADDR: usize = 24;
}
