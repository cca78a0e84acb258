//! Where clients come from.
use super::ExportError;
use rustix::fs::{FileType, Mode, fchmod, lstat, unlink};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::Duration;

/// Between attempts to connect.
const RETRY: Duration = Duration::from_millis(250);
/// Clients that wait for their turn.
const BACKLOG: i32 = 16;

/// Where clients come from.
#[derive(Debug)]
pub enum Endpoint {
    /// Listen on a socket of this path. The file is ours: it is made, and removed in the end.
    Listen(PathBuf),
    /// Listen on a socket that is there already (socket activation).
    Listener(UnixListener),
    /// Connect to the socket of this path, and try again for ever.
    Connect(PathBuf),
}

/// An endpoint in use.
#[derive(Debug)]
pub(super) enum Door {
    Listens { listener: UnixListener, _file: Option<SocketFile> },
    Connects { path: PathBuf },
}

/// What came of a look out of the door.
pub(super) enum Visitor {
    Here(OwnedFd),
    /// Nobody yet: look again when [`Door::fd`] is readable, or after that time.
    Later(Option<Duration>),
    Failed(io::Error),
}

/// The socket's file, removed when this is dropped, if it still is ours.
#[derive(Debug)]
pub(super) struct SocketFile {
    path: PathBuf,
    /// Device and inode number.
    id: (u64, u64),
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if lstat(&self.path).is_ok_and(|found| (found.st_dev, found.st_ino) == self.id)
            && let Err(error) = unlink(&self.path)
        {
            tracing::warn!("{}: {error}", self.path.display());
        }
    }
}

impl Door {
    pub(super) fn open(endpoint: Endpoint) -> Result<Self, ExportError> {
        match endpoint {
            Endpoint::Connect(path) => Ok(Self::Connects { path }),
            Endpoint::Listener(listener) => {
                // A client that goes away before we look must not make us wait for the next one.
                listener.set_nonblocking(true).map_err(|source| {
                    let path = listener.local_addr().ok().and_then(|addr| Some(addr.as_pathname()?.into()));
                    ExportError::Socket { path: path.unwrap_or_default(), source }
                })?;
                Ok(Self::Listens { listener, _file: None })
            }
            Endpoint::Listen(path) => {
                let refused = |source: rustix::io::Errno| ExportError::Socket {
                    path: path.clone(),
                    source: source.into(),
                };
                let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
                let socket =
                    socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(refused)?;
                // The file gets the socket's mode: nobody else can connect, not even for a moment.
                fchmod(&socket, Mode::RUSR | Mode::WUSR).map_err(refused)?;
                let addr = SocketAddrUnix::new(&*path).map_err(refused)?;
                match bind(&socket, &addr) {
                    Err(rustix::io::Errno::ADDRINUSE) => {
                        remove_stale(&path)?;
                        bind(&socket, &addr).map_err(refused)?;
                    }
                    result => result.map_err(refused)?,
                }
                let found = lstat(&path).map_err(refused)?;
                let file = SocketFile { path: path.clone(), id: (found.st_dev, found.st_ino) };
                listen(&socket, BACKLOG).map_err(refused)?;
                Ok(Self::Listens { listener: socket.into(), _file: Some(file) })
            }
        }
    }

    pub(super) fn visitor(&mut self) -> Visitor {
        let result = match self {
            Self::Listens { listener, .. } => listener.accept().map(|(stream, _)| stream),
            Self::Connects { path } => match UnixStream::connect(&*path) {
                Err(error) => {
                    tracing::debug!("{}: {error}", path.display());
                    return Visitor::Later(Some(RETRY));
                }
                stream => stream,
            },
        };
        match result {
            Ok(stream) => Visitor::Here(stream.into()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Visitor::Later(None),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Visitor::Later(Some(Duration::ZERO)),
            Err(error) => Visitor::Failed(error),
        }
    }

    /// Readable when somebody is there.
    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Listens { listener, .. } => Some(listener.as_fd()),
            Self::Connects { .. } => None,
        }
    }
}

/// Removes a socket that nobody listens on.
fn remove_stale(path: &PathBuf) -> Result<(), ExportError> {
    let refused =
        |source: rustix::io::Errno| ExportError::Socket { path: path.clone(), source: source.into() };
    let found = lstat(path).map_err(refused)?;
    if FileType::from_raw_mode(found.st_mode) != FileType::Socket {
        return Err(ExportError::NotASocket { path: path.clone() });
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let probe = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(refused)?;
    match connect(&probe, &SocketAddrUnix::new(&**path).map_err(refused)?) {
        Err(rustix::io::Errno::CONNREFUSED) => unlink(path).map_err(refused),
        // Also if it has no time for us now (AGAIN), or is of another kind (PROTOTYPE).
        _ => Err(ExportError::InUse { path: path.clone() }),
    }
}
