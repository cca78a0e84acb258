//! Where a queue reports: to its driver, and to the host.
use paravane_device::ServeError;
use paravane_notify::Notifier;
use std::io;

/// Receives from I/O threads what a queue's driver has to know.
///
/// The queues of one device may be on several threads.
pub trait QueueEvents: Send + Sync {
    /// Interrupts the driver: used buffers of `queue` were published.
    ///
    /// Called at most once a batch; this is a hot path.
    fn used_buffer(&self, queue: u16);

    /// Counts `count` kicks of `queue`, which may be 0.
    fn kicked(&self, queue: u16, count: u64);

    /// Eventfd that interrupts the driver for `queue`, for another process \[none\].
    ///
    /// Mask, pending bits and counters know nothing of it.
    fn message(&self, queue: u16) -> Option<Notifier> {
        let _ = queue;
        None
    }

    /// Marks `queue` as failed until its driver resets it.
    ///
    /// It is not served any more, and nothing is in flight.
    fn failed(&self, queue: u16, error: &ServeError);

    /// Marks `queue` as failed: the code that serves it panicked \[as [`QueueEvents::failed`]\].
    ///
    /// The queue has ended. The state of its device is unknown.
    fn panicked(&self, queue: u16, message: &str) {
        self.failed(queue, &ServeError::Host(io::Error::other(format!("internal error: panic: {message}"))));
    }
}
