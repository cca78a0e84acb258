//! The image's header, and all of its code that runs in ring 0.
//!
//! Where ring 0 is emulated an instruction costs more than a microsecond, so a stub has the fewest
//! that do. No stub changes a register: the control page and the local APIC, whose addresses do not
//! fit in a signed 32-bit displacement, are written with the address-size prefix (0x67), under
//! which they do.
use core::arch::global_asm;
use core::mem::offset_of;
use core::sync::atomic::AtomicU64;
use paravane_spec::builtin::{
    ABI, CONTROL_BASE, IMAGE_BASE, IMAGE_MAGIC, INTERRUPTS, MAX_CPUS, STACK_TOP, control,
};

/// Bytes between stubs; link.ld checks that they fit.
const STRIDE: u32 = 32;
/// The end-of-interrupt register of the local APIC.
const APIC_EOI: u32 = 0xfee0_00b0;

// What link.ld takes for granted.
const _: () = assert!(IMAGE_BASE == 0x10_0000 && STACK_TOP == 0x40_0000 && INTERRUPTS == 153);

/// Interrupts that one processor has taken. Written by its stubs only, which find it by GS.
#[repr(C, align(128))]
pub(crate) struct Counters {
    /// All numbers together.
    pub(crate) taken: AtomicU64,
    /// On each number.
    pub(crate) taken_on: [AtomicU64; INTERRUPTS],
}

/// The counters of all processors.
pub(crate) static COUNTERS: [Counters; MAX_CPUS] =
    [const { Counters { taken: AtomicU64::new(0), taken_on: [const { AtomicU64::new(0) }; INTERRUPTS] } };
        MAX_CPUS];

global_asm!(
    // ImageHeader, at the start of the image.
    ".pushsection .header, \"a\"",
    ".quad {magic}",
    ".long {abi}",
    ".long {stride}",
    ".quad guest_entry",
    ".quad image_end",
    ".quad exception_stubs",
    ".quad irq_stubs",
    ".quad wait_stub",
    ".quad {counters}",
    ".quad {counters_stride}",
    ".popsection",
    magic = const IMAGE_MAGIC,
    abi = const ABI,
    stride = const STRIDE,
    counters = sym COUNTERS,
    counters_stride = const size_of::<Counters>(),
);

global_asm!(
    ".pushsection .stubs, \"ax\"",
    ".global exception_stubs, irq_stubs, wait_stub",
    // Exceptions: tell the VMM the vector. The frame stays as the processor pushed it on the ring-0
    // stack.
    ".balign {stride}",
    "exception_stubs:",
    ".set vector, 0",
    ".rept 32",
    ".balign {stride}, 0xcc",
    // mov dword ptr [crash], vector
    ".byte 0x67, 0xc7, 0x04, 0x25",
    ".long {crash}",
    ".long vector",
    "2: hlt",
    "jmp 2b",
    ".set vector, vector + 1",
    ".endr",
    // Interrupts: count, acknowledge, go back. The counters are this processor's, so no lock prefix.
    ".balign {stride}, 0xcc",
    "irq_stubs:",
    ".set number, 0",
    ".rept {interrupts}",
    ".balign {stride}, 0xcc",
    "inc qword ptr gs:[{taken_on} + 8 * number]",
    "inc qword ptr gs:[{taken}]",
    // mov dword ptr [eoi], 0
    ".byte 0x67, 0xc7, 0x04, 0x25",
    ".long {eoi}",
    ".long 0",
    "iretq",
    ".set number, number + 1",
    ".endr",
    // Sleeping: an interrupt gate, so interrupts are off until STI, which lets none in before HLT
    // begins: one that came after the comparison ends the HLT at once. RFLAGS come back with IRETQ.
    ".balign {stride}, 0xcc",
    "wait_stub:",
    "cmp qword ptr gs:[{taken}], rdi",
    "jne 3f",
    "sti",
    "hlt",
    "3: iretq",
    ".popsection",
    stride = const STRIDE,
    crash = const (CONTROL_BASE + control::CRASH) as u32,
    eoi = const APIC_EOI,
    interrupts = const INTERRUPTS,
    taken = const offset_of!(Counters, taken),
    taken_on = const offset_of!(Counters, taken_on),
);
