//! A Linux guest: the same machine, plus what a stock kernel needs.
//!
//! ```text
//! files --arch::linux--> RAM, vCPU ---> runs ---> bus: devices, as for the built-in guest
//!                                         '-----> system devices: console; sleep and reset end the run
//! ```
//! There is no firmware: [`crate::arch`] loads the kernel, describes the machine to it, and enters it.
mod run;

pub use run::run;

use crate::config::RunConfig;
use crate::machine::console::Power;
use crate::report::{CpuFigures, GuestFailure, MemoryFigures};
use std::path::PathBuf;

/// A run of a Linux guest.
#[derive(Clone, Debug)]
pub struct LinuxConfig {
    /// The kernel: a bzImage or an x86-64 vmlinux.
    pub kernel: PathBuf,
    /// The initial RAM disk.
    pub initrd: Option<PathBuf>,
    /// The kernel's command line.
    pub cmdline: String,
    /// Action when the guest reboots.
    pub on_reboot: OnReboot,
    /// The machine.
    ///
    /// Settings of the built-in guest's jobs are ignored.
    pub machine: RunConfig,
}

/// Action when a guest resets its machine.
///
/// A guest does so by ACPI, the keyboard controller, or a triple fault.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnReboot {
    /// The run ends. A triple fault counts as a crash.
    #[default]
    Exit,
    /// Restart: new RAM, the kernel's files read again, same disks and cards.
    Restart,
}

/// End of a Linux guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinuxEnd {
    /// By itself.
    Power(Power),
    /// It crashed without a word of its kernel.
    Failed(GuestFailure),
    /// The operator stopped it.
    Cancelled,
}

/// Report of a Linux guest that has ended.
#[derive(Clone, Debug)]
pub struct LinuxReport {
    /// How it ended.
    pub end: LinuxEnd,
    /// Number of restarts. The other figures are sums over all of them.
    pub restarts: u64,
    /// First fault of each device that needed a reset, one a line.
    pub faults: Vec<String>,
    /// Exits to user space.
    pub exits: u64,
    /// Exits by KVM's count, if it counts them (Linux 5.14): also those that it handles itself.
    pub kvm_exits: Option<u64>,
    /// Seconds from the start of the program to the first kick, of the first start.
    pub boot_s: Option<f64>,
    /// Each vCPU.
    pub cpus: Vec<CpuFigures>,
    /// Kicks that the I/O threads took.
    pub kicks: u64,
    /// Interrupts that devices raised.
    pub interrupts: u64,
    /// Of those, messages.
    pub messages: u64,
    /// Its RAM at its last end.
    pub memory: MemoryFigures,
    /// Seconds since the program started.
    pub wall_s: f64,
}
