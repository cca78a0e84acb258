//! A disk apart from its queues.
use super::queue::{RequestQueue, start};
use crate::shared::SharedDevice;
use crate::{DriverError, Pool, Transport, Virtio};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::mem::offset_of;
use paravane_spec::blk::{
    Config, F_BLK_SIZE, F_DISCARD, F_FLUSH, F_MQ, F_RO, F_SEG_MAX, F_TOPOLOGY, F_WRITE_ZEROES, SECTOR,
};
use paravane_spec::{device_id, feature, mmio};

/// Fields of the configuration space, read at set-up.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Limits {
    capacity: u64,
    blk_size: u32,
    pub(super) discard_sectors: u32,
    pub(super) write_zeroes_sectors: u32,
    pub(super) may_unmap: bool,
    queues: u16,
}

/// A disk with several queues, apart from those: what its queues have in common.
///
/// One owner has it, and takes the interrupts of the device.
#[derive(Debug)]
pub struct BlkDevice<T> {
    shared: Arc<SharedDevice<T>>,
    limits: Limits,
}

impl<T: Transport> BlkDevice<T> {
    /// Sets the device up with up to `queues` queues, and sets DRIVER_OK.
    ///
    /// The device may limit the number of queues. Each has `slots` requests. The queues are independent:
    /// send each to the processor that is to use it.
    ///
    /// # Errors
    /// No such device, or too little memory. The device is then told FAILED.
    pub fn new(
        transport: T,
        queues: u16,
        slots: u16,
        pool: &mut Pool,
    ) -> Result<(Self, Vec<RequestQueue<T>>), DriverError> {
        let wanted = feature::INDIRECT_DESC
            | F_FLUSH
            | F_RO
            | F_SEG_MAX
            | F_BLK_SIZE
            | F_TOPOLOGY
            | F_DISCARD
            | F_WRITE_ZEROES
            | if queues > 1 { F_MQ } else { 0 };
        let (device, (limits, started)) = Virtio::set_up(transport, device_id::BLK, wanted, |device| {
            let limits = Limits::read(device, device.features())?;
            // Section 5.2.4: there is at least one.
            if limits.queues == 0 {
                return Err(DriverError::Queue(0));
            }
            let mut started = Vec::new();
            for index in 0..queues.clamp(1, limits.queues) {
                started.push(start(device, index, slots.max(1), pool)?);
            }
            Ok((limits, started))
        })?;
        let shared = SharedDevice::new(device);
        let queue = |started| RequestQueue::new(&shared, limits, started);
        let queues = started.into_iter().map(queue).collect();
        Ok((Self { shared, limits }, queues))
    }

    /// Capacity in sectors. Changes only in [`BlkDevice::interrupt`].
    pub fn capacity(&self) -> u64 {
        self.limits.capacity
    }

    /// Block size of the device in bytes \[512\]. A hint: it may be any number.
    pub fn block_size(&self) -> u32 {
        self.limits.blk_size
    }

    /// Whether the device is read-only.
    pub fn read_only(&self) -> bool {
        self.features() & F_RO != 0
    }

    /// Negotiated features.
    pub fn features(&self) -> u64 {
        self.shared.virtio().features()
    }

    /// The device, for what is the same with every driver.
    pub fn device(&self) -> &Virtio<T> {
        self.shared.virtio()
    }

    /// Reads and acknowledges the causes of an interrupt of this device.
    ///
    /// Call it after each wired interrupt, and after the message of the configuration change. Then have
    /// the owner of each queue look for completed requests: the wired interrupt does not tell whose they
    /// are.
    ///
    /// # Errors
    /// The device needs a reset, or its configuration keeps changing. Every later call, of every queue
    /// as well, returns the same error.
    pub fn interrupt(&mut self) -> Result<u32, DriverError> {
        let causes = self.shared.interrupt()?;
        if causes & mmio::INT_CONFIG_CHANGE != 0 {
            let limits = Limits::read(self.shared.virtio(), self.features());
            // The limits of requests are those of the set-up, which each queue has a copy of.
            self.limits.capacity = limits.map_err(|error| self.shared.fail(error))?.capacity;
        }
        Ok(causes)
    }
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
