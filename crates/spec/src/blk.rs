//! Block device (section 5.2).
//!
//! Features are in section 5.2.3, the configuration space in 5.2.4, requests in 5.2.6.
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Feature: `size_max` is the largest segment.
pub const F_SIZE_MAX: u64 = 1 << 1;
/// Feature: `seg_max` is the largest number of segments.
pub const F_SEG_MAX: u64 = 1 << 2;
/// Feature: the device is read-only.
pub const F_RO: u64 = 1 << 5;
/// Feature: `blk_size` is the optimal block size.
pub const F_BLK_SIZE: u64 = 1 << 6;
/// Feature: the flush command is supported.
pub const F_FLUSH: u64 = 1 << 9;
/// Feature: `physical_block_exp` and the three fields after it are valid.
pub const F_TOPOLOGY: u64 = 1 << 10;
/// Feature: `writeback` switches the cache mode.
pub const F_CONFIG_WCE: u64 = 1 << 11;
/// Feature: more than one queue; `num_queues` is their number.
pub const F_MQ: u64 = 1 << 12;
/// Feature: the discard command is supported.
pub const F_DISCARD: u64 = 1 << 13;
/// Feature: the write-zeroes command is supported.
pub const F_WRITE_ZEROES: u64 = 1 << 14;

/// Request type: read sectors.
pub const T_IN: u32 = 0;
/// Request type: write sectors.
pub const T_OUT: u32 = 1;
/// Request type: flush the write cache.
pub const T_FLUSH: u32 = 4;
/// Request type: read the 20-byte identifier.
pub const T_GET_ID: u32 = 8;
/// Request type: discard ranges.
pub const T_DISCARD: u32 = 11;
/// Request type: write zeroes to ranges.
pub const T_WRITE_ZEROES: u32 = 13;

/// Status byte: success.
pub const S_OK: u8 = 0;
/// Status byte: an error of the device or the driver.
pub const S_IOERR: u8 = 1;
/// Status byte: the request is not supported.
pub const S_UNSUPP: u8 = 2;

/// Flag of a [`DiscardRange`]: the range may be unmapped (write-zeroes only).
pub const WRITE_ZEROES_F_UNMAP: u32 = 1;

/// Size of a sector in bytes.
///
/// The unit of `capacity` and of every request, for any `blk_size`.
pub const SECTOR: u64 = 512;
/// Size in bytes of the identifier that [`T_GET_ID`] returns, padded with zeroes.
pub const ID_LEN: usize = 20;

/// Header of every request (little endian; section 5.2.6).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RequestHeader {
    /// One of the `T_` constants.
    pub kind: u32,
    /// Reserved (formerly the I/O priority).
    pub reserved: u32,
    /// First sector; 0 for requests without one.
    pub sector: u64,
}

/// One range of a discard or write-zeroes request (little endian).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DiscardRange {
    /// First sector.
    pub sector: u64,
    /// Number of sectors.
    pub num_sectors: u32,
    /// [`WRITE_ZEROES_F_UNMAP`] or 0.
    pub flags: u32,
}

/// Configuration space (section 5.2.4), little endian.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, packed)]
pub struct Config {
    /// Size of the disk in sectors.
    pub capacity: u64,
    /// Largest segment in bytes.
    pub size_max: u32,
    /// Largest number of segments in a request.
    pub seg_max: u32,
    /// Legacy geometry: cylinders.
    pub cylinders: u16,
    /// Legacy geometry: heads.
    pub heads: u8,
    /// Legacy geometry: sectors.
    pub sectors: u8,
    /// Optimal block size in bytes.
    pub blk_size: u32,
    /// log2 of the number of logical blocks in a physical block.
    pub physical_block_exp: u8,
    /// Offset of the first aligned logical block.
    pub alignment_offset: u8,
    /// Suggested minimum I/O in blocks.
    pub min_io_size: u16,
    /// Suggested largest I/O in blocks.
    pub opt_io_size: u32,
    /// Cache mode: 0 write-through, 1 write-back.
    pub writeback: u8,
    /// Padding.
    pub unused0: u8,
    /// Number of queues.
    pub num_queues: u16,
    /// Largest discard in sectors.
    pub max_discard_sectors: u32,
    /// Largest number of ranges in a discard.
    pub max_discard_seg: u32,
    /// Alignment of discards in sectors.
    pub discard_sector_alignment: u32,
    /// Largest write-zeroes in sectors.
    pub max_write_zeroes_sectors: u32,
    /// Largest number of ranges in a write-zeroes.
    pub max_write_zeroes_seg: u32,
    /// 1 if write-zeroes may unmap.
    pub write_zeroes_may_unmap: u8,
    /// Padding.
    pub unused1: [u8; 3],
}
