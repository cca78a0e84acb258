//! Driver side of virtio over MMIO, version 2 (section 4.2).
//!
//! ```text
//!  probe: magic, version, type; reset; ACKNOWLEDGE, DRIVER
//!    | negotiate: features, FEATURES_OK
//!    v
//!  start_queue (once a queue): addresses, QueueReady <---.
//!    |                                                   | start_queue_again, on the same memory
//!    v                                                   |
//!  driver_ok: DRIVER_OK --- in use --- reset_queue (RING_RESET, bounded)
//!                             |
//!                           reset (bounded)
//! ```
use crate::{DmaArea, DriverError, Pool};
use alloc::boxed::Box;
use paravane_ring::driver::poll::Poller;
use paravane_ring::driver::{Layout, Queue};
use paravane_spec::{feature, mmio, queue, status};
use thiserror::Error;

/// Access to one device's registers; offsets in bytes from its base.
pub trait Registers {
    /// Reads 32 bits.
    fn read32(&self, offset: u64) -> u32;
    /// Writes 32 bits.
    fn write32(&self, offset: u64, value: u32);
    /// Reads 8 bits (configuration space).
    fn read8(&self, offset: u64) -> u8;
}

/// How often the status is read until a reset must be over. A device that needs longer than so many
/// register reads (each is an exit to the VMM) is taken for broken.
const RESET_READS: u32 = 100_000;

/// How often the configuration space is read again because it changed meanwhile.
const CONFIG_READS: u32 = 64;

/// What a queue's memory is aligned to, in bytes.
const QUEUE_ALIGN: usize = 4096;

/// A queue that was not reset.
#[derive(Debug, Error)]
#[error("{error}")]
pub struct NotReset {
    /// Why.
    pub error: DriverError,
    /// The queue, with what is in flight. Not to be used with a device that was asked to reset it
    /// ([`DriverError::QueueReset`]), but to be kept until that has been reset: [`Queue::into_memory`] is the way to its
    /// memory then.
    pub queue: Queue,
}

/// A device on virtio-mmio.
#[derive(Debug)]
pub struct Mmio<R> {
    registers: R,
    features: u64,
}

impl<R: Registers> Mmio<R> {
    /// Probes the device: magic, version, type. Resets it and says ACKNOWLEDGE and DRIVER.
    ///
    /// # Errors
    /// It is not a virtio-mmio version 2 device of type `device_id`, or does not reset.
    pub fn probe(registers: R, device_id: u32) -> Result<Self, DriverError> {
        // Section 4.2.3.1.1: wrong magic or version, or DeviceID 0, is "no device", and no other register may
        // be touched then.
        let magic = registers.read32(mmio::MAGIC_VALUE);
        if magic != mmio::MAGIC {
            return Err(DriverError::Magic(magic));
        }
        let version = registers.read32(mmio::VERSION);
        if version != mmio::VERSION_2 {
            return Err(DriverError::Version(version));
        }
        let found = registers.read32(mmio::DEVICE_ID);
        if found != device_id {
            return Err(DriverError::DeviceId { wanted: device_id, found });
        }
        let mut transport = Self { registers, features: 0 };
        transport.reset()?;
        transport.registers.write32(mmio::STATUS, status::ACKNOWLEDGE);
        transport.registers.write32(mmio::STATUS, status::ACKNOWLEDGE | status::DRIVER);
        Ok(transport)
    }

    /// Negotiates: accepts `wanted` as far as offered; all of `required` must be.
    ///
    /// # Errors
    /// A required bit is missing or the device refuses the set. The device is told FAILED.
    pub fn negotiate(&mut self, required: u64, wanted: u64) -> Result<u64, DriverError> {
        let offered = self.device_features();
        let missing = required & !offered;
        if missing != 0 {
            self.give_up();
            return Err(DriverError::Features(missing));
        }
        let accepted = offered & (required | wanted);
        for (word, bits) in [(0, accepted as u32), (1, (accepted >> 32) as u32)] {
            self.registers.write32(mmio::DRIVER_FEATURES_SEL, word);
            self.registers.write32(mmio::DRIVER_FEATURES, bits);
        }
        let negotiating = status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK;
        self.registers.write32(mmio::STATUS, negotiating);
        if self.status() & status::FEATURES_OK == 0 {
            self.give_up();
            return Err(DriverError::FeaturesRefused);
        }
        self.features = accepted;
        Ok(accepted)
    }

    /// Sets up queue `index` with at most `size` descriptors and indirect tables of `indirect` entries.
    ///
    /// # Errors
    /// There is no such queue, or too little memory. The device is told FAILED.
    pub fn start_queue(
        &mut self,
        index: u16,
        size: u16,
        indirect: u16,
        pool: &mut Pool,
    ) -> Result<Queue, DriverError> {
        let (queue, _) = self.start_in(index, size, indirect, |needed| pool.take(needed, QUEUE_ALIGN))?;
        Ok(queue)
    }

    /// As [`Mmio::start_queue`], for a queue that other threads, or interrupt handlers, poll.
    ///
    /// # Errors
    /// As [`Mmio::start_queue`].
    pub fn start_polled_queue(
        &mut self,
        index: u16,
        size: u16,
        indirect: u16,
        pool: &mut Pool,
    ) -> Result<(Queue, Poller), DriverError> {
        self.start_in(index, size, indirect, |needed| pool.take(needed, QUEUE_ALIGN))
    }

    /// Starts queue `index` again, in the memory that [`Mmio::reset_queue`] gave back. It may differ from the one
    /// before in size and tables as far as the memory allows.
    ///
    /// # Errors
    /// As [`Mmio::start_queue`].
    pub fn start_queue_again(
        &mut self,
        index: u16,
        size: u16,
        indirect: u16,
        memory: DmaArea,
    ) -> Result<(Queue, Poller), DriverError> {
        self.start_in(index, size, indirect, |_| Ok(memory))
    }

    /// Resets queue `index` alone (section 2.6.1) and returns its memory, which the device has let go of. What
    /// was in flight is lost. The rest of the device goes on.
    ///
    /// # Errors
    /// RING_RESET was not negotiated, and the queue goes on as if nobody had asked. Or the device does not finish the
    /// reset, or keeps the queue: then only a reset of the device stops the memory from being written to.
    pub fn reset_queue(&mut self, index: u16, queue: Queue) -> Result<DmaArea, Box<NotReset>> {
        match self.try_reset_queue(index) {
            Ok(()) => Ok(queue.into_memory()),
            Err(error) => Err(Box::new(NotReset { error, queue })),
        }
    }

    fn try_reset_queue(&self, index: u16) -> Result<(), DriverError> {
        if self.features & feature::RING_RESET == 0 {
            return Err(DriverError::Features(feature::RING_RESET));
        }
        self.registers.write32(mmio::QUEUE_SEL, u32::from(index));
        self.registers.write32(mmio::QUEUE_RESET, 1);
        for _ in 0..RESET_READS {
            if self.registers.read32(mmio::QUEUE_RESET) == 0 {
                // The driver must verify that the queue was reset (section 2.6.1.2): it is not ready any more.
                if self.registers.read32(mmio::QUEUE_READY) != 0 {
                    break;
                }
                return Ok(());
            }
            core::hint::spin_loop();
        }
        Err(DriverError::QueueReset(index))
    }

    /// Sets a queue up in what `memory` hands out for so many bytes.
    fn start_in(
        &mut self,
        index: u16,
        size: u16,
        indirect: u16,
        memory: impl FnOnce(usize) -> Result<DmaArea, DriverError>,
    ) -> Result<(Queue, Poller), DriverError> {
        let started = self.try_start_in(index, size, indirect, memory);
        if started.is_err() {
            self.give_up();
        }
        started
    }

    fn try_start_in(
        &mut self,
        index: u16,
        size: u16,
        indirect: u16,
        memory: impl FnOnce(usize) -> Result<DmaArea, DriverError>,
    ) -> Result<(Queue, Poller), DriverError> {
        self.registers.write32(mmio::QUEUE_SEL, u32::from(index));
        if self.registers.read32(mmio::QUEUE_READY) != 0 {
            return Err(DriverError::Queue(index));
        }
        let most = self.registers.read32(mmio::QUEUE_SIZE_MAX).min(u32::from(queue::MAX_SIZE));
        // The bound above makes this exact.
        let size = power_of_two_up_to(size.min(most as u16)).ok_or(DriverError::Queue(index))?;

        let layout = Layout::new(size, indirect, self.features)?;
        let (mut queue, at) = Queue::new(layout, memory(layout.memory())?)?;
        // Before the device may use the queue, or never.
        let poller = queue.poller().map_err(|_| DriverError::Queue(index))?;
        self.registers.write32(mmio::QUEUE_SIZE, u32::from(at.size));
        for (low, high, addr) in [
            (mmio::QUEUE_DESC_LOW, mmio::QUEUE_DESC_HIGH, at.desc),
            (mmio::QUEUE_DRIVER_LOW, mmio::QUEUE_DRIVER_HIGH, at.driver),
            (mmio::QUEUE_DEVICE_LOW, mmio::QUEUE_DEVICE_HIGH, at.device),
        ] {
            self.registers.write32(low, addr as u32);
            self.registers.write32(high, (addr >> 32) as u32);
        }
        self.registers.write32(mmio::QUEUE_READY, 1);
        // The register reads what was last written (section 4.2.2); a device that did not take the queue shows here.
        if self.registers.read32(mmio::QUEUE_READY) != 1 {
            return Err(DriverError::Queue(index));
        }
        queue.ready();
        Ok((queue, poller))
    }

    /// Says DRIVER_OK.
    ///
    /// # Errors
    /// The device asks to be reset.
    pub fn driver_ok(&mut self) -> Result<(), DriverError> {
        let all = status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK | status::DRIVER_OK;
        self.registers.write32(mmio::STATUS, all);
        self.check_alive()
    }

    /// Kicks `queue`, which is the device's queue `index`, and says how far it has come if NOTIFICATION_DATA was
    /// negotiated.
    pub fn notify(&self, index: u16, queue: &Queue) {
        let data = self.features & feature::NOTIFICATION_DATA != 0;
        let value = if data { queue.notification(index) } else { u32::from(index) };
        self.registers.write32(mmio::QUEUE_NOTIFY, value);
    }

    /// Reads and acknowledges the interrupt status (`INT_USED_BUFFER`, `INT_CONFIG_CHANGE`).
    pub fn acknowledge_interrupt(&self) -> u32 {
        // Bits that the specification does not define are neither believed nor acknowledged (section 4.2.2.2).
        let causes =
            self.registers.read32(mmio::INTERRUPT_STATUS) & (mmio::INT_USED_BUFFER | mmio::INT_CONFIG_CHANGE);
        if causes != 0 {
            self.registers.write32(mmio::INTERRUPT_ACK, causes);
        }
        causes
    }

    /// Reads and acknowledges the interrupt status and, if the configuration has changed, looks whether the
    /// device is still well.
    ///
    /// # Errors
    /// The device asks to be reset.
    pub fn interrupt(&self) -> Result<u32, DriverError> {
        let causes = self.acknowledge_interrupt();
        if causes & mmio::INT_CONFIG_CHANGE != 0 {
            self.check_alive()?;
        }
        Ok(causes)
    }

    /// Reads the configuration space, consistently (ConfigGeneration). Aligned words are read 32 bits at a
    /// time and the rest in bytes, so a 16-bit field must not be read by this (section 4.2.2.2).
    ///
    /// # Errors
    /// It kept changing.
    pub fn read_config(&self, offset: u32, out: &mut [u8]) -> Result<(), DriverError> {
        self.consistently(|config| {
            let mut at = u64::from(offset);
            let mut rest = &mut *out;
            while !rest.is_empty() {
                let step = if at.is_multiple_of(4) && rest.len() >= 4 { 4 } else { 1 };
                let (now, later) = rest.split_at_mut(step);
                match step {
                    4 => now.copy_from_slice(&config.word(at).to_le_bytes()),
                    _ => now[0] = config.byte(at),
                }
                at += step as u64;
                rest = later;
            }
        })
    }

    /// Runs `read` until the configuration space has not changed meanwhile.
    pub(crate) fn consistently<T>(&self, mut read: impl FnMut(Config<'_, R>) -> T) -> Result<T, DriverError> {
        let mut before = self.registers.read32(mmio::CONFIG_GENERATION);
        for _ in 0..CONFIG_READS {
            let value = read(Config(&self.registers));
            let after = self.registers.read32(mmio::CONFIG_GENERATION);
            if before == after {
                return Ok(value);
            }
            before = after;
        }
        Err(DriverError::ConfigUnstable)
    }

    /// Resets the device. Nothing that was negotiated holds afterwards.
    ///
    /// # Errors
    /// It does not finish.
    pub fn reset(&mut self) -> Result<(), DriverError> {
        self.features = 0;
        self.registers.write32(mmio::STATUS, 0);
        for _ in 0..RESET_READS {
            if self.status() == 0 {
                return Ok(());
            }
            core::hint::spin_loop();
        }
        Err(DriverError::Reset)
    }

    /// Device status register.
    pub fn status(&self) -> u32 {
        self.registers.read32(mmio::STATUS)
    }

    /// The 64 feature bits that the device offers.
    fn device_features(&self) -> u64 {
        let word = |select: u32| {
            self.registers.write32(mmio::DEVICE_FEATURES_SEL, select);
            u64::from(self.registers.read32(mmio::DEVICE_FEATURES))
        };
        word(0) | word(1) << 32
    }

    fn check_alive(&self) -> Result<(), DriverError> {
        if self.status() & status::DEVICE_NEEDS_RESET != 0 {
            return Err(DriverError::NeedsReset);
        }
        Ok(())
    }

    /// Tells the device that the driver has given up on it (section 3.1.1).
    pub(crate) fn give_up(&self) {
        self.registers.write32(mmio::STATUS, self.status() | status::FAILED);
    }
}

/// The configuration space during one consistent reading; offsets in bytes from its start.
pub(crate) struct Config<'a, R>(&'a R);

impl<R: Registers> Config<'_, R> {
    /// A 32-bit field.
    pub(crate) fn word(&self, offset: u64) -> u32 {
        self.0.read32(mmio::CONFIG + offset)
    }

    /// A 64-bit field; the specification has it read as two words.
    pub(crate) fn long(&self, offset: u64) -> u64 {
        u64::from(self.word(offset)) | u64::from(self.word(offset + 4)) << 32
    }

    /// An 8-bit field.
    pub(crate) fn byte(&self, offset: u64) -> u8 {
        self.0.read8(mmio::CONFIG + offset)
    }
}

/// The largest power of two that is not above `size`, `None` for 0.
fn power_of_two_up_to(size: u16) -> Option<u16> {
    size.checked_ilog2().map(|log| 1 << log)
}
