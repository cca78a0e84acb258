//! Connection to a client: whole messages with their descriptors. No call waits.
//!
//! ```text
//!  idle --12 bytes--> header --payload_len--> payload --last byte--> a message, and idle again
//!    |                  |                        |
//!    closed: end        closed: cut off          closed: cut off
//! ```
//! A client may send its bytes one by one; wait for them with `poll`. It must not stop in the
//! middle of a message: the received descriptors may include its own end of the connection, which
//! would never close while we wait. It must not let our replies fill its socket either.
use crate::message::{self, HEADER, MAX_FDS, MAX_PAYLOAD, MessageError};
use paravane_spec::vhost_user::Header;
use rustix::io::{Errno, IoSlice, IoSliceMut};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};
use thiserror::Error;
use zerocopy::FromBytes;

/// Longest time from the first to the last byte of a message.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(5);

/// Error that ends a connection.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SocketError {
    /// Malformed message.
    #[error(transparent)]
    Message(#[from] MessageError),
    /// Disconnection within a message.
    #[error("client disconnected in the middle of a message")]
    CutOff,
    /// Message with too many descriptors.
    #[error("message with more than {MAX_FDS} file descriptors")]
    TooManyFds,
    /// Message that takes too long to arrive.
    #[error("incomplete message after {MESSAGE_TIMEOUT:?}")]
    Slow,
    /// Client whose socket buffer is full.
    #[error("client does not read its socket, and the reply does not fit")]
    NotReading,
    /// Failed system call.
    #[error("socket: {0}")]
    Os(#[from] io::Error),
}

/// Result of [`Connection::receive`].
#[derive(Debug)]
pub enum Received {
    /// A message. [`Connection::payload`] returns its payload.
    Message(Header, Vec<OwnedFd>),
    /// No complete message yet.
    Nothing,
    /// The client closed its end.
    Closed,
}

/// Our end of a connection.
#[derive(Debug)]
pub struct Connection {
    socket: OwnedFd,
    bytes: Box<[u8; HEADER + MAX_PAYLOAD]>,
    /// Number of bytes received.
    have: usize,
    /// Number of bytes of the message, as far as known.
    need: usize,
    /// Time of its first byte.
    begun: Option<Instant>,
    fds: Vec<OwnedFd>,
}

impl Connection {
    /// Takes a connected stream socket. Leaves its flags unchanged.
    #[must_use]
    pub fn new(socket: OwnedFd) -> Self {
        let bytes = Box::new([0; HEADER + MAX_PAYLOAD]);
        Self { socket, bytes, have: 0, need: HEADER, begun: None, fds: Vec::new() }
    }

    /// Continues a connection, in the middle of a message perhaps.
    ///
    /// `part` and `fds` are those that [`Connection::into_parts`] returned.
    ///
    /// # Errors
    /// The part is no beginning of a message.
    pub fn resume(socket: OwnedFd, part: &[u8], fds: Vec<OwnedFd>) -> Result<Self, SocketError> {
        let mut connection = Self::new(socket);
        if part.is_empty() && fds.is_empty() {
            return Ok(connection);
        }
        if let Ok((header, _)) = Header::read_from_prefix(part) {
            connection.need = HEADER + message::payload_len(header)?;
        }
        if part.is_empty() || part.len() >= connection.need {
            return Err(SocketError::CutOff);
        }
        if fds.len() > MAX_FDS {
            return Err(SocketError::TooManyFds);
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
        let Self { socket, bytes, have, need, fds, .. } = self;
        // The last message has been handled.
        let have = if have == need { 0 } else { have };
        (socket, bytes[..have].to_vec(), fds)
    }

    /// Receives until a message is complete or nothing is left to read.
    ///
    /// # Errors
    /// The data is no valid message, or the message takes too long.
    pub fn receive(&mut self) -> Result<Received, SocketError> {
        // The last message has been handled.
        if self.have == self.need {
            (self.have, self.need) = (0, HEADER);
        }
        loop {
            match self.receive_some()? {
                None if self.rest() == Some(Duration::ZERO) => return Err(SocketError::Slow),
                None => return Ok(Received::Nothing),
                Some(0) if self.have == 0 => return Ok(Received::Closed),
                Some(0) => return Err(SocketError::CutOff),
                Some(bytes) => {
                    self.have += bytes;
                    self.begun.get_or_insert_with(Instant::now);
                }
            }
            if self.have < self.need {
                continue;
            }
            // Plain data: every bit pattern is valid.
            let (header, _) = Header::read_from_prefix(&self.bytes[..]).map_err(|_| SocketError::CutOff)?;
            if self.have == HEADER {
                self.need = HEADER + message::payload_len(header)?;
            }
            if self.have == self.need {
                self.begun = None;
                return Ok(Received::Message(header, std::mem::take(&mut self.fds)));
            }
        }
    }

    /// Time left for the current message to complete; `None` if none has begun.
    #[must_use]
    pub fn rest(&self) -> Option<Duration> {
        Some(MESSAGE_TIMEOUT.saturating_sub(self.begun?.elapsed()))
    }

    /// Payload of the last message.
    #[must_use]
    pub fn payload(&self) -> &[u8] {
        &self.bytes[HEADER..self.need.max(HEADER)]
    }

    /// Receives once; `None` if there is no data.
    fn receive_some(&mut self) -> Result<Option<usize>, SocketError> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut slices = [IoSliceMut::new(&mut self.bytes[self.have..self.need])];
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
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
        if received.flags.contains(ReturnFlags::CTRUNC) || self.fds.len() > MAX_FDS {
            return Err(SocketError::TooManyFds);
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
pub(crate) fn send(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fd: Option<BorrowedFd<'_>>,
) -> Result<(), SocketError> {
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
