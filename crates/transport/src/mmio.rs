//! virtio over MMIO, version 2 (section 4.2).
use crate::{DeviceDescription, Effect};
use paravane_notify::InterruptLine;
use std::sync::Arc;

/// The register machine of one device.
pub struct Mmio {}

impl Mmio {
    /// A device after reset.
    #[must_use]
    pub fn new(device: DeviceDescription, line: Arc<InterruptLine>) -> Self {
        let _ = (device, line);
        todo!()
    }

    /// Reads a register. `config` reads the device's configuration space (offset, destination); it is
    /// called for offsets from 0x100 on. Whatever a guest does, `data` is filled.
    pub fn read(&self, offset: u64, data: &mut [u8], config: impl FnOnce(u32, &mut [u8])) {
        let _ = (offset, data, config);
        todo!()
    }

    /// Writes a register.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Option<Effect> {
        let _ = (offset, data);
        todo!()
    }

    /// The owner has carried out [`Effect::Reset`].
    pub fn reset_done(&mut self) {
        todo!()
    }

    /// The owner has carried out [`Effect::ResetQueue`].
    pub fn queue_reset_done(&mut self, queue: u16) {
        let _ = queue;
        todo!()
    }

    /// The owner could not start the device, or a queue has failed: sets DEVICE_NEEDS_RESET and raises a
    /// configuration change.
    pub fn needs_reset(&mut self) {
        todo!()
    }

    /// The configuration space has changed: new generation, and an interrupt.
    pub fn config_changed(&mut self) {
        todo!()
    }

    /// Device status register.
    #[must_use]
    pub fn status(&self) -> u32 {
        todo!()
    }

    /// Accesses that the specification forbids, counted.
    #[must_use]
    pub fn violations(&self) -> u64 {
        todo!()
    }
}
