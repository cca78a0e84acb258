//! A microVM for virtio devices, with the built-in guest or a Linux guest.
//!
//! ```text
//! config, open devices -.-> run (work, watch, judge, report): the built-in guest -.
//!                        '-> linux: a Linux guest --------------------------------+-> machine: memory, bus, vCPU
//! arch: what one architecture needs
//! doctor, injection: measurements of the host
//! ```
//!
//! # Files
//!
//! * The microVM: `machine` (memory, bus, devices, threads, the KVM vCPU or the thread in its
//!   place), `job` (of the built-in guest on a device), `run` (work, judge, report), `linux` (a run of a Linux guest), `arch` (all that one
//!   processor architecture needs: vCPU, interrupts, exits, loader and tables for Linux), `doctor`
//!   (KVM), `injection` (measures interrupts).
//! * Its build script makes the guest image.
mod arch;
mod config;
mod error;
mod job;
mod linux;
mod machine;
mod report;
mod run;

pub mod doctor;
pub mod injection;

pub use arch::LoadError;
pub use config::{
    AccelChoice, BlockOrder, Completion, DirtyLogging, Inject, MmioVersion, MsiDelivery, RingLayout,
    RunConfig, TransportChoice,
};
pub use error::RunError;
pub use job::{DiskJob, DiskWork, Job, NetJob, Traffic};
pub use linux::run as run_linux;
pub use linux::{LinuxConfig, LinuxEnd, LinuxReport, OnReboot};
pub use machine::console::Power;
pub use machine::devices::NamedDevice;
pub use machine::server::{QueueServer, ServerFigures};
pub use paravane_attach::KickPath;
pub use paravane_io::IoThreadFigures;
pub use report::{
    CpuFigures, DirtyFigures, DiskResult, ExitFigures, GuestFailure, KickFigures, MemoryFigures, NetResult,
    Outcome, PhaseFigures, QueueResult, Report,
};
pub use run::{Phase, Progress, run};
