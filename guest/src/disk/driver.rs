//! The driver of a disk's queue, as the work on it needs it.
use crate::worker::Interrupts;
use alloc::vec::Vec;
use paravane_driver::blk::{BlkDevice, Done, Request, RequestQueue};
use paravane_driver::{DriverError, Message, Pool, Transport};
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
    /// See [`RequestQueue::submit`].
    fn submit(&mut self, request: Request, tag: u64) -> Result<bool, DriverError>;
    /// See [`RequestQueue::kick`].
    fn kick(&mut self) -> bool;
    /// See [`RequestQueue::complete`].
    fn complete(&mut self) -> Result<Option<Done>, DriverError>;
}

/// One queue of a disk; the first one has the disk, and takes its interrupts.
pub(crate) struct DiskQueue<T> {
    queue: RequestQueue<T>,
    disk: Option<BlkDevice<T>>,
    capacity: u64,
    features: u64,
    read_only: bool,
}

impl<T: Transport> DiskQueue<T> {
    /// Sets a disk up with up to this number of queues, with `depth` requests each.
    ///
    /// # Errors
    /// The driver refuses.
    pub(crate) fn open(
        transport: T,
        queues: u16,
        depth: u16,
        pool: &mut Pool,
    ) -> Result<Vec<Self>, DriverError> {
        let (disk, queues) = BlkDevice::new(transport, queues, depth, pool)?;
        let (capacity, features, read_only) = (disk.capacity(), disk.features(), disk.read_only());
        let mut disk = Some(disk);
        let one = |queue| Self { queue, disk: disk.take(), capacity, features, read_only };
        Ok(queues.into_iter().map(one).collect())
    }
}

impl<T: Transport> Disk for DiskQueue<T> {
    fn capacity(&self) -> u64 {
        self.capacity
    }
    fn read_only(&self) -> bool {
        self.read_only
    }
    fn has_flush(&self) -> bool {
        self.features & F_FLUSH != 0
    }
    fn slots(&self) -> usize {
        self.queue.slots()
    }
    fn submit(&mut self, request: Request, tag: u64) -> Result<bool, DriverError> {
        self.queue.submit(request, tag)
    }
    fn kick(&mut self) -> bool {
        self.queue.kick()
    }
    fn complete(&mut self) -> Result<Option<Done>, DriverError> {
        self.queue.complete()
    }
}

impl<T: Transport> Interrupts for DiskQueue<T> {
    fn enable_interrupts(&mut self) -> bool {
        self.queue.enable_interrupts()
    }
    fn disable_interrupts(&mut self) {
        self.queue.disable_interrupts();
    }
    fn interrupt(&mut self) -> Result<u32, DriverError> {
        self.disk.as_mut().map_or(Ok(0), BlkDevice::interrupt)
    }
    fn set_message(&self, number: u16, message: Message) -> Result<(), DriverError> {
        self.queue.device().set_message(number, message)
    }
}
