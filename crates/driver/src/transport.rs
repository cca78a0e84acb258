//! What a driver needs of the registers of a device, wherever they are and however they are laid out.
use crate::DriverError;
use paravane_spec::queue::QueueAddresses;

/// What an interrupt is, where the device sends messages: a write of `data` to `address`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// Where to; on x86 it names the local APIC.
    pub address: u64,
    /// What; on x86 the low 8 bits are the vector.
    pub data: u32,
}

/// The registers of one device. Nothing here is checked but what the layout itself takes: a device answers what it
/// likes, and [`crate::Virtio`] judges it.
pub trait Transport {
    /// Virtio device identifier.
    fn device_id(&self) -> u32;
    /// Device status.
    fn status(&self) -> u32;
    /// Writes the device status.
    fn set_status(&self, status: u32);
    /// The 64 feature bits that the device offers.
    fn device_features(&self) -> u64;
    /// The 64 feature bits that the driver accepts.
    fn set_driver_features(&self, accepted: u64);
    /// Feature bits of the transport itself that the driver wants, beside its own.
    fn wanted_features(&self) -> u64 {
        0
    }
    /// Feature negotiation has ended with `features`: tells the device how to interrupt for a configuration change,
    /// unless by its wire.
    ///
    /// # Errors
    /// The device does not take it.
    fn set_up_interrupts(&mut self, features: u64) -> Result<(), DriverError> {
        let _ = features;
        Ok(())
    }
    /// Largest size of queue `index`, 0 if it does not exist.
    fn queue_max(&self, index: u16) -> u32;
    /// Whether queue `index` is enabled.
    fn queue_enabled(&self, index: u16) -> bool;
    /// Tells the device where queue `index` is, how it is to interrupt for it, and enables it.
    ///
    /// # Errors
    /// What the device says about the queue cannot be.
    fn enable_queue(&mut self, index: u16, at: &QueueAddresses) -> Result<(), DriverError>;
    /// Asks for a reset of queue `index`. RING_RESET was negotiated.
    fn reset_queue(&self, index: u16);
    /// Whether a reset of queue `index` is under way. RING_RESET was negotiated.
    fn queue_resetting(&self, index: u16) -> bool;
    /// Kicks queue `index`, which was enabled; with `data` if NOTIFICATION_DATA was negotiated.
    fn notify(&self, index: u16, data: Option<u32>);
    /// With messages, which say themselves what they are for: the configuration change. Else reads and acknowledges
    /// the causes of the wired interrupt
    /// ([`INT_USED_BUFFER`](paravane_spec::mmio::INT_USED_BUFFER) and
    /// [`INT_CONFIG_CHANGE`](paravane_spec::mmio::INT_CONFIG_CHANGE)).
    fn take_causes(&self) -> u32;
    /// Changes whenever the configuration space has changed.
    fn generation(&self) -> u32;
    /// Reads 32 bits of the configuration space; the offset is a multiple of 4.
    fn config32(&self, offset: u64) -> u32;
    /// Reads 16 bits of the configuration space; the offset is a multiple of 2.
    fn config16(&self, offset: u64) -> u16;
    /// Reads 8 bits of the configuration space.
    fn config8(&self, offset: u64) -> u8;
}
