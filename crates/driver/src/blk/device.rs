//! A disk apart from its queues.
use super::limits::Limits;
use super::queue::{RequestQueue, start};
use crate::shared::SharedDevice;
use crate::{DriverError, Pool, Transport, Virtio};
use alloc::sync::Arc;
use alloc::vec::Vec;
use paravane_spec::blk::{F_BLK_SIZE, F_DISCARD, F_FLUSH, F_MQ, F_RO, F_SEG_MAX, F_TOPOLOGY, F_WRITE_ZEROES};
use paravane_spec::{device_id, feature, mmio};

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
