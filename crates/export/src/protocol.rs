//! What an export needs of a protocol.
//!
//! ```text
//!  bytes --Framing--> whole message --prepare--> recorded --answer--> queues start and stop; an answer
//!  save --> sections of a record --check--> --replay--> the same session, in another export
//! ```
//! A session uses no socket of its own: the export receives messages, sends answers and waits for
//! descriptors. What makes an answer survive a kill is in the export too ([`crate::keeper`]); a
//! session only says which messages may start queues ([`Session::prepare`]).
use crate::framing::{Framing, SessionEnd};
use crate::handover::HandoverError;
use crate::status::SharedStatus;
use paravane_device::Device;
use paravane_io::DeviceThreads;
use std::any::Any;
use std::fmt::Debug;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

/// Bytes to send, and at most one descriptor.
pub type Answer = (Vec<u8>, Option<OwnedFd>);

/// Ring features that an export offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Packed queues.
    pub packed: bool,
    /// Buffers used in the order of their arrival.
    pub in_order: bool,
}

/// Makes sessions of one protocol.
pub trait Protocol: Debug + Send + Sync {
    /// Number in handover records. Published: it never changes.
    ///
    /// 0 is vhost-user.
    fn number(&self) -> u32;

    /// Name in messages for the operator.
    fn name(&self) -> &'static str;

    /// Largest number of queues that a client can address.
    fn max_queues(&self) -> usize;

    /// Frame of the client's messages.
    fn framing(&self) -> &'static Framing;

    /// Checks the sections of a session that [`Session::replay`] is to continue.
    ///
    /// # Errors
    /// They are not what [`Session::save`] writes, or a later version wrote one that is needed.
    fn check(&self, sections: &[Section]) -> Result<(), HandoverError>;

    /// Begins the session of a client that has connected.
    ///
    /// The session owns the device until it ends.
    ///
    /// # Errors
    /// The process has too few descriptors or too little memory left. Returns the device.
    fn begin(
        &self,
        device: Box<dyn Device>,
        threads: Arc<DeviceThreads>,
        status: Arc<SharedStatus>,
        offer: Offer,
    ) -> Result<Box<dyn Session>, (Box<dyn Device>, SessionEnd)>;
}

/// Session of one client.
///
/// The first error of a method ends it: call [`Session::end`] then.
pub trait Session: Send {
    /// The device that the session owns.
    fn device(&mut self) -> &mut dyn Device;

    /// Tracks what is in flight, so that a later process can continue the session after a crash.
    ///
    /// # Errors
    /// The process has too few descriptors or too little memory left.
    fn track(&mut self) -> Result<(), SessionEnd>;

    /// Continues a session that another export has saved.
    ///
    /// `hold`: no queue starts before [`Session::release`].
    ///
    /// # Errors
    /// The sections contradict each other or the device, or the host cannot serve a queue.
    fn replay(&mut self, sections: Vec<Section>, hold: bool) -> Result<(), SessionEnd>;

    /// Starts the queues that were held back.
    ///
    /// # Errors
    /// A queue cannot be served.
    fn release(&mut self) -> Result<(), SessionEnd>;

    /// Prepares for a whole message: clears the tracking of queues that it may start anew.
    ///
    /// Returns whether the message may start queues.
    ///
    /// # Errors
    /// The host refuses.
    fn prepare(&mut self, message: &[u8]) -> Result<bool, SessionEnd>;

    /// Handles a whole message.
    ///
    /// Send the answer even if the result is an error.
    ///
    /// # Errors
    /// The message is malformed or not allowed in this state, or the host cannot serve it.
    fn answer(&mut self, message: &[u8], fds: Vec<OwnedFd>) -> (Option<Answer>, Result<(), SessionEnd>);

    /// Tells the client that the configuration space changed, if it can be told.
    fn config_changed(&mut self);

    /// Whether addresses are translated by tables that may lack an entry.
    fn translates(&self) -> bool;

    /// Prepares to wait. Returns the time until [`Session::tick`] is due, if nothing else happens.
    fn rest(&mut self) -> Option<Duration>;

    /// Descriptors to wait for, with numbers from 0 to 2. The same until the next [`Session::rest`].
    fn descriptors(&self) -> Vec<(u8, BorrowedFd<'_>)>;

    /// Handles an event of the descriptor with this number.
    ///
    /// Returns whether the state to save has changed.
    ///
    /// # Errors
    /// The client has broken what the descriptor is for.
    fn woken(&mut self, number: u8) -> Result<bool, SessionEnd>;

    /// Does what is due. Called after each wait.
    ///
    /// # Errors
    /// A queue cannot be served.
    fn tick(&mut self) -> Result<(), SessionEnd>;

    /// Stops all queues for another export; they keep their positions.
    ///
    /// # Errors
    /// The position of a queue is unknown.
    fn stop(&mut self) -> Result<(), HandoverError>;

    /// Writes the state. [`Successor::Present`] and [`Successor::Within`] need [`Session::stop`] before.
    ///
    /// # Errors
    /// No process could continue the session now, or a descriptor cannot be given.
    fn save(&mut self, successor: Successor, into: &mut dyn Sections) -> Result<(), HandoverError>;

    /// Leaves the client to the export that continues the session. Call it after [`Session::save`].
    ///
    /// Returns the device, and what takes long to drop.
    fn leave(self: Box<Self>) -> (Box<dyn Device>, Box<dyn Any + Send>);

    /// Ends the session.
    ///
    /// Completes what is in flight, and drops all that belongs to the client. Returns the device.
    fn end(self: Box<Self>) -> Box<dyn Device>;
}

/// Who continues a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Successor {
    /// Another process, which is there.
    Present,
    /// This process. What is kept of the session stays.
    Within,
    /// The next process, when this one has died. Queues stay live.
    Later,
}

/// Section of a record that a session writes and reads.
///
/// `D` is the descriptor itself, or the number under which it is kept.
#[derive(Debug)]
pub struct Section<D = OwnedFd> {
    /// Tag. Each protocol assigns those in [`SECTION_TAGS`](crate::handover::SECTION_TAGS), and those
    /// with [`REQUIRED`](crate::handover::REQUIRED).
    pub tag: u32,
    /// Content.
    pub value: Vec<u8>,
    /// Descriptors.
    pub fds: Vec<D>,
}

/// Takes the sections of a session in their order.
pub trait Sections {
    /// Adds a section. Its descriptors are duplicated or kept.
    ///
    /// # Errors
    /// A descriptor cannot be duplicated or kept.
    fn push(&mut self, tag: u32, value: Vec<u8>, fds: &[BorrowedFd<'_>]) -> Result<(), HandoverError>;
}

/// Sections whose descriptors `give` makes.
pub(crate) struct Collected<D, G> {
    pub(crate) sections: Vec<Section<D>>,
    pub(crate) give: G,
}

impl<D, G: FnMut(BorrowedFd<'_>) -> Result<D, HandoverError>> Sections for Collected<D, G> {
    fn push(&mut self, tag: u32, value: Vec<u8>, fds: &[BorrowedFd<'_>]) -> Result<(), HandoverError> {
        let fds = fds.iter().map(|fd| (self.give)(*fd)).collect::<Result<_, _>>()?;
        self.sections.push(Section { tag, value, fds });
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests;
