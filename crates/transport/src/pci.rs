//! Modern virtio over PCI (section 4.1) as a pure register machine.
//!
//! One function with one memory BAR.
//!
//! ```text
//!             configuration space                         BAR 0
//! ECAM ---> header, BAR, command                   0x0_0000  common configuration   -> DeviceState -> Effect
//!           capabilities:  MSI-X ----------------> 0x0_8000  MSI-X table            -> Interrupts
//!                          virtio, one per region  0x0_3000  pending bits
//!                          window into the BAR --> 0x0_1000  ISR status             -> Interrupts (wired line)
//!                                                  0x0_2000  configuration space    -> WriteConfig
//!                                                  0x1_0000  notifications: queue n at 4 n    -> Notify
//! ```
//!
//! The [front page](crate#states) has the states, and the handling of forbidden accesses. This
//! layout adds:
//!
//! - **Width.** A field is accessed with its own width, naturally aligned; a 64-bit field by halves
//!   or whole. Anything else is a violation. A kick is a write of 1, 2, 4 or 8 bytes at the queue's
//!   address: the address identifies the queue, the value is ignored, as with an ioeventfd.
//! - **`queue_enable`** accepts 1 only (section 4.1.4.3.2). It reads 1 until a reset of the queue
//!   is done, and so does `queue_reset`, because 0 promises that the device does not access the
//!   queue any more.
//! - **`queue_size`** is the maximum after a reset of the device or the queue, and the queue has no
//!   vector.
//! - **Vectors** may be mapped in every state except during a reset, also for a live queue. A
//!   vector that the function lacks reads back as none (section 4.1.5.1.2.1).
//! - **The window** (cfg_type 5) reads and writes the BAR whether memory is enabled or not: 1, 2 or
//!   4 bytes.
//! - **Bus mastering** off holds messages back, which become pending. It does not stop the queues:
//!   a driver that wants them stopped resets the device.
//! - **A reset of the device** is virtio's: it unmaps the vectors and drops what is pending.
//!   Command register, BAR, MSI-X table and message control belong to PCI and stay.
//! - The BAR is where the driver put it if memory is enabled, and nowhere else ([`Effect::Move`]
//!   tells the owner).
mod common_cfg;
mod config_space;
mod msix;
pub mod root;

use crate::common::Common;
use crate::saved::{self, Reader, RestoreError};
use crate::state::DeviceState;
use crate::violation::Violation;
use crate::{AccessKind, DeviceDescription, Effect, NotifyAddress, Restored, Transport};
use config_space::{ConfigSpace, Identity, accessible};
use msix::Msix;
use paravane_notify::Interrupts;
use paravane_spec::pci::{self, cap, capability, class, command, common, msix as table};
use paravane_spec::{device_id, mmio::WINDOW};
use std::ops::Range;
use std::sync::Arc;

/// Kind of transport in saved registers.
const KIND: u8 = 2;

const COMMON: Range<u64> = 0..common::LENGTH;
const ISR: Range<u64> = 0x1000..0x1001;
/// As long as it can be on mmio.
const DEVICE: Range<u64> = 0x2000..0x2000 + (WINDOW - paravane_spec::mmio::CONFIG);
const PENDING: u64 = 0x3000;
const TABLE: u64 = 0x8000;
const NOTIFY: u64 = 0x1_0000;
/// Distance in bytes between the notification addresses of two queues.
const NOTIFY_STEP: u32 = 4;

/// Register machine of one function.
#[derive(Debug)]
pub struct Pci {
    config: ConfigSpace,
    state: DeviceState,
    msix: Msix,
    /// Offsets of the writable capabilities.
    msix_at: Option<u16>,
    window_at: u16,
}

/// Target of an access to the BAR.
enum BarTarget {
    Common(u64),
    Isr,
    Device(u32),
    Pending(u64),
    Table(u64),
    Notify(u16),
}

impl Pci {
    /// Offset of the configuration space in the transport's window: behind every BAR.
    pub const CONFIG_SPACE: u64 = 1 << 32;

    /// Makes a function after reset, with its BAR at 0 and disabled.
    ///
    /// It has MSI-X if `interrupts` has messages. `line` is the value of the interrupt line
    /// register.
    #[must_use]
    pub fn new(device: DeviceDescription, interrupts: Arc<Interrupts>, line: u8) -> Self {
        let mut config = ConfigSpace::new(Identity {
            vendor: pci::VENDOR,
            // The specification's identifiers are far below the overflow of the sum.
            device: pci::DEVICE_BASE.wrapping_add(device.device_id as u16),
            revision: pci::REVISION,
            class: match device.device_id {
                device_id::NET => class::NETWORK,
                device_id::BLK => class::STORAGE,
                _ => class::OTHER,
            },
            subsystem: [pci::VENDOR, pci::SUBSYSTEM],
        });
        let queues = device.queue_sizes.len() as u64;
        config.add_memory_bar(bar_size(queues));
        config.add_interrupt_pin(line);

        let msix = Msix::new(Arc::clone(&interrupts));
        let msix_at = msix.vectors().checked_sub(1).map(|last| {
            let at = config.add_capability(msix_capability(last));
            let control = at + table::CONTROL;
            config.allow(control, (table::ENABLE | table::FUNCTION_MASK).to_le_bytes());
            at
        });
        config.add_capability(virtio_capability(cap::COMMON, &COMMON));
        config.add_capability(virtio_capability(cap::ISR, &ISR));
        config.add_capability(virtio_capability(cap::DEVICE, &DEVICE));
        let notify = NOTIFY..NOTIFY + queues.max(1) * u64::from(NOTIFY_STEP);
        config.add_capability(long_capability(cap::NOTIFY, &notify, NOTIFY_STEP));
        let window_at = config.add_capability(long_capability(cap::PCI, &(0..0), 0));
        config.allow(window_at + cap::BAR, [0xff]);
        config.allow(window_at + cap::OFFSET, [0xff; 12]);

        let machine = Self {
            config,
            // The maximum (section 4.1.4.3).
            state: DeviceState::new(&device, interrupts, |max| max),
            msix,
            msix_at,
            window_at,
        };
        machine.apply_control();
        machine
    }

    /// Size of the BAR in bytes: a power of two. Its address is a multiple of it.
    #[must_use]
    pub fn bar_size(&self) -> u64 {
        bar_size(u64::from(self.state.queue_count()))
    }

    /// Puts the BAR at `address`, as firmware does.
    ///
    /// It is decoded once the driver enables memory.
    pub fn place(&mut self, address: u64) {
        self.config.place_bar(address);
    }

    /// Address where the BAR is decoded; `None` while memory is disabled.
    #[must_use]
    pub fn window(&self) -> Option<u64> {
        (self.config.command() & command::MEMORY != 0).then(|| self.config.bar())
    }

    /// Offset in the BAR of the notification address of `queue`.
    ///
    /// Each queue has its own, so an ioeventfd there needs no datamatch, and NOTIFICATION_DATA
    /// works.
    #[must_use]
    pub fn notification(queue: u16) -> u64 {
        NOTIFY + u64::from(queue) * u64::from(NOTIFY_STEP)
    }

    /// Reads the configuration space.
    ///
    /// `config` is as for [`Transport::read`]. Fills `data` for any access.
    fn read_config(&self, register: u16, data: &mut [u8], config: impl FnOnce(u32, &mut [u8])) {
        data.fill(0);
        if !accessible(register, data.len()) {
            return self.state.violation();
        }
        self.config.read(register, data);
        let Some((at, skip)) = self.in_window(register, data.len()) else { return };
        let Some((offset, len)) = self.window_access() else { return self.state.violation() };
        let mut value = [0; 4];
        self.read_bar(offset, &mut value[..len], config);
        for (byte, value) in data[at..].iter_mut().zip(value[..len].iter().skip(skip)) {
            *byte = *value;
        }
    }

    /// Writes to the configuration space.
    fn write_config(&mut self, register: u16, data: &[u8]) -> Option<Effect> {
        if !accessible(register, data.len()) {
            self.state.violation();
            return None;
        }
        let before = self.window();
        self.config.write(register, data);
        self.apply_control();
        if self.in_window(register, data.len()).is_some() {
            let Some((offset, len)) = self.window_access() else {
                self.state.violation();
                return None;
            };
            let value: [u8; 4] = self.config.get(self.window_at + cap::PCI_CFG_DATA);
            return self.write_bar(offset, &value[..len]);
        }
        let window = self.window();
        (window != before).then_some(Effect::Move { window })
    }

    /// Whether an access touches the data of the window.
    ///
    /// Returns the offset of the window's data in the access, and the number of their first bytes
    /// that it skips.
    fn in_window(&self, register: u16, len: usize) -> Option<(usize, usize)> {
        let (data, register) = (usize::from(self.window_at + cap::PCI_CFG_DATA), usize::from(register));
        let (at, skip) = (data.saturating_sub(register), register.saturating_sub(data));
        (at < len && skip < 4).then_some((at, skip))
    }

    /// Target of the window: offset and length in the BAR.
    fn window_access(&self) -> Option<(u64, usize)> {
        let [bar] = self.config.get(self.window_at + cap::BAR);
        let offset = u64::from(u32::from_le_bytes(self.config.get(self.window_at + cap::OFFSET)));
        let len = u64::from(u32::from_le_bytes(self.config.get(self.window_at + cap::LENGTH)));
        // Section 4.1.4.9.2.
        let legal = bar == 0 && matches!(len, 1 | 2 | 4) && offset.is_multiple_of(len);
        legal.then_some((offset, len as usize))
    }

    /// Applies the command register and message control.
    fn apply_control(&self) {
        let command = self.config.command();
        self.state.interrupts.line().silence(command & command::INTX_DISABLE != 0);
        if let Some(at) = self.msix_at {
            let control = u16::from_le_bytes(self.config.get(at + table::CONTROL));
            self.msix.control(control, command & command::BUS_MASTER != 0);
        }
    }

    /// Reads at `offset` of the BAR. Calls `config` at most once.
    fn read_bar(&self, offset: u64, data: &mut [u8], config: impl FnOnce(u32, &mut [u8])) {
        data.fill(0);
        let done = match decode(offset, data.len()) {
            Some(BarTarget::Common(at)) => self.read_common(at, data.len()).map(|value| {
                data.copy_from_slice(&value.to_le_bytes()[..data.len()]);
            }),
            Some(BarTarget::Isr) => {
                let line = self.state.interrupts.line();
                let causes = line.status();
                // A cause that is added between the two is cleared too if it is the same: the
                // driver looks at its queues after this read.
                line.acknowledge(causes);
                data[0] = causes as u8;
                Ok(())
            }
            Some(BarTarget::Device(at)) => {
                config(at, data);
                Ok(())
            }
            Some(BarTarget::Pending(at)) => self.msix.read_pending(at, data),
            Some(BarTarget::Table(at)) => self.msix.read_table(at, data),
            // Write-only.
            Some(BarTarget::Notify(_)) | None => Err(Violation),
        };
        if done.is_err() {
            data.fill(0);
            self.state.violation();
        }
    }

    /// Writes at `offset` of the BAR.
    fn write_bar(&mut self, offset: u64, data: &[u8]) -> Option<Effect> {
        let done = match decode(offset, data.len()) {
            Some(BarTarget::Common(at)) => {
                let mut value = [0; 8];
                value[..data.len()].copy_from_slice(data);
                self.write_common(at, data.len(), u64::from_le_bytes(value))
            }
            Some(BarTarget::Device(at)) if self.state.status.queues_writable() => {
                Ok(Some(Effect::WriteConfig { offset: at, data: data.to_vec() }))
            }
            Some(BarTarget::Table(at)) => self.msix.write_table(at, data).map(|()| None),
            Some(BarTarget::Notify(queue)) => self.state.notify(queue),
            // Read-only, or nothing.
            Some(BarTarget::Device(_) | BarTarget::Isr | BarTarget::Pending(_)) | None => Err(Violation),
        };
        self.state.effect(done)
    }

    /// Device status.
    #[must_use]
    pub fn status(&self) -> u32 {
        self.state.status.bits
    }
}

impl Common for Pci {
    fn state(&self) -> &DeviceState {
        &self.state
    }

    fn state_mut(&mut self) -> &mut DeviceState {
        &mut self.state
    }

    fn set_defaults(&mut self) {
        self.state.interrupts.line().reset();
        self.msix.device_reset(self.state.queue_count());
    }

    fn set_queue_defaults(&mut self, queue: u16) {
        self.msix.queue_reset(queue);
    }
}

/// The window: the BAR, then the configuration space at [`Pci::CONFIG_SPACE`].
impl Transport for Pci {
    fn read(&mut self, offset: u64, data: &mut [u8], config: &mut dyn FnMut(u32, &mut [u8])) {
        match config_register(offset) {
            Some(register) => self.read_config(register, data, config),
            None => self.read_bar(offset, data, config),
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Option<Effect> {
        match config_register(offset) {
            Some(register) => self.write_config(register, data),
            None => self.write_bar(offset, data),
        }
    }

    fn access(&self, offset: u64, _write: bool) -> AccessKind {
        if offset >= Self::CONFIG_SPACE || DEVICE.contains(&offset) {
            // The configuration space has a window into the device's.
            AccessKind::Config
        } else if ISR.contains(&offset) {
            AccessKind::InterruptStatus
        } else if offset >= NOTIFY {
            AccessKind::Notify
        } else {
            AccessKind::Other
        }
    }

    fn notify_address(&self, queue: u16) -> Option<NotifyAddress> {
        Some(NotifyAddress { offset: Self::notification(queue), datamatch: None })
    }

    fn reset(&mut self) -> Option<Effect> {
        self.write_bar(COMMON.start + common::DEVICE_STATUS, &[0])
    }

    fn save(&self) -> Vec<u8> {
        let mut bytes = saved::begin(KIND);
        self.config.save(&mut bytes);
        self.state.save(&mut bytes);
        bytes.extend(self.state.interrupts.line().status().to_le_bytes());
        self.msix.save(self.state.queue_count(), &mut bytes);
        bytes
    }

    fn restore(&mut self, saved: &[u8]) -> Result<Restored, RestoreError> {
        let mut from = Reader::new(saved, KIND)?;
        self.config.restore(&mut from)?;
        let restored = self.state.restore(&mut from)?;
        let causes = from.causes()?;
        self.msix.restore(self.state.queue_count(), &mut from)?;
        from.end()?;
        // Sends nothing that the driver has masked.
        self.apply_control();
        self.state.interrupts.line().raise(causes);
        Ok(Restored { window: self.window(), ..restored })
    }
}

/// Configuration space register at `offset` of the transport's window, if any.
fn config_register(offset: u64) -> Option<u16> {
    u16::try_from(offset.checked_sub(Pci::CONFIG_SPACE)?).ok()
}

/// Size in bytes of a BAR for `queues` queues.
fn bar_size(queues: u64) -> u64 {
    (NOTIFY + queues.max(1) * u64::from(NOTIFY_STEP)).next_power_of_two()
}

/// Decodes an access.
///
/// `None` if a driver may not use its width, alignment or offset. Each structure checks the rest.
fn decode(offset: u64, len: usize) -> Option<BarTarget> {
    let width = len as u64;
    if !matches!(len, 1 | 2 | 4 | 8) || !offset.is_multiple_of(width) {
        return None;
    }
    let within = |range: &Range<u64>| range.contains(&offset) && width <= range.end - offset;
    if within(&COMMON) {
        Some(BarTarget::Common(offset))
    } else if within(&ISR) {
        Some(BarTarget::Isr)
    } else if within(&DEVICE) {
        Some(BarTarget::Device((offset - DEVICE.start) as u32))
    } else if (PENDING..PENDING + 0x1000).contains(&offset) {
        Some(BarTarget::Pending(offset - PENDING))
    } else if (TABLE..NOTIFY).contains(&offset) {
        Some(BarTarget::Table(offset - TABLE))
    } else {
        // The state knows which queues exist.
        let at = offset.checked_sub(NOTIFY)?;
        let queue = u16::try_from(at / u64::from(NOTIFY_STEP)).ok()?;
        at.is_multiple_of(NOTIFY_STEP.into()).then_some(BarTarget::Notify(queue))
    }
}

fn msix_capability(last_vector: u16) -> [u8; table::LEN as usize] {
    let mut bytes = [0; table::LEN as usize];
    bytes[0] = capability::MSIX;
    // The BAR is number 0, so the lowest three bits are right.
    for (at, value) in
        [(table::CONTROL, u32::from(last_vector)), (table::TABLE, TABLE as u32), (table::PBA, PENDING as u32)]
    {
        let width = if at == table::CONTROL { 2 } else { 4 };
        bytes[usize::from(at)..][..width].copy_from_slice(&value.to_le_bytes()[..width]);
    }
    bytes
}

fn virtio_capability(cfg_type: u8, region: &Range<u64>) -> [u8; cap::SIZE as usize] {
    let mut bytes = [0; cap::SIZE as usize];
    bytes[0] = capability::VENDOR;
    bytes[usize::from(cap::LEN)] = cap::SIZE;
    bytes[usize::from(cap::CFG_TYPE)] = cfg_type;
    bytes[usize::from(cap::OFFSET)..][..4].copy_from_slice(&(region.start as u32).to_le_bytes());
    let len = (region.end - region.start) as u32;
    bytes[usize::from(cap::LENGTH)..][..4].copy_from_slice(&len.to_le_bytes());
    bytes
}

/// Long capability, with one more word: the multiplier, or the window's data.
fn long_capability(cfg_type: u8, region: &Range<u64>, word: u32) -> [u8; cap::SIZE_LONG as usize] {
    let mut bytes = [0; cap::SIZE_LONG as usize];
    bytes[..usize::from(cap::SIZE)].copy_from_slice(&virtio_capability(cfg_type, region));
    bytes[usize::from(cap::LEN)] = cap::SIZE_LONG;
    bytes[usize::from(cap::SIZE)..].copy_from_slice(&word.to_le_bytes());
    bytes
}
