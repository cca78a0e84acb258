//! Connection to a client: whole messages with their descriptors. No call waits.
//!
//! ```text
//!  idle --first bytes--> header --its length--> payload --last byte--> a message, and idle again
//!    |                     |                       |
//!    closed: end           closed: cut off         closed: cut off
//! ```
//! A client may send its bytes one by one; wait for them with `poll`. It must not stop in the
//! middle of a message: the received descriptors may include its own end of the connection, which
//! would never close while we wait. It must not let our replies fill its socket either.
//!
//! A connection that a later process may continue (see [`crate::keeper`]) leaves each message on the
//! socket until it is done:
//! ```text
//!  idle --all of it has arrived: peeked--> a message --settle: taken off, and answered--> idle
//! ```
mod exchange;
mod peek;

use crate::framing::{Framing, SessionEnd};
use crate::handover::record::{Pending, PendingAnswer};
use exchange::Exchange;
use rustix::io::{Errno, IoSlice, IoSliceMut};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recv, recvmsg, sendmsg,
};
use std::fmt::Debug;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};
use thiserror::Error;

/// Longest time from the first to the last byte of a message.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(5);
/// Time until another look at a message that has arrived in part and stays on the socket.
const PEEK_INTERVAL: Duration = Duration::from_millis(1);

/// Error that ends a connection.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SocketError {
    /// Malformed message.
    #[error(transparent)]
    Message(SessionEnd),
    /// Disconnection within a message.
    #[error("client disconnected in the middle of a message")]
    CutOff,
    /// Message with too many descriptors.
    #[error("message with more than {0} file descriptors")]
    TooManyFds(usize),
    /// Message that takes too long to arrive.
    #[error("incomplete message after {MESSAGE_TIMEOUT:?}")]
    Slow,
    /// Client whose socket buffer is full.
    #[error("client does not read its socket, and the reply does not fit")]
    NotReading,
    /// Message that an earlier process may have answered or not.
    #[error("an earlier process died while it answered a message; the answer may be missing")]
    Unanswered,
    /// Message with a descriptor that must not be taken.
    #[error("message with a descriptor that cannot be taken: {0}")]
    Refused(#[source] io::Error),
    /// Failed system call.
    #[error("socket: {0}")]
    Os(#[from] io::Error),
}

/// Looks at the descriptors of a message in another process, before this one has them.
///
/// Whoever has a descriptor must close it, which may take for ever: the owner of a file system that a
/// process serves (FUSE) answers when it likes.
pub trait Inspector: Debug + Send + Sync {
    /// Judges the descriptors that come with the next `len` bytes of a stream socket.
    ///
    /// Peeks them, so that they can be received afterwards. The peek offset moves.
    ///
    /// # Errors
    /// One must not be taken, or there is no answer.
    fn inspect(&self, connection: BorrowedFd<'_>, len: usize) -> io::Result<()>;
}

/// Bytes of an answer, and at most one descriptor.
pub(crate) type AnswerParts<'a> = (&'a [u8], Option<BorrowedFd<'a>>);

/// Result of [`Connection::receive`].
#[derive(Debug)]
pub enum Received {
    /// A message. [`Connection::message`] returns its bytes.
    Message(Vec<OwnedFd>),
    /// No complete message yet.
    Nothing,
    /// The client closed its end.
    Closed,
}

/// What was peeked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Peeked {
    Whole,
    Part,
    /// There is no more, and there will be none.
    Closed,
}

/// Our end of a connection.
#[derive(Debug)]
pub struct Connection {
    socket: OwnedFd,
    framing: &'static Framing,
    /// One more than the longest message: see [`Connection::peek_to_need`].
    bytes: Box<[u8]>,
    /// Space for the descriptors of a message.
    control: Box<[MaybeUninit<u8>]>,
    /// Number of bytes received.
    have: usize,
    /// Number of bytes of the message, as far as known.
    need: usize,
    /// Time of its first byte.
    begun: Option<Instant>,
    fds: Vec<OwnedFd>,
    /// Messages stay on the socket until they are settled.
    is_kept: bool,
    /// `None`: settling takes two steps.
    exchange: Option<Exchange>,
    /// Lengths of the pieces in which the last message lies on the socket.
    pieces: Vec<usize>,
    inspector: Option<Arc<dyn Inspector>>,
}

impl Connection {
    /// Takes a connected stream socket. Leaves its flags unchanged.
    #[must_use]
    pub fn new(socket: OwnedFd, framing: &'static Framing) -> Self {
        Self {
            socket,
            framing,
            bytes: vec![0; framing.max_message + 1].into(),
            control: vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(framing.max_fds))].into(),
            have: 0,
            need: framing.header,
            begun: None,
            fds: Vec::new(),
            is_kept: false,
            exchange: None,
            pieces: Vec::new(),
            inspector: None,
        }
    }

    /// Takes no descriptor that `inspector` has not judged [all are taken].
    #[must_use]
    pub fn inspected_by(self, inspector: Option<Arc<dyn Inspector>>) -> Self {
        Self { inspector, ..self }
    }

    /// Continues a connection, in the middle of a message perhaps.
    ///
    /// `part` and `fds` are those that [`Connection::into_parts`] returned.
    ///
    /// # Errors
    /// The part is no beginning of a message.
    pub fn resume(
        socket: OwnedFd,
        framing: &'static Framing,
        part: &[u8],
        fds: Vec<OwnedFd>,
    ) -> Result<Self, SocketError> {
        let mut connection = Self::new(socket, framing);
        if part.is_empty() && fds.is_empty() {
            return Ok(connection);
        }
        connection.need = framing.message_len(part).map_err(SocketError::Message)?;
        if part.is_empty() || part.len() >= connection.need {
            return Err(SocketError::CutOff);
        }
        if fds.len() > framing.max_fds {
            return Err(SocketError::TooManyFds(framing.max_fds));
        }
        connection.bytes[..part.len()].copy_from_slice(part);
        (connection.have, connection.begun, connection.fds) = (part.len(), Some(Instant::now()), fds);
        Ok(connection)
    }

    /// Ends the use of a connection, and leaves it open.
    ///
    /// Returns the socket, and the part of a message that has arrived with its descriptors.
    #[must_use]
    pub fn into_parts(self) -> (OwnedFd, Vec<u8>, Vec<OwnedFd>) {
        let Self { socket, bytes, have, need, fds, is_kept, .. } = self;
        // The last message has been handled, or it lies on the socket.
        let have = if have == need || is_kept { 0 } else { have };
        (socket, bytes[..have].to_vec(), fds)
    }

    /// From the next message on, leaves each on the socket until it is settled.
    ///
    /// Call it at a boundary.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(crate) fn keep(&mut self) -> Result<(), SocketError> {
        peek::set_offset(self.socket.as_fd(), 0)?;
        self.exchange =
            Exchange::new(self.framing).inspect_err(|error| tracing::debug!("no io_uring: {error}")).ok();
        self.is_kept = true;
        Ok(())
    }

    /// Whether messages stay on the socket until they are settled.
    pub(crate) fn is_kept(&self) -> bool {
        self.is_kept
    }

    /// Whether [`Connection::settle`] is one step.
    pub(crate) fn settles_at_once(&self) -> bool {
        self.exchange.is_some()
    }

    /// Whether the last message lies on the socket.
    pub(crate) fn is_unsettled(&self) -> bool {
        !self.pieces.is_empty()
    }

    /// Whether no part of a message has been taken off the socket.
    pub(crate) fn is_at_boundary(&self) -> bool {
        self.have == 0 || self.have == self.need
    }

    /// As [`Connection::keep`], where an earlier process has left a message.
    ///
    /// Returns whether the first message on the socket is done, and must be settled with its answer.
    ///
    /// # Errors
    /// The client may have an answer or not; or there is no such message.
    pub(crate) fn recover(&mut self, pending: &Pending) -> Result<bool, SocketError> {
        let offset = usize::try_from(peek::offset(self.socket.as_fd())?).unwrap_or(0);
        self.keep()?;
        let Pending::Done { len, answer, at_once } = pending else { return Ok(false) };
        if offset != *len {
            // It was taken off the socket.
            let is_answered = *at_once || *answer == PendingAnswer::None;
            return if is_answered { Ok(false) } else { Err(SocketError::Unanswered) };
        }
        if *answer == PendingAnswer::Again {
            return Ok(false);
        }
        match self.receive()? {
            Received::Message(_) if self.need == *len && self.is_unsettled() => Ok(true),
            _ => Err(SocketError::CutOff),
        }
    }

    /// Takes the last message off the socket and sends its answer.
    ///
    /// # Errors
    /// The client does not read, or has disconnected.
    pub(crate) fn settle(&mut self, answer: Option<AnswerParts<'_>>) -> Result<(), SocketError> {
        let pieces = std::mem::take(&mut self.pieces);
        if !pieces.is_empty() {
            if let Some(exchange) = &mut self.exchange {
                return exchange.run(self.socket.as_fd(), &pieces, answer).map_err(|error| {
                    match error.kind() {
                        io::ErrorKind::WouldBlock => SocketError::NotReading,
                        _ => error.into(),
                    }
                });
            }
            let mut taken = vec![0; self.framing.max_message];
            for piece in pieces {
                let space = taken.get_mut(..piece).ok_or(SocketError::CutOff)?;
                let received = loop {
                    match recv(&self.socket, &mut *space, RecvFlags::DONTWAIT) {
                        Err(Errno::INTR) => {}
                        received => break received.map_err(io::Error::from)?,
                    }
                };
                if received.0 != piece {
                    return Err(SocketError::CutOff);
                }
            }
        }
        match answer {
            Some((bytes, fd)) => self.send(bytes, fd),
            None => Ok(()),
        }
    }

    /// Looks at the next message without taking it off the socket.
    fn peek(&mut self) -> Result<Received, SocketError> {
        (self.have, self.need) = (0, self.framing.header);
        let mut peeked = self.peek_to_need()?;
        if peeked == Peeked::Whole {
            self.need = self.message_len()?;
            if self.need > self.framing.header {
                // From the start again, so that the pieces are those of the whole message.
                self.have = 0;
                peeked = self.peek_to_need()?;
            }
        }
        let timeout = self.rest() == Some(Duration::ZERO);
        match peeked {
            Peeked::Whole => {
                self.begun = None;
                Ok(Received::Message(std::mem::take(&mut self.fds)))
            }
            Peeked::Closed if self.have == 0 => Ok(Received::Closed),
            Peeked::Closed => Err(SocketError::CutOff),
            Peeked::Part if timeout => Err(SocketError::Slow),
            Peeked::Part => {
                if self.have > 0 {
                    self.begun.get_or_insert_with(Instant::now);
                }
                self.pieces.clear();
                self.fds.clear();
                Ok(Received::Nothing)
            }
        }
    }

    /// Peeks the first `need` bytes, with their descriptors. The peek offset is `need` then.
    ///
    /// The kernel ends a piece behind bytes that descriptors came with. If there were none, it goes
    /// on, and may return descriptors of the next message even if no byte of that was asked for. So
    /// one byte more is asked for: with it, the descriptors are those of the next message.
    fn peek_to_need(&mut self) -> Result<Peeked, SocketError> {
        peek::set_offset(self.socket.as_fd(), 0)?;
        self.pieces.clear();
        self.fds.clear();
        while self.have < self.need {
            let own = self.fds.len();
            match self.receive_some(self.need + 1, RecvFlags::PEEK)? {
                None => return Ok(Peeked::Part),
                Some(0) => return Ok(Peeked::Closed),
                Some(bytes) => {
                    let rest = self.need - self.have;
                    if bytes > rest {
                        self.fds.truncate(own);
                    }
                    self.check_fds()?;
                    self.have += bytes.min(rest);
                    self.pieces.push(bytes.min(rest));
                }
            }
        }
        peek::set_offset(self.socket.as_fd(), self.need as libc::c_int)?;
        Ok(Peeked::Whole)
    }

    fn check_fds(&self) -> Result<(), SocketError> {
        let most = self.framing.max_fds;
        if self.fds.len() > most { Err(SocketError::TooManyFds(most)) } else { Ok(()) }
    }

    /// Length of the message whose header is there.
    fn message_len(&self) -> Result<usize, SocketError> {
        self.framing.message_len(&self.bytes[..self.have]).map_err(SocketError::Message)
    }

    /// Whether a part of a message is on the socket, which is readable therefore.
    pub(crate) fn has_part(&self) -> bool {
        self.is_kept && self.begun.is_some()
    }

    /// Receives until a message is complete or nothing is left to read.
    ///
    /// # Errors
    /// The data is no valid message, or the message takes too long.
    pub fn receive(&mut self) -> Result<Received, SocketError> {
        if self.is_kept {
            return self.peek();
        }
        // The last message has been handled.
        if self.have == self.need {
            (self.have, self.need) = (0, self.framing.header);
        }
        loop {
            match self.receive_some(self.need, RecvFlags::empty())? {
                None if self.rest() == Some(Duration::ZERO) => return Err(SocketError::Slow),
                None => return Ok(Received::Nothing),
                Some(0) if self.have == 0 => return Ok(Received::Closed),
                Some(0) => return Err(SocketError::CutOff),
                Some(bytes) => {
                    self.have += bytes;
                    self.check_fds()?;
                    self.begun.get_or_insert_with(Instant::now);
                }
            }
            if self.have < self.need {
                continue;
            }
            if self.have == self.framing.header {
                self.need = self.message_len()?;
            }
            if self.have == self.need {
                self.begun = None;
                return Ok(Received::Message(std::mem::take(&mut self.fds)));
            }
        }
    }

    /// Time left for the current message to complete; `None` if none has begun.
    #[must_use]
    pub fn rest(&self) -> Option<Duration> {
        Some(MESSAGE_TIMEOUT.saturating_sub(self.begun?.elapsed()))
    }

    /// Time until [`Connection::receive`] is due, if the socket does not become readable before.
    pub(crate) fn next_look(&self) -> Option<Duration> {
        let rest = self.rest()?;
        Some(if self.is_kept { rest.min(PEEK_INTERVAL) } else { rest })
    }

    /// The last message.
    #[must_use]
    pub fn message(&self) -> &[u8] {
        &self.bytes[..self.need]
    }

    /// Receives once, up to the byte `end` of the message; `None` if there is no data.
    fn receive_some(&mut self, end: usize, more: RecvFlags) -> Result<Option<usize>, SocketError> {
        let Some(inspector) = self.inspector.clone() else { return self.receive_all(end, more) };
        // A connection that was kept may have an offset.
        self.set_peek_offset()?;
        let (bytes, has_fds) = match self.peek_bytes(end)? {
            None => return Ok(None),
            Some((0, _)) => return Ok(Some(0)),
            Some(found) => found,
        };
        if !has_fds {
            return if more.contains(RecvFlags::PEEK) { Ok(Some(bytes)) } else { self.take_bytes(bytes) };
        }
        self.set_peek_offset()?;
        inspector.inspect(self.socket.as_fd(), end - self.have).map_err(SocketError::Refused)?;
        self.set_peek_offset()?;
        self.receive_all(end, more)
    }

    /// Has the next peek begin where the next piece does.
    fn set_peek_offset(&self) -> Result<(), SocketError> {
        let offset = if self.is_kept { self.have as libc::c_int } else { peek::NONE };
        Ok(peek::set_offset(self.socket.as_fd(), offset)?)
    }

    /// Peeks bytes without their descriptors. Returns their number, and whether there are some.
    fn peek_bytes(&mut self, end: usize) -> Result<Option<(usize, bool)>, SocketError> {
        let mut slices = [IoSliceMut::new(&mut self.bytes[self.have..end])];
        let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
        loop {
            match recvmsg(&self.socket, &mut slices, &mut RecvAncillaryBuffer::default(), flags) {
                Ok(received) => {
                    return Ok(Some((received.bytes, received.flags.contains(ReturnFlags::CTRUNC))));
                }
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR) => {}
                // The client was killed.
                Err(Errno::CONNRESET) => return Ok(Some((0, false))),
                Err(error) => return Err(io::Error::from(error).into()),
            }
        }
    }

    /// Receives bytes that were peeked, and came without descriptors.
    fn take_bytes(&mut self, count: usize) -> Result<Option<usize>, SocketError> {
        let space = &mut self.bytes[self.have..self.have + count];
        loop {
            match recv(&self.socket, &mut *space, RecvFlags::DONTWAIT) {
                Err(Errno::INTR) => {}
                Err(Errno::CONNRESET) => return Ok(Some(0)),
                received => return Ok(Some(received.map_err(io::Error::from)?.0)),
            }
        }
    }

    /// As [`Connection::receive_some`], with all descriptors.
    fn receive_all(&mut self, end: usize, more: RecvFlags) -> Result<Option<usize>, SocketError> {
        let mut control = RecvAncillaryBuffer::new(&mut self.control);
        let mut slices = [IoSliceMut::new(&mut self.bytes[self.have..end])];
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC | more;
        let received = loop {
            match recvmsg(&self.socket, &mut slices, &mut control, flags) {
                Ok(received) => break received,
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR) => {}
                // The client was killed.
                Err(Errno::CONNRESET) => return Ok(Some(0)),
                Err(error) => return Err(io::Error::from(error).into()),
            }
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                self.fds.extend(fds);
            }
        }
        // The kernel closed the descriptors that did not fit.
        if received.flags.contains(ReturnFlags::CTRUNC) {
            return Err(SocketError::TooManyFds(self.framing.max_fds));
        }
        Ok(Some(received.bytes))
    }

    /// Sends a message.
    ///
    /// # Errors
    /// The client does not read, or has disconnected.
    pub fn send(&self, bytes: &[u8], fd: Option<BorrowedFd<'_>>) -> Result<(), SocketError> {
        send(self.socket.as_fd(), bytes, fd)
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Sends a message completely or not at all.
///
/// # Errors
/// The client does not read, or has disconnected.
pub fn send(socket: BorrowedFd<'_>, bytes: &[u8], fd: Option<BorrowedFd<'_>>) -> Result<(), SocketError> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = fd.as_slice();
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    loop {
        match sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags) {
            Ok(sent) if sent == bytes.len() => return Ok(()),
            Err(Errno::AGAIN) => return Err(SocketError::NotReading),
            // A part of a message is useless, and nothing can follow it. Our messages are smaller
            // than any buffer.
            Ok(_) => return Err(io::Error::from(io::ErrorKind::WriteZero).into()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(io::Error::from(error).into()),
        }
    }
}

#[cfg(test)]
mod tests;
