//! The socket to a client: whole messages with their descriptors, and no call that waits.
//!
//! ```text
//!  nothing --12 bytes--> header --payload_len--> payload --the last byte--> a message, and nothing again
//!     |                    |                        |
//!     closed: the end      closed: cut off          closed: cut off
//! ```
//! A client may send its bytes one by one: who waits for it, waits by `poll`. What it must not do is stop in the middle, since
//! the descriptors that have come may be its own end of the connection, which is not closed then while we wait; nor let our
//! replies fill its socket.
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

/// Longest time from the first byte of a message to the last.
const PATIENCE: Duration = Duration::from_secs(5);

/// Why a connection cannot go on.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SocketError {
    /// {0}
    #[error(transparent)]
    Message(#[from] MessageError),
    /// the client went away in the middle of a message
    #[error("the client went away in the middle of a message")]
    CutOff,
    /// more than {MAX_FDS} descriptors came with a message
    #[error("more than {MAX_FDS} descriptors came with a message")]
    TooManyFds,
    /// a message was not whole after {PATIENCE:?}
    #[error("a message was not whole after {PATIENCE:?}")]
    Slow,
    /// the client does not read what it is sent
    #[error("the client does not read what it is sent")]
    NotReading,
    /// the socket: {0}
    #[error("the socket: {0}")]
    Os(#[from] io::Error),
}

/// What a look at the socket brought.
#[derive(Debug)]
pub enum Received {
    /// A message; its payload is in [`Connection::payload`].
    Message(Header, Vec<OwnedFd>),
    /// Nothing whole yet.
    Nothing,
    /// The client has closed its end.
    Closed,
}

/// Our end.
#[derive(Debug)]
pub struct Connection {
    socket: OwnedFd,
    bytes: Box<[u8; HEADER + MAX_PAYLOAD]>,
    /// Bytes that have come.
    have: usize,
    /// Bytes of the message, as far as is known.
    need: usize,
    /// When its first byte came.
    begun: Option<Instant>,
    fds: Vec<OwnedFd>,
}

impl Connection {
    /// Takes a connected stream socket. Its flags stay what they are.
    #[must_use]
    pub fn new(socket: OwnedFd) -> Self {
        let bytes = Box::new([0; HEADER + MAX_PAYLOAD]);
        Self { socket, bytes, have: 0, need: HEADER, begun: None, fds: Vec::new() }
    }

    /// Takes what has come, up to the end of a message.
    ///
    /// # Errors
    /// What has come is no message.
    pub fn receive(&mut self) -> Result<Received, SocketError> {
        // The message that was handed out is done with.
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
            // Plain data: every value is one.
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

    /// How long the message that has begun to come may take still; `None`: none has.
    #[must_use]
    pub fn rest(&self) -> Option<Duration> {
        Some(PATIENCE.saturating_sub(self.begun?.elapsed()))
    }

    /// What came after the header of the last message.
    #[must_use]
    pub fn payload(&self) -> &[u8] {
        &self.bytes[HEADER..self.need.max(HEADER)]
    }

    /// One call; `None`: nothing is there.
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
                // As a client is gone that was killed.
                Err(Errno::CONNRESET) => return Ok(Some(0)),
                Err(error) => return Err(io::Error::from(error).into()),
            }
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                self.fds.extend(fds);
            }
        }
        // The kernel has closed what there was no room for.
        if received.flags.contains(ReturnFlags::CTRUNC) || self.fds.len() > MAX_FDS {
            return Err(SocketError::TooManyFds);
        }
        Ok(Some(received.bytes))
    }

    /// Sends a message.
    ///
    /// # Errors
    /// The client does not read, or is gone.
    pub fn send(&self, bytes: &[u8], fd: Option<BorrowedFd<'_>>) -> Result<(), SocketError> {
        send(self.socket.as_fd(), bytes, fd)
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Sends a message, whole or not at all.
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
            // Half a message is none, and nothing can follow it. One of ours is smaller than any buffer.
            Ok(_) => return Err(io::Error::from(io::ErrorKind::WriteZero).into()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(io::Error::from(error).into()),
        }
    }
}
