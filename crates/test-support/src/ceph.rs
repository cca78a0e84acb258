//! The cluster that `scripts/ceph-one` makes.
use crate::patience;
use rustix::process::{Pid, Signal, kill_process};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

/// Held shared by tests that need the OSD, exclusively by those that stop it.
static OSD: RwLock<()> = RwLock::new(());

/// The cluster whose configuration `PARAVANE_CEPH_CONF` names. It has one OSD.
#[derive(Debug)]
pub struct CephCluster {
    conf: PathBuf,
}

impl CephCluster {
    /// The cluster, or `None` and a line in the list of skipped tests.
    #[must_use]
    pub fn find(test: &str) -> Option<Self> {
        let conf = std::env::var_os("PARAVANE_CEPH_CONF");
        if conf.is_none() {
            let why = "PARAVANE_CEPH_CONF names no cluster: scripts/ceph-one start FOLDER makes one";
            crate::skip(test, why);
        }
        Some(Self { conf: conf?.into() })
    }

    /// Its configuration.
    #[must_use]
    pub fn conf(&self) -> &Path {
        &self.conf
    }

    /// Keeps the OSD up.
    pub fn in_use(&self) -> RwLockReadGuard<'static, ()> {
        OSD.read().unwrap_or_else(|error| error.into_inner())
    }

    /// Permission to stop the OSD.
    pub fn alone(&self) -> RwLockWriteGuard<'static, ()> {
        OSD.write().unwrap_or_else(|error| error.into_inner())
    }

    /// Runs a program of Ceph, and returns what it prints.
    ///
    /// # Panics
    /// It fails.
    #[must_use]
    pub fn output(&self, program: &str, arguments: &[&str]) -> Vec<u8> {
        let mut command = Command::new(program);
        command.arg("--conf").arg(&self.conf).args(arguments);
        let output = command.output().unwrap_or_else(|error| panic!("{program}: {error}"));
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{program} {arguments:?}: {error}");
        output.stdout
    }

    /// Runs a program of Ceph.
    ///
    /// # Panics
    /// It fails.
    pub fn run(&self, program: &str, arguments: &[&str]) {
        drop(self.output(program, arguments));
    }

    /// Runs a test that kills the OSD; skips it if the OSD has lost an object by itself.
    ///
    /// After a SIGKILL, BlueStore on a file (Ceph 16.2.15) now and then finds a bad checksum in what it
    /// has stored ("_verify_csum", "unfound" in its log). No other OSD has a copy, so requests for the object
    /// would wait for ever: it is given up, and says nothing about the disks of the test.
    pub fn unless_it_loses_data(&self, test: &str, body: impl FnOnce()) {
        let (before, ended) = (self.lost_objects().len(), AtomicBool::new(false));
        let result = std::thread::scope(|scope| {
            scope.spawn(|| {
                // Relaxed: the scope joins.
                while !ended.load(Ordering::Relaxed) {
                    self.lost_objects()[before..].iter().for_each(|line| self.give_up(line));
                    std::thread::sleep(Duration::from_millis(500));
                }
            });
            let result = catch_unwind(AssertUnwindSafe(body));
            ended.store(true, Ordering::Relaxed);
            result
        });
        match (self.lost_objects().get(before), result) {
            (Some(line), _) => crate::skip(test, format!("the OSD has lost an object: {line}")),
            (None, Err(panic)) => resume_unwind(panic),
            (None, Ok(())) => {}
        }
    }

    /// Objects that the OSD has lost so far, by its log.
    fn lost_objects(&self) -> Vec<String> {
        let log = std::fs::read(self.conf.with_file_name("osd.0.log")).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        log.lines().filter(|line| line.ends_with(", unfound")).map(str::to_owned).collect()
    }

    /// Has the OSD forget a lost object. An error means that it has, or cannot yet.
    fn give_up(&self, line: &str) {
        if let Some(group) = placement_group(line) {
            let mut command = Command::new("ceph");
            command.arg("--conf").arg(&self.conf).args(["pg", group, "mark_unfound_lost", "delete"]);
            drop(command.output());
        }
    }

    /// Kills the OSD. It is started again when the value is dropped.
    ///
    /// # Panics
    /// It does not run.
    #[must_use]
    pub fn kill_osd(&self) -> KilledOsd<'_> {
        self.signal_osd(Signal::KILL);
        KilledOsd(self)
    }

    /// Stops the OSD until the value is dropped.
    ///
    /// # Panics
    /// It does not run.
    #[must_use]
    pub fn stop_osd(&self) -> StoppedOsd<'_> {
        self.signal_osd(Signal::STOP);
        StoppedOsd(self)
    }

    fn pid_file(&self) -> PathBuf {
        self.conf.with_file_name("osd.pid")
    }

    fn signal_osd(&self, signal: Signal) {
        let file = self.pid_file();
        let pid =
            std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let pid = pid.trim().parse().ok().and_then(Pid::from_raw).expect("a process");
        kill_process(pid, signal).expect("the OSD runs");
    }

    fn start_osd(&self) {
        let (pid, start) = (self.pid_file(), Instant::now());
        let mut command = Command::new("ceph-osd");
        command.arg("--conf").arg(&self.conf).args(["-i", "0", "--pid-file"]).arg(pid);
        // The kernel frees the disk's lock when the process is gone.
        while !command.output().expect("ceph-osd").status.success() {
            if start.elapsed() >= 2 * patience() {
                assert!(std::thread::panicking(), "the OSD does not start");
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// The OSD is dead.
#[derive(Debug)]
pub struct KilledOsd<'a>(&'a CephCluster);

impl Drop for KilledOsd<'_> {
    fn drop(&mut self) {
        self.0.start_osd();
    }
}

/// The OSD hangs.
#[derive(Debug)]
pub struct StoppedOsd<'a>(&'a CephCluster);

impl Drop for StoppedOsd<'_> {
    fn drop(&mut self) {
        self.0.signal_osd(Signal::CONT);
    }
}

/// The placement group of a lost object.
fn placement_group(line: &str) -> Option<&str> {
    line.split_once(" missing primary copy of ")?.0.rsplit(' ').next()
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_lost_object_names_its_placement_group() {
        let line = "log_channel(cluster) log [ERR] : 1.4 missing primary copy of 1:25884f2c:::rbd_data.1.0f:head, unfound";
        assert_eq!(super::placement_group(line), Some("1.4"));
        assert_eq!(super::placement_group("something else, unfound"), None);
    }
}
