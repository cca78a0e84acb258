//! The driver of a disk, as the work on it needs it.
use crate::worker::Interrupts;
use paravane_driver::blk::{Blk, Done, Request};
use paravane_driver::{DriverError, Transport};
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
