//! A stock Linux kernel, entered without firmware by the 64-bit boot protocol.
//!
//! See Documentation/arch/x86/boot.rst. The ACPI tables call the hardware reduced, so that there are
//! no legacy timers or interrupt controllers to imitate.
//!
//! ```text
//! files --load--> RAM (layout)      acpi: what is where, for the guest
//!                  '----- cpu: long mode ----------> the vCPU's first instruction
//! ```
mod acpi;
mod cpu;
mod format;
mod layout;
mod load;

pub use load::LoadError;
pub(crate) use load::{Kernel, kernel as load};

use crate::error::RunError;
use crate::machine::attach::Attached;
use kvm_ioctls::VcpuFd;
use load::Extras;
use paravane_dma::Memory;
use paravane_spec::builtin::PCI_ECAM;
use paravane_spec::pci::ecam;
use std::path::Path;

/// What a kernel starts with.
pub(crate) struct Boot<'a> {
    pub(crate) initrd: Option<&'a Path>,
    pub(crate) cmdline: &'a str,
    pub(crate) devices: &'a Attached,
    /// Number of vCPUs.
    pub(crate) cpus: u16,
}

/// Makes the first vCPU start with `kernel`, which `memory` holds. The kernel starts the others.
///
/// # Errors
/// Something does not fit into RAM, or KVM refuses a register.
pub(crate) fn start(kernel: Kernel, boot: &Boot<'_>, memory: &Memory, vcpu: &VcpuFd) -> Result<(), RunError> {
    let ram = memory.regions().iter().map(|region| region.size()).sum();
    let entry = kernel.entry;
    let spaces = [(PCI_ECAM, ecam::BUS)];
    let extras = Extras {
        initrd: boot.initrd,
        cmdline: boot.cmdline,
        tables: &acpi::tables(layout::ACPI, boot.devices, boot.cpus),
        reserved: if matches!(boot.devices, Attached::Pci(_)) { &spaces } else { &[] },
    };
    let mut handle = memory.handle().named("the loader");
    let guard = handle.enter();
    cpu::put_tables(&guard).map_err(LoadError::Memory)?;
    kernel.finish(&guard, ram, &extras)?;
    cpu::set_up(vcpu, entry).map_err(|error| RunError::Os {
        what: "set the vCPU's registers",
        source: std::io::Error::from_raw_os_error(error.errno()),
    })
}
