//! Console driver (section 5.3): port 0.
//!
//! ```text
//!   write: bytes --> free slots --kick--> (device) --> free again
//!   read:  bytes <-- used slots <-- (device) <--kick-- offered again
//! ```
use crate::channel::Channel;
use crate::slots::Slots;
use crate::{DriverError, Pool, Transport, Virtio};
use alloc::vec::Vec;
use core::mem::offset_of;
use paravane_spec::console::{Config, F_SIZE, RECEIVE, TRANSMIT};
use paravane_spec::{device_id, mmio, queue};

/// Memory of a console.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConsoleOptions {
    /// Slots for input, and as many for output \[8\].
    pub slots: u16,
    /// Bytes of a slot \[512\].
    pub slot: usize,
}

impl Default for ConsoleOptions {
    fn default() -> Self {
        Self { slots: 8, slot: 512 }
    }
}

/// Input of a slot that is being read.
#[derive(Clone, Copy, Debug)]
struct Reading {
    slot: u16,
    len: usize,
    done: usize,
}

/// A console.
#[derive(Debug)]
pub struct Console<T> {
    channel: Channel<T, 2>,
    window: Option<(u16, u16)>,
    input: Slots,
    reading: Option<Reading>,
    output: Slots,
    /// Slots for output that are not in flight, as far as is known.
    free: Vec<u16>,
}

impl<T: Transport> Console<T> {
    /// Sets the device up, with all its slots for input on offer, and sets DRIVER_OK.
    ///
    /// The device may limit the number of slots.
    ///
    /// # Errors
    /// No such device, or too little memory. The device is then told FAILED.
    pub fn new(transport: T, options: ConsoleOptions, pool: &mut Pool) -> Result<Self, DriverError> {
        let size = options.slots.clamp(1, queue::MAX_SIZE).next_power_of_two();
        let (device, (window, queues, [input, output])) =
            Virtio::set_up(transport, device_id::CONSOLE, F_SIZE, |device| {
                let queues = [
                    device.start_queue(RECEIVE, size, 0, pool)?,
                    device.start_queue(TRANSMIT, size, 0, pool)?,
                ];
                let mut slots = |queue: usize| {
                    let size = queues[queue].size();
                    Slots::new(options.slots.max(1).min(size), options.slot.max(1), size, pool)
                };
                let slots = [slots(0)?, slots(1)?];
                Ok((read_window(device)?, queues, slots))
            })?;
        let free = (0..output.memory.len() as u16).rev().collect();
        let channel = Channel::new(device, queues);
        let mut console = Self { channel, window, input, reading: None, output, free };
        console.disable_interrupts();
        for slot in 0..console.input.memory.len() as u16 {
            console.offer(slot)?;
        }
        console.channel.kick(RECEIVE);
        Ok(console)
    }

    /// Columns and rows, if the device tells them. Changes only in [`Console::interrupt`].
    pub fn window(&self) -> Option<(u16, u16)> {
        self.window
    }

    /// Adds a slot for input; the device sees it after the next kick.
    fn offer(&mut self, slot: u16) -> Result<(), DriverError> {
        let segment = self.input.segment(slot, self.input.len(slot));
        // There are no more slots than descriptors.
        let Some(id) = self.channel.add(RECEIVE, &[], &[segment])? else {
            return Err(self.channel.fail(DriverError::Queue(RECEIVE)));
        };
        self.input.in_flight.insert(id, slot).map_err(|error| self.channel.fail(error))
    }

    /// Takes output, as far as slots are free, and kicks if the device wants it.
    ///
    /// Returns the number of bytes. With 0, wait until the device has used what is in flight.
    ///
    /// # Errors
    /// The driver has failed.
    pub fn write(&mut self, bytes: &[u8]) -> Result<usize, DriverError> {
        self.channel.check_failed()?;
        let mut written = 0;
        while written < bytes.len() {
            self.reclaim()?;
            let Some(&slot) = self.free.last() else { break };
            let part = self.output.len(slot).min(bytes.len() - written);
            let fits = self.output.memory[usize::from(slot)].area.write(0, &bytes[written..written + part]);
            debug_assert!(fits, "a part is no longer than a slot");
            let segment = self.output.segment(slot, part);
            let Some(id) = self.channel.add(TRANSMIT, &[segment], &[])? else { break };
            self.free.pop();
            self.output.in_flight.insert(id, slot).map_err(|error| self.channel.fail(error))?;
            written += part;
        }
        self.channel.kick(TRANSMIT);
        Ok(written)
    }

    /// Takes back what the device has used, if no slot is free.
    fn reclaim(&mut self) -> Result<(), DriverError> {
        while self.free.is_empty() {
            let Some(used) = self.channel.pop(TRANSMIT)? else { break };
            let slot = self.output.in_flight.remove(used.id).map_err(|error| self.channel.fail(error))?;
            self.free.push(slot);
        }
        Ok(())
    }

    /// Copies input into `out` and returns the number of bytes; 0: none is there.
    ///
    /// # Errors
    /// The device broke the protocol. The driver has latched.
    pub fn read(&mut self, out: &mut [u8]) -> Result<usize, DriverError> {
        self.channel.check_failed()?;
        let mut read = 0;
        // A slot that is offered again is not published before the end: there are as many turns as slots
        // at most.
        while read < out.len() {
            let Some(reading) = self.next_input()? else { break };
            let Reading { slot, len, done } = reading;
            let part = (len - done).min(out.len() - read);
            let area = self.input.memory[usize::from(slot)].area;
            let fits = area.read(done, &mut out[read..read + part]);
            debug_assert!(fits, "the ring has clamped the length to the slot's");
            read += part;
            if done + part < len {
                self.reading = Some(Reading { done: done + part, ..reading });
            } else {
                self.offer(slot)?;
            }
        }
        self.channel.kick(RECEIVE);
        Ok(read)
    }

    /// The slot that is being read, or the next one that the device has used.
    fn next_input(&mut self) -> Result<Option<Reading>, DriverError> {
        if let Some(reading) = self.reading.take() {
            return Ok(Some(reading));
        }
        let Some(used) = self.channel.pop(RECEIVE)? else { return Ok(None) };
        let slot = self.input.in_flight.remove(used.id).map_err(|error| self.channel.fail(error))?;
        Ok(Some(Reading { slot, len: used.len as usize, done: 0 }))
    }

    /// Arms interrupts; `true`: something is there, and the caller must not sleep.
    #[must_use = "`true` means that no interrupt comes for what is there"]
    pub fn enable_interrupts(&mut self) -> bool {
        self.channel.enable_interrupts() || self.reading.is_some()
    }

    /// Suppresses interrupts.
    pub fn disable_interrupts(&mut self) {
        self.channel.disable_interrupts();
    }

    /// The device, for what is the same with every driver.
    pub fn device(&self) -> &Virtio<T> {
        self.channel.device()
    }

    /// Reads and acknowledges the causes of an interrupt of this device.
    ///
    /// # Errors
    /// The device needs a reset. The driver has latched.
    pub fn interrupt(&mut self) -> Result<u32, DriverError> {
        let causes = self.channel.interrupt()?;
        if causes & mmio::INT_CONFIG_CHANGE != 0 {
            let window = read_window(self.channel.device());
            self.window = window.map_err(|error| self.channel.fail(error))?;
        }
        Ok(causes)
    }
}

fn read_window<T: Transport>(device: &Virtio<T>) -> Result<Option<(u16, u16)>, DriverError> {
    if device.features() & F_SIZE == 0 {
        return Ok(None);
    }
    device.consistently(|config| {
        let half = |offset: usize| config.half(offset as u64);
        Some((half(offset_of!(Config, cols)), half(offset_of!(Config, rows))))
    })
}
