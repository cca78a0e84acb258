//! Descriptor store: descriptors that outlive the daemon.
//!
//! ```text
//!   daemon --FDSTORE=1, FDNAME=name--> service manager ($NOTIFY_SOCKET)   --LISTEN_FDS-->            the next daemon
//!          '-the same, with answers--> paravane hold (--holder PATH)      --TAKE=1, in chunks-->
//! ```
//! Both keep an open file alive after the daemon's death: connections, memory, eventfds with their
//! counters. Both speak the protocol of sd_pid_notify_with_fds(3); [`text`] has the messages that
//! only the holder knows.
//!
//! A name may have several descriptors. Store an open file under one name only: systemd ignores one
//! that it has already.
mod holder;
mod manager;
pub(crate) mod text;

pub(crate) use holder::{Held, HolderStore, WaitingHolder};
pub(crate) use manager::{ManagerStore, connect};
pub(crate) use text::Name;

use std::fmt::Debug;
use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;
use text::TextError;
use thiserror::Error;

/// How long a store may take to accept or answer a message.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Error of a descriptor store.
#[derive(Debug, Error)]
pub(crate) enum StoreError {
    #[error("the descriptor store refuses: {0}")]
    Refused(String),
    #[error("the descriptor store did not answer within {} s", TIMEOUT.as_secs())]
    Timeout,
    #[error("the holder serves another daemon for {} s: stop it, or give this one its own", .0.as_secs())]
    Busy(Duration),
    #[error("the descriptor store has ended")]
    Ended,
    #[error("invalid answer of the descriptor store: {0}")]
    Text(#[from] TextError),
    #[error("unexpected answer of the descriptor store")]
    Answer,
    #[error("descriptor store: {0}")]
    Os(io::Error),
}

impl From<io::Error> for StoreError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Self::Timeout,
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Self::Ended,
            _ => Self::Os(error),
        }
    }
}

/// Keeps copies of descriptors when this process ends.
pub(crate) trait DescriptorStore: Debug + Send {
    /// Stores copies of descriptors under a name, beside those that the name has.
    ///
    /// More than a message carries are stored in several steps: after an error, some may be stored.
    ///
    /// # Errors
    /// The store has no room, does not answer or has ended.
    fn put(&mut self, name: &Name, fds: &[BorrowedFd<'_>]) -> Result<(), StoreError>;

    /// Closes the store's copies of all descriptors of a name.
    ///
    /// # Errors
    /// The store does not answer or has ended.
    fn remove(&mut self, name: &Name) -> Result<(), StoreError>;

    /// Number of descriptors that the store takes, if it tells.
    fn limit(&mut self) -> Option<usize> {
        None
    }
}
