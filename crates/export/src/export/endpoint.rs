//! Endpoints: where an export listens or connects.
use super::backoff::Backoff;
use super::error::ExportError;
use super::rights;
use crate::handover::HandoverError;
use crate::handover::record::{EndpointState, Kind};
use rustix::fs::{FileType, Mode, fchmod, lstat, unlink};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with, sockopt,
};
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Backlog of connections that wait.
const BACKLOG: i32 = 16;

/// Where an export listens or connects.
#[derive(Debug)]
#[non_exhaustive]
pub enum Endpoint {
    /// Listen on a socket at this path.
    ///
    /// The export creates the file, and removes it when it stops.
    Listen(PathBuf),
    /// Listen on an existing socket (socket activation).
    Listener(UnixListener),
    /// Connect to the socket at this path.
    ///
    /// Retries forever, with pauses of up to 5 seconds.
    Connect(PathBuf),
    /// Serve the client at the other end of this connection.
    ///
    /// The export ends when that client disconnects.
    Connection(UnixStream),
    /// The endpoint of a handover, whatever it is.
    ///
    /// For [`Export::resume`](crate::Export::resume) only.
    Handover,
}

/// Endpoint in use.
///
/// ```text
///  listens:  accept --client--> session, and accept again at once
///               '----error----> pause
///  connects: connect --VMM--> session --it made progress--> connect again at once
///               |                '------no progress-------> pause
///               '----error----> pause
///  is given a connection: session --> ended
/// ```
/// Pauses grow ([`Backoff`]). An error is logged once, and again when it changes.
#[derive(Debug)]
pub(super) struct Acceptor {
    kind: EndpointKind,
    backoff: Backoff,
    /// Earliest time of the next attempt.
    due: Option<Instant>,
    /// Error logged last, unless a client connected since.
    last_logged: Option<String>,
}

#[derive(Debug)]
enum EndpointKind {
    Listens {
        listener: UnixListener,
    },
    Connects {
        path: PathBuf,
    },
    /// `None`: its session has begun.
    Connected {
        socket: Option<OwnedFd>,
    },
}

/// Result of [`Acceptor::next`].
#[derive(Debug)]
pub(super) enum NextClient {
    Here(OwnedFd),
    /// No client yet. Try again when [`Acceptor::fd`] is readable.
    Wait,
    /// Try again after this time.
    Pause(Duration),
    /// The attempt failed. Try again after `pause`.
    Failed {
        error: String,
        pause: Duration,
    },
    /// No further client can connect.
    Ended,
}

/// File of a socket. Removed on drop, if it still is the same file.
#[derive(Debug)]
pub(super) struct SocketFile {
    path: PathBuf,
    /// Device and inode number.
    id: (u64, u64),
    /// Another export owns it.
    given_away: bool,
}

impl SocketFile {
    /// Leaves the file to another export.
    pub(super) fn give_away(mut self) {
        self.given_away = true;
    }

    /// Takes the file that another export made, if it is still there.
    fn take_over(path: PathBuf, id: (u64, u64)) -> Option<Self> {
        let found = lstat(&path).ok()?;
        let is_socket = FileType::from_raw_mode(found.st_mode) == FileType::Socket;
        let is_same = (found.st_dev, found.st_ino) == id;
        (is_socket && is_same).then_some(Self { path, id, given_away: false })
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if !self.given_away
            && lstat(&self.path).is_ok_and(|found| (found.st_dev, found.st_ino) == self.id)
            && let Err(error) = unlink(&self.path)
        {
            tracing::warn!("cannot remove {}: {error}", self.path.display());
        }
    }
}

impl Acceptor {
    /// Opens an endpoint. Returns the socket's file too, if the export created it.
    pub(super) fn open(endpoint: Endpoint) -> Result<(Self, Option<SocketFile>), ExportError> {
        match endpoint {
            Endpoint::Handover => Err(HandoverError::Missing.into()),
            Endpoint::Connect(path) => Ok((Self::new(EndpointKind::Connects { path }), None)),
            Endpoint::Connection(stream) => {
                Ok((Self::new(EndpointKind::Connected { socket: Some(stream.into()) }), None))
            }
            Endpoint::Listener(listener) => {
                // A client that disconnects before we accept it must not make us wait for the next.
                listener.set_nonblocking(true).map_err(|source| {
                    let path = listener.local_addr().ok().and_then(|addr| Some(addr.as_pathname()?.into()));
                    ExportError::Socket { path: path.unwrap_or_default(), source }
                })?;
                Ok((Self::new(EndpointKind::Listens { listener }), None))
            }
            Endpoint::Listen(path) => {
                let refused = |source: rustix::io::Errno| ExportError::Socket {
                    path: path.clone(),
                    source: source.into(),
                };
                let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
                let socket =
                    socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(refused)?;
                // The file gets the mode of the socket, so no other user can connect even for a
                // moment.
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
                let id = (found.st_dev, found.st_ino);
                let file = SocketFile { path: path.clone(), id, given_away: false };
                listen(&socket, BACKLOG).map_err(refused)?;
                Ok((Self::new(EndpointKind::Listens { listener: socket.into() }), Some(file)))
            }
        }
    }

    /// Continues with the endpoint of a handover, which must be the configured one.
    ///
    /// Returns the socket's file too, if the export created it.
    pub(super) fn resume(
        configured: Endpoint,
        state: EndpointState,
    ) -> Result<(Self, Option<SocketFile>), ExportError> {
        let EndpointState { kind, path, file, listener } = state;
        let recorded = PathBuf::from(OsString::from_vec(path));
        let same_file = |path: &Path| lstat(path).is_ok_and(|found| (found.st_dev, found.st_ino) == file);
        let path = match (configured, kind) {
            (Endpoint::Handover, _) => recorded,
            (Endpoint::Listener(_), Kind::Listen | Kind::Listener) => recorded,
            (Endpoint::Listen(path), Kind::Listen) if path == recorded || same_file(&path) => path,
            (Endpoint::Listen(path), Kind::Listener) if path == recorded => path,
            (Endpoint::Connect(path), Kind::Connect) if path == recorded => path,
            _ => {
                let recorded = match kind {
                    Kind::Listen | Kind::Listener => format!("listening on {}", recorded.display()),
                    Kind::Connect => format!("connecting to {}", recorded.display()),
                    Kind::Connection => "a single connection".to_owned(),
                };
                return Err(HandoverError::Endpoint { recorded }.into());
            }
        };
        Ok(match (kind, listener) {
            (Kind::Connect, _) => (Self::new(EndpointKind::Connects { path }), None),
            (Kind::Connection, _) => (Self::new(EndpointKind::Connected { socket: None }), None),
            (Kind::Listen | Kind::Listener, Some(socket)) => {
                if !is_stream(&socket) || sockopt::socket_acceptconn(&socket) != Ok(true) {
                    return Err(HandoverError::Record("its listening socket is none").into());
                }
                let listener = UnixListener::from(socket);
                let refused = |source| ExportError::Socket { path: path.clone(), source };
                listener.set_nonblocking(true).map_err(refused)?;
                let file = (kind == Kind::Listen).then(|| SocketFile::take_over(path, file)).flatten();
                (Self::new(EndpointKind::Listens { listener }), file)
            }
            (Kind::Listen | Kind::Listener, None) => {
                return Err(HandoverError::Record("no listening socket").into());
            }
        })
    }

    /// The endpoint for another process, with duplicates of its descriptors.
    pub(super) fn state(&self, file: Option<&SocketFile>) -> io::Result<EndpointState> {
        let (kind, path, listener) = match (&self.kind, file) {
            (EndpointKind::Listens { listener }, Some(file)) => {
                (Kind::Listen, file.path.clone(), Some(listener))
            }
            (EndpointKind::Listens { listener }, None) => {
                let path = listener.local_addr().ok().and_then(|addr| Some(addr.as_pathname()?.to_owned()));
                (Kind::Listener, path.unwrap_or_default(), Some(listener))
            }
            (EndpointKind::Connects { path }, _) => (Kind::Connect, path.clone(), None),
            (EndpointKind::Connected { .. }, _) => (Kind::Connection, PathBuf::new(), None),
        };
        let listener = listener.map(|listener| listener.as_fd().try_clone_to_owned()).transpose()?;
        let file = file.map_or((0, 0), |file| file.id);
        Ok(EndpointState { kind, path: path.into_os_string().into_vec(), file, listener })
    }

    /// Gives a connection away whose session has not begun.
    pub(super) fn into_unserved(self) -> Option<OwnedFd> {
        match self.kind {
            EndpointKind::Connected { socket } => socket,
            EndpointKind::Listens { .. } | EndpointKind::Connects { .. } => None,
        }
    }

    fn new(kind: EndpointKind) -> Self {
        if let EndpointKind::Listens { listener } = &kind
            && let Err(error) = rights::set(listener.as_fd(), false)
        {
            tracing::debug!("kernel lacks SO_PASSRIGHTS; waiting connections can hold descriptors: {error}");
        }
        Self { kind, backoff: Backoff::default(), due: None, last_logged: None }
    }

    pub(super) fn next(&mut self) -> NextClient {
        if let Some(rest) = self.due.map(|due| due.saturating_duration_since(Instant::now()))
            && !rest.is_zero()
        {
            return NextClient::Pause(rest);
        }
        let attempt = match &mut self.kind {
            EndpointKind::Listens { listener } => accept(listener),
            EndpointKind::Connects { path } => connect_to(path),
            EndpointKind::Connected { socket } => match socket.take() {
                Some(socket) => Ok(socket),
                None => return NextClient::Ended,
            },
        };
        match attempt {
            Ok(socket) => {
                if matches!(self.kind, EndpointKind::Listens { .. }) {
                    self.backoff.reset();
                }
                (self.due, self.last_logged) = (None, None);
                NextClient::Here(socket)
            }
            Err(error) => match (error.kind(), &self.kind) {
                (io::ErrorKind::WouldBlock, EndpointKind::Listens { .. }) => NextClient::Wait,
                (io::ErrorKind::Interrupted, _) => NextClient::Pause(Duration::ZERO),
                _ => self.failed(&error),
            },
        }
    }

    fn failed(&mut self, error: &io::Error) -> NextClient {
        let message = match &self.kind {
            EndpointKind::Connects { path } => {
                format!("cannot connect to {}: {error}; retrying", path.display())
            }
            _ => format!("cannot accept a connection: {error}; retrying"),
        };
        if self.last_logged.as_ref() == Some(&message) {
            tracing::debug!("{message}");
        } else {
            tracing::warn!("{message}");
            self.last_logged = Some(message.clone());
        }
        NextClient::Failed { error: message, pause: self.pause() }
    }

    fn pause(&mut self) -> Duration {
        let pause = self.backoff.pause();
        tracing::debug!(?pause, "next attempt");
        self.due = Some(Instant::now() + pause);
        pause
    }

    /// Records the end of a session. `served`: it made progress.
    pub(super) fn closed(&mut self, served: bool) {
        match self.kind {
            EndpointKind::Listens { .. } | EndpointKind::Connected { .. } => {}
            EndpointKind::Connects { .. } if served => self.backoff.reset(),
            EndpointKind::Connects { .. } => drop(self.pause()),
        }
    }

    /// Readable when a client waits.
    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.kind {
            EndpointKind::Listens { listener } => Some(listener.as_fd()),
            EndpointKind::Connects { .. } | EndpointKind::Connected { .. } => None,
        }
    }
}

/// Whether a descriptor is a UNIX stream socket.
pub(super) fn is_stream(fd: &OwnedFd) -> bool {
    let is_unix = rustix::net::getsockname(fd).is_ok_and(|name| name.address_family() == AddressFamily::UNIX);
    is_unix && sockopt::socket_type(fd) == Ok(SocketType::STREAM)
}

/// Accepts the next client, which may send descriptors from now on.
fn accept(listener: &UnixListener) -> io::Result<OwnedFd> {
    let (stream, _) = listener.accept()?;
    // Without the option, descriptors were allowed all the time.
    let _ = rights::set(stream.as_fd(), true);
    Ok(stream.into())
}

/// Connects without waiting: if the VMM's backlog is full, a later attempt follows.
fn connect_to(path: &Path) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// Removes a socket that no server listens on.
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
        // Also if its backlog is full (AGAIN) or its type differs (PROTOTYPE).
        _ => Err(ExportError::InUse { path: path.clone() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the pause before the next attempt, and skips it.
    fn pause(acceptor: &mut Acceptor) -> Duration {
        let NextClient::Failed { pause, .. } = acceptor.next() else { panic!("unexpected connection") };
        let NextClient::Pause(_) = acceptor.next() else { panic!("no pause") };
        acceptor.due = None;
        pause
    }

    #[test]
    fn pauses_grow_while_the_vmm_makes_no_progress() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let (mut acceptor, _) = Acceptor::open(Endpoint::Connect(path.clone())).unwrap();
        let (first, second, third) = (pause(&mut acceptor), pause(&mut acceptor), pause(&mut acceptor));
        assert!(first < second && second < third, "{first:?} {second:?} {third:?}");
        assert!(acceptor.last_logged.as_ref().unwrap().contains("No such file"), "{acceptor:?}");
        let _listener = UnixListener::bind(&path).unwrap();
        let NextClient::Here(_) = acceptor.next() else { panic!("no connection") };
        assert_eq!(acceptor.last_logged, None);
        acceptor.closed(false);
        let NextClient::Pause(fourth) = acceptor.next() else {
            panic!("no pause after a session without progress")
        };
        assert!(fourth > third, "{third:?} {fourth:?}");
        acceptor.due = None;
        let NextClient::Here(_) = acceptor.next() else { panic!("no connection") };
        acceptor.closed(true);
        let NextClient::Here(_) = acceptor.next() else { panic!("unexpected pause") };
    }

    #[test]
    fn connecting_to_a_full_backlog_does_not_block() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let _listener = UnixListener::bind(&path).unwrap();
        let (mut acceptor, _) = Acceptor::open(Endpoint::Connect(path)).unwrap();
        let mut sockets = Vec::new();
        // Nothing accepts, so the backlog fills up and the loop ends.
        while let NextClient::Here(socket) = acceptor.next() {
            sockets.push(socket);
        }
        assert!(acceptor.last_logged.as_ref().unwrap().contains("temporarily unavailable"), "{acceptor:?}");
    }

    #[test]
    fn a_connection_has_one_session() {
        let (near, _far) = UnixStream::pair().unwrap();
        let (mut acceptor, file) = Acceptor::open(Endpoint::Connection(near)).unwrap();
        assert!(file.is_none() && acceptor.fd().is_none());
        let NextClient::Here(_) = acceptor.next() else { panic!("no session") };
        acceptor.closed(true);
        let NextClient::Ended = acceptor.next() else { panic!("a second session") };
    }
}
