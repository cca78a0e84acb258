//! virtio over MMIO, version 2 (section 4.2), as a pure register machine.
//!
//! ```text
//!                ACKNOWLEDGE, DRIVER        FEATURES_OK               DRIVER_OK
//!   Reset (0) ------------------------> Features ----------> Queues -------------> Running
//!      ^                                (DriverFeatures      (queue registers      (Notify; queues may
//!      |                                 may be written)      may be written)       start, stop, reset)
//!      | reset_done                                                                    |
//!      |                            Status = 0, from anywhere                          |
//!   Resetting <------------------------------------------------------------------------+
//!   (Status reads what it was, writes have no effect)
//!
//!   FAILED             (driver) from anywhere: only a reset leads out
//!   DEVICE_NEEDS_RESET (device) from anywhere but Reset: nothing more is started or notified until a reset
//!
//! one queue:
//!            QueueReady=1            DRIVER_OK
//!     Idle <--------------> Ready ------------> Live ---- QueueReady=0 --> Stopping  --+
//!      ^     QueueReady=0                        |                           |         |
//!      |  `------- QueueReady=1 in Running ----->|                      QueueReset=1   |
//!      |                                         |                           v         |
//!      |                                         +---- QueueReset=1 ---> Resetting ----+
//!      +------------------------- queue_reset_done --------------------------+---------+
//! ```
//!
//! What the specification leaves to the device, or forbids the driver, is settled so:
//!
//! - An access that the driver must not make has no effect whatsoever, reads 0, and is counted
//!   ([`Mmio::violations`]). The exceptions are named here: undefined bits in InterruptACK are counted while
//!   the defined ones are acknowledged; FEATURES_OK over an unacceptable set is not a violation, the bit just
//!   does not stick (section 2.2.2), and the other bits of the same write count.
//! - **Status.** Bits are only ever added. DRIVER needs ACKNOWLEDGE, FEATURES_OK needs DRIVER (both may come
//!   in one write), DRIVER_OK needs that FEATURES_OK stuck in an *earlier* write, since the driver must have
//!   read it back (section 3.1.1). FAILED comes alone. DEVICE_NEEDS_RESET is the device's: the driver may
//!   write back what it read, or may not have seen it yet; it cannot set or clear the bit.
//! - **Queue registers** may be written between FEATURES_OK and FAILED, by a queue that is Idle. From
//!   QueueReady=1 on they are frozen: a later write has no effect, then or afterwards (CVE-2026-5747). A size
//!   that is not a power of two from 1 to QueueSizeMax leaves QueueReady at 0. Addresses are checked by
//!   whoever activates the queue.
//! - **QueueReady=0 on a live queue** is the way to stop using it (section 4.2.2.2), with RING_RESET or
//!   without. The queue is stopped by [`Effect::ResetQueue`]; QueueReady reads 1 until it is done, because 0
//!   promises that the device does not look at the queue any more. The registers keep their values, the
//!   positions start from 0 if it is made ready again.
//! - **QueueReset** needs RING_RESET. It reads 1 while the reset is under way; afterwards the registers of
//!   that queue are at their defaults (section 2.6.1). On a queue that is not live there is nothing to stop,
//!   so it is done at once.
//! - **Reset of a device whose status is 0** is done at once too: before ACKNOWLEDGE nothing could have been
//!   started or changed outside of these registers.
//! - The configuration space may be written from FEATURES_OK on (section 3.1.1, step 4), with 1, 2, 4 or 8
//!   bytes, naturally aligned.
mod features;
mod queue;
mod status;

use crate::{DeviceDescription, Effect};
use features::Features;
use paravane_notify::InterruptLine;
use paravane_spec::{feature, mmio as reg};
use queue::{Part, QueueRegisters, ReadyWrite, ResetWrite};
use status::{Status, StatusWrite};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The register machine of one device.
pub struct Mmio {
    device_id: u32,
    line: Arc<InterruptLine>,
    status: Status,
    features: Features,
    queues: Vec<QueueRegisters>,
    queue_sel: u32,
    generation: u32,
    /// A plain statistic, atomic only because reads take `&self`.
    violations: AtomicU64,
}

/// An access that the specification forbids the driver.
struct Violation;

impl Mmio {
    /// A device after reset.
    #[must_use]
    pub fn new(device: DeviceDescription, line: Arc<InterruptLine>) -> Self {
        Self {
            device_id: device.device_id,
            line,
            status: Status::default(),
            features: Features::new(device.features),
            queues: device.queue_sizes.iter().map(|&max| QueueRegisters::new(max)).collect(),
            queue_sel: 0,
            generation: 0,
            violations: AtomicU64::new(0),
        }
    }

    /// Reads a register. `config` reads the device's configuration space (offset, destination); it is
    /// called for offsets from 0x100 on. Whatever a guest does, `data` is filled.
    pub fn read(&self, offset: u64, data: &mut [u8], config: impl FnOnce(u32, &mut [u8])) {
        data.fill(0);
        match Access::decode(offset, data.len()) {
            Some(Access::Register) => match self.read_register(offset) {
                Ok(value) => data.copy_from_slice(&value.to_le_bytes()),
                Err(Violation) => self.violation(),
            },
            Some(Access::Config(offset)) => config(offset, data),
            None => self.violation(),
        }
    }

    /// Writes a register.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Option<Effect> {
        let done = match (Access::decode(offset, data.len()), data) {
            (Some(Access::Register), &[a, b, c, d]) => {
                self.write_register(offset, u32::from_le_bytes([a, b, c, d]))
            }
            (Some(Access::Config(offset)), data) if self.status.config_writable() => {
                Ok(Some(Effect::WriteConfig { offset, data: data.to_vec() }))
            }
            _ => Err(Violation),
        };
        done.unwrap_or_else(|Violation| {
            self.violation();
            None
        })
    }

    /// The owner has carried out [`Effect::Reset`]. Without a reset under way nothing happens.
    pub fn reset_done(&mut self) {
        if self.status.resetting() {
            self.set_defaults();
        }
    }

    /// The owner has carried out [`Effect::ResetQueue`]. Without one under way nothing happens.
    pub fn queue_reset_done(&mut self, queue: u16) {
        if let Some(queue) = self.queues.get_mut(usize::from(queue)) {
            queue.stopped();
        }
    }

    /// The owner could not start the device, or a queue has failed: sets DEVICE_NEEDS_RESET and raises a
    /// configuration change (section 2.1.2), once. A device at reset or under reset has nothing to report.
    pub fn needs_reset(&mut self) {
        if self.status.set_needs_reset() && self.status.running() {
            self.line.raise(reg::INT_CONFIG_CHANGE);
        }
    }

    /// The configuration space has changed: new generation, and an interrupt if the driver is running.
    pub fn config_changed(&mut self) {
        self.generation = self.generation.wrapping_add(1);
        if self.status.running() {
            self.line.raise(reg::INT_CONFIG_CHANGE);
        }
    }

    /// Device status register.
    #[must_use]
    pub fn status(&self) -> u32 {
        self.status.bits()
    }

    /// Accesses that the specification forbids, counted.
    #[must_use]
    pub fn violations(&self) -> u64 {
        self.violations.load(Ordering::Relaxed) // A statistic: orders nothing.
    }

    fn violation(&self) {
        self.violations.fetch_add(1, Ordering::Relaxed); // A statistic: orders nothing.
    }

    fn read_register(&self, offset: u64) -> Result<u32, Violation> {
        let queue = self.selected();
        Ok(match offset {
            reg::MAGIC_VALUE => reg::MAGIC,
            reg::VERSION => reg::VERSION_2,
            reg::DEVICE_ID => self.device_id,
            reg::VENDOR_ID => reg::VENDOR,
            reg::DEVICE_FEATURES => self.features.offered_word(),
            reg::QUEUE_SIZE_MAX => queue.map_or(0, |q| u32::from(q.max())),
            reg::QUEUE_READY => queue.map_or(0, |q| u32::from(q.ready())),
            reg::INTERRUPT_STATUS => self.line.status(),
            reg::STATUS => self.status.bits(),
            // No device of ours has a shared memory region: length and base are all ones (section 4.2.2).
            reg::SHM_LEN_LOW | reg::SHM_LEN_HIGH | reg::SHM_BASE_LOW | reg::SHM_BASE_HIGH => u32::MAX,
            reg::QUEUE_RESET if self.negotiated(feature::RING_RESET) => {
                queue.map_or(0, |q| u32::from(q.resetting()))
            }
            reg::CONFIG_GENERATION => self.generation,
            _ => return Err(Violation),
        })
    }

    fn write_register(&mut self, offset: u64, value: u32) -> Result<Option<Effect>, Violation> {
        if offset == reg::STATUS {
            return self.write_status(value);
        }
        if self.status.resetting() {
            return Err(Violation);
        }
        match offset {
            reg::DEVICE_FEATURES_SEL => self.features.select_offered(value),
            reg::DRIVER_FEATURES_SEL => self.features.select_accepted(value),
            reg::DRIVER_FEATURES if self.status.features_writable() => self.features.accept(value),
            reg::QUEUE_SEL => self.queue_sel = value,
            reg::QUEUE_SIZE => self.writable_queue()?.set_size(value)?,
            reg::QUEUE_DESC_LOW => self.writable_queue()?.set_low(Part::Desc, value)?,
            reg::QUEUE_DESC_HIGH => self.writable_queue()?.set_high(Part::Desc, value)?,
            reg::QUEUE_DRIVER_LOW => self.writable_queue()?.set_low(Part::Driver, value)?,
            reg::QUEUE_DRIVER_HIGH => self.writable_queue()?.set_high(Part::Driver, value)?,
            reg::QUEUE_DEVICE_LOW => self.writable_queue()?.set_low(Part::Device, value)?,
            reg::QUEUE_DEVICE_HIGH => self.writable_queue()?.set_high(Part::Device, value)?,
            reg::QUEUE_READY => return self.write_queue_ready(value),
            reg::QUEUE_RESET => return self.write_queue_reset(value),
            reg::QUEUE_NOTIFY => return self.notify(value),
            reg::INTERRUPT_ACK => {
                let defined = reg::INT_USED_BUFFER | reg::INT_CONFIG_CHANGE;
                self.line.acknowledge(value & defined);
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
        match self.status.write(value, self.features.acceptable())? {
            StatusWrite::Noted => Ok(None),
            StatusWrite::AtReset => {
                self.set_defaults();
                Ok(None)
            }
            StatusWrite::Reset => Ok(Some(Effect::Reset)),
            StatusWrite::Activate => {
                let queues =
                    (0..=u16::MAX).zip(&mut self.queues).filter_map(|(index, q)| Some((index, q.go_live()?)));
                Ok(Some(Effect::Activate { features: self.features.accepted(), queues: queues.collect() }))
            }
        }
    }

    fn write_queue_ready(&mut self, value: u32) -> Result<Option<Effect>, Violation> {
        let (running, broken) = (self.status.running(), self.status.needs_reset());
        if value == 0 && self.selected().is_some_and(|q| !q.ready()) {
            // Drivers clean up so after a reset, when no register may be written any more. It reads 0 already.
            return Ok(None);
        }
        let index = self.queue_index()?;
        let packed = self.features.accepted() & feature::RING_PACKED != 0;
        let queue = self.writable_queue()?;
        let effect = match value {
            // A device that needs a reset starts nothing; the driver may not have seen that yet.
            1 if broken => return Ok(None),
            1 => queue.make_ready(running, packed)?.map(ReadyWrite::Start),
            0 => queue.unready(),
            _ => return Err(Violation),
        };
        Ok(effect.map(|effect| match effect {
            ReadyWrite::Start(addresses) => {
                Effect::StartQueue { features: self.features.accepted(), queue: index, addresses }
            }
            ReadyWrite::Stop => Effect::ResetQueue { queue: index },
        }))
    }

    fn write_queue_reset(&mut self, value: u32) -> Result<Option<Effect>, Violation> {
        if value != 1 || !self.negotiated(feature::RING_RESET) {
            return Err(Violation);
        }
        let index = self.queue_index()?;
        Ok(match self.writable_queue()?.reset() {
            ResetWrite::Stop => Some(Effect::ResetQueue { queue: index }),
            ResetWrite::Noted => None,
        })
    }

    /// An available-buffer notification (section 4.2.3.3).
    fn notify(&self, value: u32) -> Result<Option<Effect>, Violation> {
        let index = if self.negotiated(feature::NOTIFICATION_DATA) {
            value as u16 // The ring position is in the upper half (section 2.9).
        } else {
            u16::try_from(value).map_err(|_| Violation)?
        };
        let queue = self.queues.get(usize::from(index)).ok_or(Violation)?;
        if !queue.live() || self.status.failed() {
            return Err(Violation);
        }
        // The driver may kick a broken device before it has noticed; nothing comes of it (section 2.1.1).
        Ok((!self.status.needs_reset()).then_some(Effect::Notify { queue: index }))
    }

    fn negotiated(&self, bit: u64) -> bool {
        self.status.negotiated() && self.features.accepted() & bit != 0
    }

    fn selected(&self) -> Option<&QueueRegisters> {
        self.queues.get(usize::from(u16::try_from(self.queue_sel).ok()?))
    }

    fn queue_index(&self) -> Result<u16, Violation> {
        u16::try_from(self.queue_sel).map_err(|_| Violation)
    }

    /// The selected queue, in a state of the device in which its registers may be written at all.
    fn writable_queue(&mut self) -> Result<&mut QueueRegisters, Violation> {
        let index = self.queue_index()?;
        let queue = self.queues.get_mut(usize::from(index)).filter(|q| q.max() != 0).ok_or(Violation)?;
        if self.status.queues_writable() { Ok(queue) } else { Err(Violation) }
    }

    /// Reset is complete (section 2.4). The generation goes on counting: a driver that compares it across a
    /// reset must not be told that nothing has changed.
    fn set_defaults(&mut self) {
        self.status = Status::default();
        self.features.reset();
        for queue in &mut self.queues {
            *queue = QueueRegisters::new(queue.max());
        }
        self.queue_sel = 0;
        self.line.reset();
    }
}

impl fmt::Debug for Mmio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mmio")
            .field("device_id", &self.device_id)
            .field("status", &self.status)
            .field("features", &self.features)
            .field("queues", &self.queues)
            .field("queue_sel", &self.queue_sel)
            .field("generation", &self.generation)
            .field("violations", &self.violations())
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
