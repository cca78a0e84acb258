//! A microVM: memory, one vCPU (or a host thread in its place), virtio-mmio devices, I/O threads, and the
//! built-in guest or a Linux guest.
mod config;
mod error;
mod helper;
mod linux;
mod lock;
mod machine;
mod report;
mod run;

pub mod doctor;
pub mod injection;

pub use config::{
    AccelChoice, BlockOrder, Completion, DirtyLogging, DiskConfig, Inject, Job, MsiDelivery, NetConfig,
    Network, RingLayout, RunConfig, ServingMode, TransportChoice,
};
pub use error::RunError;
pub use helper::helper_main;
pub use linux::{LinuxConfig, LinuxEnd, LinuxReport, LoadError, OnReboot};
pub use machine::ports::Power;
pub use paravane_attach::KickPath;
pub use paravane_device::blk::EngineChoice;
pub use paravane_io::IoThreadFigures;
pub use report::{
    DirtyFigures, DiskResult, ExitFigures, GuestFailure, KickFigures, NetResult, Outcome, PhaseFigures,
    QueueResult, Report,
};
pub use run::{Phase, Progress};

use std::sync::Arc;

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
