//! The device that a queue belongs to, as its I/O thread sees it.
use paravane_device::ServeError;

/// Told by I/O threads what a queue's driver has to know. One for a device, and its queues may be on several threads.
pub trait QueueEvents: Send + Sync {
    /// Used buffers of `queue` were published, and the driver wants an interrupt. Called once a batch at most, on the way of
    /// every request.
    fn used_buffer(&self, queue: u16);

    /// `count` kicks of `queue` were taken, perhaps none.
    fn kicked(&self, queue: u16, count: u64);

    /// `queue` is out of order until its driver resets it. It is served no more, and nothing of it is in flight.
    fn failed(&self, queue: u16, error: &ServeError);
}
