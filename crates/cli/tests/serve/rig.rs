//! A disk that the program serves, for clients that know it as the crate vhost's tests do.
use crate::daemon::{Daemon, Folder, PATIENCE};
use paravane_vhost::{ExportStatus, QueueStatus};
use serde_json::Value;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Bytes of the disk.
pub(crate) const DISK: usize = 4 << 20;

pub(crate) struct Rig {
    daemon: Daemon,
    folder: Folder,
}

impl Rig {
    /// A disk of zeroes with so many queues, served by two workers.
    pub(crate) fn new(queues: u16) -> Self {
        Self::start(&["--queues", &queues.to_string(), "--workers", "2"])
    }

    /// The same with one queue, for reading only.
    pub(crate) fn read_only() -> Self {
        Self::start(&["--read-only"])
    }

    fn start(more: &[&str]) -> Self {
        let folder = Folder::new();
        std::fs::write(folder.path("disk.img"), vec![0; DISK]).unwrap();
        let (image, socket, control) = (folder.text("disk.img"), folder.text("s"), folder.text("control"));
        let arguments =
            ["blk", "--image", &image, "--socket", &socket, "--control", &control, "--queue-size", "256"];
        Self { daemon: Daemon::start(&[&arguments[..], more].concat()), folder }
    }

    pub(crate) fn image(&self) -> PathBuf {
        self.folder.path("disk.img")
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.path("s")
    }

    /// What `paravane status --json` shows, asked for as it does.
    pub(crate) fn status(&self) -> ExportStatus {
        let mut text = Vec::new();
        UnixStream::connect(self.folder.path("control")).unwrap().read_to_end(&mut text).unwrap();
        let report: Value = serde_json::from_slice(&text).unwrap();
        let device = &report["devices"][0];
        let number = |value: &Value| value.as_u64().unwrap();
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let queue = |queue: &Value| QueueStatus {
            live: queue["live"].as_bool().unwrap(),
            enabled: queue["enabled"].as_bool().unwrap(),
            taken: number(&queue["taken"]),
            completed: number(&queue["completed"]),
            error: text(&queue["error"]),
            ..QueueStatus::default()
        };
        ExportStatus {
            connected: device["connected"].as_bool().unwrap(),
            sessions: number(&device["sessions"]),
            queues: device["queues"].as_array().unwrap().iter().map(queue).collect(),
            protocol_errors: number(&device["protocol_errors"]),
            last_error: text(&device["last_error"]),
            ..ExportStatus::default()
        }
    }

    /// Waits until the status is as `wanted`.
    pub(crate) fn wait_for(&self, wanted: impl Fn(&ExportStatus) -> bool) -> ExportStatus {
        let end = Instant::now() + PATIENCE;
        loop {
            let status = self.status();
            if wanted(&status) {
                return status;
            }
            assert!(Instant::now() < end, "still {status:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Descriptors of the daemon whose file has `text` in its name.
    pub(crate) fn open_files(&self, text: &str) -> usize {
        let fds = std::fs::read_dir(format!("/proc/{}/fd", self.daemon.pid())).unwrap();
        let links = fds.filter_map(|fd| std::fs::read_link(fd.unwrap().path()).ok());
        links.filter(|link| link.to_string_lossy().contains(text)).count()
    }
}
