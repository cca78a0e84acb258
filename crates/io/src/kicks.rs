//! Where the kicks of a queue arrive.
use crate::pipes::read_now;
use paravane_notify::{HostNotifier, NotifierState, NotifyError};
use rustix::event::epoll::EventFlags;
use rustix::fs::FileType;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Where the kicks of a queue arrive.
#[derive(Debug)]
pub enum Kicks {
    /// From a guest of this process: at a notifier, by ioeventfd or by an exit.
    Host(Arc<HostNotifier>),
    /// From another process.
    Foreign(ForeignKicks),
}

impl From<Arc<HostNotifier>> for Kicks {
    fn from(notifier: Arc<HostNotifier>) -> Self {
        Self::Host(notifier)
    }
}

impl Kicks {
    /// Whether the notifier counts signals, our own among them.
    pub(crate) fn are_ours(&self) -> bool {
        matches!(self, Self::Host(_))
    }

    /// See [`HostNotifier::assign`].
    pub(crate) fn assign(&self) -> Result<(), NotifyError> {
        match self {
            Self::Host(notifier) => notifier.assign(),
            Self::Foreign(_) => Ok(()),
        }
    }

    /// Ends the loan to a back end, if there is one, and signals once.
    pub(crate) fn give_back(&self) {
        if let Self::Host(notifier) = self {
            while notifier.state() == NotifierState::OffLimits && notifier.release().is_ok() {}
        }
    }

    /// Removes the ioeventfd, if there is one: kicks exit.
    pub(crate) fn deassign(&self) {
        if let Self::Host(notifier) = self
            && notifier.state() == NotifierState::Assigned
            && let Err(error) = notifier.deassign()
        {
            tracing::error!("cannot remove an ioeventfd: {error}");
        }
    }

    /// Descriptor to wait on.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Host(notifier) => notifier.notifier().as_fd(),
            Self::Foreign(kicks) => kicks.fd.as_fd(),
        }
    }

    /// Events to wait for.
    pub(crate) fn events(&self) -> EventFlags {
        match self {
            Self::Host(_) => EventFlags::IN,
            // Each write is an event, read or not.
            Self::Foreign(_) => EventFlags::IN | EventFlags::ET,
        }
    }

    /// Takes the signals that have arrived and returns their number.
    ///
    /// It is 1 for kicks from another process.
    pub(crate) fn take(&self) -> u64 {
        match self {
            Self::Host(notifier) => notifier.notifier().take(),
            Self::Foreign(kicks) => kicks.take(),
        }
    }
}

/// A descriptor that another process writes to as a kick.
///
/// An eventfd, or a pipe (User Mode Linux).
///
/// The other process shares the file description, so we leave its flags alone. A read may block if
/// the other process has read first. An eventfd is therefore never read: an edge-triggered wait
/// sees each write, which also saves a system call a kick. A pipe fills up, and is read without
/// waiting.
#[derive(Debug)]
pub struct ForeignKicks {
    fd: OwnedFd,
    is_pipe: bool,
}

impl ForeignKicks {
    /// Takes ownership of the descriptor.
    ///
    /// # Errors
    /// It is neither an eventfd nor a pipe.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        let is_pipe = !is_eventfd(&fd)?;
        Ok(Self { fd, is_pipe })
    }

    fn take(&self) -> u64 {
        if self.is_pipe {
            while matches!(read_now(&self.fd, &mut [0; 4096]), Ok(4096)) {}
        }
        // The number of writes is not known without reading.
        1
    }
}

/// Whether a descriptor of another process is an eventfd; `false`: it is a pipe.
///
/// Other kinds are refused. A socket can carry descriptors of other connections, and keeps them
/// open as long as we keep the socket. Most others block, or have side effects when read or
/// written.
///
/// # Errors
/// It is neither, or cannot be examined.
pub fn is_eventfd(fd: &OwnedFd) -> io::Result<bool> {
    let refused = || io::Error::new(io::ErrorKind::InvalidInput, "neither an eventfd nor a pipe");
    match FileType::from_raw_mode(rustix::fs::fstat(fd)?.st_mode) {
        FileType::Fifo => Ok(false),
        // Anonymous inodes have no type; the name tells. Without /proc, such a descriptor counts as
        // an eventfd.
        FileType::Unknown => match std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())) {
            Ok(name) if name.as_os_str() != "anon_inode:[eventfd]" => Err(refused()),
            _ => Ok(true),
        },
        _ => Err(refused()),
    }
}
