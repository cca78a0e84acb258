//! What a disk says of itself.
use crate::{DriverError, Transport, Virtio};
use core::mem::offset_of;
use paravane_spec::blk::{Config, F_BLK_SIZE, F_DISCARD, F_MQ, F_WRITE_ZEROES, SECTOR};

/// Fields of the configuration space, read at set-up.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Limits {
    pub(super) capacity: u64,
    pub(super) blk_size: u32,
    pub(super) discard_sectors: u32,
    pub(super) write_zeroes_sectors: u32,
    pub(super) may_unmap: bool,
    pub(super) queues: u16,
}

impl Limits {
    /// Reads the fields that the negotiated features make valid, consistently.
    pub(super) fn read<T: Transport>(device: &Virtio<T>, features: u64) -> Result<Self, DriverError> {
        let has = |bit: u64| features & bit != 0;
        device.consistently(|config| {
            let word = |offset: usize, bit: u64| if has(bit) { config.word(offset as u64) } else { 0 };
            let mut limits = Self {
                capacity: config.long(offset_of!(Config, capacity) as u64),
                blk_size: word(offset_of!(Config, blk_size), F_BLK_SIZE),
                discard_sectors: word(offset_of!(Config, max_discard_sectors), F_DISCARD),
                write_zeroes_sectors: word(offset_of!(Config, max_write_zeroes_sectors), F_WRITE_ZEROES),
                may_unmap: false,
                queues: 1,
            };
            if has(F_MQ) {
                limits.queues = config.half(offset_of!(Config, num_queues) as u64);
            }
            if has(F_WRITE_ZEROES) {
                limits.may_unmap = config.byte(offset_of!(Config, write_zeroes_may_unmap) as u64) != 0;
            }
            if !has(F_BLK_SIZE) {
                limits.blk_size = SECTOR as u32;
            }
            limits
        })
    }
}
