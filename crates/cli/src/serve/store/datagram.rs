//! Messages with descriptors over sockets that keep their boundaries.
use super::text::MAX_FDS;
use rustix::io::{Errno, IoSlice, IoSliceMut};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

/// A message that was received.
#[derive(Debug)]
pub(crate) struct Received {
    /// Length of the text in bytes. 0: the other end was closed.
    pub(crate) len: usize,
    pub(crate) fds: Vec<OwnedFd>,
    /// The text is longer than the buffer.
    pub(crate) text_cut: bool,
    /// The kernel dropped descriptors: there were too many, or this process may open no more.
    pub(crate) fds_cut: bool,
}

/// Receives a message.
///
/// # Errors
/// The kernel refuses, or there is no message and the socket or `flags` forbid to wait.
pub(crate) fn receive(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
    flags: RecvFlags,
) -> Result<Received, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let mut slices = [IoSliceMut::new(buffer)];
        match recvmsg(socket, &mut slices, &mut control, flags | RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            received => break received?,
        }
    };
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(more) = message {
            fds.extend(more);
        }
    }
    let flags = received.flags;
    let (text_cut, fds_cut) = (flags.contains(ReturnFlags::TRUNC), flags.contains(ReturnFlags::CTRUNC));
    Ok(Received { len: received.bytes.min(buffer.len()), fds, text_cut, fds_cut })
}

/// Sends a message with at most [`MAX_FDS`] descriptors.
///
/// # Errors
/// The kernel refuses, or there is no room and the socket or `flags` forbid to wait.
pub(crate) fn send(
    socket: BorrowedFd<'_>,
    text: &str,
    fds: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many descriptors for a message"));
    }
    loop {
        match sendmsg(socket, &[IoSlice::new(text.as_bytes())], &mut control, flags | SendFlags::NOSIGNAL) {
            // Such sockets take a message as a whole.
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
