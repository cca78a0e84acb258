//! The machine as the program sees it from ring 3.
use super::stubs::{COUNTERS, Counters};
use core::arch::asm;
use core::arch::x86_64::_rdtsc;
use core::mem::offset_of;
use core::ptr::NonNull;
use core::sync::atomic::Ordering::Relaxed;
use paravane_guest::{Area, DmaArea, Platform, Space, VolatileSpace};
use paravane_spec::builtin::{
    BOOT_INFO, BootInfo, HEAP_BASE, IRQ_COUNT, IRQ_VECTOR_BASE, MMIO_BASE, REPORT_BASE, REPORT_SIZE,
    WAIT_VECTOR, control,
};

/// I/O APIC: selects a register.
const IOAPIC_SELECT: u64 = 0xfec0_0000;
/// I/O APIC: the selected register.
const IOAPIC_DATA: u64 = 0xfec0_0010;
/// I/O APIC: first of the two registers of redirection entry 0.
const IOAPIC_ENTRIES: u32 = 0x10;
/// Local APIC: command register, its two halves.
const APIC_COMMAND: u64 = 0xfee0_0300;
const APIC_COMMAND_HIGH: u64 = 0xfee0_0310;
/// Bytes of the page at the boot information.
const BOOT_PAGE: u64 = 4096;
/// Device memory must lie in what the VMM's page tables map.
const MAPPED: u64 = 1 << 32;

/// The machine under the image.
pub(crate) struct Machine {
    ram_size: u64,
    heap_base: u64,
    /// Time-stamp counter at the start.
    start: u64,
    /// Nanoseconds a tick, times 2^32.
    scale: u64,
}

impl Machine {
    /// `None` if the boot information does not say how fast the clock is.
    pub(crate) fn new(info: &BootInfo) -> Option<Self> {
        let scale = (1_000_000u64 << 32).checked_div(info.clock_khz)?;
        Some(Self {
            ram_size: info.ram_size,
            heap_base: info.heap_base.max(HEAP_BASE),
            start: Self::ticks(),
            scale,
        })
    }

    fn ticks() -> u64 {
        // SAFETY: RDTSC reads a counter; the VMM leaves it to ring 3 (CR4.TSD is 0).
        unsafe { _rdtsc() }
    }

    fn counters(cpu: usize) -> Option<&'static Counters> {
        COUNTERS.get(cpu)
    }

    /// Interrupts that a processor has taken so far.
    pub(crate) fn taken(cpu: usize) -> u64 {
        // Relaxed: the stubs run on that processor, between two instructions. Of another one, the
        // count is for display.
        Self::counters(cpu).map_or(0, |counters| counters.taken.load(Relaxed))
    }

    /// The memory of all devices.
    ///
    /// It is accessed with plain MOVs, which every VMM can decode.
    fn devices() -> VolatileSpace {
        // SAFETY: the VMM's page tables map all of the first 4 GiB for ring 3; RAM ends below the
        // first device, and what lies above it is devices or nothing. They reach RAM only as their
        // drivers tell them.
        unsafe { VolatileSpace::new(MMIO_BASE as *mut u8, MMIO_BASE..MAPPED) }
    }

    /// Writes device memory.
    pub(crate) fn write32(addr: u64, value: u32) {
        Self::devices().write32(addr, value);
    }

    /// Interrupts that the calling processor has taken so far.
    pub(crate) fn taken_here() -> u64 {
        let taken: u64;
        // SAFETY: the VMM has set GS to this processor's counters, of which this is the first.
        unsafe {
            asm!("mov {}, gs:[{first}]", out(reg) taken, first = const offset_of!(Counters, taken),
                options(nostack, readonly));
        }
        taken
    }

    /// Sends an interrupt to a processor.
    pub(crate) fn send(cpu: usize, number: u32) {
        // The upper half of the command holds the destination; a write of the lower half sends.
        Self::write32(APIC_COMMAND_HIGH, (cpu as u32) << 24);
        Self::write32(APIC_COMMAND, u32::from(IRQ_VECTOR_BASE) + number);
    }

    /// Sleeps until the calling processor's count of interrupts is no longer `seen`.
    pub(crate) fn sleep(seen: u64) {
        const { assert!(WAIT_VECTOR == 3, "int3 raises vector 3") };
        // SAFETY: the gate of WAIT_VECTOR leads to the wait stub, which changes no register and
        // works on its own stack.
        unsafe { asm!("int3", in("rdi") seen) };
    }
}

impl Platform for Machine {
    fn mmio_read32(&self, addr: u64) -> u32 {
        Self::devices().read32(addr)
    }

    fn mmio_write32(&self, addr: u64, value: u32) {
        Self::write32(addr, value);
    }

    fn mmio_read8(&self, addr: u64) -> u8 {
        Self::devices().read8(addr)
    }

    fn mmio_read16(&self, addr: u64) -> u16 {
        Self::devices().read16(addr)
    }

    fn mmio_write16(&self, addr: u64, value: u16) {
        Self::devices().write16(addr, value);
    }

    fn mmio_write8(&self, addr: u64, value: u8) {
        Self::devices().write8(addr, value);
    }

    fn ram(&self, addr: u64, len: usize) -> Option<DmaArea> {
        let end = addr.checked_add(len as u64)?;
        // The image, its stack and the VMM's tables are not shared memory.
        let boot_page = addr >= BOOT_INFO && end <= BOOT_INFO + BOOT_PAGE;
        let report = addr >= REPORT_BASE && end <= REPORT_BASE + REPORT_SIZE;
        let heap = addr >= self.heap_base && end <= self.ram_size.min(MAPPED);
        if !boot_page && !report && !heap {
            return None;
        }
        let start = NonNull::new(addr as *mut u8)?;
        // SAFETY: RAM is mapped one to one for as long as the guest runs, and the three pieces let
        // through hold no Rust object: those lie in the image and on the processors' stacks, which
        // lie between them.
        let area = unsafe { Area::new(start, len) };
        Some(DmaArea { area, addr })
    }

    fn now_ns(&self) -> u64 {
        let ticks = Self::ticks().wrapping_sub(self.start);
        ((u128::from(ticks) * u128::from(self.scale)) >> 32) as u64
    }

    fn interrupts(&self, cpu: usize) -> u64 {
        Self::taken(cpu)
    }

    fn interrupts_on(&self, cpu: usize, number: u32) -> u64 {
        let count = Self::counters(cpu).and_then(|counters| counters.taken_on.get(number as usize));
        // Relaxed: as in `taken`.
        count.map_or(0, |count| count.load(Relaxed))
    }

    fn enable_line(&self, gsi: u32, cpu: usize) {
        if gsi as usize >= IRQ_COUNT {
            return;
        }
        // Upper half: physical destination. Lower half: the vector; fixed, edge, unmasked.
        let entry = IOAPIC_ENTRIES + 2 * gsi;
        for (register, value) in [(entry + 1, (cpu as u32) << 24), (entry, u32::from(IRQ_VECTOR_BASE) + gsi)]
        {
            Self::write32(IOAPIC_SELECT, register);
            Self::write32(IOAPIC_DATA, value);
        }
    }

    fn interrupt(&self, cpu: usize, number: u32) {
        Self::send(cpu, number);
    }

    fn on_each_cpu<W: Send>(&self, work: &mut [W], run: &(dyn Fn(usize, &mut W) + Sync)) {
        crate::processors::on_each(work, run);
    }

    fn wait(&self, _cpu: usize, seen: u64) {
        Self::sleep(seen);
    }

    fn relax(&self) {
        Self::control(control::YIELD, 0);
    }

    fn crash(&self) -> ! {
        // SAFETY: an undefined instruction does nothing but raise an exception, which is what is
        // asked for.
        unsafe { asm!("ud2", options(noreturn)) }
    }
}
