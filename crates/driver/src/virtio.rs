//! Initialization, queues and interrupts of a device, on any transport.
//!
//! Section 3.1 of the specification has the order.
//!
//! ```text
//!  probe: type; reset; ACKNOWLEDGE, DRIVER
//!    | negotiate: features, FEATURES_OK
//!    v
//!  start_queue (once a queue): addresses, enabled <------.
//!    |                                                   | start_queue_again, on the same memory
//!    v                                                   |
//!  driver_ok: DRIVER_OK --- in use --- reset_queue (RING_RESET, bounded)
//!                             |
//!                           reset (bounded)
//! ```
use crate::{DmaArea, DriverError, Message, Pool, Transport};
use alloc::boxed::Box;
use core::sync::atomic::{AtomicBool, Ordering};
use paravane_ring::driver::poll::Poller;
use paravane_ring::driver::{DriverConfig, Queue};
use paravane_spec::{feature, mmio, queue, status};
use thiserror::Error;

/// Most reads of a register until a reset must have finished, with a [`Transport::pause`] between two.
///
/// A reset waits for requests in flight. Each read is an exit to the VMM, so this is seconds.
const RESET_READS: u32 = 1_000_000;

/// Most attempts to read the configuration space while it changes.
const CONFIG_READS: u32 = 64;

/// Alignment of a queue's memory, in bytes.
const QUEUE_ALIGN: usize = 4096;

/// Feature bits that every driver here accepts, beside its own.
const FEATURES: u64 = feature::EVENT_IDX
    | feature::RING_PACKED
    | feature::IN_ORDER
    | feature::NOTIFICATION_DATA
    | feature::ACCESS_PLATFORM;

/// A queue that was not reset.
#[derive(Debug, Error)]
#[error("{error}")]
#[non_exhaustive]
pub struct NotReset {
    /// The reason.
    pub error: DriverError,
    /// The queue, with what is in flight.
    ///
    /// Not to be used with a device that was asked to reset it ([`DriverError::QueueReset`]), but
    /// to be kept until that has been reset: [`Queue::into_memory`] is the way to its memory then.
    pub queue: Queue,
}

/// A device and what was negotiated with it.
#[derive(Debug)]
pub struct Virtio<T> {
    transport: T,
    features: u64,
    /// Whether a message is being changed, which selects a queue first.
    selecting: AtomicBool,
}

impl<T: Transport> Virtio<T> {
    /// Sets a device up, from [`Virtio::probe`] to [`Virtio::driver_ok`].
    ///
    /// `start` reads the configuration and starts the queues, after `wanted` features were
    /// negotiated.
    ///
    /// # Errors
    /// Those of each step. Once the type is right, the device is told FAILED.
    pub(crate) fn set_up<Q>(
        transport: T,
        device_id: u32,
        wanted: u64,
        start: impl FnOnce(&mut Self) -> Result<Q, DriverError>,
    ) -> Result<(Self, Q), DriverError> {
        let mut device = Self::probe(transport, device_id)?;
        device.negotiate(feature::VERSION_1, FEATURES | wanted)?;
        let started = start(&mut device).inspect_err(|_| device.give_up())?;
        device.driver_ok()?;
        Ok((device, started))
    }

    /// Checks the type of the device, resets it, and sets ACKNOWLEDGE and DRIVER.
    ///
    /// # Errors
    /// It is not of type `device_id`, or does not reset.
    pub fn probe(transport: T, device_id: u32) -> Result<Self, DriverError> {
        // DeviceID 0 is "no device", and no other register may be touched then (section 4.2.3.1.1).
        let found = transport.device_id();
        if found != device_id {
            return Err(DriverError::DeviceId { wanted: device_id, found });
        }
        let mut device = Self { transport, features: 0, selecting: AtomicBool::new(false) };
        device.reset()?;
        device.transport.set_status(status::ACKNOWLEDGE);
        device.transport.set_status(status::ACKNOWLEDGE | status::DRIVER);
        Ok(device)
    }

    /// Negotiates: accepts `wanted` as far as offered; all of `required` must be.
    ///
    /// # Errors
    /// A required bit is missing or the device refuses the set. The device is told FAILED.
    pub fn negotiate(&mut self, required: u64, wanted: u64) -> Result<u64, DriverError> {
        let offered = self.transport.device_features();
        let missing = required & !offered;
        if missing != 0 {
            self.give_up();
            return Err(DriverError::Features(missing));
        }
        let accepted = offered & (required | wanted | self.transport.wanted_features());
        self.transport.set_driver_features(accepted);
        let negotiating = status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK;
        self.transport.set_status(negotiating);
        if self.status() & status::FEATURES_OK == 0 {
            self.give_up();
            return Err(DriverError::FeaturesRefused);
        }
        self.transport.set_up_interrupts(accepted).inspect_err(|_| self.give_up())?;
        self.features = accepted;
        Ok(accepted)
    }

    /// Sets up queue `index`.
    ///
    /// It has at most `size` descriptors and indirect tables of `indirect` entries.
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

    /// As [`Virtio::start_queue`], for a queue that other threads or handlers poll.
    ///
    /// # Errors
    /// As [`Virtio::start_queue`].
    pub fn start_polled_queue(
        &mut self,
        index: u16,
        size: u16,
        indirect: u16,
        pool: &mut Pool,
    ) -> Result<(Queue, Poller), DriverError> {
        self.start_in(index, size, indirect, |needed| pool.take(needed, QUEUE_ALIGN))
    }

    /// Starts queue `index` again, in the memory from [`Virtio::reset_queue`].
    ///
    /// # Errors
    /// As [`Virtio::start_queue`].
    pub fn start_queue_again(
        &mut self,
        index: u16,
        size: u16,
        indirect: u16,
        memory: DmaArea,
    ) -> Result<(Queue, Poller), DriverError> {
        self.start_in(index, size, indirect, |_| Ok(memory))
    }

    /// Resets queue `index` alone (section 2.6.1), and returns its memory.
    ///
    /// The device no longer uses that memory.
    ///
    /// # Errors
    /// RING_RESET was not negotiated: the queue continues unchanged. Or the device does not finish
    /// the reset, or keeps the queue: then only a reset of the device stops the memory from being
    /// written to.
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
        self.transport.reset_queue(index);
        for _ in 0..RESET_READS {
            if !self.transport.queue_resetting(index) {
                // The driver must verify that the queue was reset (section 2.6.1.2): it is not
                // enabled any more.
                if self.transport.queue_enabled(index) {
                    break;
                }
                return Ok(());
            }
            self.transport.pause();
        }
        Err(DriverError::QueueReset(index))
    }

    /// Sets a queue up in memory that `memory` supplies, given its size in bytes.
    fn start_in(
        &mut self,
        index: u16,
        size: u16,
        indirect: u16,
        memory: impl FnOnce(usize) -> Result<DmaArea, DriverError>,
    ) -> Result<(Queue, Poller), DriverError> {
        self.try_start_in(index, size, indirect, memory).inspect_err(|_| self.give_up())
    }

    fn try_start_in(
        &mut self,
        index: u16,
        size: u16,
        indirect: u16,
        memory: impl FnOnce(usize) -> Result<DmaArea, DriverError>,
    ) -> Result<(Queue, Poller), DriverError> {
        if self.transport.queue_enabled(index) {
            return Err(DriverError::Queue(index));
        }
        let most = self.transport.queue_max(index).min(u32::from(queue::MAX_SIZE));
        // The bound above makes this exact.
        let size = power_of_two_up_to(size.min(most as u16)).ok_or(DriverError::Queue(index))?;

        let layout = DriverConfig::new(size, indirect, self.features)?;
        let (mut queue, at) = Queue::new(layout, memory(layout.memory())?)?;
        // Before the device may use the queue, or never.
        let poller = queue.poller().map_err(|_| DriverError::Queue(index))?;
        self.transport.enable_queue(index, &at)?;
        // The register reads what was last written (sections 4.1.4.3 and 4.2.2); a device that did
        // not take the queue shows here.
        if !self.transport.queue_enabled(index) {
            return Err(DriverError::Queue(index));
        }
        queue.ready();
        Ok((queue, poller))
    }

    /// Sets DRIVER_OK.
    ///
    /// # Errors
    /// The device needs a reset.
    pub fn driver_ok(&mut self) -> Result<(), DriverError> {
        let all = status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK | status::DRIVER_OK;
        self.transport.set_status(all);
        self.check_alive()
    }

    /// Kicks `queue`, which is the device's queue `index`.
    ///
    /// The kick has the queue's position if NOTIFICATION_DATA was negotiated.
    pub fn notify(&self, index: u16, queue: &Queue) {
        let data = self.features & feature::NOTIFICATION_DATA != 0;
        self.transport.notify(index, data.then(|| queue.kick_data(index)));
    }

    /// Reads and acknowledges the causes of the interrupt.
    ///
    /// These are `INT_USED_BUFFER` and `INT_CONFIG_CHANGE`. If the configuration has changed, the
    /// device status is checked, too.
    ///
    /// # Errors
    /// The device needs a reset.
    pub fn interrupt(&self) -> Result<u32, DriverError> {
        let causes = self.transport.take_causes();
        if causes & mmio::INT_CONFIG_CHANGE != 0 {
            self.check_alive()?;
        }
        Ok(causes)
    }

    /// Reads the configuration space, consistently (ConfigGeneration).
    ///
    /// Aligned words are read 32 bits at a time and the rest in bytes, so a 16-bit field must not
    /// be read by this (section 4.2.2.2).
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
    pub(crate) fn consistently<V>(&self, mut read: impl FnMut(Config<'_, T>) -> V) -> Result<V, DriverError> {
        let mut before = self.transport.generation();
        for _ in 0..CONFIG_READS {
            let value = read(Config(&self.transport));
            let after = self.transport.generation();
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
        self.transport.set_status(0);
        for _ in 0..RESET_READS {
            if self.status() == 0 {
                return Ok(());
            }
            self.transport.pause();
        }
        Err(DriverError::Reset)
    }

    /// See [`Transport::set_message`].
    ///
    /// The owners of several queues may call it at the same time, each on its processor: one waits for
    /// the other. Do not call it in an interrupt handler.
    ///
    /// # Errors
    /// As there.
    pub fn set_message(&self, number: u16, message: Message) -> Result<(), DriverError> {
        // Acquire, pairs with the release below: the registers are one processor's at a time.
        while self.selecting.swap(true, Ordering::Acquire) {
            core::hint::spin_loop();
        }
        let set = self.transport.set_message(number, message);
        self.selecting.store(false, Ordering::Release);
        set
    }

    /// Negotiated features.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Device status register.
    pub fn status(&self) -> u32 {
        self.transport.status()
    }

    fn check_alive(&self) -> Result<(), DriverError> {
        if self.status() & status::DEVICE_NEEDS_RESET != 0 {
            return Err(DriverError::NeedsReset);
        }
        Ok(())
    }

    /// Sets FAILED (section 3.1.1).
    pub(crate) fn give_up(&self) {
        self.transport.set_status(self.status() | status::FAILED);
    }
}

/// Configuration space during one consistent read.
///
/// Offsets are in bytes from its start.
pub(crate) struct Config<'a, T>(&'a T);

impl<T: Transport> Config<'_, T> {
    /// A 32-bit field.
    pub(crate) fn word(&self, offset: u64) -> u32 {
        self.0.config32(offset)
    }

    /// A 64-bit field; the specification has it read as two words.
    pub(crate) fn long(&self, offset: u64) -> u64 {
        u64::from(self.word(offset)) | u64::from(self.word(offset + 4)) << 32
    }

    /// A 16-bit field.
    pub(crate) fn half(&self, offset: u64) -> u16 {
        self.0.config16(offset)
    }

    /// An 8-bit field.
    pub(crate) fn byte(&self, offset: u64) -> u8 {
        self.0.config8(offset)
    }
}

/// The largest power of two that is not above `size`, `None` for 0.
fn power_of_two_up_to(size: u16) -> Option<u16> {
    size.checked_ilog2().map(|log| 1 << log)
}
