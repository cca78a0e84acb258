//! Where clients come from.
use super::ExportError;
use super::backoff::Backoff;
use super::rights;
use rustix::fs::{FileType, Mode, fchmod, lstat, unlink};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Clients that wait for their turn.
const BACKLOG: i32 = 16;

/// Where clients come from.
#[derive(Debug)]
#[non_exhaustive]
pub enum Endpoint {
    /// Listen on a socket of this path. The file is ours: it is made, and removed in the end.
    Listen(PathBuf),
    /// Listen on a socket that is there already (socket activation).
    Listener(UnixListener),
    /// Connect to the socket of this path, and try again for ever, with pauses of up to 5 seconds.
    Connect(PathBuf),
}

/// An endpoint in use.
///
/// ```text
///  listens:  accept --a client--> session, and accept again at once
///               '----error------> pause
///  connects: connect --a VMM----> session --it did something--> connect again at once
///               |                    '----it did nothing------> pause
///               '-----error------> pause
/// ```
/// Pauses grow ([`Backoff`]). An error is logged once, and again when it is another.
#[derive(Debug)]
pub(super) struct Acceptor {
    way: Kind,
    backoff: Backoff,
    /// No attempt before.
    due: Option<Instant>,
    /// The error that was logged last, if nobody has come since.
    told: Option<String>,
}

#[derive(Debug)]
enum Kind {
    Listens { listener: UnixListener },
    Connects { path: PathBuf },
}

/// What came of a look out of the acceptor.
#[derive(Debug)]
pub(super) enum NextClient {
    Here(OwnedFd),
    /// Nobody yet: look again when [`Acceptor::fd`] is readable.
    Wait,
    /// Look again after that time.
    Pause(Duration),
    /// The attempt failed: look again after `pause`.
    Failed {
        error: String,
        pause: Duration,
    },
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
            tracing::warn!("cannot remove {}: {error}", self.path.display());
        }
    }
}

impl Acceptor {
    /// Opens it; with the socket's file, if that is ours.
    pub(super) fn open(endpoint: Endpoint) -> Result<(Self, Option<SocketFile>), ExportError> {
        match endpoint {
            Endpoint::Connect(path) => Ok((Self::new(Kind::Connects { path }), None)),
            Endpoint::Listener(listener) => {
                // A client that goes away before we look must not make us wait for the next one.
                listener.set_nonblocking(true).map_err(|source| {
                    let path = listener.local_addr().ok().and_then(|addr| Some(addr.as_pathname()?.into()));
                    ExportError::Socket { path: path.unwrap_or_default(), source }
                })?;
                Ok((Self::new(Kind::Listens { listener }), None))
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
                Ok((Self::new(Kind::Listens { listener: socket.into() }), Some(file)))
            }
        }
    }

    fn new(way: Kind) -> Self {
        if let Kind::Listens { listener } = &way
            && let Err(error) = rights::set(listener.as_fd(), false)
        {
            tracing::debug!("connections that wait for their turn may bring descriptors: {error}");
        }
        Self { way, backoff: Backoff::default(), due: None, told: None }
    }

    pub(super) fn next(&mut self) -> NextClient {
        if let Some(rest) = self.due.map(|due| due.saturating_duration_since(Instant::now()))
            && !rest.is_zero()
        {
            return NextClient::Pause(rest);
        }
        let attempt = match &self.way {
            Kind::Listens { listener } => accept(listener),
            Kind::Connects { path } => connect_to(path),
        };
        match attempt {
            Ok(socket) => {
                if matches!(self.way, Kind::Listens { .. }) {
                    self.backoff.reset();
                }
                (self.due, self.told) = (None, None);
                NextClient::Here(socket)
            }
            Err(error) => match (error.kind(), &self.way) {
                (io::ErrorKind::WouldBlock, Kind::Listens { .. }) => NextClient::Wait,
                (io::ErrorKind::Interrupted, _) => NextClient::Pause(Duration::ZERO),
                _ => self.failed(&error),
            },
        }
    }

    fn failed(&mut self, error: &io::Error) -> NextClient {
        let words = match &self.way {
            Kind::Listens { .. } => format!("cannot accept a client: {error}; trying again"),
            Kind::Connects { path } => format!("cannot connect to {}: {error}; trying again", path.display()),
        };
        if self.told.as_ref() == Some(&words) {
            tracing::debug!("{words}");
        } else {
            tracing::warn!("{words}");
            self.told = Some(words.clone());
        }
        NextClient::Failed { error: words, pause: self.pause() }
    }

    fn pause(&mut self) -> Duration {
        let pause = self.backoff.pause();
        tracing::debug!(?pause, "next attempt");
        self.due = Some(Instant::now() + pause);
        pause
    }

    /// The client is gone. `served`: its session did something.
    pub(super) fn closed(&mut self, served: bool) {
        match self.way {
            Kind::Listens { .. } => {}
            Kind::Connects { .. } if served => self.backoff.reset(),
            Kind::Connects { .. } => drop(self.pause()),
        }
    }

    /// Readable when somebody is there.
    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.way {
            Kind::Listens { listener } => Some(listener.as_fd()),
            Kind::Connects { .. } => None,
        }
    }
}

/// The next client, which may send descriptors from now on.
fn accept(listener: &UnixListener) -> io::Result<OwnedFd> {
    let (stream, _) = listener.accept()?;
    // Where the option is unknown, it was so all the time.
    let _ = rights::set(stream.as_fd(), true);
    Ok(stream.into())
}

/// Connects without a wait: a VMM whose queue of connections is full is tried again later.
fn connect_to(path: &Path) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
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

#[cfg(test)]
mod tests {
    use super::*;

    /// The pause before the next attempt, which then is due.
    fn pause(acceptor: &mut Acceptor) -> Duration {
        let NextClient::Failed { pause, .. } = acceptor.next() else { panic!("somebody is there") };
        let NextClient::Pause(_) = acceptor.next() else { panic!("it did not pause") };
        acceptor.due = None;
        pause
    }

    #[test]
    fn a_vmm_that_does_nothing_is_asked_less_and_less_often() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let (mut acceptor, _) = Acceptor::open(Endpoint::Connect(path.clone())).unwrap();
        let (first, second, third) = (pause(&mut acceptor), pause(&mut acceptor), pause(&mut acceptor));
        assert!(first < second && second < third, "{first:?} {second:?} {third:?}");
        assert!(acceptor.told.as_ref().unwrap().contains("No such file"), "{acceptor:?}");
        let _listener = UnixListener::bind(&path).unwrap();
        let NextClient::Here(_) = acceptor.next() else { panic!("it does not connect") };
        assert_eq!(acceptor.told, None);
        acceptor.closed(false);
        let NextClient::Pause(fourth) = acceptor.next() else { panic!("it flaps") };
        assert!(fourth > third, "{third:?} {fourth:?}");
        acceptor.due = None;
        let NextClient::Here(_) = acceptor.next() else { panic!("it does not connect") };
        acceptor.closed(true);
        let NextClient::Here(_) = acceptor.next() else { panic!("it paused") };
    }

    #[test]
    fn a_vmm_whose_queue_of_connections_is_full_keeps_nobody_waiting() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let _listener = UnixListener::bind(&path).unwrap();
        let (mut acceptor, _) = Acceptor::open(Endpoint::Connect(path)).unwrap();
        let mut sockets = Vec::new();
        // Nobody accepts. Its end is reached, or this test never ends.
        while let NextClient::Here(socket) = acceptor.next() {
            sockets.push(socket);
        }
        assert!(acceptor.told.as_ref().unwrap().contains("temporarily unavailable"), "{acceptor:?}");
    }
}
