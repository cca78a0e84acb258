//! Messages between the two processes: of one size, with at most one descriptor.
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use vmm_sys_util::sock_ctrl_msg::ScmSocket;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Kinds of requests. All with a descriptor but [`START`](kind::START) have no answer.
pub(super) mod kind {
    /// Guest memory, as a descriptor.
    pub(crate) const MEMORY: u32 = 1;
    /// The disk's image, as a descriptor; also of a network card.
    pub(crate) const IMAGE: u32 = 2;
    /// The eventfd for the kicks of the queue that is started next.
    pub(crate) const KICK: u32 = 3;
    /// Start a queue, which interrupts by the descriptor.
    pub(crate) const START: u32 = 4;
    /// Stop a queue.
    pub(crate) const STOP: u32 = 5;
    /// Say what was counted.
    pub(crate) const FIGURES: u32 = 6;
}

/// A request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct Request {
    /// One of [`kind`].
    pub(super) kind: u32,
    pub(super) queue: u32,
    pub(super) size: u32,
    /// Position to begin at, as SET_VRING_BASE has it.
    pub(super) base: u32,
    pub(super) desc: u64,
    pub(super) driver: u64,
    pub(super) device_area: u64,
    pub(super) features: u64,
}

impl Request {
    pub(super) fn of(kind: u32) -> Self {
        Self { kind, ..Self::default() }
    }
}

/// An answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct Answer {
    /// 0: it was done.
    pub(super) refused: u64,
    pub(super) kicks: u64,
    pub(super) interrupts: u64,
    pub(super) cpu_ns: u64,
    pub(super) transmitted: u64,
    pub(super) received: u64,
    /// Position of a queue that was stopped.
    pub(super) base: u64,
}

/// Sends one.
///
/// # Errors
/// The other process is gone.
pub(super) fn send<T: IntoBytes + Immutable>(
    socket: &UnixStream,
    message: &T,
    fd: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let bytes = message.as_bytes();
    let fds: Vec<_> = fd.iter().map(AsRawFd::as_raw_fd).collect();
    let sent = socket.send_with_fds(&[bytes], &fds)?;
    // So few bytes fit into any socket's buffer at once.
    if sent == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// Receives one.
///
/// # Errors
/// The other process is gone.
pub(super) fn receive<T: FromBytes>(socket: &UnixStream) -> io::Result<(T, Option<File>)> {
    let mut bytes = vec![0; size_of::<T>()];
    let (got, file) = socket.recv_with_fd(&mut bytes)?;
    match T::read_from_bytes(&bytes) {
        Ok(message) if got == bytes.len() => Ok((message, file)),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn messages_come_one_by_one_with_their_descriptors() {
        let (one, other) = UnixStream::pair().unwrap();
        let request = Request { queue: 7, features: u64::MAX, ..Request::of(kind::START) };
        send(&one, &request, Some(other.as_fd())).unwrap();
        send(&one, &Request::of(kind::STOP), None).unwrap();
        let (got, file): (Request, _) = receive(&other).unwrap();
        assert!(got == request && file.is_some());
        let (got, file): (Request, _) = receive(&other).unwrap();
        assert!(got == Request::of(kind::STOP) && file.is_none());
        drop(one);
        assert!(receive::<Request>(&other).is_err());
    }
}
