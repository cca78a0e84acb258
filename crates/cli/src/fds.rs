//! Messages with descriptors over Unix sockets.
use rustix::io::{Errno, IoSlice, IoSliceMut};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Most descriptors that the kernel takes at once (SCM_MAX_FD).
pub(crate) const MOST: usize = 253;
/// Bytes of their control message.
const SPACE: usize = rustix::cmsg_space!(ScmRights(MOST));

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

/// Two connected sockets that keep the boundaries of messages.
///
/// # Errors
/// The kernel refuses.
pub(crate) fn pair() -> Result<(OwnedFd, OwnedFd), Errno> {
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
}

/// Receives a message with at most about `most` descriptors. The kernel closes others.
///
/// # Errors
/// The kernel refuses, or there is no message and the socket or `flags` forbid to wait.
pub(crate) fn receive(
    socket: &impl AsFd,
    buffer: &mut [u8],
    most: usize,
    flags: RecvFlags,
) -> Result<Received, Errno> {
    let mut space = [MaybeUninit::uninit(); SPACE];
    let most = most.min(MOST);
    let mut control = RecvAncillaryBuffer::new(&mut space[..rustix::cmsg_space!(ScmRights(most))]);
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

/// Sends a message with at most [`MOST`] descriptors.
///
/// # Errors
/// The kernel refuses, or there is no room and the socket or `flags` forbid to wait.
pub(crate) fn send(
    socket: &impl AsFd,
    text: &[u8],
    fds: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::INVAL);
    }
    loop {
        match sendmsg(socket, &[IoSlice::new(text)], &mut control, flags | SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            // Sockets that keep boundaries take a message as a whole.
            sent => return sent.map(drop),
        }
    }
}
