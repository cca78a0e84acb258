//! The contract between the microVM and its built-in guest. Ours, not the specification's.
//!
//! The guest is one flat image, loaded at [`IMAGE_BASE`] and started in ring 3 of long mode with flat,
//! identity-mapped page tables. It finds a [`BootInfo`] at [`BOOT_INFO`], works on the devices named there,
//! and keeps a [`ReportHeader`] and one [`DiskReport`] a disk at [`BootInfo::report_addr`] up to date while
//! it runs, so that the VMM can show progress and can report even if the guest is stopped half-way. The VMM
//! trusts none of it. Run as a host thread, the same program gets the same structures at the same
//! guest-physical addresses.
//!
//! ```text
//! 0x0000_1000  BootInfo (one page)
//! 0x0000_2000  the VMM's page tables, GDT, IDT, TSS; ring-0 stack (to 0x0002_0000)
//! 0x0010_0000  image: ImageHeader, code, data, bss; its stack ends at STACK_TOP
//! 0x0040_0000  report area (REPORT_SIZE)
//! 0x0080_0000  heap, to the end of RAM
//! 0xd000_0000  virtio-mmio devices, two pages each
//! 0xd0ff_f000  control page
//! 0xe000_0000  PCI: configuration spaces of bus 0 (ECAM)
//! 0xe800_0000  PCI: where BARs lie
//! ```
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Where [`BootInfo`] lies.
pub const BOOT_INFO: u64 = 0x1000;
/// "PARABOOT", little endian: [`BootInfo::magic`].
pub const BOOT_MAGIC: u64 = u64::from_le_bytes(*b"PARABOOT");
/// "PARAIMG1": [`ImageHeader::magic`].
pub const IMAGE_MAGIC: u64 = u64::from_le_bytes(*b"PARAIMG1");
/// "PARAREPT": [`ReportHeader::magic`].
pub const REPORT_MAGIC: u64 = u64::from_le_bytes(*b"PARAREPT");
/// Version of this contract.
pub const ABI: u32 = 8;

/// Where the flat image is loaded and linked.
pub const IMAGE_BASE: u64 = 0x10_0000;
/// Top of the guest's ring-3 stack (it grows down towards the image).
pub const STACK_TOP: u64 = 0x40_0000;
/// Start of the report area.
pub const REPORT_BASE: u64 = 0x40_0000;
/// Size of the report area in bytes.
pub const REPORT_SIZE: u64 = 0x40_0000;
/// Start of the guest's heap: rings, buffers, pass maps.
pub const HEAP_BASE: u64 = 0x80_0000;
/// First virtio-mmio device; device n is at this plus n times [`crate::mmio_msi::WINDOW`].
pub const MMIO_BASE: u64 = 0xd000_0000;
/// The control page.
pub const CONTROL_BASE: u64 = 0xd0ff_f000;
/// The configuration spaces of the PCI bus.
pub const PCI_ECAM: u64 = 0xe000_0000;
/// Where the BARs of PCI devices lie: device n's at the start plus n times [`PCI_BAR_STEP`].
pub const PCI_WINDOW: core::ops::Range<u64> = 0xe800_0000..0xf000_0000;
/// Bytes from one device's BAR to the next; no BAR is larger.
pub const PCI_BAR_STEP: u64 = 1 << 20;
/// Most devices in one machine.
pub const MAX_DEVICES: usize = 32;

/// Vectors 0 to 31 are exceptions; interrupt number n arrives at this vector plus n.
pub const IRQ_VECTOR_BASE: u8 = 0x40;
/// Interrupt numbers below this are GSIs, each with a line to the I/O APIC's pin of that number.
pub const IRQ_COUNT: usize = 24;
/// Number of interrupts that have a stub. From [`IRQ_COUNT`] on they are free for messages.
pub const INTERRUPTS: usize = 152;
/// Address of messages: the local APIC of the only processor.
pub const MESSAGE_ADDRESS: u64 = 0xfee0_0000;
/// Vector by which ring 3 goes to sleep: returns at once if the interrupt count is no longer what RDI holds,
/// else sleeps until an interrupt. It is the breakpoint exception (the instruction `int3`), because some hosts
/// (kvm-pvm) let no other software interrupt out of ring 3. Its gate must be open to ring 3.
pub const WAIT_VECTOR: u8 = 3;
/// First GSI given to a device (below lie the legacy ones).
pub const FIRST_GSI: u32 = 5;

/// Registers of the control page: 32 bits wide, write-only, offsets in bytes.
pub mod control {
    /// Low 32 bits of the guest-physical address of a message.
    pub const PRINT_ADDR: u64 = 0x00;
    /// Length of the message in bytes: the VMM prints it as UTF-8 text.
    pub const PRINT_LEN: u64 = 0x04;
    /// Ends the run: 0 done, else one of the [`super::exit`] codes.
    pub const EXIT: u64 = 0x08;
    /// An exception: the vector; the interrupted frame is on the ring-0 stack.
    pub const CRASH: u64 = 0x0c;
    /// A milestone: one of the [`super::event`] codes.
    pub const EVENT: u64 = 0x10;
    /// Measures one exit: the VMM does nothing (used by `doctor`).
    pub const NOP: u64 = 0x14;
}

/// Values written to [`control::EVENT`].
pub mod event {
    /// The guest has started.
    pub const STARTED: u32 = 1;
    /// All drivers are up.
    pub const DRIVERS_UP: u32 = 2;
    /// The first request has been published.
    pub const FIRST_IO: u32 = 3;
    /// A device's measured phase has begun, and none was in its before.
    pub const MEASURE: u32 = 4;
    /// The last device has ended its measured phase.
    pub const MEASURED: u32 = 5;
}

/// Values written to [`control::EXIT`].
pub mod exit {
    /// All work is done; whether it verified is in the reports.
    pub const DONE: u32 = 0;
    /// The guest panicked; the message was printed before.
    pub const PANIC: u32 = 1;
    /// The boot information was not understood.
    pub const BAD_BOOT_INFO: u32 = 2;
}

/// Values of [`BootInfo::transport`].
pub mod transport {
    /// Virtio over MMIO, version 2.
    pub const MMIO: u32 = 0;
    /// The same with our extension ([`crate::mmio_msi`]).
    pub const MMIO_MSI: u32 = 1;
    /// Virtio over PCI, modern, with MSI-X.
    pub const PCI: u32 = 2;
}

/// Values of [`DeviceEntry::job`].
pub mod job {
    /// Leave the device alone.
    pub const NONE: u32 = 0;
    /// Read the whole disk in order and hash it with SHA-256; never write.
    pub const HASH: u32 = 1;
    /// Fill, mix random reads and writes, flush, read back and verify.
    pub const WRITE_TEST: u32 = 2;
    /// Entropy source: draw bytes and count them.
    pub const RNG: u32 = 3;
    /// Network card with an echo behind it: send frames, and compare what comes back.
    pub const NET_ECHO: u32 = 4;
    /// Network card: send frames, as fast as they go.
    pub const NET_SEND: u32 = 5;
    /// Network card: receive frames that come as fast as there are buffers. Byte n of a frame is the low byte of n, but
    /// for eight bytes at 14 that hold its number, from 0 on, little endian.
    pub const NET_RECEIVE: u32 = 6;
    /// Network card whose far side is a card with [`NET_ECHO`]: be its echo.
    pub const NET_MIRROR: u32 = 7;
}

/// Values of [`BootInfo::inject`]: faults that tests ask for.
pub mod inject {
    /// None.
    pub const NONE: u32 = 0;
    /// Execute an undefined instruction after the first request (in a thread: panic).
    pub const CRASH: u32 = 1;
    /// Stop making progress after the first request.
    pub const HANG: u32 = 2;
    /// Panic after the first request.
    pub const PANIC: u32 = 3;
}

/// Values of [`BootInfo::completion`].
pub mod completion {
    /// Sleep until an interrupt.
    pub const INTERRUPT: u32 = 0;
    /// Poll the used ring, interrupts suppressed.
    pub const POLL: u32 = 1;
}

/// Values of [`BootInfo::order`].
pub mod order {
    /// Blocks are drawn at random.
    pub const RANDOM: u32 = 0;
    /// One block after the other, from the first again after the last.
    pub const SEQUENTIAL: u32 = 1;
}

/// Values of [`DiskReport::state`], in the order in which they come.
pub mod state {
    /// Not started.
    pub const IDLE: u32 = 0;
    /// Write test: writing the pattern everywhere.
    pub const FILL: u32 = 1;
    /// Write test: random reads and writes.
    pub const MIX: u32 = 2;
    /// Write test: flushing.
    pub const FLUSH: u32 = 3;
    /// Write test: reading back.
    pub const READ_BACK: u32 = 4;
    /// Hash job: reading.
    pub const HASH: u32 = 5;
    /// Done without an error.
    pub const DONE: u32 = 6;
    /// Ended by [`super::DiskReport::error`].
    pub const FAILED: u32 = 7;
}

/// Values of [`DiskReport::error`].
pub mod error {
    /// None.
    pub const NONE: u32 = 0;
    /// The driver could not be set up.
    pub const SETUP: u32 = 1;
    /// A request ended with a status other than OK.
    pub const IO: u32 = 2;
    /// Read data was not what had been written.
    pub const MISMATCH: u32 = 3;
    /// The device broke the ring protocol.
    pub const RING: u32 = 4;
    /// The guest has too little memory for the job.
    pub const MEMORY: u32 = 5;
}

/// What starts the flat image. The VMM reads it from the file, before the guest runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ImageHeader {
    /// [`IMAGE_MAGIC`].
    pub magic: u64,
    /// [`ABI`].
    pub abi: u32,
    /// Bytes between interrupt stubs.
    pub stub_stride: u32,
    /// Ring-3 entry; RDI holds the address of the [`BootInfo`], RSP is [`STACK_TOP`] minus 8.
    pub entry: u64,
    /// First byte after the image in memory, bss included.
    pub end: u64,
    /// Ring-0 stub of exception 0; exception n is n strides further, up to 31. [`WAIT_VECTOR`] has another.
    pub exception_stubs: u64,
    /// Ring-0 stub of interrupt 0; interrupt n is n strides further, [`INTERRUPTS`] of them.
    pub irq_stubs: u64,
    /// Ring-0 stub of [`WAIT_VECTOR`].
    pub wait_stub: u64,
}

/// One device, as the VMM made it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DeviceEntry {
    /// Guest-physical address of the virtio-mmio registers; PCI: of the function's configuration space.
    pub base: u64,
    /// GSI of its interrupt line.
    pub gsi: u32,
    /// One of the [`job`] codes.
    pub job: u32,
    /// Write test: bytes from the start of the disk to work on, a multiple of the block size. Rng: bytes to draw. Net:
    /// frames to send.
    pub span: u64,
    /// What the device's addresses are more than guest-physical ones (modulo 2^64), a multiple of 4096: the
    /// translation that the VMM has put in front of the device. Only the heap is mapped there. 0: no translation.
    pub iova_offset: u64,
    /// Number of the interrupt that is free for the message of its configuration change; those that follow are for its
    /// queues. The message of interrupt n is a write of [`IRQ_VECTOR_BASE`] + n to [`MESSAGE_ADDRESS`].
    pub messages: u32,
    /// How many interrupts are free for its messages.
    pub message_count: u32,
    /// Net: bytes of a frame, from 22 to 65549.
    pub frame: u32,
    /// Net: pairs of queues to use.
    pub pairs: u32,
    /// Net: bytes of each frame that comes back, from 22 to 65549. It begins as the frame that was sent, with its
    /// addresses swapped; what it has more is 0.
    pub reply: u32,
    /// 0.
    pub reserved: u32,
}

/// Everything the guest is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct BootInfo {
    /// [`BOOT_MAGIC`].
    pub magic: u64,
    /// [`ABI`].
    pub abi: u32,
    /// One of the [`inject`] codes.
    pub inject: u32,
    /// Frequency of the time-stamp counter in kHz; 0 when the platform has its own clock.
    pub tsc_khz: u64,
    /// Bytes of RAM from address 0.
    pub ram_size: u64,
    /// Start of the heap.
    pub heap_base: u64,
    /// Bytes of the heap.
    pub heap_size: u64,
    /// Start of the report area.
    pub report_addr: u64,
    /// Bytes of the report area.
    pub report_size: u64,
    /// Write test: how long the mixed phase lasts, in nanoseconds.
    pub duration_ns: u64,
    /// Write test: seed of pattern and order.
    pub seed: u64,
    /// Requests in flight a disk.
    pub depth: u32,
    /// Bytes a request, a multiple of 512.
    pub block: u32,
    /// One of the [`completion`] codes.
    pub completion: u32,
    /// Write test: percentage of reads in the mixed phase.
    pub read_percent: u32,
    /// Write test: one of the [`order`] codes for the mixed phase.
    pub order: u32,
    /// Whether kicks are timed: 0 or 1.
    pub time_kicks: u32,
    /// Number of valid entries in `devices`.
    pub device_count: u32,
    /// One of the [`transport`] codes.
    pub transport: u32,
    /// The devices.
    pub devices: [DeviceEntry; MAX_DEVICES],
}

/// Head of the report area; [`ReportHeader::disk_count`] [`DiskReport`]s follow at [`DISK_REPORTS`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ReportHeader {
    /// [`REPORT_MAGIC`] once the guest has started.
    pub magic: u64,
    /// Counts up whenever the guest makes progress; a VMM that sees it stand still suspects a hang.
    pub heartbeat: u64,
    /// Interrupts that the guest took.
    pub interrupts: u64,
    /// Of those, the ones from the begin of the first measured phase to the end of the last.
    pub measured_interrupts: u64,
    /// Kicks that the guest wrote.
    pub kicks: u64,
    /// Entropy bytes drawn and found plausible.
    pub entropy_bytes: u64,
    /// Number of disk reports, one a device entry (in the same order, also for jobs that are not a disk's).
    pub disk_count: u32,
    /// Padding.
    pub reserved: u32,
}

/// Offset of the [`KickReport`] in the report area.
pub const KICK_REPORT: u64 = 0x1000;
/// Offset of the first [`DiskReport`] in the report area.
pub const DISK_REPORTS: u64 = 0x4000;

/// Sub-buckets of an octave in a latency histogram, as a power of two.
pub const HIST_SUB_BITS: u32 = 5;
/// Buckets of a latency histogram. A value v in nanoseconds below 32 has bucket v; above, with
/// e = floor(log2 v), it has bucket (e - 4) * 32 + (v >> (e - 5)) - 32. Values of 2^40 ns and more share the last.
pub const HIST_BUCKETS: usize = 36 * 32;

/// For how long kicks have stopped the guest, if it was to time them: from right before the write to the notification
/// address until right after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct KickReport {
    /// Sum in nanoseconds.
    pub ns: u64,
    /// Each, see [`HIST_BUCKETS`].
    pub histogram: [u32; HIST_BUCKETS],
}

/// What the guest knows of one disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DiskReport {
    /// One of the [`state`] codes.
    pub state: u32,
    /// One of the [`error`] codes.
    pub error: u32,
    /// More on the error: the status byte, or the driver's code.
    pub error_detail: u64,
    /// First sector of the request that failed or did not match.
    pub error_sector: u64,
    /// Capacity in sectors, as the device's configuration says.
    pub capacity: u64,
    /// Bytes that the whole job will move; `bytes_done` of them are done.
    pub bytes_total: u64,
    /// Bytes moved so far, over all phases.
    pub bytes_done: u64,
    /// Requests completed in the measured phase (mixed phase, or the hash job's reading).
    pub ops: u64,
    /// Bytes moved in the measured phase.
    pub bytes: u64,
    /// Duration of the measured phase in nanoseconds.
    pub elapsed_ns: u64,
    /// Bytes that were read and compared with what they must be (write test).
    pub bytes_verified: u64,
    /// Write test: guest-physical address of one u32 a block: the pass of the last write that was acknowledged and flushed.
    pub pass_map: u64,
    /// Write test: number of entries there.
    pub pass_map_blocks: u64,
    /// SHA-256 of the disk (hash job).
    pub sha256: [u8; 32],
    /// Latencies of the measured phase, see [`HIST_BUCKETS`].
    pub histogram: [u32; HIST_BUCKETS],
}
