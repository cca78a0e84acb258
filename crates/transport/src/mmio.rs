//! virtio over MMIO, version 2 (section 4.2), as a pure register machine.
//!
//! ```text
//! register access -> decode -> DeviceState (the states of device and queues) -> Effect
//!                       `----> Interrupts (InterruptStatus, InterruptACK)
//! ```
//!
//! The states, and what becomes of accesses that the driver must not make, are in the module `state`. What this
//! layout adds to that:
//!
//! - Undefined bits in InterruptACK are a violation, and the defined ones are acknowledged all the same.
//! - **QueueReady=0 on a live queue** is the way to stop using it (section 4.2.2.2), with RING_RESET or
//!   without. The queue is stopped by [`Effect::ResetQueue`]; QueueReady reads 1 until it is done, because 0
//!   promises that the device does not look at the queue any more. The registers keep their values, the
//!   positions start from 0 if it is made ready again.
//! - **QueueReset** reads 1 while the reset is under way.
use crate::state::{DeviceState, Part, Violation};
use crate::{AccessKind, DeviceDescription, Effect, NotifyAddress, Transport};
use paravane_notify::Interrupts;
use paravane_spec::{feature, mmio as reg};
use std::fmt;
use std::sync::Arc;

/// The register machine of one device.
pub struct Mmio {
    device_id: u32,
    interrupts: Arc<Interrupts>,
    state: DeviceState,
}

impl Mmio {
    /// A device after reset.
    #[must_use]
    pub fn new(device: DeviceDescription, interrupts: Arc<Interrupts>) -> Self {
        Self { device_id: device.device_id, interrupts, state: DeviceState::new(&device) }
    }

    /// Reads a register. `config` reads the device's configuration space (offset, destination); it is
    /// called for offsets from 0x100 on. Whatever a guest does, `data` is filled.
    pub fn read(&self, offset: u64, data: &mut [u8], config: impl FnOnce(u32, &mut [u8])) {
        data.fill(0);
        match Access::decode(offset, data.len()) {
            Some(Access::Register) => match self.read_register(offset) {
                Ok(value) => data.copy_from_slice(&value.to_le_bytes()),
                Err(Violation) => self.state.violation(),
            },
            Some(Access::Config(offset)) => config(offset, data),
            None => self.state.violation(),
        }
    }

    /// Writes a register.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Option<Effect> {
        let done = match (Access::decode(offset, data.len()), data) {
            (Some(Access::Register), &[a, b, c, d]) => {
                self.write_register(offset, u32::from_le_bytes([a, b, c, d]))
            }
            (Some(Access::Config(offset)), data) if self.state.config_writable() => {
                Ok(Some(Effect::WriteConfig { offset, data: data.to_vec() }))
            }
            _ => Err(Violation),
        };
        done.unwrap_or_else(|Violation| {
            self.state.violation();
            None
        })
    }

    /// The owner has carried out [`Effect::Reset`]. Without a reset under way nothing happens.
    pub fn reset_done(&mut self) {
        if self.state.reset_done() {
            self.interrupts.reset();
        }
    }

    /// The owner has carried out [`Effect::ResetQueue`]. Without one under way nothing happens.
    pub fn queue_reset_done(&mut self, queue: u16) {
        self.state.queue_reset_done(queue);
    }

    /// The owner could not start the device, or a queue has failed: sets DEVICE_NEEDS_RESET and raises a
    /// configuration change (section 2.1.2), once. A device at reset or under reset has nothing to report.
    pub fn needs_reset(&mut self) {
        if self.state.needs_reset() {
            self.interrupts.config_change();
        }
    }

    /// The configuration space has changed: new generation, and an interrupt if the driver is running.
    pub fn config_changed(&mut self) {
        if self.state.config_changed() {
            self.interrupts.config_change();
        }
    }

    /// Device status register.
    #[must_use]
    pub fn status(&self) -> u32 {
        self.state.status()
    }

    /// Accesses that the specification forbids, counted.
    #[must_use]
    pub fn violations(&self) -> u64 {
        self.state.violations()
    }

    fn read_register(&self, offset: u64) -> Result<u32, Violation> {
        let queue = self.state.selected();
        Ok(match offset {
            reg::MAGIC_VALUE => reg::MAGIC,
            reg::VERSION => reg::VERSION_2,
            reg::DEVICE_ID => self.device_id,
            reg::VENDOR_ID => reg::VENDOR,
            reg::DEVICE_FEATURES => self.state.features.offered_word(),
            reg::QUEUE_SIZE_MAX => queue.map_or(0, |q| u32::from(q.max())),
            reg::QUEUE_READY => queue.map_or(0, |q| u32::from(q.enabled())),
            reg::INTERRUPT_STATUS => self.interrupts.line().status(),
            reg::STATUS => self.state.status(),
            // No device of ours has a shared memory region: length and base are all ones (section 4.2.2).
            reg::SHM_LEN_LOW | reg::SHM_LEN_HIGH | reg::SHM_BASE_LOW | reg::SHM_BASE_HIGH => u32::MAX,
            reg::QUEUE_RESET if self.state.negotiated(feature::RING_RESET) => {
                queue.map_or(0, |q| u32::from(q.resetting()))
            }
            reg::CONFIG_GENERATION => self.state.generation(),
            _ => return Err(Violation),
        })
    }

    fn write_register(&mut self, offset: u64, value: u32) -> Result<Option<Effect>, Violation> {
        if offset == reg::STATUS {
            return self.write_status(value);
        }
        if self.state.resetting() {
            return Err(Violation);
        }
        match offset {
            reg::DEVICE_FEATURES_SEL => self.state.features.select_offered(value),
            reg::DRIVER_FEATURES_SEL => self.state.features.select_accepted(value),
            reg::DRIVER_FEATURES if self.state.features_writable() => self.state.features.accept(value),
            reg::QUEUE_SEL => self.state.select_queue(value),
            reg::QUEUE_SIZE => self.state.writable_queue()?.set_size(value)?,
            reg::QUEUE_DESC_LOW => self.state.writable_queue()?.set_low(Part::Desc, value)?,
            reg::QUEUE_DESC_HIGH => self.state.writable_queue()?.set_high(Part::Desc, value)?,
            reg::QUEUE_DRIVER_LOW => self.state.writable_queue()?.set_low(Part::Driver, value)?,
            reg::QUEUE_DRIVER_HIGH => self.state.writable_queue()?.set_high(Part::Driver, value)?,
            reg::QUEUE_DEVICE_LOW => self.state.writable_queue()?.set_low(Part::Device, value)?,
            reg::QUEUE_DEVICE_HIGH => self.state.writable_queue()?.set_high(Part::Device, value)?,
            reg::QUEUE_READY => return self.state.enable_queue(value),
            reg::QUEUE_RESET => return self.state.reset_queue(value),
            reg::QUEUE_NOTIFY => return self.notify(value),
            reg::INTERRUPT_ACK => {
                let defined = reg::INT_USED_BUFFER | reg::INT_CONFIG_CHANGE;
                self.interrupts.line().acknowledge(value & defined);
                if value & !defined != 0 {
                    return Err(Violation);
                }
            }
            reg::SHM_SEL => {}
            _ => return Err(Violation),
        }
        Ok(None)
    }

    fn write_status(&mut self, value: u32) -> Result<Option<Effect>, Violation> {
        let effect = self.state.write_status(value)?;
        if self.state.status() == 0 {
            self.interrupts.reset();
        }
        Ok(effect)
    }

    /// An available-buffer notification (section 4.2.3.3).
    fn notify(&self, value: u32) -> Result<Option<Effect>, Violation> {
        let index = if self.state.negotiated(feature::NOTIFICATION_DATA) {
            value as u16 // The ring position is in the upper half (section 2.9).
        } else {
            u16::try_from(value).map_err(|_| Violation)?
        };
        self.state.notify(index)
    }
}

impl Transport for Mmio {
    fn read(&mut self, offset: u64, data: &mut [u8], config: &mut dyn FnMut(u32, &mut [u8])) {
        Self::read(self, offset, data, config);
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Option<Effect> {
        Self::write(self, offset, data)
    }

    fn access(&self, offset: u64, write: bool) -> AccessKind {
        match offset {
            reg::QUEUE_NOTIFY if write => AccessKind::Notify,
            reg::INTERRUPT_STATUS if !write => AccessKind::InterruptStatus,
            reg::INTERRUPT_ACK if write => AccessKind::InterruptAcknowledge,
            reg::CONFIG.. => AccessKind::Config,
            _ => AccessKind::Other,
        }
    }

    fn notify_address(&self, queue: u16) -> Option<NotifyAddress> {
        // With NOTIFICATION_DATA the upper half of what is written varies, and a match is on all of it.
        (!self.state.negotiated(feature::NOTIFICATION_DATA))
            .then_some(NotifyAddress { offset: reg::QUEUE_NOTIFY, datamatch: Some(u32::from(queue)) })
    }

    fn reset_done(&mut self) {
        Self::reset_done(self);
    }

    fn queue_reset_done(&mut self, queue: u16) {
        Self::queue_reset_done(self, queue);
    }

    fn needs_reset(&mut self) {
        Self::needs_reset(self);
    }

    fn config_changed(&mut self) {
        Self::config_changed(self);
    }
}

impl fmt::Debug for Mmio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mmio")
            .field("device_id", &self.device_id)
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}

/// Where an access goes.
enum Access {
    /// A 32-bit register.
    Register,
    /// The configuration space, at this offset in it.
    Config(u32),
}

impl Access {
    /// `None` if width, alignment or place are none that a driver may use (section 4.2.2.2).
    fn decode(offset: u64, len: usize) -> Option<Self> {
        let len = len as u64;
        if offset < reg::CONFIG {
            return (len == 4 && offset.is_multiple_of(4)).then_some(Self::Register);
        }
        let fits = matches!(len, 1 | 2 | 4 | 8)
            && offset.is_multiple_of(len)
            && offset.checked_add(len).is_some_and(|end| end <= reg::WINDOW);
        fits.then_some(Self::Config((offset - reg::CONFIG) as u32))
    }
}
