//! The control socket: sends a report to each client, or a trace of requests to one that asks.
//!
//! ```text
//!   accept --client's end has no name--> report --> closed
//!      '-----client's end has a name---> its line --> trace (see `trace::lines`) --> closed
//!                                                '--> handover (see `take_over`), snapshot (see `snapshot`)
//! ```
//! A client that asks binds its own end to a name before it connects (Linux finds one: autobind in
//! unix(7)). So the daemon need not wait for a line that may not come, and nobody else is read.
//!
//! By default it is PID.sock in a directory of all daemons of the user, where `paravane status`
//! finds it.
use super::connections::{Client, ConnectionGuard, Connections, accept_until, in_thread};
use super::deadline::Until;
use super::places::Places;
use super::private_socket;
use super::report::Report;
use super::reporter::Reporter;
use super::sandbox::user::Target;
use super::trace::RequestTrace;
use super::trace::lines::{Answer, Ask};
use super::trace::stream::{self, Find, Give};
use crate::printable::printable_json;
use anyhow::{Context, anyhow};
use hyper::body::Bytes;
use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::ffi::OsStr;
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::AsyncWriteExt;
use tokio::sync::Notify;

/// How long either side waits for the other.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Longest wait for a whole report.
const REPORT_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of connections.
const CONNECTIONS: usize = 64;
/// Daemons that `paravane status` asks in parallel.
const ASKED_AT_ONCE: usize = 32;
/// Maximum length of a report in bytes.
const MAX_LEN: u64 = 64 << 20;

/// Directory of this user's control sockets; `None`: there is no private one.
pub(crate) fn directory() -> Option<PathBuf> {
    // Set by systemd for RuntimeDirectory=; may be a list.
    if let Some(list) = std::env::var_os("RUNTIME_DIRECTORY").filter(|list| !list.is_empty()) {
        return std::env::split_paths(&list).next();
    }
    if rustix::process::geteuid().is_root() {
        return Some("/run/paravane".into());
    }
    std::env::var_os("XDG_RUNTIME_DIR")
        .filter(|path| !path.is_empty())
        .map(|path| Path::new(&path).join("paravane"))
}

/// The socket; dropping it removes its file.
#[derive(Debug)]
pub(crate) struct Control {
    pub(crate) path: PathBuf,
    pub(crate) listener: UnixListener,
}

impl Control {
    /// Binds the socket to `path`, else to the default path.
    ///
    /// `None`: `path` is `off`, or there is no default.
    ///
    /// # Errors
    /// The socket cannot be created, or another process listens on it.
    pub(crate) fn open(path: Option<&Path>) -> Result<Option<Self>, anyhow::Error> {
        let path = match (path, directory()) {
            (Some(path), _) if path == Path::new("off") => return Ok(None),
            (Some(path), _) => path.to_owned(),
            (None, Some(directory)) => {
                if let Err(error) = std::fs::create_dir_all(&directory) {
                    tracing::warn!(
                        "no control socket: cannot create {}: {error}; name one with --control PATH",
                        directory.display()
                    );
                    return Ok(None);
                }
                directory.join(format!("{}.sock", std::process::id()))
            }
            (None, None) => {
                tracing::warn!(
                    "no control socket: XDG_RUNTIME_DIR is not set; name one with --control PATH, or off"
                );
                return Ok(None);
            }
        };
        let listener =
            private_socket::bind(&path).with_context(|| format!("control socket {}", path.display()))?;
        Ok(Some(Self { path, listener }))
    }

    /// Makes the user that the daemon becomes the owner of the socket's file.
    ///
    /// # Errors
    /// The process lacks the privilege, or the file is gone.
    pub(crate) fn give_to(&self, user: &Target) -> Result<(), anyhow::Error> {
        let give = || {
            let (uid, gid) = user.owner();
            let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let file = rustix::fs::open(&self.path, flags, Mode::empty())?;
            // Nothing that has taken its place.
            let found = rustix::fs::fstat(&file)?;
            if FileType::from_raw_mode(found.st_mode) != FileType::Socket {
                return Err(io::Error::other("it is no socket any more"));
            }
            Ok(rustix::fs::chownat(&file, "", Some(uid), Some(gid), AtFlags::EMPTY_PATH)?)
        };
        give().with_context(|| format!("control socket {}", self.path.display()))
    }

    /// Answers clients in a new thread until the process ends.
    ///
    /// `find` finds the trace of a device by its name, `give` hands all devices over, or takes a snapshot. `moved` ends
    /// accepting: another daemon does.
    ///
    /// # Errors
    /// The thread or its descriptors cannot be created.
    pub(crate) fn serve(
        &self,
        report: impl Fn() -> Report + Send + 'static,
        find: impl Fn(&str) -> Result<Arc<RequestTrace>, Answer> + Send + Sync + 'static,
        give: impl Fn(UnixStream, Ask) -> io::Result<()> + Send + Sync + 'static,
        moved: Arc<Notify>,
    ) -> Result<(), anyhow::Error> {
        let listener = self.listener.try_clone()?;
        listener.set_nonblocking(true)?;
        // Serialization cannot fail; if it did, the client would get an empty answer.
        let make = move || Bytes::from(serde_json::to_vec(&report()).unwrap_or_default());
        in_thread("control", "control socket failed", async move {
            answer(listener, make, Arc::new(find), Arc::new(give), &moved).await
        })
    }
}

async fn answer(
    listener: UnixListener,
    make: impl Fn() -> Bytes + Send + 'static,
    find: Arc<Find>,
    give: Arc<Give>,
    moved: &Notify,
) -> io::Result<()> {
    let listener = tokio::net::UnixListener::from_std(listener)?;
    let connections = Connections::new(CONNECTIONS);
    let reporter = Reporter::start(CONNECTIONS, make);
    let traces = Arc::new(Places::default());
    loop {
        let Some(accepted) = accept_until(moved, |context| listener.poll_accept(context)).await else {
            break;
        };
        let mut stream = match accepted {
            Ok((stream, _)) => stream,
            // Possibly out of descriptors: retry later.
            Err(error) => {
                tracing::debug!(%error, "control socket: cannot accept");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        // The address of `accept` lacks abstract names.
        let asks = stream.peer_addr().is_ok_and(|client| !client.is_unnamed());
        let (reporter, traces) = (reporter.clone(), traces.clone());
        let (find, give) = (find.clone(), give.clone());
        let serve = move |connection: ConnectionGuard| async move {
            if asks {
                // There are fewer traces than connections.
                let trace = stream::serve(stream, &*find, &*give, &traces, || connection.waits());
                if let Err(error) = trace.await {
                    tracing::debug!(%error, "control socket: trace ended");
                }
                return;
            }
            connection.waits();
            let Some(text) = reporter.report().await else { return };
            connection.reads();
            if let Ok(Err(error)) = tokio::time::timeout(TIMEOUT, stream.write_all(&text)).await {
                tracing::debug!(%error, "control socket: cannot send");
            }
        };
        connections.serve(Client::LOCAL, serve).await;
    }
    drop(listener);
    // The connections go on until the process ends.
    std::future::pending().await
}

impl Drop for Control {
    fn drop(&mut self) {
        // May fail after a change of user. `paravane status` removes sockets without a listener.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Connects, with a timeout for a daemon that does not respond.
fn connect(path: &Path, asks: bool) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    if asks {
        // Autobind: the kernel finds a name.
        rustix::net::bind(&socket, &SocketAddrUnix::new_unnamed())?;
    }
    set_socket_timeout(&socket, Timeout::Send, Some(TIMEOUT))?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}

/// Reads the report of the daemon at `path`. Its strings are printable.
///
/// # Errors
/// The daemon does not answer, or the answer is no report.
pub(crate) fn ask(path: &Path) -> io::Result<Report> {
    let stream = connect(path, false)?;
    let end = Some(Instant::now() + REPORT_TIMEOUT);
    let mut text = Vec::new();
    Until { stream: &stream, end }.take(MAX_LEN).read_to_end(&mut text)?;
    serde_json::from_slice(&printable_json(&text))
        .map_err(|error| io::Error::new(ErrorKind::InvalidData, error))
}

/// Sends a request to the daemon at `path`, and returns the stream of its answers.
///
/// # Errors
/// The daemon does not accept it.
pub(crate) fn request(path: &Path, request: &Ask) -> io::Result<UnixStream> {
    let mut stream = connect(path, true)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    stream.write_all(&line)?;
    Ok(stream)
}

/// The directory of control sockets, for a client.
///
/// # Errors
/// There is none.
pub(crate) fn known_directory() -> Result<PathBuf, anyhow::Error> {
    directory().context("no control directory: name the socket with --control PATH")
}

/// The control socket: `path`, else that of the only daemon of this user.
///
/// # Errors
/// There are several, or none: then `none` is the way out.
pub(crate) fn only_daemon(path: Option<&Path>, none: &str) -> Result<PathBuf, anyhow::Error> {
    if let Some(path) = path {
        return Ok(path.to_owned());
    }
    let directory = known_directory()?;
    let mut paths = sockets(&directory).with_context(|| directory.display().to_string())?;
    paths.retain(|path| UnixStream::connect(path).is_ok());
    match paths.as_slice() {
        [path] => Ok(path.clone()),
        [] => Err(anyhow!("no daemon in {}{none}", directory.display())),
        paths => {
            let list: Vec<_> = paths.iter().map(|path| path.display().to_string()).collect();
            Err(anyhow!("several daemons run: choose one with --control: {}", list.join(", ")))
        }
    }
}

/// Control sockets of all daemons of this user.
pub(crate) fn sockets(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let mut paths: Vec<PathBuf> = match std::fs::read_dir(directory) {
        Ok(entries) => entries.map(|entry| entry.map(|entry| entry.path())).collect::<io::Result<_>>()?,
        Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
        Err(error) => return Err(error),
    };
    // The directory may have sockets of devices, which must not be connected to.
    let is_pid = |stem: &str| stem.parse::<u32>().is_ok();
    paths.retain(|path| {
        path.extension().is_some_and(|extension| extension == "sock")
            && path.file_stem().and_then(OsStr::to_str).is_some_and(is_pid)
    });
    paths.sort();
    Ok(paths)
}

/// Reads the reports of all daemons of this user.
///
/// Removes sockets left behind by killed daemons.
pub(crate) fn ask_all(directory: &Path) -> io::Result<Vec<(PathBuf, io::Result<Report>)>> {
    let paths = sockets(directory)?;
    let mut reports = Vec::new();
    for some in paths.chunks(ASKED_AT_ONCE) {
        let answers: Vec<_> = std::thread::scope(|scope| {
            let asked: Vec<_> = some.iter().map(|path| scope.spawn(|| ask(path))).collect();
            let panicked = |_| Err(io::Error::other("internal error: cannot read the report"));
            asked.into_iter().map(|answer| answer.join().unwrap_or_else(panicked)).collect()
        });
        for (path, answer) in some.iter().zip(answers) {
            match answer {
                Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
                    let _ = std::fs::remove_file(path);
                }
                answer => reports.push((path.clone(), answer)),
            }
        }
    }
    Ok(reports)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_report_is_answered_and_the_socket_is_private() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("7.sock");
        let control = Control::open(Some(&path)).unwrap().unwrap();
        let none = |name: &str| Err(Answer::NoDevice(name.to_owned()));
        let give = |_, _| Err(ErrorKind::Unsupported.into());
        let moved = Arc::new(Notify::new());
        control.serve(|| Report { pid: 7, ..Report::default() }, none, give, moved).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(ask(&path).unwrap().pid, 7);
        let taken = Control::open(Some(&path)).unwrap_err();
        assert!(format!("{taken:#}").contains("in use by another process"), "{taken:#}");
        let _device = UnixListener::bind(directory.path().join("vm0.sock")).unwrap();
        assert_eq!(ask_all(directory.path()).unwrap().len(), 1);
        drop(control);
        assert!(!path.exists());
    }

    #[test]
    fn only_the_socket_is_given_to_a_user() {
        let directory = tempfile::tempdir().unwrap();
        let (path, file) = (directory.path().join("7.sock"), directory.path().join("file"));
        let control = Control::open(Some(&path)).unwrap().unwrap();
        let Ok(user) = Target::find(&rustix::process::geteuid().as_raw().to_string()) else { return };
        control.give_to(&user).unwrap();
        std::fs::write(&file, "").unwrap();
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink(&file, &path).unwrap();
        let error = control.give_to(&user).unwrap_err();
        assert!(format!("{error:#}").contains("no socket any more"), "{error:#}");
    }

    #[test]
    fn stale_sockets_are_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("7.sock");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        assert!(ask_all(directory.path()).unwrap().is_empty());
        assert!(!path.exists());
        drop(UnixListener::bind(&path).unwrap());
        let control = Control::open(Some(&path)).unwrap().unwrap();
        assert!(path.exists());
        drop(control);
        std::fs::write(&path, "a file").unwrap();
        Control::open(Some(&path)).unwrap_err();
        assert_eq!(std::fs::read(&path).unwrap(), b"a file");
        assert!(Control::open(Some(Path::new("off"))).unwrap().is_none());
    }
}
