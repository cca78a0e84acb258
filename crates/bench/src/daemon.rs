//! A program that serves, for as long as it is measured.
use crate::BenchError;
use crate::error::broken;
use crate::machine::Pinned;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

/// How long a server may take to end before it is killed.
const END: Duration = Duration::from_secs(5);

/// A process that ends when this is dropped.
pub(crate) struct Daemon {
    child: Child,
}

impl Daemon {
    /// Starts it on `cpu`, in the scheduling class of the calling thread.
    ///
    /// # Errors
    /// It cannot be started; `subject` is named.
    pub(crate) fn start(
        mut command: Command,
        subject: &'static str,
        cpu: Option<usize>,
    ) -> Result<Self, BenchError> {
        // A process begins where the thread that starts it may run.
        let _pinned = cpu.and_then(Pinned::to);
        let child = command.spawn().map_err(|error| broken(subject, error))?;
        Ok(Self { child })
    }

    /// Its process.
    pub(crate) fn pid(&self) -> Pid {
        // Process numbers are positive and fit.
        Pid::from_raw(self.child.id() as libc::pid_t)
    }

    /// What it ended with, if it has ended.
    pub(crate) fn ended(&mut self) -> Option<String> {
        self.child.try_wait().ok().flatten().map(|status| format!("it ended: {status}"))
    }

    /// The pipes that its command asked for, once.
    pub(crate) fn pipes(&mut self) -> Option<(std::process::ChildStdin, std::process::ChildStdout)> {
        self.child.stdin.take().zip(self.child.stdout.take())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Refused, it has ended already.
        let _ = kill(self.pid(), Signal::SIGTERM);
        let end = Instant::now() + END;
        while self.ended().is_none() {
            if Instant::now() > end {
                let _ = self.child.kill();
                let _ = self.child.wait();
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
