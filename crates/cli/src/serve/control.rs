//! The control socket: sends a report to each client, and takes no commands.
//!
//! A daemon that is not told where has it in a directory of all daemons of its user, as PID.sock; `paravane status` asks
//! all that are there.
use super::connections::{Client, Connections, Place};
use super::report::Report;
use super::reporter::Reporter;
use anyhow::{Context, bail};
use hyper::body::Bytes;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::ffi::OsStr;
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::io::AsyncWriteExt;

/// How long either side waits for the other one.
const PATIENCE: Duration = Duration::from_secs(5);
/// Connections at a time.
const CONNECTIONS: usize = 64;
/// Daemons that are asked at a time.
const ASKED_AT_ONCE: usize = 32;
/// Longest report that is read.
const MAX_LEN: u64 = 64 << 20;

/// Where daemons of this user have their control sockets; none if there is no place that is this user's alone.
pub(crate) fn directory() -> Option<PathBuf> {
    // systemd's word for RuntimeDirectory=, perhaps with others behind it.
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

/// The socket; its file is removed with it.
#[derive(Debug)]
pub(crate) struct Control {
    pub(crate) path: PathBuf,
    listener: UnixListener,
}

impl Control {
    /// Opens it at `path`, or where daemons of this user have it. `None`: it is `off`, or there is no such place.
    ///
    /// # Errors
    /// It cannot be made, or another daemon has it.
    pub(crate) fn open(path: Option<&Path>) -> Result<Option<Self>, anyhow::Error> {
        let path = match path {
            Some(path) if path == Path::new("off") => return Ok(None),
            Some(path) => path.to_owned(),
            None => match directory() {
                Some(directory) => {
                    let made = std::fs::create_dir_all(&directory);
                    if let Err(error) = made {
                        tracing::info!("no control socket: {}: {error}", directory.display());
                        return Ok(None);
                    }
                    directory.join(format!("{}.sock", std::process::id()))
                }
                None => return Ok(None),
            },
        };
        let listener = bind(&path).with_context(|| format!("control socket {}", path.display()))?;
        Ok(Some(Self { path, listener }))
    }

    /// Answers in a thread of its own, for as long as the process lives.
    ///
    /// # Errors
    /// There can be no thread, or it lacks descriptors.
    pub(crate) fn serve(&self, report: impl Fn() -> Report + Send + 'static) -> Result<(), anyhow::Error> {
        let listener = self.listener.try_clone()?;
        listener.set_nonblocking(true)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
        // A report without JSON is none; whoever asked finds nothing.
        let make = move || Bytes::from(serde_json::to_vec(&report()).unwrap_or_default());
        let serve = move || runtime.block_on(answer(listener, make));
        std::thread::Builder::new().name("control".into()).spawn(move || {
            if let Err(error) = serve() {
                tracing::error!(%error, "control socket closed");
            }
        })?;
        Ok(())
    }
}

async fn answer(listener: UnixListener, make: impl Fn() -> Bytes + Send + 'static) -> io::Result<()> {
    let listener = tokio::net::UnixListener::from_std(listener)?;
    let connections = Connections::new(CONNECTIONS);
    let reporter = Reporter::start(CONNECTIONS, make);
    loop {
        let mut stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            // Out of descriptors, perhaps: not to be asked again at once.
            Err(error) => {
                tracing::debug!(%error, "control socket");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let reporter = reporter.clone();
        let serve = |place: Place| async move {
            place.waits();
            let Some(text) = reporter.report().await else { return };
            place.reads();
            if let Ok(Err(error)) = tokio::time::timeout(PATIENCE, stream.write_all(&text)).await {
                tracing::debug!(%error, "control socket");
            }
        };
        connections.serve(Client::LOCAL, serve).await;
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        // As another user we may not, perhaps. `paravane status` removes what nobody listens on.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Listens with mode 0600. A file that nobody listens on any more is replaced.
fn bind(path: &Path) -> Result<UnixListener, anyhow::Error> {
    if UnixStream::connect(path).is_ok() {
        bail!("another process listens there");
    }
    if path.symlink_metadata().is_ok_and(|file| std::os::unix::fs::FileTypeExt::is_socket(&file.file_type()))
    {
        std::fs::remove_file(path)?;
    }
    // Nobody else can come between: it is made with the mode that it keeps. There is one thread yet.
    let before = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o177));
    let listener = UnixListener::bind(path);
    rustix::process::umask(before);
    let listener = listener?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Connects, and does not wait for ever for a daemon that is stopped.
fn connect(path: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    set_socket_timeout(&socket, Timeout::Send, Some(PATIENCE))?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}

/// Asks the daemon at `path`.
///
/// # Errors
/// Nobody answers, or not with a report.
pub(crate) fn ask(path: &Path) -> io::Result<Report> {
    let stream = connect(path)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut text = Vec::new();
    stream.take(MAX_LEN).read_to_end(&mut text)?;
    serde_json::from_slice(&text).map_err(|error| io::Error::new(ErrorKind::InvalidData, error))
}

/// The sockets of all daemons of this user, and the daemons' reports; what a daemon that was killed has left is removed.
pub(crate) fn ask_all(directory: &Path) -> io::Result<Vec<(PathBuf, io::Result<Report>)>> {
    let mut paths: Vec<PathBuf> = match std::fs::read_dir(directory) {
        Ok(entries) => entries.map(|entry| entry.map(|entry| entry.path())).collect::<io::Result<_>>()?,
        Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
        Err(error) => return Err(error),
    };
    // There may be devices' sockets, too, and those are not to be connected to.
    let is_pid = |stem: &str| stem.parse::<u32>().is_ok();
    paths.retain(|path| {
        path.extension().is_some_and(|extension| extension == "sock")
            && path.file_stem().and_then(OsStr::to_str).is_some_and(is_pid)
    });
    paths.sort();
    let mut reports = Vec::new();
    for some in paths.chunks(ASKED_AT_ONCE) {
        let answers: Vec<_> = std::thread::scope(|scope| {
            let asked: Vec<_> = some.iter().map(|path| scope.spawn(|| ask(path))).collect();
            let panicked = |_| Err(io::Error::other("its report is not understood"));
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

    #[test]
    fn a_report_comes_back_and_the_socket_is_ours_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("7.sock");
        let control = Control::open(Some(&path)).unwrap().unwrap();
        control.serve(|| Report { pid: 7, ..Report::default() }).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(ask(&path).unwrap().pid, 7);
        let taken = Control::open(Some(&path)).unwrap_err();
        assert!(format!("{taken:#}").contains("another process listens"), "{taken:#}");
        let _device = UnixListener::bind(directory.path().join("vm0.sock")).unwrap();
        assert_eq!(ask_all(directory.path()).unwrap().len(), 1);
        drop(control);
        assert!(!path.exists());
    }

    #[test]
    fn what_is_left_behind_is_replaced() {
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
