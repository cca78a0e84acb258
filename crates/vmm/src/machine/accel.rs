//! Accelerators: the interface of KVM and of the host thread in its place.
//!
//! ```text
//! choose -> Accelerator --sink, msi, ioeventfds--> devices, bus
//!               | start(bus)
//!               v
//!           Running --stop--> (Ended arrives on the channel) --join-->
//! ```
use crate::error::RunError;
use crate::machine::bus::Bus;
use crate::machine::console::Power;
use crate::machine::dirty::VcpuLog;

use crate::report::GuestFailure;
use paravane_notify::msi::MsiController;
use paravane_notify::{InterruptSink, IoEventFds, NotifyError};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

/// Time for a guest to stop.
const GRACE: Duration = Duration::from_secs(2);

/// End of the guest.
#[derive(Debug)]
pub(crate) enum Ended {
    /// It wrote this exit code; registers unless it is a thread.
    Exit(u32, Vec<String>),
    /// A Linux guest switched itself off, or reset itself.
    Power(Power),
    /// A triple fault, which resets a processor; registers.
    TripleFault(Vec<String>),
    /// It crashed.
    Failed(GuestFailure),
    /// It was stopped; registers.
    Stopped(Vec<String>),
    /// The host failed under it.
    Host(RunError),
}

/// A machine whose guest has not started.
pub(crate) trait Accelerator {
    /// "kvm" or "thread".
    fn name(&self) -> &'static str;
    /// The interrupt line of `gsi`.
    ///
    /// # Errors
    /// The host refuses.
    fn sink(&self, gsi: u32) -> Result<Arc<dyn InterruptSink>, NotifyError>;
    /// Source of message delivery, a vector at a time.
    fn msi(&self) -> Arc<dyn MsiController>;
    /// Source of ioeventfds.
    fn ioeventfds(&self) -> Arc<dyn IoEventFds>;
    /// Number of processors.
    fn cpus(&self) -> u16;
    /// Frequency of the guest's clock in kHz; 0: it must not be used.
    fn clock_khz(&self) -> u64;
    /// Loads the built-in guest into RAM.
    ///
    /// # Errors
    /// There is no guest in this build, or RAM is too small.
    fn prepare(&mut self) -> Result<(), RunError>;
    /// Log of the guest's writes to RAM, if it is on.
    fn vcpu_log(&self) -> Option<Box<dyn VcpuLog>>;
    /// Starts the guest, after [`Accelerator::prepare`].
    ///
    /// Its end is sent to `ended`, once.
    ///
    /// # Errors
    /// The host refuses.
    fn start(self: Box<Self>, bus: Arc<Bus>, ended: Sender<Ended>) -> Result<Box<dyn Running>, RunError>;
}

/// Calls `start` on `cpus`: threads that it starts stay there. None: any CPU.
///
/// # Errors
/// There is no such CPU, or the host refuses.
pub(crate) fn on_cpus<T>(cpus: &[usize], start: impl FnOnce() -> T) -> Result<T, RunError> {
    if cpus.is_empty() {
        return Ok(start());
    }
    let refused = |source: rustix::io::Errno| RunError::Os { what: "choose a CPU", source: source.into() };
    if cpus.iter().any(|&cpu| cpu >= CpuSet::MAX_CPU) {
        return Err(refused(rustix::io::Errno::INVAL));
    }
    let before = sched_getaffinity(None).map_err(refused)?;
    let mut only = CpuSet::new();
    cpus.iter().for_each(|&cpu| only.set(cpu));
    sched_setaffinity(None, &only).map_err(refused)?;
    let started = start();
    sched_setaffinity(None, &before).map_err(refused)?;
    Ok(started)
}

/// A guest that runs.
pub(crate) trait Running {
    /// Asks the guest to stop.
    ///
    /// [`Ended::Stopped`] follows, unless it has ended already or cannot be stopped.
    fn stop(&self);
    /// Waits for the guest's thread.
    ///
    /// Call it after the guest's end only. Drop a guest that cannot be stopped: its detached thread
    /// holds all that it needs.
    fn join(self: Box<Self>);
}

/// The error for a guest whose thread is gone.
pub(crate) fn lost() -> RunError {
    RunError::Os { what: "run the guest", source: std::io::Error::other("its thread ended without a result") }
}

/// Stops the guest; `None` if it cannot be stopped.
///
/// # Errors
/// The guest's thread is gone.
pub(crate) fn stop(running: Box<dyn Running>, ended: &Receiver<Ended>) -> Result<Option<Ended>, RunError> {
    running.stop();
    match ended.recv_timeout(GRACE) {
        Ok(end) => {
            running.join();
            Ok(Some(end))
        }
        Err(RecvTimeoutError::Timeout) => Ok(None),
        Err(RecvTimeoutError::Disconnected) => Err(lost()),
    }
}
