//! What a card is connected to: two ends a pair of queues, each owned by the queue's handler.
//!
//! ```text
//!   transmit queue --Frame--> Sender    Sent, or Refused (dropped, counted), or Full: again when `fd` says so
//!   receive queue <--Frames-- Receiver  `fetch` has some at hand, `done` lets go of them
//! ```
//! Handlers are generic over the ends, so that no frame costs a virtual call.
use crate::ServeError;
use paravane_dma::{Access, AccessGuard, Segment};
use paravane_spec::net::Header;
use std::io;
use std::os::fd::BorrowedFd;

/// Bytes of the header before each frame.
pub(super) const HEADER: usize = size_of::<Header>();

/// One side of a network: a TAP device, the end of a link. Shared by the card's handlers.
pub trait BackEnd: Send + Sync + 'static {
    /// Takes the frames of a transmit queue.
    type Sender: Sender + 'static;
    /// Gives frames to a receive queue.
    type Receiver: Receiver + 'static;

    /// Most pairs of queues, at least 1.
    fn pairs(&self) -> u16;

    /// What it can do of checksums and segmentation, as feature bits of section 5.1.3.
    fn offloads(&self) -> u64;

    /// Largest packet in bytes that it takes, without the Ethernet header; `None` if it takes any or does not tell.
    fn mtu(&self) -> Option<u32> {
        None
    }

    /// The driver has accepted these features; none after a reset. What it did not accept must not reach it.
    ///
    /// # Errors
    /// The host refuses.
    fn accept(&self, features: u64) -> io::Result<()>;

    /// From here on `pairs` pairs are in use: from 1 to [`BackEnd::pairs`].
    ///
    /// # Errors
    /// The host refuses; as many as before are in use.
    fn use_pairs(&self, pairs: u16) -> io::Result<()>;

    /// Sends a frame that is not the driver's, beside the queues, as well as it can: a network may lose frames.
    ///
    /// # Errors
    /// The host refuses.
    fn inject(&self, frame: &[u8]) -> io::Result<()>;

    /// The end for the transmit queue of `pair`.
    ///
    /// # Errors
    /// The host has no file descriptors left.
    fn sender(&self, pair: u16) -> io::Result<Self::Sender>;

    /// The end for the receive queue of `pair`. The one before is gone.
    ///
    /// # Errors
    /// As [`BackEnd::sender`].
    fn receiver(&self, pair: u16) -> io::Result<Self::Receiver>;
}

/// A frame on its way from the driver. The header was checked; the bytes behind it are still the driver's to change.
#[derive(Debug)]
pub struct Outgoing<'a> {
    /// Our copy of what stood before the frame, in the machine's byte order.
    pub header: Header,
    /// The guard to the memory that the frame lies in.
    pub memory: &'a AccessGuard<'a>,
    /// Header and frame.
    pub segments: &'a [Segment],
    /// Bytes of the frame, without the header.
    pub len: usize,
}

impl Outgoing<'_> {
    /// Copies the frame, once. `out` is as long as it is.
    ///
    /// # Errors
    /// Part of it is not in memory.
    pub fn copy_to(&self, out: &mut [u8]) -> Result<(), ServeError> {
        let copied = self.memory.read_segments(self.segments, HEADER as u64, out, Access::READ);
        Ok(copied.map_err(crate::address_error)?)
    }
}

/// What became of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sent {
    /// It is on its way.
    Sent,
    /// It was dropped: nobody is there, or the host wants none of it.
    Refused,
    /// There is no room for it now; to be tried again when [`Sender::fd`] is readable.
    Full,
}

/// Takes the frames of one transmit queue.
pub trait Sender: Send {
    /// Sends a frame.
    ///
    /// # Errors
    /// The frame is not in memory.
    fn send(&mut self, frame: &Outgoing<'_>) -> Result<Sent, ServeError>;

    /// The batch ends: whoever waits for the frames is told.
    fn flush(&mut self) {}

    /// After [`Sent::Full`]: from here on room makes [`Sender::fd`] readable. `true` if there is some already.
    fn listen(&mut self) -> bool {
        false
    }

    /// After [`Sent::Full`]: whether there is room by now. `None`: that does not show without a system call.
    fn has_room(&self) -> Option<bool> {
        None
    }

    /// Readable when there is room again. `None`: it is never full.
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// The queue of a TAP device behind it, if it is one.
    fn tap(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// A frame for the driver: header in the machine's byte order, without `num_buffers`, and bytes.
#[derive(Clone, Copy, Debug)]
pub struct Incoming<'a> {
    /// What stands before it.
    pub header: Header,
    /// The frame.
    pub bytes: &'a [u8],
}

/// Gives frames to one receive queue.
pub trait Receiver: Send {
    /// Has frames at hand, `most` (1 at least) of those that are there at most, and says how many. They stay at hand, in their
    /// order, until [`Receiver::done`].
    ///
    /// # Errors
    /// The host has failed.
    fn fetch(&mut self, most: usize) -> io::Result<usize>;

    /// Number `number` of the frames at hand, from 0 on; `None` if there are not so many.
    fn frame(&self, number: usize) -> Option<Incoming<'_>>;

    /// The first `count` frames at hand were delivered or dropped.
    fn done(&mut self, count: usize);

    /// The batch ends: whoever waits for room is told.
    fn flush(&mut self) {}

    /// From here on a frame makes [`Receiver::fd`] readable. `true` if there is one already.
    fn listen(&mut self) -> bool {
        false
    }

    /// Whether there is a frame by now. `None`: that does not show without a system call.
    fn has_frame(&self) -> Option<bool> {
        None
    }

    /// Becomes readable when a frame comes.
    fn fd(&self) -> BorrowedFd<'_>;

    /// The queue of a TAP device behind it, if it is one.
    fn tap(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
