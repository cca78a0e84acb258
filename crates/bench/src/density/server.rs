//! The servers: one process for all devices.
use super::disks::Disks;
use crate::BenchError;
use crate::builds::Build;
use crate::daemon::{Daemon, STORAGE_DAEMON, is_installed};
use crate::error::broken;
use nix::unistd::Pid;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::io;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Time limit for a server to be ready.
const START: Duration = Duration::from_secs(60);
/// Time between two looks whether a server is ready.
const LOOK: Duration = Duration::from_micros(100);

/// A subject.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Subject {
    /// `paravane serve`.
    Paravane(Build),
    /// `qemu-storage-daemon`.
    StorageDaemon,
}

impl Subject {
    /// This build, then the other one if named, then the peer if installed.
    ///
    /// # Errors
    /// There is no program `paravane`.
    pub(super) fn all() -> Result<Vec<Self>, BenchError> {
        let mut all: Vec<Self> = Build::all()?.into_iter().map(Self::Paravane).collect();
        if is_installed(STORAGE_DAEMON) {
            all.push(Self::StorageDaemon);
        }
        Ok(all)
    }

    /// Name in results.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Paravane(build) => build.name,
            Self::StorageDaemon => STORAGE_DAEMON,
        }
    }
}

/// A running server, stopped when dropped.
pub(super) struct Server {
    daemon: Daemon,
    /// Where it also says that it ends.
    _ready: Ready,
    /// Whether it is killed instead of asked to end.
    killed: bool,
    /// Time from its start until it was ready.
    pub(super) start_time: Duration,
}

impl Server {
    /// Serves `images`, the first one at the first socket, and waits until the server is ready.
    ///
    /// It inherits the CPUs and the scheduling class of the calling thread.
    ///
    /// # Errors
    /// The process cannot be started, ends, or is not ready in time.
    pub(super) fn start(subject: &Subject, disks: &Disks, images: &[PathBuf]) -> Result<Self, BenchError> {
        let name = subject.name();
        let failed = |error: io::Error| broken(name, error);
        for disk in 0..images.len() {
            // Of the server before.
            let _ = std::fs::remove_file(disks.socket(disk));
        }
        let mut ready = Ready::new(subject, disks.folder()).map_err(failed)?;
        let mut command = match subject {
            Subject::Paravane(build) => paravane(build, disks, images).map_err(failed)?,
            Subject::StorageDaemon => storage_daemon(disks, images),
        };
        ready.ask(&mut command);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let start = Instant::now();
        let mut daemon = Daemon::start(command, name, None)?;
        while !ready.has_come() {
            if let Some(ended) = daemon.ended() {
                return Err(broken(name, ended));
            }
            if start.elapsed() > START {
                return Err(broken(name, format_args!("not ready after {START:?}")));
            }
            std::thread::sleep(LOOK);
        }
        let (start_time, killed) = (start.elapsed(), *subject == Subject::StorageDaemon);
        Ok(Self { daemon, _ready: ready, killed, start_time })
    }

    /// Its process identifier.
    pub(super) fn pid(&self) -> Pid {
        self.daemon.pid()
    }

    /// Its exit status as text, if it has ended.
    pub(super) fn ended(&mut self) -> Option<String> {
        self.daemon.ended()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // With 100 clients that have just left, it needs more than 5 s to end.
        if self.killed {
            self.daemon.kill();
        }
    }
}

/// How a server says that it is ready.
enum Ready {
    /// By a datagram, as to systemd.
    Notify { socket: UnixDatagram, path: PathBuf },
    /// By a file with its process identifier.
    PidFile(PathBuf),
}

impl Ready {
    fn new(subject: &Subject, folder: &Path) -> io::Result<Self> {
        let path = folder.join("ready");
        let _ = std::fs::remove_file(&path);
        match subject {
            Subject::Paravane(_) => {
                let socket = UnixDatagram::bind(&path)?;
                socket.set_nonblocking(true)?;
                Ok(Self::Notify { socket, path })
            }
            Subject::StorageDaemon => Ok(Self::PidFile(path)),
        }
    }

    /// Tells the server of it.
    fn ask(&self, command: &mut Command) {
        match self {
            Self::Notify { path, .. } => command.env("NOTIFY_SOCKET", path),
            Self::PidFile(path) => command.arg("--pidfile").arg(path),
        };
    }

    fn has_come(&mut self) -> bool {
        match self {
            Self::Notify { socket, .. } => {
                let mut message = [0; 4096];
                let len = socket.recv(&mut message).unwrap_or(0);
                String::from_utf8_lossy(&message[..len]).contains("READY=1")
            }
            Self::PidFile(path) => path.exists(),
        }
    }
}

fn paravane(build: &Build, disks: &Disks, images: &[PathBuf]) -> io::Result<Command> {
    let mut text = String::new();
    for (disk, image) in images.iter().enumerate() {
        let (image, socket) = (image.display(), disks.socket(disk));
        let _ = writeln!(text, "[[blk]]\nname = \"disk{disk}\"\nimage = \"{image}\"");
        let _ = writeln!(text, "socket = \"{}\"", socket.display());
    }
    let file = disks.folder().join("devices.toml");
    std::fs::write(&file, text)?;
    let mut command = Command::new(&build.program);
    command.args(["serve", "--control", "off", "--config"]).arg(file).args(&build.extra_args);
    // Log lines of each connection would mix with the table.
    if std::env::var_os("RUST_LOG").is_none() {
        command.env("RUST_LOG", "warn");
    }
    Ok(command)
}

fn storage_daemon(disks: &Disks, images: &[PathBuf]) -> Command {
    let with = |before: String, path: &Path| {
        let mut argument = OsString::from(before);
        argument.push(path);
        argument
    };
    let mut command = Command::new(STORAGE_DAEMON);
    command.args(["--object", "iothread,id=thread"]);
    for (disk, image) in images.iter().enumerate() {
        let file = format!("driver=file,node-name=disk{disk},aio=io_uring,locking=off,filename=");
        let export = format!(
            "type=vhost-user-blk,id=export{disk},node-name=disk{disk},writable=on,iothread=thread,addr.type=unix,addr.path="
        );
        command.arg("--blockdev").arg(with(file, image));
        command.arg("--export").arg(with(export, &disks.socket(disk)));
    }
    command
}
