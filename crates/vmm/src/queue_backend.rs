//! Owners of queues outside our I/O threads: the kernel's vhost, another thread.
//!
//! ```text
//!             kick eventfd (the queue's notifier, grabbed)
//!   driver ------------------------------------------------> QueueBackend
//!      ^                                                        |
//!      '--- Interrupts <--- Relay <--- call eventfd ------------'
//! ```
//! An owner serves one queue from the position that it is told until it is stopped, and then says where it has come to:
//! what vhost calls SET_VRING_BASE and GET_VRING_BASE. `slot/lending.rs` lends queues and takes them back.
mod relay;
mod vhost_net;

pub(crate) use relay::Relay;
pub(crate) use vhost_net::VhostNet;

use paravane_device::{ParkedQueue, QueueHandler};
use paravane_dma::Lent;
use paravane_notify::Notifier;
use paravane_spec::queue::QueueAddresses;
use std::io;

/// Serves one queue in our place.
pub(crate) trait QueueBackend: Send {
    /// Takes the queue, and serves it from now on. What was available before, it finds without a kick.
    ///
    /// # Errors
    /// It cannot serve this queue: it touches neither ring nor memory.
    fn start(&mut self, loan: &mut Loan<'_>) -> io::Result<()>;

    /// Stops, and says where it has come to, as vhost does. When this returns nothing is in flight and it does not touch
    /// the memory any more, whatever the result. Called at most once for each start that succeeded.
    ///
    /// # Errors
    /// It does not know where it has come to.
    fn stop(&mut self) -> io::Result<u32>;

    /// The handler that it took from its loan.
    fn handler(&mut self) -> Option<Box<dyn QueueHandler>> {
        None
    }
}

/// All that an owner is told about its queue.
pub(crate) struct Loan<'a> {
    /// Index in its device.
    pub(crate) queue: u16,
    /// What serves the queue when we do. It rests, unless the owner takes it for the time that it has the queue.
    pub(crate) handler: &'a mut Option<Box<dyn QueueHandler>>,
    /// Negotiated features.
    pub(crate) features: u64,
    /// Where the driver has put the rings, guest-physical.
    pub(crate) addresses: QueueAddresses,
    /// The rings in this process, and the position to begin at.
    pub(crate) parked: &'a ParkedQueue,
    /// Guest memory. It stays mapped until the owner has stopped.
    pub(crate) memory: &'a Lent,
    /// Signalled by kicks, and once at the beginning.
    pub(crate) kick: &'a Notifier,
    /// To be signalled when the driver wants an interrupt.
    pub(crate) call: &'a Notifier,
    /// To be signalled when the queue is broken.
    pub(crate) error: &'a Notifier,
}
