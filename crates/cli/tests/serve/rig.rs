//! A device that the program serves in its sandbox.
//!
//! With the functions of the rig of the crate vhost's tests. Its sessions are kept by a holder
//! (`--holder`), while those of the library are not: both have to bear the same clients.
pub(crate) use crate::daemon::skip;
use crate::daemon::{Daemon, Folder, paravane, patience, without_sandbox};
use crate::images::{Format, Image};
use paravane_export::{ExportStatus, QueueStatus};
use serde_json::Value;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Bytes of the disk.
pub(crate) const DISK: usize = 4 << 20;

/// Whether disks offer IN_ORDER.
pub(crate) const IN_ORDER: bool = false;

pub(crate) struct Rig {
    daemon: Option<Daemon>,
    _holder: Daemon,
    folder: Folder,
}

impl Rig {
    /// A disk of zeroes with several queues, served by two workers.
    pub(crate) fn new(queues: u16) -> Self {
        let mut rig = Self::empty();
        rig.start(queues);
        rig
    }

    /// The same with one queue, for reading only.
    pub(crate) fn read_only() -> Self {
        let mut rig = Self::empty();
        rig.serve("blk", &["--image", &rig.folder.text("disk.img"), "--queue-size", "256", "--read-only"]);
        rig
    }

    /// An entropy device.
    pub(crate) fn entropy() -> Self {
        let mut rig = Self::empty();
        rig.serve("rng", &[]);
        rig
    }

    /// A network card with two pairs of queues, whose frames come back.
    pub(crate) fn card() -> Self {
        let mut rig = Self::empty();
        rig.serve("net", &["--echo", "--queues", "2"]);
        rig
    }

    fn empty() -> Self {
        let folder = Folder::new();
        std::fs::write(folder.path("disk.img"), vec![0; DISK]).unwrap();
        let mut holder = paravane();
        holder.args(["hold", "--socket", &folder.text("hold")]).args(without_sandbox());
        let mut holder = Daemon::spawn(&mut holder);
        holder.wait_for("ready");
        Self { daemon: None, _holder: holder, folder }
    }

    pub(crate) fn start(&mut self, queues: u16) {
        let (image, queues) = (self.folder.text("disk.img"), queues.to_string());
        self.serve("blk", &["--image", &image, "--queue-size", "256", "--queues", &queues, "--workers", "2"]);
    }

    fn serve(&mut self, kind: &str, more: &[&str]) {
        let (socket, control) = (self.folder.text("s"), self.folder.text("control"));
        let holder = self.folder.text("hold");
        let arguments = [kind, "--socket", &socket, "--control", &control, "--holder", &holder];
        self.daemon = Some(Daemon::start(&[&arguments[..], more].concat()));
    }

    /// Ends the daemon by SIGTERM.
    pub(crate) fn stop(&mut self) {
        let (status, log) = self.daemon.take().unwrap().end();
        assert!(status.success(), "{log:?}");
    }

    pub(crate) fn image(&self) -> PathBuf {
        self.folder.path("disk.img")
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.path("s")
    }

    /// The report of the control socket.
    pub(crate) fn status(&self) -> ExportStatus {
        let mut text = Vec::new();
        UnixStream::connect(self.folder.path("control")).unwrap().read_to_end(&mut text).unwrap();
        let report: Value = serde_json::from_slice(&text).unwrap();
        let device = &report["devices"][0];
        let number = |value: &Value| value.as_u64().unwrap();
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let queue = |queue: &Value| {
            let mut status = QueueStatus::default();
            status.live = queue["live"].as_bool().unwrap();
            status.enabled = queue["enabled"].as_bool().unwrap();
            status.size = number(&queue["size"]) as u16;
            status.kicks = number(&queue["kicks"]);
            status.taken = number(&queue["taken"]);
            status.completed = number(&queue["completed"]);
            status.interrupts = number(&queue["interrupts"]);
            status.error = text(&queue["error"]);
            status
        };
        let mut status = ExportStatus::default();
        status.connected = device["connected"].as_bool().unwrap();
        status.sessions = number(&device["sessions"]);
        status.queues = device["queues"].as_array().unwrap().iter().map(queue).collect();
        status.refused_translations = number(&device["refused_translations"]);
        status.protocol_errors = number(&device["protocol_errors"]);
        let features = device["protocol_features"].as_str().and_then(|text| text.strip_prefix("0x"));
        status.protocol_features = u64::from_str_radix(features.unwrap(), 16).unwrap();
        status.last_error = text(&device["last_error"]);
        status
    }

    /// Waits until the status is as `wanted`.
    pub(crate) fn wait_for(&self, wanted: impl Fn(&ExportStatus) -> bool) -> ExportStatus {
        let end = Instant::now() + patience();
        loop {
            let status = self.status();
            if wanted(&status) {
                return status;
            }
            assert!(Instant::now() < end, "still {status:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The serving process.
    pub(crate) fn process(&self) -> u32 {
        self.daemon.as_ref().unwrap().pid()
    }

    /// Descriptors of the daemon whose file has `text` in its name.
    pub(crate) fn open_files(&self, text: &str) -> usize {
        let fds = std::fs::read_dir(format!("/proc/{}/fd", self.process())).unwrap();
        let links = fds.filter_map(|fd| std::fs::read_link(fd.unwrap().path()).ok());
        links.filter(|link| link.to_string_lossy().contains(text)).count()
    }
}

/// A disk of zeroes served by several daemons in sequence.
pub(crate) struct Disk {
    image: Image,
    options: &'static [&'static str],
}

impl Disk {
    pub(crate) fn new() -> Self {
        Self::of(Image::new(Format::Raw, false, DISK), &[])
    }

    /// One with this image, served with more options.
    pub(crate) fn of(image: Image, options: &'static [&'static str]) -> Self {
        Self { image, options }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.image.folder().path("s")
    }

    pub(crate) fn serve(&self) -> Server {
        let socket = self.image.folder().text("s");
        let more = ["--socket", &socket, "--control", "off"];
        let image = self.image.options();
        let image: Vec<&str> = image.iter().map(String::as_str).collect();
        Server(Daemon::start(&[&["blk"], &image[..], &more, self.options].concat()))
    }

    /// Contents of the disk, while no daemon serves it.
    pub(crate) fn content(&self) -> Vec<u8> {
        self.image.content()
    }
}

/// A daemon that serves a [`Disk`]. Dropped, it is killed.
pub(crate) struct Server(Daemon);

impl Server {
    /// Ends the daemon by SIGTERM.
    pub(crate) fn end(self) {
        let (status, log) = self.0.end();
        assert!(status.success(), "{log:?}");
    }
}
