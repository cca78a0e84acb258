//! A microVM: memory, one vCPU (or a host thread in its place), virtio-mmio devices, I/O threads, and the
//! built-in guest or a Linux guest.
mod accel;
#[cfg(test)]
mod addresses;
mod attach;
mod balance;
mod bus;
mod config;
mod console;
mod counters;
mod dirty;
mod error;
mod footprint;
mod guard;
mod helper;
#[cfg(test)]
mod hostile_tests;
mod image;
mod kvm;
mod latency;
mod linux;
mod measured;
#[cfg(test)]
mod net_tests;
mod nets;
#[cfg(test)]
mod pci_tests;
mod phase;
mod plan;
mod rebalance;
mod report;
mod report_area;
mod run;
mod thread;
mod verify;
mod vhost_net;
mod watch;

pub mod doctor;
pub mod injection;

pub use config::{
    AccelChoice, BlockOrder, Completion, DirtyLogging, DiskConfig, Inject, Job, MsiDelivery, NetConfig,
    Network, RingLayout, RunConfig, ServingMode, TransportChoice,
};
pub use error::RunError;
pub use helper::helper_main;
pub use linux::{LinuxConfig, LinuxEnd, LinuxReport, LoadError, OnReboot, Power};
pub use paravane_attach::KickPath;
pub use paravane_device::blk::EngineChoice;
pub use paravane_io::IoThreadFigures;
pub use phase::Phase;
pub use report::{
    DirtyFigures, DiskResult, ExitFigures, GuestFailure, KickFigures, NetResult, Outcome, PhaseFigures,
    QueueResult, Report,
};

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

/// What a run shows while it goes on, and how it is asked to stop. Shared with the caller's thread.
#[derive(Debug, Default)]
pub struct Progress {
    /// Set by the caller: end the run cleanly, with the report so far.
    pub cancel: AtomicBool,
    /// Bytes that all jobs will move.
    pub bytes_total: AtomicU64,
    /// Bytes moved.
    pub bytes_done: AtomicU64,
    /// Phase of the slowest disk: one of [`paravane_spec::builtin::state`].
    pub phase: AtomicU64,
}

impl Progress {
    /// What the slowest disk is at.
    #[must_use]
    pub fn phase(&self) -> Phase {
        // Relaxed: a figure for the eye.
        Phase::of_state(self.phase.load(std::sync::atomic::Ordering::Relaxed))
    }
}

/// Starts the machine, runs the built-in guest to its end, verifies on the host, and reports.
///
/// `started` is when the process started, for the report's `boot_ms`.
///
/// # Errors
/// The machine could not be made ([`RunError::exit_status`] 2: nothing was touched) or the host failed under it.
/// A guest that crashes or hangs is no error here but an [`Outcome`] in the report.
pub fn run(
    config: RunConfig,
    progress: Arc<Progress>,
    started: std::time::Instant,
) -> Result<Report, RunError> {
    run::run(&config, &progress, started)
}

/// Starts the machine with a Linux guest, whose console output goes to `console`, and waits for its end. Only KVM runs it.
///
/// # Errors
/// As for [`run()`]; a kernel that cannot be loaded touches nothing either.
pub fn run_linux(
    config: &LinuxConfig,
    console: Box<dyn std::io::Write + Send>,
    progress: &Progress,
    started: std::time::Instant,
) -> Result<LinuxReport, RunError> {
    linux::run(config, console, progress, started)
}
