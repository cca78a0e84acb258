//! Parts of a device and of a queue that only network cards have.
use super::Totals;
use crate::HostSide;
use std::os::fd::BorrowedFd;

/// A network card as its transport sees it, beyond [`Device`](crate::Device).
///
/// [`Device::net`](crate::Device::net) returns it.
pub trait NetDevice {
    /// Reports the number of enabled queues, counted from the first.
    ///
    /// For transports that enable queues one by one (vhost-user), and whose front end may handle
    /// the control queue itself.
    fn enable_queues(&mut self, count: u16);

    /// Announces the driver's address `mac` to the network, at its new place.
    ///
    /// For a machine that has been migrated, and whose driver cannot announce itself.
    fn announce(&mut self, mac: [u8; 6]);

    /// Number of queue pairs that the driver has set through the control queue; 0 if none.
    fn commanded_pairs(&self) -> u16;

    /// Frames so far.
    fn totals(&self) -> Totals;

    /// Descriptors of the host's network, in their order, that a later process can go on with.
    ///
    /// Those of a TAP device: see [`Tap::resume`](super::Tap::resume).
    fn host_fds(&self) -> Vec<BorrowedFd<'_>>;

    /// Has `told` called whenever the driver has set that number, on the thread of the control queue.
    ///
    /// Only the first call counts.
    fn tell_commands(&mut self, told: Box<dyn Fn() + Send + Sync>);

    /// Looks whether the host's network is still there, and takes it again if it can.
    ///
    /// The configuration space shows a link that is down while it is gone.
    fn look(&mut self) -> HostSide;

    /// Has `told` called when a queue finds that the network is gone, on the thread of the queue, and
    /// when [`NetDevice::link_is_up`] may have changed, where the back end is told.
    ///
    /// Only the first call counts. Then call [`NetDevice::look`], and again until it is there.
    fn tell_change(&mut self, told: Box<dyn Fn() + Send + Sync>);

    /// Sets whether the driver is told of changes of the configuration space \[it is not\].
    ///
    /// Only then its link follows the carrier of the host's network: a driver that once read that the
    /// link is down would never learn that it is up.
    fn follow_carrier(&mut self, is_told: bool);

    /// Whether the configuration space shows a link that is up.
    fn link_is_up(&self) -> bool;

    /// Sets the number of queue pairs as the driver did, before a pause or in another process.
    ///
    /// 0: it has set none. Ignores a number that the driver could not have set.
    fn restore_pairs(&mut self, pairs: u16);
}

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
