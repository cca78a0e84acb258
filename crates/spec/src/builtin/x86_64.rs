//! The machine of the built-in guest on x86-64.
//!
//! The image starts in ring 3 of long mode with flat, identity-mapped page tables. The processor's clock
//! is the time-stamp counter.
//!
//! ```text
//! 0x0000_1000  BootInfo (one page)
//! 0x0000_2000  the VMM's page tables and IDT
//! 0x0002_0000  the VMM's areas of the processors: GDT, TSS, ring-0 stack (to 0x000a_0000)
//! 0x0010_0000  image: ImageHeader, code, data, bss; its stack ends at STACK_TOP
//! 0x0040_0000  report area (REPORT_SIZE)
//! 0x0080_0000  stacks of the other processors (CPU_STACK each); heap, to the end of RAM
//! 0xd000_0000  virtio-mmio devices, two pages each
//! 0xd0ff_f000  control page
//! 0xe000_0000  PCI: configuration spaces of bus 0 (ECAM)
//! 0xe800_0000  PCI: BARs
//! ```
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Address of [`super::BootInfo`].
pub const BOOT_INFO: u64 = 0x1000;
/// Address at which the flat image is loaded and linked.
pub const IMAGE_BASE: u64 = 0x10_0000;
/// Top of the guest's ring-3 stack (it grows down towards the image).
pub const STACK_TOP: u64 = 0x40_0000;
/// Start of the report area.
pub const REPORT_BASE: u64 = 0x40_0000;
/// Size of the report area in bytes.
pub const REPORT_SIZE: u64 = 0x40_0000;
/// Start of the guest's heap on a machine with one processor: rings, buffers, pass maps.
///
/// With more it begins one [`CPU_STACK`] later for each of them.
pub const HEAP_BASE: u64 = 0x80_0000;
/// Bytes of the ring-3 stack of each processor but the first.
pub const CPU_STACK: u64 = 128 << 10;
/// Most processors.
pub const MAX_CPUS: usize = 64;
/// Address of the first virtio-mmio device.
///
/// Device n is n times [`crate::mmio_msi::WINDOW`] further.
pub const MMIO_BASE: u64 = 0xd000_0000;
/// Address of the control page.
pub const CONTROL_BASE: u64 = 0xd0ff_f000;
/// Address of the PCI configuration spaces.
pub const PCI_ECAM: u64 = 0xe000_0000;
/// Address range of the BARs of PCI devices.
///
/// That of device n begins n times [`PCI_BAR_STEP`] after the start.
pub const PCI_WINDOW: core::ops::Range<u64> = 0xe800_0000..0xf000_0000;
/// Distance in bytes between the BARs of two devices; no BAR is larger.
pub const PCI_BAR_STEP: u64 = 1 << 20;
/// Vector of interrupt number 0; number n follows n further.
///
/// Vectors 0 to 31 are exceptions.
pub const IRQ_VECTOR_BASE: u8 = 0x40;
/// Number of GSIs: interrupt numbers below this.
///
/// Each has a line to the I/O APIC's pin of the same number.
pub const IRQ_COUNT: usize = 24;
/// Number of interrupts that have a stub.
///
/// From [`IRQ_COUNT`] on they are free for messages, but for [`WAKE`].
pub const INTERRUPTS: usize = 153;
/// Interrupt by which processors wake each other.
pub const WAKE: u32 = INTERRUPTS as u32 - 1;

/// Address of messages to a processor: its local APIC.
#[must_use]
pub const fn message_address(cpu: u32) -> u64 {
    0xfee0_0000 | (cpu as u64 & 0xff) << 12
}

/// Vector by which ring 3 sleeps until an interrupt.
///
/// Returns at once if the interrupt count differs from RDI. It is the breakpoint exception (the
/// instruction `int3`), because some hosts (kvm-pvm) allow no other software interrupt from ring 3.
/// Its gate must be open to ring 3.
pub const WAIT_VECTOR: u8 = 3;
/// First GSI of a device; legacy devices use those below.
pub const FIRST_GSI: u32 = 5;

/// Header of the flat image. The VMM reads it from the file, before the guest runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ImageHeader {
    /// [`super::IMAGE_MAGIC`].
    pub magic: u64,
    /// [`super::ABI`].
    pub abi: u32,
    /// Bytes between interrupt stubs.
    pub stub_stride: u32,
    /// Ring-3 entry.
    ///
    /// RDI holds the address of the [`super::BootInfo`], RSI the number of the processor. RSP is
    /// [`STACK_TOP`] minus 8, or as far below the end of the processor's stack.
    pub entry: u64,
    /// First byte after the image in memory, bss included.
    pub end: u64,
    /// Ring-0 stub of exception 0; exception n is n strides further, up to 31.
    ///
    /// [`WAIT_VECTOR`] has another.
    pub exception_stubs: u64,
    /// Ring-0 stub of interrupt 0.
    ///
    /// Interrupt n is n strides further; there are [`INTERRUPTS`].
    pub irq_stubs: u64,
    /// Ring-0 stub of [`WAIT_VECTOR`].
    pub wait_stub: u64,
    /// Counters of processor 0, the base of its GS segment.
    ///
    /// The stubs count there: all interrupts, and those of each number.
    pub counters: u64,
    /// Distance in bytes to the counters of the next one of [`MAX_CPUS`].
    pub counters_stride: u64,
}
