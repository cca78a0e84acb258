//! What reads a console's output on the host's side, and writes its input.
use rustix::fs::{Mode, OFlags, open};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{OptionalActions, tcgetattr, tcsetattr};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

/// The host's side of a console.
#[derive(Debug)]
pub enum BackEnd {
    /// Clients of a socket, one at a time: the next one waits until the first has gone.
    Socket(UnixListener),
    /// Programs that open a pseudo-terminal.
    Pty(Pty),
    /// Appends the output to a file. The guest gets no input.
    Log(File),
    /// Two open files, for example the standard streams.
    Streams {
        /// Where input comes from.
        input: OwnedFd,
        /// Where output goes.
        output: OwnedFd,
    },
}

/// A pseudo-terminal, by its controlling side.
#[derive(Debug)]
pub struct Pty {
    pub(super) fd: OwnedFd,
    path: PathBuf,
}

impl Pty {
    /// Opens a new one, in raw mode.
    ///
    /// # Errors
    /// The host refuses it.
    pub fn open() -> io::Result<Self> {
        let fd = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        grantpt(&fd)?;
        unlockpt(&fd)?;
        let name = ptsname(&fd, Vec::new())?;
        let path = PathBuf::from(name.to_str().map_err(io::Error::other)?);
        // Once it has been opened and closed, the controlling side tells whether somebody has it open.
        let terminal = open(&path, OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty())?;
        let mut mode = tcgetattr(&terminal)?;
        mode.make_raw();
        tcsetattr(&terminal, OptionalActions::Now, &mode)?;
        Ok(Self { fd, path })
    }

    /// Where programs open it.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}
