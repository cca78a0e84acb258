//! Block device driver.
use crate::mmio::{Mmio, Registers};
use crate::{DmaArea, DriverError, Pool};

/// What to do.
#[derive(Clone, Copy, Debug)]
pub enum Request {
    /// Read into the buffer from this sector.
    Read {
        /// First sector.
        sector: u64,
        /// Destination, a multiple of 512 bytes.
        buffer: DmaArea,
    },
    /// Write the buffer from this sector on.
    Write {
        /// First sector.
        sector: u64,
        /// Source, a multiple of 512 bytes.
        buffer: DmaArea,
    },
    /// Flush the write cache.
    Flush,
    /// Discard sectors.
    Discard {
        /// First sector.
        sector: u64,
        /// Number of sectors.
        sectors: u32,
    },
    /// Write zeroes.
    WriteZeroes {
        /// First sector.
        sector: u64,
        /// Number of sectors.
        sectors: u32,
        /// Whether the range may be unmapped.
        unmap: bool,
    },
    /// Read the identifier into the buffer (20 bytes).
    GetId {
        /// Destination.
        buffer: DmaArea,
    },
}

/// A completed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// The tag given at submission.
    pub tag: u64,
    /// Status byte: [`paravane_spec::blk::S_OK`] or an error.
    pub status: u8,
}

/// A disk. Requests are asynchronous; up to [`Blk::slots`] are in flight.
#[derive(Debug)]
pub struct Blk<R> {
    transport: Mmio<R>,
}

impl<R: Registers> Blk<R> {
    /// Sets the device up with one queue and room for `slots` requests, and says DRIVER_OK.
    ///
    /// # Errors
    /// No such device, or too little memory.
    pub fn new(registers: R, slots: u16, pool: &mut Pool) -> Result<Self, DriverError> {
        let _ = (slots, pool);
        Ok(Self { transport: Mmio::probe(registers, paravane_spec::device_id::BLK)? })
    }

    /// Capacity in sectors.
    pub fn capacity(&self) -> u64 {
        let _ = &self.transport;
        todo!()
    }

    /// Whether the device is read-only.
    pub fn read_only(&self) -> bool {
        todo!()
    }

    /// Negotiated features.
    pub fn features(&self) -> u64 {
        todo!()
    }

    /// Requests that fit in flight.
    pub fn slots(&self) -> usize {
        todo!()
    }

    /// Adds a request; the device sees it after [`Blk::kick`]. `false` if no slot is free. `tag` comes back in [`Done`].
    ///
    /// # Errors
    /// The ring has failed.
    pub fn submit(&mut self, request: Request, tag: u64) -> Result<bool, DriverError> {
        let _ = (request, tag);
        todo!()
    }

    /// Publishes what was added and kicks if the device wants it. Says whether it kicked.
    pub fn kick(&mut self) -> bool {
        todo!()
    }

    /// The next completed request.
    ///
    /// # Errors
    /// The device broke the protocol.
    pub fn complete(&mut self) -> Result<Option<Done>, DriverError> {
        todo!()
    }

    /// Arms interrupts; `true` if something is already there and the caller must not sleep.
    pub fn enable_interrupts(&mut self) -> bool {
        todo!()
    }

    /// Suppresses interrupts.
    pub fn disable_interrupts(&mut self) {
        todo!()
    }

    /// To be called after an interrupt of this device: reads and acknowledges its causes.
    ///
    /// # Errors
    /// The device asks to be reset.
    pub fn interrupt(&mut self) -> Result<u32, DriverError> {
        todo!()
    }

    /// Requests in flight.
    pub fn in_flight(&self) -> usize {
        todo!()
    }
}
