//! Where things lie in the RAM of a Linux guest when it starts.
//!
//! ```text
//! 0x0000_0500  GDT
//! 0x0000_7000  boot parameters (the "zero page")
//! 0x0000_9000  page tables: PML4, PDPT, four directories (GiB 0 to 3, mapped to themselves)
//! 0x0002_0000  command line (to 0x0003_0000)
//! 0x0009_fc00  end of low RAM
//! 0x000e_0000  ACPI tables, the RSDP first (to 0x0010_0000)
//! 0x0010_0000  kernel, where its file says; the initial RAM disk as high as it may be
//! ```
//! What is not RAM lies where the built-in guest finds it too ([`paravane_spec::builtin`]).

/// Descriptor table.
pub(super) const GDT: u64 = 0x500;
/// Boot parameters.
pub(super) const BOOT_PARAMS: u64 = 0x7000;
/// Top page table.
pub(super) const PML4: u64 = 0x9000;
/// Command line, with its final zero.
pub(super) const CMDLINE: u64 = 0x2_0000;
/// Bytes there.
pub(super) const CMDLINE_ROOM: u64 = 0x1_0000;
/// End of low RAM.
pub(super) const LOW_END: u64 = 0x9_fc00;
/// ACPI tables, where a kernel that was told nothing looks for them.
pub(super) const ACPI: u64 = 0xe_0000;
/// Start of high RAM.
pub(super) const HIGH: u64 = 0x10_0000;
