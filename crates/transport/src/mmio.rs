//! Virtio over MMIO, versions 2 and 3 (section 4.2), as a pure register machine.
//!
//! ```text
//! register access -> decode -> DeviceState (states of the device and its queues) -> Effect
//!                       `----> Interrupts (InterruptStatus, InterruptACK)
//! ```
//!
//! The [front page](crate#states) has the states, and the handling of forbidden accesses. This
//! layout adds:
//!
//! - **A reset** is done when the write of 0 to Status is, with version 2: [`Effect::Reset`] has to be
//!   carried out before the access returns to the guest. With version 3 ([`Mmio::version_3`]; virtio
//!   1.5) the driver then reads Status until it is 0, so the reset may take place afterwards. Until
//!   then each write is a violation, but for 0 to Status, which changes nothing, and InterruptACK:
//!   another processor of the guest may be in its interrupt handler.
//! - Undefined bits in InterruptACK are a violation, and the defined ones are still acknowledged.
//! - **QueueReady=0 on a live queue** stops it (section 4.2.2.2), with or without RING_RESET.
//!   [`Effect::ResetQueue`] stops the queue; QueueReady reads 1 until that is done, because 0
//!   promises that the device does not access the queue any more. The registers keep their values;
//!   the positions start from 0 if the queue is made ready again.
//! - **QueueReset** reads 1 during the reset.
//! - **The MSI extension** (docs/reference/virtio-mmio-msi.md) exists if its feature bits are
//!   offered, and the driver has accepted them: otherwise its registers do not exist, and a driver
//!   that does not know it sees a plain device. The address of a kick identifies the queue; the value
//!   written does not matter.
mod msi;

use crate::common::{self, Common};
use crate::saved::{self, Reader, RestoreError, same};
use crate::state::DeviceState;
use crate::violation::Violation;
use crate::{AccessKind, DeviceDescription, Effect, NotifyAddress, Restored, Transport};
use msi::{MsiRegisters, Source};
use paravane_notify::Interrupts;
use paravane_spec::{feature, mmio as reg, mmio_msi, status};
use std::sync::Arc;

/// Kind of transport in saved registers.
const KIND: u8 = 1;
/// The same with version 3: a driver that polls and one that does not are not exchanged.
const KIND_3: u8 = 3;

/// Register machine of one device.
#[derive(Debug)]
pub struct Mmio {
    device_id: u32,
    /// Version register.
    version: u32,
    state: DeviceState,
    msi: MsiRegisters,
}

impl Mmio {
    /// Makes a device after reset.
    ///
    /// It can offer messages ([`mmio_msi::F_MSI`]) if `interrupts` has a vector for each queue and
    /// one more.
    #[must_use]
    pub fn new(mut device: DeviceDescription, interrupts: Arc<Interrupts>) -> Self {
        if !interrupts.msi().is_some_and(|table| msi::suffices(table, device.queue_sizes.len())) {
            device.features &= !mmio_msi::F_MSI;
        }
        Self {
            device_id: device.device_id,
            version: reg::VERSION_2,
            // No size (section 4.2.2).
            state: DeviceState::new(&device, interrupts, |_| 0),
            msi: MsiRegisters::default(),
        }
    }

    /// Gives the device version 3 \[2\]: the driver polls Status until a reset is done.
    ///
    /// Linux drives version 3 from 7.3 on.
    #[must_use]
    pub fn version_3(self) -> Self {
        Self { version: reg::VERSION_3, ..self }
    }

    /// Reads a register. Fills `data` for any offset and length.
    ///
    /// `config` reads the device's configuration space (offset, destination) for offsets from 0x100
    /// on.
    pub fn read(&self, offset: u64, data: &mut [u8], config: impl FnOnce(u32, &mut [u8])) {
        data.fill(0);
        match Access::decode(offset, data.len()) {
            Some(Access::Register) => match self.read_register(offset) {
                Ok(value) => data.copy_from_slice(&value.to_le_bytes()),
                Err(Violation) => self.state.violation(),
            },
            Some(Access::Config(offset)) => config(offset, data),
            Some(Access::Notify(_)) | None => self.state.violation(),
        }
    }

    /// Writes a register.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Option<Effect> {
        let done = match (Access::decode(offset, data.len()), data) {
            (Some(Access::Register), &[a, b, c, d]) => {
                self.write_register(offset, u32::from_le_bytes([a, b, c, d]))
            }
            (Some(Access::Config(offset)), data) if self.state.status.queues_writable() => {
                Ok(Some(Effect::WriteConfig { offset, data: data.to_vec() }))
            }
            (Some(Access::Notify(queue)), _) if self.state.negotiated(mmio_msi::F_NOTIFICATION) => {
                self.state.notify(queue)
            }
            _ => Err(Violation),
        };
        self.state.effect(done)
    }

    /// Device status register.
    #[must_use]
    pub fn status(&self) -> u32 {
        self.state.status.bits
    }

    /// Kind of transport in saved registers.
    fn kind(&self) -> u8 {
        if self.version == reg::VERSION_3 { KIND_3 } else { KIND }
    }

    fn read_register(&self, offset: u64) -> Result<u32, Violation> {
        let queue = self.state.selected();
        Ok(match offset {
            reg::MAGIC_VALUE => reg::MAGIC,
            reg::VERSION => self.version,
            reg::DEVICE_ID => self.device_id,
            reg::VENDOR_ID => reg::VENDOR,
            reg::DEVICE_FEATURES => self.state.features.offered_word(),
            reg::QUEUE_SIZE_MAX => queue.map_or(0, |q| u32::from(q.max)),
            reg::QUEUE_READY => queue.map_or(0, |q| u32::from(q.enabled())),
            reg::INTERRUPT_STATUS => self.state.interrupts.line().status(),
            reg::STATUS => self.state.status.bits,
            // No shared memory regions: length and base are all ones (section 4.2.2).
            reg::SHM_LEN_LOW | reg::SHM_LEN_HIGH | reg::SHM_BASE_LOW | reg::SHM_BASE_HIGH => u32::MAX,
            reg::QUEUE_RESET if self.state.negotiated(feature::RING_RESET) => {
                queue.map_or(0, |q| u32::from(q.resetting()))
            }
            mmio_msi::NOTIFY_BASE if self.state.negotiated(mmio_msi::F_NOTIFICATION) => {
                mmio_msi::NOTIFY_PAGE as u32
            }
            mmio_msi::NOTIFY_MULTIPLIER if self.state.negotiated(mmio_msi::F_NOTIFICATION) => {
                mmio_msi::NOTIFY_STRIDE
            }
            mmio_msi::MSI_LIMIT if self.state.negotiated(mmio_msi::F_MSI) => {
                self.state.interrupts.msi().map_or(0, |table| u32::from(table.len()))
            }
            mmio_msi::MSI_STATE if self.state.negotiated(mmio_msi::F_MSI) => {
                self.msi.state(&self.state.interrupts, self.source())
            }
            reg::CONFIG_GENERATION => self.state.generation,
            _ => return Err(Violation),
        })
    }

    fn write_register(&mut self, offset: u64, value: u32) -> Result<Option<Effect>, Violation> {
        if offset == reg::STATUS {
            return common::write_status(self, value);
        }
        if self.state.status.resetting() && offset != reg::INTERRUPT_ACK {
            return Err(Violation);
        }
        match offset {
            reg::DEVICE_FEATURES_SEL => self.state.features.offered_sel = value,
            reg::DRIVER_FEATURES_SEL => self.state.features.accepted_sel = value,
            reg::DRIVER_FEATURES if self.state.status.features_writable() => {
                self.state.features.accept(value);
            }
            reg::QUEUE_SEL => self.state.queue_sel = value,
            reg::QUEUE_SIZE => self.state.idle_queue()?.size = value,
            reg::QUEUE_DESC_LOW => self.state.idle_queue()?.areas[0] = value,
            reg::QUEUE_DESC_HIGH => self.state.idle_queue()?.areas[1] = value,
            reg::QUEUE_DRIVER_LOW => self.state.idle_queue()?.areas[2] = value,
            reg::QUEUE_DRIVER_HIGH => self.state.idle_queue()?.areas[3] = value,
            reg::QUEUE_DEVICE_LOW => self.state.idle_queue()?.areas[4] = value,
            reg::QUEUE_DEVICE_HIGH => self.state.idle_queue()?.areas[5] = value,
            reg::QUEUE_READY => return self.state.enable_queue(value),
            reg::QUEUE_RESET => return common::reset_queue(self, value),
            reg::QUEUE_NOTIFY => return self.notify(value),
            reg::INTERRUPT_ACK => {
                let defined = reg::INT_USED_BUFFER | reg::INT_CONFIG_CHANGE;
                self.state.interrupts.line().acknowledge(value & defined);
                if value & !defined != 0 {
                    return Err(Violation);
                }
            }
            reg::SHM_SEL => {}
            mmio_msi::MSI_COMMAND if self.msi_writable() => {
                let running = self.state.status.bits & status::DRIVER_OK != 0;
                self.msi.command(value, &self.state.interrupts, self.source(), running)?;
            }
            _ if self.msi_writable() => self.msi.stage(offset, value)?,
            _ => return Err(Violation),
        }
        Ok(None)
    }

    /// Whether the registers of the MSI extension may be written: as those of a queue.
    fn msi_writable(&self) -> bool {
        self.state.negotiated(mmio_msi::F_MSI) && self.state.status.queues_writable()
    }

    /// Selected source, if it exists.
    fn source(&self) -> Option<Source> {
        match self.state.queue_sel {
            mmio_msi::SELECT_CONFIGURATION => Some(Source::Configuration),
            queue => {
                self.state.selected().filter(|queue| queue.max != 0)?;
                u16::try_from(queue).ok().map(Source::Queue)
            }
        }
    }

    /// Available buffer notification (section 4.2.3.3).
    fn notify(&self, value: u32) -> Result<Option<Effect>, Violation> {
        let index = if self.state.negotiated(feature::NOTIFICATION_DATA) {
            value as u16 // The upper half is the ring position (section 2.9).
        } else {
            u16::try_from(value).map_err(|_| Violation)?
        };
        self.state.notify(index)
    }
}

impl Common for Mmio {
    fn state(&self) -> &DeviceState {
        &self.state
    }

    fn state_mut(&mut self) -> &mut DeviceState {
        &mut self.state
    }

    fn set_defaults(&mut self) {
        self.state.interrupts.reset();
        self.msi = MsiRegisters::default();
    }

    fn set_queue_defaults(&mut self, queue: u16) {
        if let Some(table) = self.state.interrupts.msi() {
            table.forget(queue);
        }
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
            reg::CONFIG..reg::WINDOW => AccessKind::Config,
            reg::WINDOW.. if write => AccessKind::Notify,
            _ => AccessKind::Other,
        }
    }

    fn notify_address(&self, queue: u16) -> Option<NotifyAddress> {
        if self.state.negotiated(mmio_msi::F_NOTIFICATION) {
            let offset = mmio_msi::NOTIFY_PAGE + u64::from(queue) * u64::from(mmio_msi::NOTIFY_STRIDE);
            return Some(NotifyAddress { offset, datamatch: None });
        }
        // With NOTIFICATION_DATA the upper half of the value varies, and a datamatch covers all of
        // it.
        (!self.state.negotiated(feature::NOTIFICATION_DATA))
            .then_some(NotifyAddress { offset: reg::QUEUE_NOTIFY, datamatch: Some(u32::from(queue)) })
    }

    fn reset(&mut self) -> Option<Effect> {
        Self::write(self, reg::STATUS, &[0; 4])
    }

    fn polls_reset(&self) -> bool {
        self.version == reg::VERSION_3
    }

    fn save(&self) -> Vec<u8> {
        let mut bytes = saved::begin(self.kind());
        bytes.extend(self.device_id.to_le_bytes());
        self.state.save(&mut bytes);
        bytes.extend(self.state.interrupts.line().status().to_le_bytes());
        self.msi.save(&self.state.interrupts, &mut bytes);
        bytes
    }

    fn restore(&mut self, saved: &[u8]) -> Result<Restored, RestoreError> {
        let mut from = Reader::new(saved, self.kind())?;
        same(from.u32()?, self.device_id, "device identifier")?;
        let restored = self.state.restore(&mut from)?;
        let causes = from.causes()?;
        self.msi.restore(&self.state.interrupts, self.state.negotiated(mmio_msi::F_MSI), &mut from)?;
        from.end()?;
        self.state.interrupts.line().raise(causes);
        Ok(restored)
    }
}

/// Target of an access.
enum Access {
    /// A 32-bit register.
    Register,
    /// The configuration space, at this offset.
    Config(u32),
    /// The notification address of this queue.
    Notify(u16),
}

impl Access {
    /// Decodes an access.
    ///
    /// `None` if a driver may not use its width, alignment or offset (section 4.2.2.2).
    fn decode(offset: u64, len: usize) -> Option<Self> {
        let len = len as u64;
        if offset < reg::CONFIG {
            return (len == 4 && offset.is_multiple_of(4)).then_some(Self::Register);
        }
        if offset >= mmio_msi::NOTIFY_PAGE {
            let (offset, stride) = (offset - mmio_msi::NOTIFY_PAGE, u64::from(mmio_msi::NOTIFY_STRIDE));
            let queue = u16::try_from(offset / stride).ok()?;
            return (len != 0 && offset.is_multiple_of(stride)).then_some(Self::Notify(queue));
        }
        let fits = matches!(len, 1 | 2 | 4 | 8)
            && offset.is_multiple_of(len)
            && offset.checked_add(len).is_some_and(|end| end <= reg::WINDOW);
        fits.then_some(Self::Config((offset - reg::CONFIG) as u32))
    }
}
