//! Entropy device driver.
use crate::mmio::{Mmio, Registers};
use crate::{DriverError, Pool};

/// An entropy source.
#[derive(Debug)]
pub struct Rng<R> {
    transport: Mmio<R>,
}

impl<R: Registers> Rng<R> {
    /// Sets the device up with one buffer of `buffer` bytes, and says DRIVER_OK.
    ///
    /// # Errors
    /// No such device, or too little memory.
    pub fn new(registers: R, buffer: usize, pool: &mut Pool) -> Result<Self, DriverError> {
        let _ = (buffer, pool);
        Ok(Self { transport: Mmio::probe(registers, paravane_spec::device_id::RNG)? })
    }

    /// Asks for up to the buffer's length of bytes and kicks. At most one request is in flight.
    ///
    /// # Errors
    /// One is in flight already, or the ring has failed.
    pub fn request(&mut self, len: usize) -> Result<bool, DriverError> {
        let _ = (len, &self.transport);
        todo!()
    }

    /// Copies what has come into `out`; `None` while nothing has.
    ///
    /// # Errors
    /// The device broke the protocol.
    pub fn poll(&mut self, out: &mut [u8]) -> Result<Option<usize>, DriverError> {
        let _ = out;
        todo!()
    }

    /// Arms interrupts; `true` if something is already there and the caller must not sleep.
    pub fn enable_interrupts(&mut self) -> bool {
        todo!()
    }

    /// To be called after an interrupt of this device.
    ///
    /// # Errors
    /// The device asks to be reset.
    pub fn interrupt(&mut self) -> Result<u32, DriverError> {
        todo!()
    }
}
