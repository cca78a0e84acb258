//! The network behind a card: a sender and a receiver for each pair of queues.
//!
//! ```text
//!   transmit queue --frame--> Sender    Sent; Refused (dropped, counted); Full: retry when what it registers is readable
//!   receive queue <--frames-- Receiver  `fetch` gets some, `done` releases them
//! ```
//! Handlers are generic over the ends, so that no frame costs a virtual call.
use super::header::EncodedHeader;
use crate::{HostSide, Rest, ServeError, WakeSet};
use paravane_dma::{Access, AccessGuard, ReadSpan, Segment};
use std::io;
use std::os::fd::BorrowedFd;

/// A network, as a card sees it: a TAP device, one end of a link.
///
/// Shared by the card's handlers.
pub trait BackEnd: Send + Sync + 'static {
    /// Sends the frames of a transmit queue.
    type Sender: Sender + 'static;
    /// Receives the frames for a receive queue.
    type Receiver: Receiver + 'static;

    /// Number of queue pairs, at least 1.
    fn pairs(&self) -> u16;

    /// Checksum and segmentation offloads, as feature bits of section 5.1.3.
    fn offloads(&self) -> u64;

    /// MTU in bytes, without the Ethernet header. `None` if unlimited or unknown.
    fn mtu(&self) -> Option<u32> {
        None
    }

    /// Sets the features that the driver has accepted; 0 after a reset.
    ///
    /// Frames that need another feature must not reach the driver.
    ///
    /// # Errors
    /// The host refuses.
    fn accept(&self, features: u64) -> io::Result<()>;

    /// Sets the number of pairs in use, from 1 to [`BackEnd::pairs`].
    ///
    /// # Errors
    /// The host refuses; the number has not changed.
    fn use_pairs(&self, pairs: u16) -> io::Result<()>;

    /// Sends a frame of the device itself. Best effort: it may be lost.
    ///
    /// # Errors
    /// The host refuses.
    fn inject(&self, frame: &[u8]) -> io::Result<()>;

    /// Descriptors of the host's network that a later process can go on with; none if there are none.
    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }

    /// Looks whether the host's network is still there, and takes it again if it can \[it is\].
    fn look(&self) -> HostSide {
        HostSide::Present
    }

    /// Has `told` called when a sender or receiver finds that the network is gone, on its thread, and
    /// when [`BackEnd::has_carrier`] may have changed, where the back end is told.
    ///
    /// Only the first call counts. Then call [`BackEnd::look`].
    fn tell_change(&self, _told: Box<dyn Fn() + Send + Sync>) {}

    /// Whether frames can pass: what a driver sees as the state of its link \[`true`\].
    fn is_up(&self) -> bool {
        true
    }

    /// Whether there is somebody to receive frames at the moment \[`true`\].
    ///
    /// An interface of the host is up; the far end of a link has a driver.
    fn has_carrier(&self) -> bool {
        true
    }

    /// Creates the sender for the transmit queue of `pair`, counted from 0.
    ///
    /// # Errors
    /// The process has no file descriptors left.
    fn sender(&self, pair: u16) -> io::Result<Self::Sender>;

    /// Creates the receiver for the receive queue of `pair`.
    ///
    /// The previous one has been dropped.
    ///
    /// # Errors
    /// As [`BackEnd::sender`].
    fn receiver(&self, pair: u16) -> io::Result<Self::Receiver>;
}

/// A frame that the driver sends.
///
/// The header was checked. The frame still lies in guest memory, where the driver may change it.
#[derive(Debug)]
pub struct Outgoing<'a> {
    /// Checked copy of the frame's header.
    pub header: EncodedHeader,
    /// Access to guest memory.
    pub memory: &'a AccessGuard<'a>,
    /// Segments of header and frame.
    pub segments: &'a [Segment],
    /// Their memory, if it is in one piece.
    pub span: Option<ReadSpan<'a>>,
    /// Bytes of the header in the segments. A legacy driver's has no `num_buffers`.
    pub header_len: usize,
    /// Length of the frame in bytes, without the header.
    pub len: usize,
}

impl Outgoing<'_> {
    /// Copies the first `out.len()` bytes of the frame. Reads guest memory once.
    ///
    /// # Errors
    /// The frame is not in guest memory, or shorter than `out`.
    #[inline(always)]
    pub fn copy_to(&self, out: &mut [u8]) -> Result<(), ServeError> {
        match self.span {
            Some(span) => span.read(self.header_len, out),
            None => self.memory.read_segments(self.segments, self.header_len as u64, out, Access::READ)?,
        }
        Ok(())
    }
}

/// Result of sending a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sent {
    /// The frame is on its way.
    Sent,
    /// The frame was dropped: there is no receiver, or the host refuses it.
    Refused,
    /// There is no room. Retry the frame when there is some ([`Sender::rest`]).
    Full,
}

/// Sends the frames of one transmit queue.
pub trait Sender: Send {
    /// Sends a frame.
    ///
    /// # Errors
    /// The frame is not in guest memory.
    fn send(&mut self, frame: &Outgoing<'_>) -> Result<Sent, ServeError>;

    /// Ends a batch: wakes the receiver of its frames.
    fn flush(&mut self) {}

    /// Whether there is room, after [`Sent::Full`] \[[`Rest::Ask`]\]. Kicks do not count.
    ///
    /// With `arm`, makes room signal what [`Sender::register`] added.
    fn rest(&mut self, _arm: bool) -> Rest {
        Rest::Ask { kicks: false }
    }

    /// Whether a rate limit refused the frame, after [`Sent::Full`].
    fn is_held(&self) -> bool {
        false
    }

    /// Adds what becomes readable when there is room again \[the sender is never full\].
    ///
    /// # Errors
    /// See [`QueueHandler::register`](crate::QueueHandler::register).
    fn register(&mut self, _wakes: Option<&WakeSet>) -> io::Result<()> {
        Ok(())
    }

    /// Applies a rate limit that was set or taken away. Register it again afterwards.
    ///
    /// # Errors
    /// The process has no file descriptors left.
    fn renew(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// Queue of the TAP device behind it, if there is one.
    fn tap(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// A frame for the driver.
#[derive(Clone, Copy, Debug)]
pub struct Incoming<'a> {
    /// Its header. `num_buffers` is ignored.
    pub header: EncodedHeader,
    /// Bytes of the frame, without the header.
    pub bytes: &'a [u8],
}

/// Receives the frames for one receive queue.
pub trait Receiver: Send {
    /// Gets up to `most` frames (at least 1), and returns the number at hand.
    ///
    /// They stay at hand, in order, until [`Receiver::done`].
    ///
    /// # Errors
    /// The host has failed.
    fn fetch(&mut self, most: usize) -> io::Result<usize>;

    /// Frame `number` of those at hand, counted from 0.
    fn frame(&self, number: usize) -> Option<Incoming<'_>>;

    /// Releases the first `count` frames at hand: they were delivered or dropped.
    fn done(&mut self, count: usize);

    /// Ends a batch: wakes senders that wait for room.
    fn flush(&mut self) {}

    /// Whether there is a frame \[[`Rest::Ask`]\]. Kicks do not count.
    ///
    /// With `arm`, makes frames signal what [`Receiver::register`] added.
    fn rest(&mut self, _arm: bool) -> Rest {
        Rest::Ask { kicks: false }
    }

    /// Whether a rate limit holds frames back, after an empty [`Receiver::fetch`].
    fn is_held(&self) -> bool {
        false
    }

    /// Adds what becomes readable when a frame arrives \[frames are there at once or never\].
    ///
    /// # Errors
    /// See [`QueueHandler::register`](crate::QueueHandler::register).
    fn register(&mut self, _wakes: Option<&WakeSet>) -> io::Result<()> {
        Ok(())
    }

    /// Applies a rate limit that was set or taken away. Register it again afterwards.
    ///
    /// # Errors
    /// The process has no file descriptors left.
    fn renew(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// Queue of the TAP device behind it, if there is one.
    fn tap(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
