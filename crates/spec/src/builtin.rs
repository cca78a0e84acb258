//! Contract between the microVM and its built-in guest.
//!
//! Source: Paravane, not the specification.
//!
//! The guest is one flat image, loaded at [`IMAGE_BASE`]. It finds a [`BootInfo`] at [`BOOT_INFO`]
//! and works on the devices listed there. It keeps a [`ReportHeader`] and one [`DiskReport`] per
//! queue at [`BootInfo::report_addr`] up to date while it runs, so that the VMM can show progress,
//! and can report even if the guest is stopped half-way. The VMM trusts none of it. If the same
//! program runs as a host thread, it gets the same structures at the same guest-physical addresses.
//!
//! Addresses, interrupts and the image's header depend on the architecture: x86-64 has them.
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "x86_64")]
pub use x86_64::*;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// "PARABOOT", little endian: [`BootInfo::magic`].
pub const BOOT_MAGIC: u64 = u64::from_le_bytes(*b"PARABOOT");
/// "PARAIMG1": [`ImageHeader::magic`].
pub const IMAGE_MAGIC: u64 = u64::from_le_bytes(*b"PARAIMG1");
/// "PARAREPT": [`ReportHeader::magic`].
pub const REPORT_MAGIC: u64 = u64::from_le_bytes(*b"PARAREPT");
/// Version of this contract.
pub const ABI: u32 = 10;

/// Most devices in one machine.
pub const MAX_DEVICES: usize = 32;

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
    /// Lets the host run other threads, for which the guest may be waiting.
    pub const YIELD: u64 = 0x18;
}

/// Values written to [`control::EVENT`].
pub mod event {
    /// The guest has started.
    pub const STARTED: u32 = 1;
    /// All drivers are up.
    pub const DRIVERS_UP: u32 = 2;
    /// The first request has been published.
    pub const FIRST_IO: u32 = 3;
    /// The first device has begun its measured phase.
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
    /// The same with the MSI extension ([`crate::mmio_msi`]).
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
    /// Network device with an echo: send frames, and compare those that return.
    pub const NET_ECHO: u32 = 4;
    /// Network device: send frames at the highest rate.
    pub const NET_SEND: u32 = 5;
    /// Network device: receive frames that arrive whenever there are buffers.
    ///
    /// Byte n of a frame is the low byte of n, except for eight bytes at 14 that hold its number,
    /// from 0 on, little endian.
    pub const NET_RECEIVE: u32 = 6;
    /// Network device whose peer is a device with [`NET_ECHO`]: echo its frames.
    pub const NET_MIRROR: u32 = 7;
}

/// Values of [`BootInfo::inject`]: faults for tests.
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

/// Values of [`DiskReport::state`], in their order over time.
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
    /// Read data differs from written data.
    pub const MISMATCH: u32 = 3;
    /// The device broke the ring protocol.
    pub const RING: u32 = 4;
    /// The guest has too little memory for the job.
    pub const MEMORY: u32 = 5;
}

/// Part `number` of `parts` (at least 1) of `units` of work.
///
/// A write test has blocks of [`BootInfo::block`] bytes, a hash job requests, the last one of which may
/// be short, and a network device frames.
#[must_use]
pub const fn part(units: u64, parts: u32, number: u32) -> core::ops::Range<u64> {
    let (parts, number) = (if parts == 0 { 1 } else { parts as u64 }, number as u64);
    let (each, more) = (units / parts, units % parts);
    let start = number * each + if number < more { number } else { more };
    start..start + each + (number < more) as u64
}

/// Device, as the VMM made it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DeviceEntry {
    /// Guest-physical address of the device.
    ///
    /// Of its virtio-mmio registers, or of the PCI function's configuration space.
    pub base: u64,
    /// GSI of its interrupt line.
    pub gsi: u32,
    /// One of the [`job`] codes.
    pub job: u32,
    /// Amount of work.
    ///
    /// Write test: size in bytes of the part to work on, from the start of the disk, a multiple of
    /// the block size. Entropy source: bytes to draw. Network device: frames to send.
    pub span: u64,
    /// Device address minus guest-physical address, modulo 2^64.
    ///
    /// A multiple of 4096.
    ///
    /// It is the translation that the VMM has put in front of the device. Only the heap is mapped
    /// there. 0: no translation.
    pub iova_offset: u64,
    /// Interrupt number of the configuration change message.
    ///
    /// Those of the queues follow.
    ///
    /// The message of interrupt n is a write of [`IRQ_VECTOR_BASE`] + n to the
    /// [`message_address`] of a processor.
    pub messages: u32,
    /// Number of interrupts for its messages.
    pub message_count: u32,
    /// Network device: size of a frame in bytes, from 22 to 65549.
    pub frame: u32,
    /// Number of a disk's queues, or of a network device's queue pairs, to use; else 1.
    ///
    /// Each does a [`part`] of the work. Queue or pair q is the work of processor [`DeviceEntry::cpu`]
    /// + q, modulo the number of processors, which takes its messages.
    pub queues: u32,
    /// Network device: size in bytes of each returning frame, from 22 to 65549.
    ///
    /// It starts with the frame that was sent, with its addresses swapped; the rest is 0.
    pub reply: u32,
    /// Number of the processor that works on its first queue and takes the interrupts of the device.
    pub cpu: u32,
    /// Number of the [`DiskReport`] of its first queue. Those of the others follow.
    pub report: u32,
    /// 0.
    pub reserved: u32,
}

/// Boot information of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct BootInfo {
    /// [`BOOT_MAGIC`].
    pub magic: u64,
    /// [`ABI`].
    pub abi: u32,
    /// One of the [`inject`] codes.
    pub inject: u32,
    /// Frequency of the processor's clock in kHz; 0 if the platform has another one.
    pub clock_khz: u64,
    /// Size of RAM in bytes, from address 0.
    pub ram_size: u64,
    /// Start of the heap.
    pub heap_base: u64,
    /// Size of the heap in bytes.
    pub heap_size: u64,
    /// Start of the report area.
    pub report_addr: u64,
    /// Size of the report area in bytes.
    pub report_size: u64,
    /// Write test: duration of the mixed phase in nanoseconds.
    pub duration_ns: u64,
    /// Write test: random seed of pattern and order.
    pub seed: u64,
    /// Number of requests in flight per disk.
    pub depth: u32,
    /// Size of a request in bytes, a multiple of 512.
    pub block: u32,
    /// One of the [`completion`] codes.
    pub completion: u32,
    /// Write test: percentage of reads in the mixed phase.
    pub read_percent: u32,
    /// Write test: one of the [`order`] codes for the mixed phase.
    pub order: u32,
    /// Whether to time kicks: 0 or 1.
    pub time_kicks: u32,
    /// Number of valid entries in `devices`.
    pub device_count: u32,
    /// One of the [`transport`] codes.
    pub transport: u32,
    /// Number of processors, at least 1.
    pub cpus: u32,
    /// How often each queue's messages are moved to another processor while it works.
    pub moves: u32,
    /// Number of [`DiskReport`]s.
    pub report_count: u32,
    /// 0.
    pub reserved: u32,
    /// The devices.
    pub devices: [DeviceEntry; MAX_DEVICES],
}

/// Header of the report area.
///
/// A [`CpuReport`] for each processor follows at [`CPU_REPORTS`],
/// [`ReportHeader::count`] [`DiskReport`]s at [`DISK_REPORTS`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ReportHeader {
    /// [`REPORT_MAGIC`] once the guest has started.
    pub magic: u64,
    /// Number of disk reports.
    ///
    /// One for each queue in use, in the order of the device entries, also for other jobs.
    pub count: u32,
    /// Padding.
    pub reserved: u32,
}

/// Report of one processor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct CpuReport {
    /// Progress counter.
    ///
    /// A VMM that sees it stand still suspects a hang.
    pub heartbeat: u64,
    /// Number of interrupts that the guest took.
    pub interrupts: u64,
    /// Interrupts of all processors since the first measured phase began.
    ///
    /// Written when a phase begins or ends on this processor: the highest is the last.
    pub measured_interrupts: u64,
    /// Number of kicks that the guest wrote.
    pub kicks: u64,
    /// Number of entropy bytes drawn and found plausible.
    pub entropy_bytes: u64,
    /// Number of times that messages of a device were moved to another processor.
    pub moves: u64,
    /// 0.
    pub reserved: [u64; 2],
}

/// Offset of the [`KickReport`] in the report area.
pub const KICK_REPORT: u64 = 0x1000;
/// Offset of the first [`CpuReport`] in the report area.
pub const CPU_REPORTS: u64 = 0x3000;
/// Offset of the first [`DiskReport`] in the report area.
pub const DISK_REPORTS: u64 = 0x4000;

/// Base-2 logarithm of the sub-buckets per octave in a latency histogram.
pub const HIST_SUB_BITS: u32 = 5;
/// Number of buckets of a latency histogram.
///
/// A value v in nanoseconds below 32 has bucket v; above, with e = floor(log2 v), it has bucket (e
/// - 4) * 32 + (v >> (e - 5)) - 32. Values of 2^40 ns and more share the last bucket.
pub const HIST_BUCKETS: usize = 36 * 32;

/// Durations of kicks, if they were timed.
///
/// From right before the write to the notification address until right after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct KickReport {
    /// Sum in nanoseconds.
    pub ns: u64,
    /// Histogram, see [`HIST_BUCKETS`].
    pub histogram: [u32; HIST_BUCKETS],
}

/// Report on the work on one queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DiskReport {
    /// One of the [`state`] codes.
    pub state: u32,
    /// One of the [`error`] codes.
    pub error: u32,
    /// Detail of the error: the status byte, or the driver's code.
    pub error_detail: u64,
    /// First sector of the request that failed or did not match.
    pub error_sector: u64,
    /// Capacity in sectors, as the device's configuration says.
    pub capacity: u64,
    /// Number of bytes that the job will move on this queue.
    pub bytes_total: u64,
    /// Number of bytes moved so far, over all phases.
    pub bytes_done: u64,
    /// Number of requests completed in the measured phase.
    ///
    /// The mixed phase, or the hash job's reading.
    pub ops: u64,
    /// Number of bytes moved in the measured phase.
    pub bytes: u64,
    /// Duration of the measured phase in nanoseconds.
    pub elapsed_ns: u64,
    /// Write test: number of bytes read and compared.
    pub bytes_verified: u64,
    /// Write test: guest-physical address of the pass map.
    ///
    /// One u32 per block: the pass of its last acknowledged and flushed write.
    pub pass_map: u64,
    /// Write test: number of entries there.
    pub pass_map_blocks: u64,
    /// SHA-256 of the queue's part of the disk (hash job).
    pub sha256: [u8; 32],
    /// Latencies of the measured phase, see [`HIST_BUCKETS`].
    pub histogram: [u32; HIST_BUCKETS],
}
