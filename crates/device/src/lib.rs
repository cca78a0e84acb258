//! Virtio devices: block, network, entropy, and traits for a device of your own.
//!
//! ```text
//! Device (configuration, features)          one for each device, control path
//!    |  start_queue(n)
//!    v
//! QueueHandler                              one for each live queue, owned by one I/O thread
//!    serve(&mut MappedQueue)  pop what is available, start or do it, complete, publish once
//!    register                 adds the descriptors of host events to the owner's epoll instance
//!    rest(false)              looks for host events without a system call, for an owner that polls
//!    rest(true)               before the owner sleeps: makes host events signal the descriptors
//!    drain                    wait until nothing is in flight (reset, stop)
//! ```
//! A handler never blocks in `serve`. Work that the host has not finished signals a registered
//! descriptor later.
//!
//! | Module | Device | Host side |
//! |---|---|---|
//! | [`blk`] | disk | raw and qcow2 images; io_uring, threads, or memory-mapped |
//! | [`net`] | network card | TAP, or a link between cards |
//! | [`rng`] | entropy source | getrandom(2) |
//!
//! # A device of your own
//! A device with one queue, which returns what the driver sends. `paravane-vhost` serves it over
//! vhost-user, and `paravane-io` on threads of your own.
//!
//! ```
//! use paravane_device::{Device, MappedQueue, QueueBatch, QueueHandler, ServeError, Served};
//! use paravane_dma::Access;
//! use paravane_ring::device::QueueConfig;
//! use paravane_spec::feature;
//! use std::io;
//!
//! struct Echo;
//!
//! impl Device for Echo {
//!     fn device_id(&self) -> u32 {
//!         0x3f
//!     }
//!
//!     fn features(&self) -> u64 {
//!         feature::VERSION_1 | feature::RING_RESET | QueueConfig::SPLIT_FEATURES
//!     }
//!
//!     fn queue_sizes(&self) -> &[u16] {
//!         &[64]
//!     }
//!
//!     fn read_config(&self, _offset: u32, out: &mut [u8]) {
//!         out.fill(0);
//!     }
//!
//!     fn start_queue(&mut self, _index: u16, _features: u64) -> io::Result<Box<dyn QueueHandler>> {
//!         Ok(Box::new(EchoQueue { bytes: [0; 256] }))
//!     }
//! }
//!
//! struct EchoQueue {
//!     bytes: [u8; 256],
//! }
//!
//! impl QueueHandler for EchoQueue {
//!     fn serve(&mut self, queue: &mut MappedQueue) -> Result<Served, ServeError> {
//!         let QueueBatch { queue, memory, chains, .. } = queue.begin_batch();
//!         let taken = memory.pop(queue, chains)? as u32;
//!         for (chain, readable, writable) in chains.iter() {
//!             let len = chain.readable_len().min(chain.writable_len()).min(256);
//!             let bytes = &mut self.bytes[..len as usize];
//!             memory.read_segments(readable, 0, bytes, Access::READ)?;
//!             memory.write_segments(writable, 0, bytes, Access::WRITE)?;
//!             queue.complete(chain.head, len)?;
//!         }
//!         Ok(Served { taken, completed: taken, interrupt: queue.publish()? })
//!     }
//!
//!     fn drain(&mut self, _queue: &mut MappedQueue, _complete: bool) -> Served {
//!         Served::default() // Nothing is in flight between two calls of `serve`.
//!     }
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # use paravane_dma::{Backing, Memory, Region, RegionConfig};
//! # use paravane_ring::driver::{DriverConfig, Queue};
//! # use paravane_ring::{Area, DmaArea, Segment};
//! # let config = RegionConfig { gpa: 0, size: 65536, backing: Backing::Pages, writable: true };
//! # let region = Region::new(config)?;
//! # let memory = Memory::new(vec![region.clone()])?;
//! # let features = Echo.features();
//! # let layout = DriverConfig::new(64, 0, features)?;
//! # // SAFETY: the region outlives the driver's queue.
//! # let area = unsafe { Area::new(region.host(), layout.memory()) };
//! # let (mut driver, addresses) = Queue::new(layout, DmaArea { area, addr: 0 })?;
//! # memory.handle().enter().write(0x8000, b"hello", Access::WRITE)?;
//! # driver.add(&[Segment { addr: 0x8000, len: 5 }], &[Segment { addr: 0x9000, len: 16 }])?;
//! # driver.publish();
//! // The owner of the queue, here without threads and a transport:
//! let mut queue = MappedQueue::start(addresses, 64, features, memory.handle())?;
//! let mut handler = Echo.start_queue(0, features)?;
//! let served = handler.serve(&mut queue)?;
//! assert_eq!((served.taken, served.completed), (1, 1));
//! # let used = driver.pop_used()?.ok_or("nothing was used")?;
//! # let mut answer = [0; 5];
//! # memory.handle().enter().read(0x9000, &mut answer, Access::READ)?;
//! # assert_eq!((used.len, &answer), (5, b"hello"));
//! # Ok(())
//! # }
//! ```
//!
//! # Files
//!
//! * `Device` (configuration, control path) and `QueueHandler` (one live queue, one I/O thread).
//! * `mapped_queue` is where ring meets dma: a queue rests (`ParkedQueue`) while another owner
//!   serves it, and waits for translations behind an IOMMU (`InvalidationLock`).
//! * `rate` keeps a device below a rate.
//! * `blk`, `net`, `rng` and `console` are the devices; `console/port` has the bytes of a console
//!   on their way, which `console/pump`, a thread, takes to its back end and from it; `wakeup`
//!   signals a thread only if it is about to sleep; `net/extension` is what the queues of network cards offer
//!   beyond `QueueHandler`.
//! * `blk/qcow2` reads and writes qcow2 (`tables` has the order in which clusters change hands;
//!   `io` is the only way to the bytes below); `blk/handler` serves a queue: `at_once` does
//!   transfers of an image in memory in the batch that takes them, `drain` waits for what is in
//!   flight at its end.
//! * `blk/errors` counts failed requests; `blk/direct` knows the alignment of O_DIRECT;
//!   `blk/engine` chooses what does the jobs of a queue: engines of files (`file` of the store
//!   crate) or a store, and beside them threads for what `engine/clusters` and
//!   `engine/whole_blocks` do not place there; `blk/qcow2/cluster_map` knows which clusters of a
//!   qcow2 image may be read and written in place, and `blk/qcow2/in_use` lists those of transfers
//!   in flight, which are not freed.
//! * `blk/image_file` opens and locks the file; its `lock` tells requests of a dead process from a
//!   live one; `blk/block_status` asks a file or another store which parts are zeroes; `blk/image` is the disk in it.
//! * `blk/images` is for programs without a guest: makes images, describes them, copies disks,
//!   merges overlays.
//! * `blk/current` is the image that the queues of a disk use, and holds them while it is replaced;
//!   `blk/snapshot` replaces it by an overlay that `blk/overlay` makes and another process may pass
//!   on, and `blk/mark` marks the image below.
//! * `blk/layers` compares the layers that an operator names with headers, `blk/magic` knows how
//!   other formats begin, `blk/serial` is what guests know a disk by.
//! * `blk/full` counts writes that wait for room.
//! * `net/lane` has the frames and buffers of links.
//! * `latency` has the histograms of a queue, which its I/O thread writes and observers read; it
//!   reads the clock for each batch, and steps that follow each other share a reading;
//!   `latency/probes` are its USDT probes.
//! * A card's back end (`net/tap`, `net/link`, `net/generator`) is a type parameter of its
//!   handlers.
mod ahead;
pub mod blk;
mod callback;
pub mod console;
#[cfg(test)]
mod dirty_tests;
pub mod latency;
mod mapped_queue;
pub mod net;
mod rate;
#[cfg(test)]
mod rig;
pub mod rng;
mod wakeup;

pub use mapped_queue::{InvalidationLock, MappedQueue, ParkedQueue, QueueBatch, QueueGuard, StartError};
pub use paravane_ring::device::{State, StateError, tracking_bytes};
pub use paravane_store::{LogDevice, Rest, WakeSet, WakeSource, lock};
pub use rate::{Limiter, Rate, RateLimit};

use paravane_dma::DmaError;
use paravane_ring::QueueError;
use std::any::Any;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicBool;
use thiserror::Error;

/// Result of one [`QueueHandler::serve`] or [`QueueHandler::drain`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Served {
    /// Chains popped from the queue.
    pub taken: u32,
    /// Chains completed and published.
    pub completed: u32,
    /// Whether the driver wants an interrupt for the completed chains.
    pub interrupt: bool,
}

/// State of the host's side of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostSide {
    /// It is there.
    Present,
    /// It is gone: what, why, and the way out.
    Gone(String),
    /// It was gone, and the device has it again: a sentence for the log.
    Returned(String),
}

/// A queue handler cannot go on.
#[derive(Debug, Error)]
pub enum ServeError {
    /// The queue has latched, until the driver resets it.
    #[error("the driver broke the queue: {0}")]
    Queue(#[from] QueueError),
    /// The host failed; the driver did nothing wrong.
    #[error("the host failed: {0}")]
    Host(#[from] std::io::Error),
}

/// A buffer that the driver placed outside guest memory.
impl From<DmaError> for ServeError {
    fn from(error: DmaError) -> Self {
        Self::Queue(address_error(error))
    }
}

/// A device as its transport sees it.
///
/// The transport calls [`start_queue`](Device::start_queue) for each queue that the driver starts,
/// and [`reset`](Device::reset) when all of their handlers are drained and dropped.
pub trait Device: Send {
    /// Device ID (section 5 of the specification).
    fn device_id(&self) -> u32;

    /// Feature bits that the device offers.
    ///
    /// These are the bits of its device type, and of the others exactly `VERSION_1`, `RING_RESET`,
    /// `INDIRECT_DESC` and `EVENT_IDX` (the last two are
    /// [`QueueConfig::SPLIT_FEATURES`](paravane_ring::device::QueueConfig::SPLIT_FEATURES)). Do not
    /// return `RING_PACKED`, `IN_ORDER`, `ACCESS_PLATFORM`, `ORDER_PLATFORM`, `NOTIFICATION_DATA`
    /// or a bit of a transport: the owner of the transport adds those that it serves. They work
    /// with every device, since the queue and guest memory implement them.
    fn features(&self) -> u64;

    /// Largest size of each queue in descriptors; the length is the number of queues.
    fn queue_sizes(&self) -> &[u16];

    /// Most descriptors of a chain that the configuration space allows [0: no limit].
    ///
    /// A driver without `INDIRECT_DESC` may wait forever for room in a queue that is smaller.
    fn longest_chain(&self) -> u16 {
        0
    }

    /// Reads the configuration space at `offset` bytes; bytes beyond its end are 0.
    fn read_config(&self, offset: u32, out: &mut [u8]);

    /// Writes the configuration space at `offset` bytes \[ignored\].
    fn write_config(&mut self, _offset: u32, _data: &[u8]) {}

    /// Counts of frames since the start, of a network card \[`None`: it is no card\].
    fn frames(&self) -> Option<net::Totals> {
        None
    }

    /// Creates the handler of queue `index`, for the negotiated `features`.
    ///
    /// # Errors
    /// There is no such queue, or the host lacks a resource.
    fn start_queue(&mut self, index: u16, features: u64) -> std::io::Result<Box<dyn QueueHandler>>;

    /// Reports the number of enabled queues, counted from the first \[ignored\].
    ///
    /// For transports that enable queues one by one (vhost-user), and whose front end may handle
    /// a card's control queue itself.
    fn enable_queues(&mut self, _count: u16) {}

    /// Whether buffers of queue `index` wait until the host has something for them \[`false`\].
    fn waits_for_host(&self, _index: u16) -> bool {
        false
    }

    /// Announces the driver's address `mac` to the network, at its new place \[ignored\].
    ///
    /// For a machine that has been migrated, and whose driver cannot announce itself.
    fn announce(&mut self, mac: [u8; 6]) {
        let _ = mac;
    }

    /// Host descriptors that a later process can take over, in a fixed order \[none\].
    ///
    /// For example those of a TAP device: see [`net::Tap::resume`].
    fn host_fds(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }

    /// State that the driver has set by requests on its queues \[empty: none\].
    ///
    /// At most 64 bytes. vhost-user carries no more than 2.
    fn state(&self) -> Vec<u8> {
        Vec::new()
    }

    /// Restores a [`Device::state`] from before a pause, or from another process \[ignored\].
    ///
    /// Called after the queues have started. Ignores values that a driver cannot have set.
    fn restore_state(&mut self, _state: &[u8]) {}

    /// Sets a callback for changes of [`Device::state`], which runs on the thread of a queue \[ignored\].
    ///
    /// Only the first call counts.
    fn tell_state(&mut self, _told: Box<dyn Fn() + Send + Sync>) {}

    /// Checks whether the host's side still exists, and reopens it if possible \[it exists\].
    fn look(&mut self) -> HostSide {
        HostSide::Present
    }

    /// Sets a callback for changes of the host's side: it has vanished, or [`Device::link_is_up`] may have
    /// changed \[ignored\].
    ///
    /// It may run on the thread of a queue. Only the first call counts. When it runs, call
    /// [`Device::look`], and repeat that until the host's side exists.
    fn tell_change(&mut self, _told: Box<dyn Fn() + Send + Sync>) {}

    /// Sets whether the driver is notified of configuration changes \[it is not\].
    ///
    /// Only then does a card's link follow the carrier of the host's network: a driver that once read
    /// that the link is down would never learn that it is up.
    fn follow_carrier(&mut self, _is_told: bool) {}

    /// Whether the configuration space reports the link as up \[`None`: it reports no link\].
    fn link_is_up(&self) -> Option<bool> {
        None
    }

    /// Whether [`QueueHandler::serve`] may block its thread on storage \[`false`\].
    ///
    /// Such a device delays all queues of its thread; give it threads that no other device uses.
    fn may_block(&self) -> bool {
        false
    }

    /// Resets the device. All handlers are drained and dropped.
    fn reset(&mut self) {}

    /// What drivers are told of the device outside of its configuration space \[nothing\].
    ///
    /// At most 64 bytes.
    fn identity(&self) -> Vec<u8> {
        Vec::new()
    }

    /// Continues as a device whose [identity](Device::identity) a driver knows \[ignored\].
    ///
    /// `None`: it was not noted. Called before the queues of a session that goes on are started.
    fn keep_identity(&mut self, _told: Option<&[u8]>) {}

    /// Checks the host's side again; `true` if the configuration space has changed.
    ///
    /// May block on storage.
    ///
    /// # Errors
    /// The host does not answer. Nothing has changed.
    fn refresh(&mut self) -> std::io::Result<bool> {
        Ok(false)
    }

    /// Gives up what a successor waits for, as the lock of an image \[the whole device\].
    ///
    /// All handlers are dropped, so nothing is in flight. Returns what takes long to give up, as the
    /// mapping of an image, and what nobody waits for.
    fn retire(self: Box<Self>) -> Option<Box<dyn Any + Send>> {
        None
    }
}

/// Serves one queue, on one I/O thread.
///
/// The owner calls [`serve`](QueueHandler::serve) until it neither pops nor completes anything. It
/// then polls or sleeps, as [`rest`](QueueHandler::rest) says, until a kick or an event of the
/// descriptors that the handler has [registered](QueueHandler::register).
pub trait QueueHandler: Send {
    /// Pops chains, starts or does them, completes finished ones, and publishes once.
    ///
    /// # Errors
    /// The queue has latched or the host has failed. The owner stops the queue, and sets
    /// DEVICE_NEEDS_RESET where the transport has it.
    fn serve(&mut self, queue: &mut MappedQueue) -> Result<Served, ServeError>;

    /// Adds the descriptors that become readable on a host event to `wakes` \[there are none\]: a request is
    /// done, a frame is there.
    ///
    /// They leave an earlier set. `None`: they only leave it, which cannot fail. Later events wait.
    ///
    /// Reliable after [`rest(true)`](QueueHandler::rest); they may become readable before. The owner calls
    /// `serve` once for each event of the set. The handler clears the descriptors.
    ///
    /// # Errors
    /// The host refuses; `None` takes out what was added.
    fn register(&mut self, _wakes: Option<&WakeSet>) -> io::Result<()> {
        Ok(())
    }

    /// Applies settings of the device that have changed: a rate limit, for example \[nothing\].
    ///
    /// Called while its descriptors are in no set; they may be others afterwards.
    /// The owner then serves the queue once.
    ///
    /// # Errors
    /// The host refuses a resource; the queue cannot go on.
    fn renew(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// What is known of the next host event \[[`Rest::Ask`], with kicks\].
    ///
    /// Called after a `serve` that did nothing. With `arm`, makes host events signal the registered
    /// descriptors; the owner sleeps now, unless the answer is [`Rest::Serve`]. Without, makes no system
    /// call.
    ///
    /// Without kicks, the owner leaves them off, and buffers may stay available.
    fn rest(&mut self, _arm: bool) -> Rest {
        Rest::Ask { kicks: true }
    }

    /// Whether the handler keeps guest memory beyond requests in flight [`false`].
    ///
    /// If so, the owner serves it after each change of the memory map, and it lets go of removed
    /// memory.
    fn keeps_memory(&self) -> bool {
        false
    }

    /// Preferred batch size under load, in buffers of a queue of `size`.
    ///
    /// The owner may delay the queue by up to 10 µs to fill it. 0 disables batching \[0\].
    fn preferred_batch(&self, _size: u16) -> u32 {
        0
    }

    /// Queue of the TAP device that a network card's frames come from or go to \[none\].
    ///
    /// The kernel's vhost-net can serve it instead of this handler.
    fn tap(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Whether [`QueueHandler::drain`] would lose no buffer of the driver [`true`].
    ///
    /// `false` while buffers wait for room on the host's side. Serve it until it is at rest.
    fn at_rest(&self) -> bool {
        true
    }

    /// Waits until nothing is in flight on the host.
    ///
    /// Guest memory is not accessed afterwards.
    ///
    /// With `complete` (a stop), chains in flight are completed and published; see
    /// [`Served::interrupt`]. Without (a reset), they are forgotten, as the driver has forgotten
    /// them.
    fn drain(&mut self, queue: &mut MappedQueue, complete: bool) -> Served;

    /// As [`QueueHandler::drain`], cut short once `cut` is set.
    ///
    /// A request that takes several steps on the host then ends after the present one: it fails, or
    /// stays in flight where in-flight tracking tells a successor about it. A step that the host
    /// has begun is always waited for.
    fn drain_until(&mut self, queue: &mut MappedQueue, complete: bool, _cut: &AtomicBool) -> Served {
        self.drain(queue, complete)
    }
}

/// Reads a configuration space; bytes beyond its end are 0.
fn read_config(config: &[u8], offset: u32, out: &mut [u8]) {
    let rest = config.get(offset as usize..).unwrap_or(&[]);
    for (index, byte) in out.iter_mut().enumerate() {
        *byte = rest.get(index).copied().unwrap_or(0);
    }
}

/// The queue error for a buffer outside guest memory.
fn address_error(error: DmaError) -> QueueError {
    QueueError::Address { addr: error.addr, len: u32::try_from(error.len).unwrap_or(u32::MAX) }
}
