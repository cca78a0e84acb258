//! The cluster, its images, and its OSD.
use nix::sys::signal::Signal;
use paravane_store::RbdLocation;
use paravane_store::rbd::{Rbd, RbdError, RbdOptions};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

/// Held shared by tests that need the OSD, exclusively by those that stop it.
static OSD: RwLock<()> = RwLock::new(());

/// How long anything of the cluster may take.
const LIMIT: Duration = Duration::from_secs(120);

/// The cluster whose configuration `PARAVANE_CEPH_CONF` names.
pub(crate) struct Cluster {
    conf: PathBuf,
}

impl Cluster {
    /// The cluster, or `None` and a line in the list of skipped tests.
    pub(crate) fn find(test: &str) -> Option<Self> {
        let Some(conf) = std::env::var_os("PARAVANE_CEPH_CONF") else {
            paravane_test_support::skip(
                test,
                "PARAVANE_CEPH_CONF names no cluster: scripts/ceph-one start FOLDER makes one",
            );
            return None;
        };
        Some(Self { conf: conf.into() })
    }

    pub(crate) fn conf(&self) -> &Path {
        &self.conf
    }

    /// Keeps the OSD up.
    pub(crate) fn in_use(&self) -> RwLockReadGuard<'static, ()> {
        OSD.read().unwrap_or_else(|error| error.into_inner())
    }

    /// Permission to stop the OSD.
    pub(crate) fn alone(&self) -> RwLockWriteGuard<'static, ()> {
        OSD.write().unwrap_or_else(|error| error.into_inner())
    }

    /// Runs a program of Ceph, and returns what it prints.
    pub(crate) fn run(&self, program: &str, arguments: &[&str]) -> String {
        let mut command = Command::new(program);
        command.arg("--conf").arg(&self.conf).args(arguments);
        let output = command.output().unwrap_or_else(|error| panic!("{program}: {error}"));
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert!(output.status.success(), "{program} {arguments:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    pub(crate) fn rbd(&self, arguments: &[&str]) -> String {
        self.run("rbd", arguments)
    }

    /// An image of this test, which goes with the value.
    pub(crate) fn image(&self, name: &str, size: &str, more: &[&str]) -> TestImage<'_> {
        let image = TestImage { cluster: self, name: format!("test-{}-{name}", std::process::id()) };
        let spec = image.spec();
        self.rbd(&[&["create", &spec, "--size", size], more].concat());
        image
    }

    /// Kills the OSD.
    pub(crate) fn kill_osd(&self) {
        self.signal_osd(Signal::SIGKILL);
    }

    /// Stops the OSD until the value is dropped.
    pub(crate) fn stop_osd(&self) -> StoppedOsd<'_> {
        self.signal_osd(Signal::SIGSTOP);
        StoppedOsd(self)
    }

    fn signal_osd(&self, signal: Signal) {
        let file = self.conf.with_file_name("osd.pid");
        let pid =
            std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let pid = nix::unistd::Pid::from_raw(pid.trim().parse().expect("a process"));
        nix::sys::signal::kill(pid, signal).expect("the OSD runs");
    }

    /// Starts the OSD that was killed.
    pub(crate) fn start_osd(&self) {
        let pid = self.conf.with_file_name("osd.pid");
        let arguments = ["-i", "0", "--pid-file", pid.to_str().expect("UTF-8")];
        // The kernel frees the disk's lock when the process is gone.
        wait_until("the OSD starts", || {
            let start = Command::new("ceph-osd").arg("--conf").arg(&self.conf).args(arguments).output();
            start.expect("ceph-osd").status.success()
        });
    }
}

/// The OSD hangs.
pub(crate) struct StoppedOsd<'a>(&'a Cluster);

impl Drop for StoppedOsd<'_> {
    fn drop(&mut self) {
        self.0.signal_osd(Signal::SIGCONT);
    }
}

/// Waits for an event that must come.
pub(crate) fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + LIMIT;
    while !done() {
        assert!(Instant::now() < end, "it does not happen that {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// An image of a test.
pub(crate) struct TestImage<'a> {
    pub(crate) cluster: &'a Cluster,
    pub(crate) name: String,
}

impl TestImage<'_> {
    /// POOL/IMAGE, as the program rbd takes it.
    pub(crate) fn spec(&self) -> String {
        format!("pool/{}", self.name)
    }

    pub(crate) fn location(&self) -> RbdLocation {
        RbdLocation {
            pool: "pool".into(),
            image: self.name.clone(),
            conf: Some(self.cluster.conf.clone()),
            ..RbdLocation::default()
        }
    }

    pub(crate) fn open(&self) -> Rbd {
        self.open_with(&RbdOptions::default()).unwrap_or_else(|error| panic!("{error}"))
    }

    pub(crate) fn open_with(&self, options: &RbdOptions) -> Result<Rbd, RbdError> {
        Rbd::open(&self.location(), options)
    }
}

impl Drop for TestImage<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        self.cluster.rbd(&["snap", "purge", "--no-progress", &self.spec()]);
        self.cluster.rbd(&["rm", "--no-progress", &self.spec()]);
    }
}
