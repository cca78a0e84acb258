//! Store in another process: `paravane hold`.
use super::datagram::{self, Received};
use super::text::{Answer, MAX_ANSWER, MAX_FDS, Name, Request};
use super::{DescriptorStore, StoreError, TIMEOUT};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with,
};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

/// Maximum number of descriptors that a holder returns: more than the kernel lets a process open.
const MAX_HELD: usize = 1 << 20;

/// Connection to a holder, which serves no other daemon meanwhile.
#[derive(Debug)]
pub(crate) struct HolderStore {
    socket: OwnedFd,
}

/// A descriptor of an earlier daemon.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) name: Name,
    pub(crate) fd: OwnedFd,
}

impl HolderStore {
    /// Connects to the holder that listens on `path`.
    ///
    /// # Errors
    /// No holder listens, or it serves another daemon.
    pub(crate) fn connect(path: &Path) -> Result<Self, StoreError> {
        let os = io::Error::from;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .map_err(os)?;
        for timeout in [Timeout::Send, Timeout::Recv] {
            set_socket_timeout(&socket, timeout, Some(TIMEOUT)).map_err(os)?;
        }
        connect(&socket, &SocketAddrUnix::new(path).map_err(os)?).map_err(os)?;
        let store = Self { socket };
        match store.answer()? {
            (Answer::Hello { .. }, fds) if fds.is_empty() => Ok(store),
            _ => Err(StoreError::Answer),
        }
    }

    /// Copies of all held descriptors, in the order in which they were stored.
    ///
    /// The holder keeps them until they are removed: a daemon that dies before it has used them
    /// leaves them to its successor.
    ///
    /// # Errors
    /// The holder does not answer, or this process may not open that many descriptors.
    pub(crate) fn take(&self) -> Result<Vec<Held>, StoreError> {
        let mut all = Vec::new();
        loop {
            match self.ask(&Request::Take { from: all.len() }, &[])? {
                (Answer::Held(names), fds) if names.len() == fds.len() && !fds.is_empty() => {
                    all.extend(names.into_iter().zip(fds).map(|(name, fd)| Held { name, fd }));
                }
                (Answer::End { total }, fds) if fds.is_empty() && total == all.len() => return Ok(all),
                _ => return Err(StoreError::Answer),
            }
            if all.len() > MAX_HELD {
                return Err(StoreError::Answer);
            }
        }
    }

    /// Sends a request and waits for the answer.
    fn ask(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<(Answer, Vec<OwnedFd>), StoreError> {
        datagram::send(self.socket.as_fd(), &request.to_string(), fds, SendFlags::empty())?;
        self.answer()
    }

    fn answer(&self) -> Result<(Answer, Vec<OwnedFd>), StoreError> {
        let mut buffer = [0; MAX_ANSWER];
        let Received { len, fds, text_cut, fds_cut } =
            datagram::receive(self.socket.as_fd(), &mut buffer, RecvFlags::empty())
                .map_err(io::Error::from)?;
        if fds_cut {
            let limit = io::Error::other("cannot receive descriptors: RLIMIT_NOFILE is too low");
            return Err(StoreError::Os(limit));
        }
        match (len, text_cut) {
            (0, _) => Err(StoreError::Ended),
            (_, true) => Err(StoreError::Answer),
            (len, false) => match Answer::parse(&buffer[..len])? {
                Answer::Refused(why) => Err(StoreError::Refused(why)),
                answer => Ok((answer, fds)),
            },
        }
    }

    fn expect_done(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<(), StoreError> {
        match self.ask(request, fds)? {
            (Answer::Done, _) => Ok(()),
            _ => Err(StoreError::Answer),
        }
    }
}

impl DescriptorStore for HolderStore {
    fn put(&self, name: &Name, fds: &[BorrowedFd<'_>]) -> Result<(), StoreError> {
        let request = Request::Store(name.clone());
        fds.chunks(MAX_FDS).try_for_each(|some| self.expect_done(&request, some))
    }

    fn remove(&self, name: &Name) -> Result<(), StoreError> {
        self.expect_done(&Request::Remove(name.clone()), &[])
    }
}
