//! The registers of virtio over MMIO, version 2 (section 4.2).
use crate::{DriverError, Transport};
use paravane_spec::mmio;
use paravane_spec::queue::QueueAddresses;

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
pub struct Mmio<R>(R);

impl<R: Registers> Mmio<R> {
    /// Looks whether there is a device: magic and version.
    ///
    /// # Errors
    /// It is not a virtio-mmio version 2 device.
    pub fn new(registers: R) -> Result<Self, DriverError> {
        // Section 4.2.3.1.1: wrong magic or version is "no device", and no other register may be touched then.
        let magic = registers.read32(mmio::MAGIC_VALUE);
        if magic != mmio::MAGIC {
            return Err(DriverError::Magic(magic));
        }
        let version = registers.read32(mmio::VERSION);
        if version != mmio::VERSION_2 {
            return Err(DriverError::Version(version));
        }
        Ok(Self(registers))
    }

    fn select(&self, queue: u16) {
        self.0.write32(mmio::QUEUE_SEL, u32::from(queue));
    }
}

impl<R: Registers> Transport for Mmio<R> {
    fn device_id(&self) -> u32 {
        self.0.read32(mmio::DEVICE_ID)
    }

    fn status(&self) -> u32 {
        self.0.read32(mmio::STATUS)
    }

    fn set_status(&self, status: u32) {
        self.0.write32(mmio::STATUS, status);
    }

    fn device_features(&self) -> u64 {
        let word = |select: u32| {
            self.0.write32(mmio::DEVICE_FEATURES_SEL, select);
            u64::from(self.0.read32(mmio::DEVICE_FEATURES))
        };
        word(0) | word(1) << 32
    }

    fn set_driver_features(&self, accepted: u64) {
        for (word, bits) in [(0, accepted as u32), (1, (accepted >> 32) as u32)] {
            self.0.write32(mmio::DRIVER_FEATURES_SEL, word);
            self.0.write32(mmio::DRIVER_FEATURES, bits);
        }
    }

    fn queue_max(&self, index: u16) -> u32 {
        self.select(index);
        self.0.read32(mmio::QUEUE_SIZE_MAX)
    }

    fn queue_enabled(&self, index: u16) -> bool {
        self.select(index);
        self.0.read32(mmio::QUEUE_READY) != 0
    }

    fn enable_queue(&mut self, index: u16, at: &QueueAddresses) -> Result<(), DriverError> {
        self.select(index);
        self.0.write32(mmio::QUEUE_SIZE, u32::from(at.size));
        for (low, high, addr) in [
            (mmio::QUEUE_DESC_LOW, mmio::QUEUE_DESC_HIGH, at.desc),
            (mmio::QUEUE_DRIVER_LOW, mmio::QUEUE_DRIVER_HIGH, at.driver),
            (mmio::QUEUE_DEVICE_LOW, mmio::QUEUE_DEVICE_HIGH, at.device),
        ] {
            self.0.write32(low, addr as u32);
            self.0.write32(high, (addr >> 32) as u32);
        }
        self.0.write32(mmio::QUEUE_READY, 1);
        Ok(())
    }

    fn reset_queue(&self, index: u16) {
        self.select(index);
        self.0.write32(mmio::QUEUE_RESET, 1);
    }

    fn queue_resetting(&self, index: u16) -> bool {
        self.select(index);
        self.0.read32(mmio::QUEUE_RESET) != 0
    }

    fn notify(&self, index: u16, data: Option<u32>) {
        self.0.write32(mmio::QUEUE_NOTIFY, data.unwrap_or(u32::from(index)));
    }

    fn take_causes(&self) -> u32 {
        // Bits that the specification does not define are neither believed nor acknowledged (section 4.2.2.2).
        let causes =
            self.0.read32(mmio::INTERRUPT_STATUS) & (mmio::INT_USED_BUFFER | mmio::INT_CONFIG_CHANGE);
        if causes != 0 {
            self.0.write32(mmio::INTERRUPT_ACK, causes);
        }
        causes
    }

    fn generation(&self) -> u32 {
        self.0.read32(mmio::CONFIG_GENERATION)
    }

    fn config32(&self, offset: u64) -> u32 {
        self.0.read32(mmio::CONFIG + offset)
    }

    fn config8(&self, offset: u64) -> u8 {
        self.0.read8(mmio::CONFIG + offset)
    }
}
