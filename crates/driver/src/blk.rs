//! Block device driver.
//!
//! ```text
//! free slot --submit--> added --kick--> with the device --complete--> free slot
//!                                                       \-> the device lies: the driver latches the error
//! ```
//! A slot is 64 bytes of shared memory: request header, discard range, status byte. The record of a
//! request in flight lies in private memory, where the device cannot change it.
//!
//! [`Blk`] is a disk with one queue and one owner. [`BlkDevice::new`] sets a disk up with several queues,
//! which have an owner each:
//!
//! ```no_run
//! # use paravane_driver::{DriverError, Message, Pool, Transport};
//! use paravane_driver::blk::{BlkDevice, RequestQueue};
//! # fn message(cpu: usize) -> Message { Message { address: 0xfee0_0000 | (cpu as u64) << 12, data: 0x40 } }
//! # fn start_on<T>(_cpu: usize, _queue: RequestQueue<T>) {}
//!
//! /// Sets a disk up with a queue for each processor, whose interrupt comes to that processor.
//! fn set_up<T: Transport>(transport: T, cpus: u16, pool: &mut Pool) -> Result<BlkDevice<T>, DriverError> {
//!     let (disk, queues) = BlkDevice::new(transport, cpus, 32, pool)?;
//!     for (cpu, queue) in queues.into_iter().enumerate() {
//!         disk.device().set_message(queue.message(), message(cpu))?;
//!         start_on(cpu, queue); // submits, kicks and completes there, without a lock
//!     }
//!     Ok(disk) // for whom takes the interrupts of configuration changes
//! }
//! ```
mod device;
mod limits;
mod queue;

pub use device::BlkDevice;
pub use queue::RequestQueue;

use crate::channel::QUEUE;
use crate::{DmaArea, DriverError, Pool, Transport, Virtio};

/// A request.
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
    ///
    /// A device that writes none leaves 0xff here.
    pub status: u8,
}

/// A disk with one queue. Requests are asynchronous; up to [`Blk::slots`] are in flight.
#[derive(Debug)]
pub struct Blk<T> {
    disk: BlkDevice<T>,
    queue: RequestQueue<T>,
}

impl<T: Transport> Blk<T> {
    /// Sets the device up with one queue and `slots` requests, and sets DRIVER_OK.
    ///
    /// # Errors
    /// No such device, or too little memory. The device is then told FAILED.
    pub fn new(transport: T, slots: u16, pool: &mut Pool) -> Result<Self, DriverError> {
        let (disk, mut queues) = BlkDevice::new(transport, 1, slots, pool)?;
        let queue = queues.pop().ok_or(DriverError::Queue(QUEUE))?;
        Ok(Self { disk, queue })
    }

    /// Capacity in sectors. Changes only in [`Blk::interrupt`].
    pub fn capacity(&self) -> u64 {
        self.disk.capacity()
    }

    /// Block size of the device in bytes \[512\]. A hint: it may be any number.
    pub fn block_size(&self) -> u32 {
        self.disk.block_size()
    }

    /// Whether the device is read-only.
    pub fn read_only(&self) -> bool {
        self.disk.read_only()
    }

    /// Negotiated features.
    pub fn features(&self) -> u64 {
        self.disk.features()
    }

    /// Requests that fit in flight.
    pub fn slots(&self) -> usize {
        self.queue.slots()
    }

    /// Adds a request; the device sees it after [`Blk::kick`].
    ///
    /// `false` if no slot is free. `tag` comes back in [`Done`].
    ///
    /// # Errors
    /// As [`RequestQueue::submit`].
    pub fn submit(&mut self, request: Request, tag: u64) -> Result<bool, DriverError> {
        self.queue.submit(request, tag)
    }

    /// Publishes what was added and kicks if the device wants it.
    ///
    /// Returns whether it kicked.
    pub fn kick(&mut self) -> bool {
        self.queue.kick()
    }

    /// The next completed request.
    ///
    /// # Errors
    /// The device broke the protocol. The driver has latched: every later call returns the same
    /// error.
    pub fn complete(&mut self) -> Result<Option<Done>, DriverError> {
        self.queue.complete()
    }

    /// Arms interrupts; `true`: something is there, and the caller must not sleep.
    #[must_use = "`true` means that no interrupt comes for what is there"]
    pub fn enable_interrupts(&mut self) -> bool {
        self.queue.enable_interrupts()
    }

    /// Suppresses interrupts.
    pub fn disable_interrupts(&mut self) {
        self.queue.disable_interrupts();
    }

    /// The device, for what is the same with every driver.
    pub fn device(&self) -> &Virtio<T> {
        self.disk.device()
    }

    /// Reads and acknowledges the causes of an interrupt of this device.
    ///
    /// Call it after an interrupt, before you look for completed requests.
    ///
    /// # Errors
    /// The device needs a reset, or its configuration keeps changing. The driver has latched.
    pub fn interrupt(&mut self) -> Result<u32, DriverError> {
        self.queue.check_failed()?;
        self.disk.interrupt()
    }

    /// Requests in flight.
    pub fn in_flight(&self) -> usize {
        self.queue.in_flight()
    }
}
