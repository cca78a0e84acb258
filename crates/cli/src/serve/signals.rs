//! Signals, read one after the other by the main thread.
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use std::io;

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
        Ok(Self { fd: SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC)? })
    }

    /// Waits for the next one.
    ///
    /// # Errors
    /// The descriptor cannot be read.
    pub(crate) fn next(&self) -> io::Result<Asked> {
        loop {
            match self.fd.read_signal() {
                Ok(Some(signal)) if signal.ssi_signo == Signal::SIGHUP as u32 => return Ok(Asked::Reload),
                Ok(Some(_)) => return Ok(Asked::End),
                Ok(None) | Err(nix::Error::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}
