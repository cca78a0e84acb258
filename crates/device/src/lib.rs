//! Virtio devices. One folder a device; what all share is here.
//!
//! ```text
//! Device (configuration, features)          one a device, control path
//!    | activate(features)
//!    v  start_queue(n)
//! QueueHandler                              one a live queue, owned by one I/O thread
//!    serve(&mut MappedQueue)  take what is available, do it, complete, publish once
//!    has_news               a look at the host's side, for an owner that polls
//!    listen                 before the owner sleeps: what is not done yet wakes it
//!    drain                  wait until nothing is in flight (reset, stop)
//! ```
//! A handler never waits in `serve`: what is not done yet wakes the thread through `completion_fd`.
pub mod blk;
#[cfg(test)]
mod dirty_tests;
mod log_device;
mod mapped_queue;
pub mod net;
mod rate;
#[cfg(test)]
mod rig;
pub mod rng;

pub use log_device::LogDevice;
pub use mapped_queue::{InvalidationLock, MappedQueue, ParkedQueue, QueueBatch, QueueGuard, StartError};
pub use paravane_ring::device::{State, StateError};
pub use rate::{Limiter, Rate, RateLimit};

use net::{NetDevice, NetQueue};
use paravane_dma::DmaError;
use paravane_ring::QueueError;
use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicBool;
use thiserror::Error;

/// What one [`QueueHandler::serve`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Served {
    /// Chains taken from the queue.
    pub taken: u32,
    /// Chains completed and published.
    pub completed: u32,
    /// The driver wants an interrupt for them.
    pub interrupt: bool,
}

/// Why a queue handler cannot go on.
#[derive(Debug, Error)]
pub enum ServeError {
    /// the driver broke the queue: {0}
    #[error("the driver broke the queue: {0}")]
    Queue(#[from] QueueError),
    /// the host failed: {0}
    #[error("the host failed: {0}")]
    Host(#[from] std::io::Error),
}

/// The device as its transport sees it.
pub trait Device: Send {
    /// Virtio device identifier.
    fn device_id(&self) -> u32;

    /// Feature bits to offer, ring and transport-independent ones included.
    fn features(&self) -> u64;

    /// Largest size of each queue; the length is the number of queues.
    fn queue_sizes(&self) -> &[u16];

    /// Most descriptors of a chain that the configuration space allows; 0 if it says nothing of them. A smaller queue without
    /// INDIRECT_DESC has no room for it, and its driver may wait for ever.
    fn longest_chain(&self) -> u16 {
        0
    }

    /// Reads the configuration space; bytes beyond its end are 0.
    fn read_config(&self, offset: u32, out: &mut [u8]);

    /// The driver writes to the configuration space; ignored where nothing is writable.
    fn write_config(&mut self, offset: u32, data: &[u8]) {
        let _ = (offset, data);
    }

    /// Makes what serves one queue. Called for each queue that the driver starts; the I/O thread owns the result.
    ///
    /// # Errors
    /// The host lacks what the handler needs.
    fn start_queue(&mut self, index: u16, features: u64) -> std::io::Result<Box<dyn QueueHandler>>;

    /// The extension of network cards, if it is one.
    fn net(&mut self) -> Option<&mut dyn NetDevice> {
        None
    }

    /// The device was reset; all handlers are drained and dropped.
    fn reset(&mut self) {}

    /// Looks at the host's side again, which may wait for the host's storage. `true`: the configuration space has changed.
    ///
    /// # Errors
    /// The host does not say; all is as before.
    fn refresh(&mut self) -> std::io::Result<bool> {
        Ok(false)
    }
}

/// Serves one queue, in one I/O thread.
pub trait QueueHandler: Send {
    /// Takes what is available (up to a batch), starts or does it, completes what is done, publishes once.
    /// Called again until it neither took nor completed anything.
    ///
    /// # Errors
    /// The queue has latched or the host has failed; the owner stops the queue and marks the device.
    fn serve(&mut self, queue: &mut MappedQueue) -> Result<Served, ServeError>;

    /// Becomes readable when there is news from the host (something in flight is done, a frame has come) after
    /// [`QueueHandler::listen`]; it may do so before. The owner calls `serve` once for each time that it does, whether or not
    /// it has been readable before. The handler resets it.
    fn completion_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// The owner will sleep, after a `serve` that did nothing: from here on news from the host makes
    /// [`QueueHandler::completion_fd`] readable. `true`: there is some already, so serve instead.
    fn listen(&mut self) -> bool {
        false
    }

    /// After a `serve` that did nothing: whether there seems to be news from the host by now, found out without a system
    /// call. `None`: only the descriptor tells.
    fn has_news(&mut self) -> Option<bool> {
        None
    }

    /// After a `serve` that did nothing: whether it is new buffers that the handler waits for. If not, kicks stay off, and
    /// buffers may be there that nothing needs yet.
    fn wants_kicks(&self) -> bool {
        true
    }

    /// Whether it keeps guest memory beyond what is in flight: then it is to be served after each change of the memory's map,
    /// and lets go of what is not there any more.
    fn keeps_memory(&self) -> bool {
        false
    }

    /// Of how many buffers in a queue of `size` it is good to take so many at once, while they come fast: its owner may wait some
    /// microseconds for them to come. 0: it is not, since somebody waits for each.
    fn preferred_batch(&self, size: u16) -> u32 {
        let _ = size;
        0
    }

    /// The extension of a network card's data queues, if it is one.
    fn net(&self) -> Option<&dyn NetQueue> {
        None
    }

    /// Whether [`QueueHandler::drain`] would lose nothing that the driver has given: nothing waits here for a host that has
    /// no room. If not, `serve` it until it is.
    fn at_rest(&self) -> bool {
        true
    }

    /// Waits until nothing is in flight in the host. Afterwards guest memory is not touched any more. What was
    /// in flight is completed and published if `complete` is set (a stop: the driver may be owed an interrupt,
    /// see [`Served::interrupt`]), else forgotten (a reset: the driver has forgotten it too).
    fn drain(&mut self, queue: &mut MappedQueue, complete: bool) -> Served;

    /// As [`QueueHandler::drain`]. Once `cut` is set, a request that takes several steps in the host is not continued: it fails, or
    /// stays in flight where the queue's in-flight memory tells a successor of it. A step that the host has begun is waited for
    /// all the same.
    fn drain_until(&mut self, queue: &mut MappedQueue, complete: bool, cut: &AtomicBool) -> Served {
        let _ = cut;
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

/// The queue error for a buffer that is not where the driver said.
fn address_error(error: DmaError) -> QueueError {
    QueueError::Address { addr: error.addr(), len: u32::try_from(error.len()).unwrap_or(u32::MAX) }
}
