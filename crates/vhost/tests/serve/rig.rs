//! A disk that is exported, in a folder of its own.
use paravane_device::blk::{Blk, BlkConfig};
use paravane_vhost::{Endpoint, Export, ExportConfig, ExportStatus};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Bytes of the disk.
pub(crate) const DISK: usize = 4 << 20;

pub(crate) struct Rig {
    pub(crate) export: Option<Export>,
    pub(crate) folder: TempDir,
}

impl Rig {
    pub(crate) fn image(&self) -> PathBuf {
        self.folder.path().join("disk.img")
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.path().join("vhost.sock")
    }

    /// A disk of zeroes with so many queues, served by two workers.
    pub(crate) fn new(queues: u16) -> Self {
        let mut rig = Self::empty();
        rig.start(queues);
        rig
    }

    /// The same, for reading only.
    pub(crate) fn read_only() -> Self {
        let mut rig = Self::empty();
        rig.serve(BlkConfig { read_only: true, ..BlkConfig::new(rig.image()) });
        rig
    }

    fn empty() -> Self {
        let rig = Self { export: None, folder: tempfile::tempdir().unwrap() };
        std::fs::write(rig.image(), vec![0; DISK]).unwrap();
        rig
    }

    pub(crate) fn start(&mut self, queues: u16) {
        self.serve(BlkConfig { queues, ..BlkConfig::new(self.image()) });
    }

    fn serve(&mut self, disk: BlkConfig) {
        let endpoint = Endpoint::Listen(self.socket());
        let mut config = ExportConfig::new("disk", endpoint);
        config.workers = 2;
        config.in_order = true;
        let disk = Blk::open(disk).unwrap();
        self.export = Some(Export::start(config, Box::new(disk)).unwrap());
    }

    pub(crate) fn status(&self) -> ExportStatus {
        self.export.as_ref().unwrap().status()
    }

    /// Descriptors of the serving process whose file has `text` in its name.
    pub(crate) fn open_files(&self, text: &str) -> usize {
        let named = |fd: std::io::Result<std::fs::DirEntry>| {
            let link = std::fs::read_link(fd.unwrap().path());
            link.is_ok_and(|link| link.to_string_lossy().contains(text))
        };
        std::fs::read_dir("/proc/self/fd").unwrap().map(named).filter(|named| *named).count()
    }

    /// Waits until the status is as `wanted`, for ten seconds at most.
    pub(crate) fn wait_for(&self, wanted: impl Fn(&ExportStatus) -> bool) -> ExportStatus {
        wait_for(Duration::from_secs(10), || self.status(), wanted)
    }
}

/// Waits until a status is as `wanted`, for so long at most.
pub(crate) fn wait_for(
    patience: Duration,
    status: impl Fn() -> ExportStatus,
    wanted: impl Fn(&ExportStatus) -> bool,
) -> ExportStatus {
    let end = Instant::now() + patience;
    loop {
        let status = status();
        if wanted(&status) {
            return status;
        }
        assert!(Instant::now() < end, "still {status:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
