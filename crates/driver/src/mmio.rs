//! Driver side of virtio over MMIO, version 2 (section 4.2).
use crate::{DriverError, Pool};
use paravane_ring::driver::Queue;

/// Access to one device's registers; offsets in bytes from its base.
pub trait Registers {
    /// Reads 32 bits.
    fn read32(&self, offset: u64) -> u32;
    /// Writes 32 bits.
    fn write32(&self, offset: u64, value: u32);
    /// Reads 8 bits (configuration space).
    fn read8(&self, offset: u64) -> u8;
}

/// A device on virtio-mmio.
#[derive(Debug)]
pub struct Mmio<R> {
    registers: R,
}

impl<R: Registers> Mmio<R> {
    /// Probes the device: magic, version, type. Resets it and says ACKNOWLEDGE and DRIVER.
    ///
    /// # Errors
    /// It is not a virtio-mmio version 2 device of type `device_id`, or does not reset.
    pub fn probe(registers: R, device_id: u32) -> Result<Self, DriverError> {
        let _ = device_id;
        Ok(Self { registers })
    }

    /// Negotiates: accepts `wanted` as far as offered; all of `required` must be.
    ///
    /// # Errors
    /// A required bit is missing or the device refuses the set.
    pub fn negotiate(&mut self, required: u64, wanted: u64) -> Result<u64, DriverError> {
        let _ = (required, wanted, &self.registers);
        todo!()
    }

    /// Sets up queue `index` with at most `size` descriptors and indirect tables of `indirect` entries.
    ///
    /// # Errors
    /// There is no such queue, or too little memory.
    pub fn start_queue(
        &mut self,
        index: u16,
        size: u16,
        indirect: u16,
        pool: &mut Pool,
    ) -> Result<Queue, DriverError> {
        let _ = (index, size, indirect, pool);
        todo!()
    }

    /// Says DRIVER_OK.
    ///
    /// # Errors
    /// The device asks to be reset.
    pub fn driver_ok(&mut self) -> Result<(), DriverError> {
        todo!()
    }

    /// Kicks queue `index`.
    pub fn notify(&self, index: u16) {
        let _ = index;
        todo!()
    }

    /// Reads and acknowledges the interrupt status (`INT_USED_BUFFER`, `INT_CONFIG_CHANGE`).
    pub fn acknowledge_interrupt(&self) -> u32 {
        todo!()
    }

    /// Reads the configuration space, consistently (ConfigGeneration).
    ///
    /// # Errors
    /// It kept changing.
    pub fn read_config(&self, offset: u32, out: &mut [u8]) -> Result<(), DriverError> {
        let _ = (offset, out);
        todo!()
    }

    /// Resets the device.
    ///
    /// # Errors
    /// It does not finish.
    pub fn reset(&mut self) -> Result<(), DriverError> {
        todo!()
    }

    /// Device status register.
    pub fn status(&self) -> u32 {
        todo!()
    }
}
