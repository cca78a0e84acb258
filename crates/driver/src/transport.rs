//! Registers of a device, as a driver needs them, on any transport.
use crate::DriverError;
use paravane_spec::queue::QueueAddresses;

/// A message-signalled interrupt: a write of `data` to `address`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// Address; on x86 that of the local APIC.
    pub address: u64,
    /// Data; on x86 the low 8 bits are the vector.
    pub data: u32,
}

/// Turns of a spin loop in a pause.
const PAUSE: u32 = 256;

/// Passes some time.
pub(crate) fn pause() {
    (0..PAUSE).for_each(|_| core::hint::spin_loop());
}

/// The registers of one device.
///
/// An implementation checks only what its own layout needs: a device may answer anything, and
/// [`crate::Virtio`] checks it.
pub trait Transport {
    /// Virtio device identifier.
    fn device_id(&self) -> u32;
    /// Device status.
    fn status(&self) -> u32;
    /// Passes some time between two reads of a register that says how far the device is.
    ///
    /// The driver waits for a reset of the device or of a queue in this way, and gives the device up
    /// after a million of them. The default takes some microseconds.
    fn pause(&self) {
        pause();
    }
    /// Writes the device status.
    fn set_status(&self, status: u32);
    /// The 64 feature bits that the device offers.
    fn device_features(&self) -> u64;
    /// The 64 feature bits that the driver accepts.
    fn set_driver_features(&self, accepted: u64);
    /// Feature bits of the transport that are accepted beside the driver's.
    fn wanted_features(&self) -> u64 {
        0
    }
    /// Sets up the interrupt for configuration changes.
    ///
    /// Call it after `features` were negotiated. It does nothing for the wired interrupt.
    ///
    /// # Errors
    /// The device does not take it.
    fn set_up_interrupts(&mut self, features: u64) -> Result<(), DriverError> {
        let _ = features;
        Ok(())
    }
    /// Changes message `number` while the device works: 0 is the configuration change's, n + 1 queue n's.
    ///
    /// When it returns, the device sends no interrupt to the old message any more, and none was lost.
    ///
    /// # Errors
    /// The source has no message, or the device refuses the new one and keeps the old one.
    fn set_message(&self, number: u16, message: Message) -> Result<(), DriverError> {
        let _ = message;
        Err(DriverError::Message(number.into()))
    }
    /// Largest size of queue `index`, 0 if it does not exist.
    fn queue_max(&self, index: u16) -> u32;
    /// Whether queue `index` is enabled.
    fn queue_enabled(&self, index: u16) -> bool;
    /// Writes the addresses and the interrupt of queue `index`, and enables it.
    ///
    /// # Errors
    /// What the device says about the queue cannot be.
    fn enable_queue(&mut self, index: u16, at: &QueueAddresses) -> Result<(), DriverError>;
    /// Asks for a reset of queue `index`. RING_RESET was negotiated.
    fn reset_queue(&self, index: u16);
    /// Whether a reset of queue `index` is under way. RING_RESET was negotiated.
    fn queue_resetting(&self, index: u16) -> bool;
    /// Kicks queue `index`; with `data` if NOTIFICATION_DATA was negotiated.
    ///
    /// The queue must be enabled.
    fn notify(&self, index: u16, data: Option<u32>);
    /// With messages returns the configuration change, which may be the cause.
    ///
    /// Otherwise reads and acknowledges the causes of the wired interrupt
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
