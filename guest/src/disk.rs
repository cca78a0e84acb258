//! Work on disks.
//!
//! ```text
//!   Lane: one disk, its requests in flight, its report
//!     | what next?  -> Job (Hash or WriteTest) -> a Work for a slot
//!     | done        -> Job: look at the data, go on to the next phase
//! ```
mod hash;
mod job;
mod lane;
mod work;
mod write_test;

pub(crate) use hash::Hash;
pub(crate) use job::Job;
pub(crate) use lane::Lane;
pub(crate) use write_test::{WriteTest, WriteTestParams};

use crate::worker::Interrupts;
use paravane_driver::blk::{Blk, Done, Request};
use paravane_driver::{DmaArea, DriverError, Transport};
use paravane_spec::blk::F_FLUSH;

/// A disk driver, as a lane needs it.
pub(crate) trait Disk: Interrupts {
    /// Capacity in sectors.
    fn capacity(&self) -> u64;
    /// Whether it refuses writes.
    fn read_only(&self) -> bool;
    /// Whether it has a cache to flush.
    fn has_flush(&self) -> bool;
    /// Requests that fit in flight.
    fn slots(&self) -> usize;
    /// See [`Blk::submit`].
    fn submit(&mut self, request: Request, tag: u64) -> Result<bool, DriverError>;
    /// See [`Blk::kick`].
    fn kick(&mut self) -> bool;
    /// See [`Blk::complete`].
    fn complete(&mut self) -> Result<Option<Done>, DriverError>;
}

impl<T: Transport> Disk for Blk<T> {
    fn capacity(&self) -> u64 {
        self.capacity()
    }
    fn read_only(&self) -> bool {
        self.read_only()
    }
    fn has_flush(&self) -> bool {
        self.features() & F_FLUSH != 0
    }
    fn slots(&self) -> usize {
        self.slots()
    }
    fn submit(&mut self, request: Request, tag: u64) -> Result<bool, DriverError> {
        self.submit(request, tag)
    }
    fn kick(&mut self) -> bool {
        self.kick()
    }
    fn complete(&mut self) -> Result<Option<Done>, DriverError> {
        self.complete()
    }
}

/// The memory of the slots: one buffer each, side by side.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Buffers {
    memory: DmaArea,
    each: usize,
}

impl Buffers {
    /// `memory` is cut into buffers of `each` bytes.
    pub(crate) fn new(memory: DmaArea, each: usize) -> Self {
        Self { memory, each }
    }

    /// First `len` bytes of a slot's buffer; `None`: no such slot, or it is shorter.
    pub(crate) fn slot(&self, slot: usize, len: usize) -> Option<DmaArea> {
        if len > self.each {
            return None;
        }
        self.memory.slice(slot.checked_mul(self.each)?, len)
    }
}

#[cfg(test)]
mod tests;
