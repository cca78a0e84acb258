//! Back ends that serve a queue in place of our threads, such as vhost-net.
//!
//! ```text
//!             kick eventfd (the queue's notifier, grabbed), or an exit
//!   driver ------------------------------------------------------------> QueueBackend
//!      ^                                                                    |
//!      '--- QueueEvents <--- Relay <--- call eventfd -----------------------'
//!                 '<------- a back end in this process --------------------'
//! ```
//! A back end serves one queue from the position that it is given until it is stopped, and then
//! reports its position: what vhost calls SET_VRING_BASE and GET_VRING_BASE.
mod relay;

pub(crate) use relay::Relay;

use crate::QueueEvents;
use paravane_device::{ParkedQueue, QueueHandler};
use paravane_dma::Lent;
use paravane_notify::Notifier;
use paravane_spec::queue::QueueAddresses;
use std::io;
use std::sync::Arc;

/// Serves one queue in place of our threads.
pub trait QueueBackend: Send {
    /// Name for log lines.
    fn name(&self) -> &'static str {
        "a back end"
    }

    /// Takes the queue and serves it from now on.
    ///
    /// Chains that are available already bring no kick.
    ///
    /// # Errors
    /// It cannot serve this queue, and has touched neither ring nor memory.
    /// [`io::ErrorKind::NotConnected`]: it is not made for such a queue, which is not worth a
    /// warning.
    fn start(&mut self, loan: &mut Loan<'_>) -> io::Result<()>;

    /// Stops, and returns the position as vhost does.
    ///
    /// When this returns nothing is in flight and memory is not touched any more, whatever the
    /// result. Called at most once for each start that succeeded.
    ///
    /// # Errors
    /// It does not know its position; the queue is lost.
    fn stop(&mut self) -> io::Result<u32>;

    /// Serves a kick that has come as an exit, on the thread of the vCPU [`false`: the kick is signalled].
    fn kick(&mut self) -> bool {
        false
    }

    /// Gives back the handler, if it took it from its loan.
    fn handler(&mut self) -> Option<Box<dyn QueueHandler>> {
        None
    }
}

/// All that a back end is told of its queue.
#[non_exhaustive]
pub struct Loan<'a> {
    /// Queue index.
    pub queue: u16,
    /// The device's handler.
    ///
    /// It rests, unless the back end takes it for the time of the loan.
    pub handler: &'a mut Option<Box<dyn QueueHandler>>,
    /// Negotiated features.
    pub features: u64,
    /// Guest-physical addresses of the rings.
    pub addresses: QueueAddresses,
    /// The rings in this process, and the position to begin at.
    pub parked: &'a ParkedQueue,
    /// Guest memory. It stays mapped until the back end has stopped.
    pub memory: &'a Lent,
    /// Signalled by kicks, and once at the beginning.
    pub kick: &'a Notifier,
    /// To signal when the driver wants an interrupt.
    pub call: &'a Notifier,
    /// Sends the queue's message itself, in place of `call` and without a thread between.
    ///
    /// Mask, pending bits and counters know nothing of it. `None`: no eventfd sends it.
    pub message: Option<&'a Notifier>,
    /// To signal when the queue is broken.
    pub error: &'a Notifier,
    /// Where a back end in this process reports, in place of `call` and `error`.
    pub events: &'a Arc<dyn QueueEvents>,
}
