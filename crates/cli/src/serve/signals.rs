//! Signals, read one after the other by the main thread.
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// The signals that the daemon knows, held back from all threads and read here.
#[derive(Debug)]
pub(crate) struct Signals {
    fd: SignalFd,
}

/// What a signal asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    /// SIGTERM, SIGINT.
    End,
    /// SIGHUP.
    Reload,
}

impl Signals {
    /// To be called before there is a second thread: those that are made later hold the signals back, too.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(crate) fn take() -> io::Result<Self> {
        let set = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP]);
        set.thread_block()?;
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        Ok(Self { fd: SignalFd::with_flags(&set, flags)? })
    }

    /// Waits for the next one; `None`: `other` is readable, or the time is over.
    ///
    /// # Errors
    /// The descriptors cannot be waited for or read.
    pub(crate) fn wait(&self, other: BorrowedFd<'_>, time: Option<Duration>) -> io::Result<Option<Asked>> {
        let time = time.map(|time| Timespec {
            tv_sec: time.as_secs().cast_signed(),
            tv_nsec: time.subsec_nanos().into(),
        });
        let mut fds = [PollFd::new(&self.fd, PollFlags::IN), PollFd::from_borrowed_fd(other, PollFlags::IN)];
        match poll(&mut fds, time.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(match self.fd.read_signal()? {
            Some(signal) if signal.ssi_signo == Signal::SIGHUP as u32 => Some(Asked::Reload),
            Some(_) => Some(Asked::End),
            None => None,
        })
    }
}
