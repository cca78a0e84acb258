//! What guests are told of disks.
use crate::serve::told::{QUEUES, SIZE, Told};
use paravane_device::blk::Geometry;
use paravane_spec::blk;
use paravane_vhost::KnownToDriver;
use zerocopy::FromBytes;

pub(super) const BLOCK: &str = "block size";
pub(super) const READ_ONLY: &str = "read-only";
pub(super) const SEGMENTS: &str = "segments of a request";

/// What the image says.
pub(super) fn geometry(Geometry { size, block }: Geometry, told: &mut Told) {
    told.put(SIZE, size);
    told.put(BLOCK, block);
}

/// What a driver has read.
pub(super) fn recorded(known: &KnownToDriver, told: &mut Told) {
    let Ok((config, _)) = blk::Config::read_from_prefix(&known.config) else { return };
    told.put(SIZE, u64::from_le(config.capacity).saturating_mul(blk::SECTOR));
    told.put(BLOCK, u32::from_le(config.blk_size));
    told.put(QUEUES, u16::from_le(config.num_queues));
    told.put(SEGMENTS, u32::from_le(config.seg_max));
    // Only a disk that is written to has them.
    told.put(READ_ONLY, config.max_write_zeroes_sectors == 0);
}

/// The block in bytes, if a guest was told of one.
pub(super) fn block(told: &Told) -> Option<u32> {
    told.get(BLOCK)?.parse().ok().filter(|block| (512..=4096).contains(block))
}
