//! A server process under measurement.
use crate::BenchError;
use crate::error::broken;
use crate::machine::Pinned;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Time from SIGTERM to SIGKILL.
const END: Duration = Duration::from_secs(5);

/// Program of a peer that serves disks.
pub(crate) const STORAGE_DAEMON: &str = "qemu-storage-daemon";

/// Whether `program` is installed.
pub(crate) fn is_installed(program: &str) -> bool {
    Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
}

/// A child process, stopped when dropped.
pub(crate) struct Daemon {
    child: Child,
}

impl Daemon {
    /// Starts `command` on `cpu`, in the scheduling class of the calling thread.
    ///
    /// # Errors
    /// The process cannot be started; the error names `subject`.
    pub(crate) fn start(
        mut command: Command,
        subject: &'static str,
        cpu: Option<usize>,
    ) -> Result<Self, BenchError> {
        // A process inherits the CPUs of the thread that starts it.
        let _pinned = cpu.and_then(Pinned::to);
        let child = command.spawn().map_err(|error| broken(subject, error))?;
        Ok(Self { child })
    }

    /// Its process identifier.
    pub(crate) fn pid(&self) -> Pid {
        // Process identifiers are positive and fit.
        Pid::from_raw(self.child.id() as libc::pid_t)
    }

    /// Its exit status as text, if it has ended.
    pub(crate) fn ended(&mut self) -> Option<String> {
        self.child.try_wait().ok().flatten().map(|status| format!("the process ended: {status}"))
    }

    /// Whether it has ended with status 0.
    pub(crate) fn succeeded(&mut self) -> bool {
        self.child.try_wait().ok().flatten().is_some_and(|status| status.success())
    }

    /// Stops all its threads until [`Daemon::resume`].
    pub(crate) fn pause(&self) {
        // If this fails, it has ended, which the next sample tells.
        let _ = kill(self.pid(), Signal::SIGSTOP);
    }

    /// Continues after [`Daemon::pause`].
    pub(crate) fn resume(&self) {
        // As above.
        let _ = kill(self.pid(), Signal::SIGCONT);
    }

    /// Kills it, for a server whose end is slow and is not measured.
    pub(crate) fn kill(&mut self) {
        // If this fails, it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Takes the pipes of its standard input and output.
    pub(crate) fn pipes(&mut self) -> Option<(std::process::ChildStdin, std::process::ChildStdout)> {
        self.child.stdin.take().zip(self.child.stdout.take())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Another process may have the number of one that has ended.
        if self.ended().is_none() {
            // If this fails, it is ending.
            let _ = kill(self.pid(), Signal::SIGTERM);
            self.resume();
        }
        let end = Instant::now() + END;
        while self.ended().is_none() {
            if Instant::now() > end {
                return self.kill();
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
