//! Device that the library exports, in its own folder.
//!
//! The program's rig has the same functions.
use paravane_device::Device;
use paravane_device::blk::{Blk, BlkConfig};
use paravane_device::latency::LatencySnapshot;
use paravane_device::net::{LinkEnd, Net, NetConfig};
use paravane_device::rng::Rng;
use paravane_export::{Endpoint, Export, ExportStatus};
use paravane_vhost::ExportConfig;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use tempfile::TempDir;

/// Size of the disk in bytes.
pub(crate) const DISK: usize = 4 << 20;

/// Whether disks offer IN_ORDER.
pub(crate) const IN_ORDER: bool = true;

pub(crate) use paravane_test_support::skip;

pub(crate) struct Rig {
    export: Option<Export>,
    folder: TempDir,
}

impl Rig {
    pub(crate) fn image(&self) -> PathBuf {
        self.folder.path().join("disk.img")
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.path().join("vhost.sock")
    }

    /// A disk of zeroes with `queues` queues, served by two workers.
    pub(crate) fn new(queues: u16) -> Self {
        let mut rig = Self::empty();
        rig.start(queues);
        rig
    }

    /// A read-only disk.
    pub(crate) fn read_only() -> Self {
        let mut rig = Self::empty();
        rig.serve(Box::new(Blk::open(BlkConfig { read_only: true, ..BlkConfig::new(rig.image()) }).unwrap()));
        rig
    }

    /// An entropy device.
    pub(crate) fn entropy() -> Self {
        let mut rig = Self::empty();
        rig.serve(Box::new(Rng::new()));
        rig
    }

    /// A network device with two queue pairs, whose frames return.
    pub(crate) fn card() -> Self {
        let mut rig = Self::empty();
        let config = NetConfig { announce: true, ..NetConfig::new([2, 0, 0, 0, 0, 1]) };
        rig.serve(Box::new(Net::new(config, LinkEnd::echo(2).unwrap()).unwrap()));
        rig
    }

    fn empty() -> Self {
        let rig = Self { export: None, folder: tempfile::tempdir().unwrap() };
        std::fs::write(rig.image(), vec![0; DISK]).unwrap();
        rig
    }

    pub(crate) fn start(&mut self, queues: u16) {
        self.serve(Box::new(Blk::open(BlkConfig { queues, ..BlkConfig::new(self.image()) }).unwrap()));
    }

    fn serve(&mut self, device: Box<dyn Device>) {
        let mut config = ExportConfig::new("device", Endpoint::Listen(self.socket()));
        config.workers = 2;
        config.in_order = true;
        self.export = Some(Export::start(config, device).unwrap());
    }

    /// Stops the server as its operator does.
    pub(crate) fn stop(&mut self) {
        self.export.take().unwrap().stop();
    }

    /// Has the driver informed of a configuration change.
    pub(crate) fn change(&self) {
        self.export.as_ref().unwrap().config_changed();
    }

    pub(crate) fn status(&self) -> ExportStatus {
        self.export.as_ref().unwrap().status()
    }

    pub(crate) fn latencies(&self) -> Vec<LatencySnapshot> {
        self.export.as_ref().unwrap().latencies()
    }

    /// The serving process.
    pub(crate) fn process(&self) -> u32 {
        std::process::id()
    }

    /// Number of descriptors of the serving process whose file has `text` in its name.
    pub(crate) fn open_files(&self, text: &str) -> usize {
        let named = |fd: std::io::Result<std::fs::DirEntry>| {
            let link = std::fs::read_link(fd.unwrap().path());
            link.is_ok_and(|link| link.to_string_lossy().contains(text))
        };
        std::fs::read_dir("/proc/self/fd").unwrap().map(named).filter(|named| *named).count()
    }

    /// Waits until the status is `wanted`.
    pub(crate) fn wait_for(&self, wanted: impl Fn(&ExportStatus) -> bool) -> ExportStatus {
        wait_for(|| self.status(), wanted)
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        if let Some(export) = self.export.as_ref().filter(|_| std::thread::panicking()) {
            eprintln!("the device: {:?}", export.status());
        }
    }
}

/// Waits until a status is `wanted`.
pub(crate) fn wait_for(
    status: impl Fn() -> ExportStatus,
    wanted: impl Fn(&ExportStatus) -> bool,
) -> ExportStatus {
    let still = || format!("{:?}", status());
    paravane_test_support::wait_for("a status", still, || Some(status()).filter(&wanted))
}

const FOLDER: &str = "PARAVANE_TEST_SERVE_FOLDER";

/// Not a test: [`Disk::serve`] starts it.
#[test]
#[ignore = "runs until it is killed"]
fn server() {
    let folder = PathBuf::from(std::env::var_os(FOLDER).unwrap());
    let mut config = ExportConfig::new("killed", Endpoint::Listen(folder.join("vhost.sock")));
    config.in_order = true;
    let disk = Blk::open(BlkConfig::new(folder.join("disk.img"))).unwrap();
    let _export = Export::start(config, Box::new(disk)).unwrap();
    loop {
        std::thread::park();
    }
}

/// Disk of zeroes that one process after the other serves.
pub(crate) struct Disk(TempDir);

impl Disk {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("disk.img"), vec![0; DISK]).unwrap();
        Self(folder)
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.0.path().join("vhost.sock")
    }

    pub(crate) fn serve(&self) -> Server {
        Server::start(self.0.path())
    }

    /// Contents of the disk, while it is not served.
    pub(crate) fn content(&self) -> Vec<u8> {
        std::fs::read(self.0.path().join("disk.img")).unwrap()
    }
}

/// Process that serves a [`Disk`]. Killed on drop.
pub(crate) struct Server(Child);

impl Server {
    fn start(folder: &Path) -> Self {
        let this = std::env::current_exe().unwrap();
        let mut command = Command::new(this);
        command.args(["--exact", "rig::server", "--ignored", "--nocapture"]).env(FOLDER, folder);
        Self(command.stdout(Stdio::null()).spawn().unwrap())
    }

    /// Ends it in good order, if it supports that.
    pub(crate) fn end(self) {}
}

impl Drop for Server {
    fn drop(&mut self) {
        // SIGKILL.
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}
