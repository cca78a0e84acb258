//! Parts of a queue that only network cards have.
use std::os::fd::BorrowedFd;

/// The handler of a receive or transmit queue of a network card.
///
/// [`QueueHandler::net`](crate::QueueHandler::net) returns it.
pub trait NetQueue {
    /// Queue of the TAP device that the frames come from or go to.
    ///
    /// `None` without a TAP device.
    ///
    /// The kernel's vhost-net can serve it instead of this handler.
    fn tap(&self) -> Option<BorrowedFd<'_>>;
}
