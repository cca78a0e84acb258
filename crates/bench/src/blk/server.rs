//! The servers: one process per subject.
use super::case::{Case, SPAN, Storage};
use super::ceph;
use super::http;
use super::image::Image;
use super::spdk;
use super::spdk::Relay;
use crate::BenchError;
use crate::builds::Build;
use crate::daemon::{Daemon, STORAGE_DAEMON, is_installed};
use crate::error::broken;
use crate::subject::OTHER_BUILD;
use nix::unistd::Pid;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Name of a local file beside the same file over HTTP.
pub(super) const LOCAL: &str = "paravane/local";

/// A subject.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Subject {
    /// `paravane serve blk`.
    Paravane(Build),
    /// `qemu-storage-daemon`.
    StorageDaemon,
    /// SPDK's `vhost`, the program with this path.
    Spdk(PathBuf),
    /// `paravane serve blk` with the file itself, beside those that get it over HTTP.
    Local(Build),
}

impl Subject {
    /// This build, then the other one if named, then the peers that are there, then local files.
    ///
    /// # Errors
    /// There is no program `paravane`.
    pub(super) fn all() -> Result<Vec<Self>, BenchError> {
        let builds = Build::all()?;
        let local = builds.first().cloned().map(|build| Self::Local(Build { name: LOCAL, ..build }));
        let mut all: Vec<Self> = builds.into_iter().map(Self::Paravane).collect();
        if is_installed(STORAGE_DAEMON) {
            all.push(Self::StorageDaemon);
        }
        all.extend(spdk::program().ok().map(Self::Spdk));
        all.extend(local);
        Ok(all)
    }

    /// Name in results.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Paravane(build) | Self::Local(build) => build.name,
            Self::StorageDaemon => STORAGE_DAEMON,
            Self::Spdk(_) => spdk::NAME,
        }
    }

    /// Name of its image: a copy per server, so that none shares pages.
    ///
    /// With O_DIRECT all servers use one file, because its place on the disk decides the speed.
    pub(super) fn image(&self, storage: Storage) -> &'static str {
        match self {
            Self::StorageDaemon if storage != Storage::Direct => "image-peer",
            Self::Paravane(build) if build.name == OTHER_BUILD && storage != Storage::Direct => "image-other",
            Self::Local(_) => "image-local",
            Self::Paravane(_) | Self::StorageDaemon | Self::Spdk(_) => "image",
        }
    }

    /// Whether it can serve images of this kind.
    pub(super) fn stores(&self, storage: Storage) -> bool {
        match self {
            Self::Paravane(_) => true,
            Self::StorageDaemon => match storage {
                Storage::Rbd => ceph::qemu_can(),
                Storage::HttpCached => http::qemu_can(),
                _ => true,
            },
            Self::Spdk(_) => storage == Storage::Tmpfs,
            Self::Local(_) => storage == Storage::HttpCached,
        }
    }

    /// Whether it has what a case needs.
    pub(super) fn fits(&self, case: Case) -> bool {
        !case.packed || !matches!(self, Self::StorageDaemon)
    }

    /// Whether the first client has to write the image.
    pub(super) fn begins_empty(&self) -> bool {
        matches!(self, Self::Spdk(_))
    }

    fn command(&self, storage: Storage, image: &Path, socket: &Path, cpu: usize) -> io::Result<Command> {
        let (qcow2, direct) = (storage.is_qcow2(), storage == Storage::Direct);
        let with = |before: &str, path: &Path, after: &str| {
            let mut argument = OsString::from(before);
            argument.push(path);
            argument.push(after);
            argument
        };
        Ok(match self {
            Self::Spdk(program) => spdk::command(program, socket, cpu)?,
            Self::Paravane(Build { program, extra_args, .. })
            | Self::Local(Build { program, extra_args, .. }) => {
                let mut command = Command::new(program);
                let image = match storage {
                    Storage::Rbd => with(&format!("rbd:{}/", ceph::POOL), image, &ceph::with_conf(":conf=")),
                    _ if storage.is_remote() => with("nbd+unix:///?socket=", image, ""),
                    _ => image.into(),
                };
                command
                    .args(["serve", "blk", "--queue-size", "1024", "--image"])
                    .arg(image)
                    .args(["--format", if qcow2 { "qcow2" } else { "raw" }]);
                if direct {
                    command.args(["--direct", "--no-lock"]);
                }
                if storage == Storage::HttpCached {
                    command.arg("--read-only");
                    if matches!(self, Self::Paravane(_)) {
                        command.arg("--cache").arg(Image::cache(socket)?);
                    }
                }
                command.arg("--socket").arg(socket).args(extra_args);
                // Log lines of each connection would mix with the table.
                if std::env::var_os("RUST_LOG").is_none() {
                    command.env("RUST_LOG", "warn");
                }
                command
            }
            Self::StorageDaemon => {
                let mut command = Command::new(STORAGE_DAEMON);
                // With O_DIRECT, all servers have one image open, which a lock would forbid.
                let file = if storage == Storage::Qcow2Nbd {
                    "driver=qcow2,node-name=disk,file.driver=nbd,file.server.type=unix,file.server.path="
                } else if storage.is_remote() {
                    "driver=nbd,node-name=disk,server.type=unix,server.path="
                } else if qcow2 {
                    "driver=qcow2,node-name=disk,file.driver=file,file.aio=io_uring,file.locking=off,file.filename="
                } else {
                    "driver=file,node-name=disk,aio=io_uring,locking=off,filename="
                };
                let file = match storage {
                    Storage::HttpCached => with("driver=http,node-name=disk,read-only=on,url=", image, ""),
                    Storage::Rbd => {
                        let before = format!("driver=rbd,node-name=disk,pool={},image=", ceph::POOL);
                        with(&before, image, &ceph::with_conf(",conf="))
                    }
                    _ => with(file, image, if direct { ",cache.direct=on" } else { "" }),
                };
                let writable = if storage == Storage::HttpCached { "off" } else { "on" };
                let export = format!(
                    "type=vhost-user-blk,id=export,node-name=disk,writable={writable},iothread=thread,\
                     addr.type=unix,addr.path="
                );
                command.args(["--object", "iothread,id=thread"]);
                command.arg("--blockdev").arg(file).arg("--export").arg(with(&export, socket, ""));
                command
            }
        })
    }
}

/// A running server, stopped when dropped.
pub(super) struct Server {
    pub(super) subject: Subject,
    pub(super) socket: PathBuf,
    daemon: Daemon,
    _relay: Option<Relay>,
}

impl Server {
    /// Starts a server on `cpu`, in the scheduling class of the calling thread.
    ///
    /// It may not listen yet when this returns.
    ///
    /// # Errors
    /// The process cannot be started.
    pub(super) fn start(
        subject: &Subject,
        storage: Storage,
        image: &Image,
        cpu: Option<usize>,
    ) -> Result<Self, BenchError> {
        let socket = image.folder().join(subject.name().replace('/', "-")).with_extension("sock");
        let (name, file) = (subject.name(), subject.image(storage));
        let image = match storage {
            Storage::Rbd => ceph::image_name(file).into(),
            Storage::HttpCached if !matches!(subject, Subject::Local(_)) => image.url(file),
            _ if storage.is_remote() => image.socket(file),
            _ => image.path(file),
        };
        let server_cpu = cpu.unwrap_or(0);
        let command = subject.command(storage, &image, &socket, server_cpu);
        let mut command = command.map_err(|error| broken(name, error))?;
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let spdk = matches!(subject, Subject::Spdk(_));
        // SPDK pins its reactor by itself. Its other threads need another CPU, or never run.
        let mut daemon = Daemon::start(command, name, cpu.filter(|_| !spdk))?;
        let relay =
            spdk.then(|| spdk::configure(&socket, server_cpu, SPAN, || daemon.ended())).transpose()?;
        let server = Self { subject: subject.clone(), socket, daemon, _relay: relay };
        server.pause();
        Ok(server)
    }

    /// Gives its CPU to the others, if it would poll it between samples.
    pub(super) fn pause(&self) {
        if matches!(self.subject, Subject::Spdk(_)) {
            self.daemon.pause();
        }
    }

    /// Goes on after [`Server::pause`].
    pub(super) fn resume(&self) {
        if matches!(self.subject, Subject::Spdk(_)) {
            self.daemon.resume();
        }
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
