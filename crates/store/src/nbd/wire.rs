//! A connection after its negotiation: plain or encrypted, without blocking.
use super::socket::{receive, send};
use paravane_dma::HostSlice;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// A connection.
#[derive(Debug)]
pub(super) enum Wire {
    Plain(OwnedFd),
    #[cfg(feature = "tls")]
    Tls(Box<super::tls::Encrypted>),
}

impl AsFd for Wire {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Plain(socket) => socket.as_fd(),
            #[cfg(feature = "tls")]
            Self::Tls(encrypted) => encrypted.as_fd(),
        }
    }
}

impl Wire {
    /// Sends from pieces, as much as goes at once. Less than all: the socket takes no more.
    ///
    /// # Safety
    /// As [`send`].
    pub(super) unsafe fn send(&mut self, pieces: &[HostSlice]) -> io::Result<usize> {
        match self {
            // SAFETY: the caller's promise.
            Self::Plain(socket) => unsafe { send(socket.as_fd(), pieces) },
            #[cfg(feature = "tls")]
            // SAFETY: the caller's promise.
            Self::Tls(encrypted) => unsafe { encrypted.send(pieces) },
        }
    }

    /// Receives into pieces. Less than fits: nothing more is there. 0: the peer has closed.
    ///
    /// # Safety
    /// As [`receive`].
    pub(super) unsafe fn receive(&mut self, pieces: &[HostSlice]) -> io::Result<usize> {
        match self {
            // SAFETY: the caller's promise.
            Self::Plain(socket) => unsafe { receive(socket.as_fd(), pieces) },
            #[cfg(feature = "tls")]
            // SAFETY: the caller's promise.
            Self::Tls(encrypted) => unsafe { encrypted.receive(pieces) },
        }
    }

    /// Sends what was encrypted and is not sent yet. `true` if all is sent.
    pub(super) fn flush(&mut self) -> io::Result<bool> {
        match self {
            Self::Plain(_) => Ok(true),
            #[cfg(feature = "tls")]
            Self::Tls(encrypted) => encrypted.flush(),
        }
    }

    /// The bare socket.
    pub(super) fn into_socket(self) -> OwnedFd {
        match self {
            Self::Plain(socket) => socket,
            #[cfg(feature = "tls")]
            Self::Tls(encrypted) => encrypted.into_socket(),
        }
    }
}
