//! A microVM for virtio devices, with the built-in guest or a Linux guest.
//!
//! ```text
//! config ---> run (open, watch, judge, report): the built-in guest ---.
//!       '---> linux: a Linux guest -----------------------------------+--> machine: memory, bus, devices, vCPU
//! arch: what one architecture needs
//! doctor, injection: measurements of the host
//! ```
//!
//! # Files
//!
//! * The microVM: `machine` (memory, bus, devices, threads, the KVM vCPU or the thread in its
//!   place), `run` (open, judge, report), `linux` (a run of a Linux guest), `arch` (all that one
//!   processor architecture needs: vCPU, interrupts, exits, loader and tables for Linux), `doctor`
//!   (KVM), `injection` (measures interrupts).
//! * Its build script makes the guest image.
mod arch;
mod config;
mod error;
mod linux;
mod lock;
mod machine;
mod report;
mod run;

pub mod doctor;
pub mod injection;

pub use arch::LoadError;
pub use config::{
    AccelChoice, BlockOrder, Completion, DirtyLogging, DiskConfig, Inject, Job, MsiDelivery, NetConfig,
    Network, RingLayout, RunConfig, TransportChoice,
};
pub use error::RunError;
pub use linux::{LinuxConfig, LinuxEnd, LinuxReport, OnReboot};
pub use machine::console::Power;
pub use machine::devices::NamedDevice;
pub use machine::server::{QueueServer, ServerFigures};
pub use paravane_attach::KickPath;
pub use paravane_device::blk::EngineChoice;
pub use paravane_io::IoThreadFigures;
pub use report::{
    DirtyFigures, DiskResult, ExitFigures, GuestFailure, KickFigures, NetResult, Outcome, PhaseFigures,
    QueueResult, Report,
};
pub use run::{Phase, Progress};

use std::sync::Arc;

/// Runs the built-in guest to its end, verifies its work on the host, and reports.
///
/// `started` is the start of the process, for the report's `boot_ms`.
///
/// # Errors
/// The machine could not be made ([`RunError::exit_status`] 2: nothing was touched), or the host
/// failed under it. A guest that crashes or hangs is an [`Outcome`], not an error.
pub fn run(
    config: RunConfig,
    progress: Arc<Progress>,
    started: std::time::Instant,
) -> Result<Report, RunError> {
    run::run(&config, &progress, started)
}

/// Runs a Linux guest under KVM to its end. Console output goes to `console`.
///
/// `more`: devices beside those of the configuration. They come after them.
///
/// # Errors
/// As [`run()`]. A kernel that cannot be loaded touches nothing.
pub fn run_linux(
    config: &LinuxConfig,
    more: Vec<NamedDevice>,
    console: Box<dyn std::io::Write + Send>,
    progress: &Progress,
    started: std::time::Instant,
) -> Result<LinuxReport, RunError> {
    linux::run(config, more, console, progress, started)
}
