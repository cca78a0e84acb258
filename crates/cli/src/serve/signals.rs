//! Signals of the daemon, read by the main thread.
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

/// SIGTERM, SIGINT and SIGHUP, blocked in all threads and read from a descriptor.
#[derive(Debug)]
pub(crate) struct Signals {
    fd: SignalFd,
}

/// The request of a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    /// SIGTERM, SIGINT.
    End,
    /// SIGHUP.
    Reload,
}

impl Signals {
    /// Blocks the signals.
    ///
    /// Must be called before a second thread starts: later threads inherit the mask.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(crate) fn take() -> io::Result<Self> {
        let set = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP]);
        set.thread_block()?;
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        Ok(Self { fd: SignalFd::with_flags(&set, flags)? })
    }

    /// Waits for the next signal. `None`: one of `others` is readable, or `time` has passed.
    ///
    /// # Errors
    /// The descriptors cannot be polled or read.
    pub(crate) fn wait(
        &self,
        others: &[BorrowedFd<'_>],
        time: Option<Duration>,
    ) -> io::Result<Option<Request>> {
        let time = time.and_then(|time| Timespec::try_from(time).ok());
        let mut fds = vec![PollFd::new(&self.fd, PollFlags::IN)];
        fds.extend(others.iter().map(|&other| PollFd::from_borrowed_fd(other, PollFlags::IN)));
        match poll(&mut fds, time.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        self.next()
    }

    /// The next signal, if one has arrived.
    ///
    /// # Errors
    /// The descriptor cannot be read.
    pub(crate) fn next(&self) -> io::Result<Option<Request>> {
        Ok(match self.fd.read_signal()? {
            Some(signal) if signal.ssi_signo == Signal::SIGHUP as u32 => Some(Request::Reload),
            Some(_) => Some(Request::End),
            None => None,
        })
    }
}

/// Readable when a signal has arrived.
impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
