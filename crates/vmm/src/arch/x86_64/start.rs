//! The state in which the guest starts: page tables, descriptor tables, registers.
//!
//! ```text
//! 0x02000 PML4   0x03000 PDPT   0x04000 four page directories (GiB 0 to 3)
//! 0x09000 IDT    0x0b000 page table of the first 2 MiB
//! 0x20000 of each vCPU: GDT, TSS, ring-0 stack (CPU_AREA bytes)
//! ```
//! RAM is identity-mapped in 2 MiB pages, user-accessible. So is the fourth GiB, uncached, with the
//! devices and interrupt controllers. Page 0 and everything else is unmapped: a stray pointer is a
//! page fault with a crash report.
use crate::error::RunError;
use kvm_bindings::{KVM_MP_STATE_RUNNABLE, kvm_mp_state, kvm_regs, kvm_segment};
use kvm_ioctls::VcpuFd;
use paravane_dma::{Access, AccessGuard, Handle, Memory, Region};
use paravane_spec::builtin::{
    BOOT_INFO, CPU_STACK, HEAP_BASE, IMAGE_BASE, INTERRUPTS, IRQ_VECTOR_BASE, ImageHeader, MAX_CPUS,
    STACK_TOP, WAIT_VECTOR,
};
use std::sync::Arc;

const PML4: u64 = 0x2000;
const PDPT: u64 = 0x3000;
const DIRECTORIES: u64 = 0x4000;
const IDT: u64 = 0x9000;
const LOW_TABLE: u64 = 0xb000;
/// Area of vCPU 0.
const CPU_AREAS: u64 = 0x2_0000;
/// Bytes of each: descriptors, and a ring-0 stack that ends with it.
const CPU_AREA: u64 = 0x2000;
/// Offset of the task state in an area. The GDT is at its start.
const TSS_AT: u64 = 0x100;

const MIB2: u64 = 2 << 20;
const GIB: u64 = 1 << 30;

/// Present, writable, user-accessible.
const TABLE: u64 = 7;
/// Present, writable, a 2 MiB page.
const LARGE: u64 = TABLE | 0x80;
/// Write-through and cache-disable.
const UNCACHED: u64 = 0x18;

const RING0_CODE: u16 = 0x08;
const RING3_CODE: u16 = 0x18 | 3;
const RING3_DATA: u16 = 0x20 | 3;
const TASK: u16 = 0x28;
const TSS_LIMIT: u32 = 0x67;
/// Null; ring-0 code and data; ring-3 code and data; the TSS (two entries), which is at `tss`.
const fn descriptors(tss: u64) -> [u64; 7] {
    // Bits 0 to 23 of the address; the rest is 0 below 16 MiB.
    let task = 0x0000_8900_0000_0000 | TSS_LIMIT as u64 | (tss & 0xff_ffff) << 16;
    let code = [0x00af_9b00_0000_ffff, 0x00af_fb00_0000_ffff];
    let data = [0x00cf_9300_0000_ffff, 0x00cf_f300_0000_ffff];
    [0, code[0], data[0], code[1], data[1], task, 0]
}

/// Start of the area of vCPU `cpu`.
const fn cpu_area(cpu: u64) -> u64 {
    CPU_AREAS + cpu * CPU_AREA
}

/// Top of the ring-0 stack of vCPU `cpu`.
pub(super) const fn ring0_stack(cpu: u64) -> u64 {
    cpu_area(cpu + 1)
}

/// CR0: protection, paging, write protection, numeric errors.
const CR0: u64 = 0x8005_0033;
/// CR4: PAE, and OSFXSR and OSXMMEXCPT for SSE.
const CR4: u64 = 0x620;
/// Long mode, enabled and active.
const EFER: u64 = 0x500;
/// RFLAGS: interrupts enabled; bit 1 is always set.
const RFLAGS: u64 = 0x202;

/// Interrupt gates to ring 0: for hardware only, and for `int` from ring 3.
const GATE: u16 = 0x8e00;
const GATE_FROM_RING3: u16 = 0xee00;

/// Entry point and interrupt handlers of a guest.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    /// First instruction.
    pub(super) rip: u64,
    /// Stack.
    pub(super) rsp: u64,
    /// First argument.
    pub(super) rdi: u64,
    /// Number of the vCPU, its second argument.
    pub(super) cpu: u64,
    /// Whether it starts in ring 3.
    pub(super) ring3: bool,
    /// Interrupt stubs; `None`: an empty interrupt descriptor table.
    pub(super) stubs: Option<ImageHeader>,
}

/// Makes the vCPUs start with the built-in guest.
///
/// # Errors
/// There is no image in this build, RAM is too small, or KVM refuses a register.
pub(crate) fn start_builtin(region: &Arc<Region>, vcpus: &[VcpuFd]) -> Result<(), RunError> {
    let image = super::image::builtin().map_err(|error| RunError::Config(error.to_string()))?;
    put(&handle(region)?.enter(), IMAGE_BASE, image.bytes)?;
    let header = image.header;
    for (cpu, vcpu) in (0..).zip(vcpus) {
        let stack = if cpu == 0 { STACK_TOP } else { HEAP_BASE + cpu * CPU_STACK };
        let entry = Entry {
            rip: header.entry,
            rsp: stack - 8,
            rdi: BOOT_INFO,
            cpu,
            ring3: true,
            stubs: Some(header),
        };
        prepare(region, vcpu, &entry)?;
    }
    Ok(())
}

fn handle(region: &Arc<Region>) -> Result<Handle, RunError> {
    Ok(Memory::new(vec![Arc::clone(region)])?.handle())
}

fn put(memory: &AccessGuard<'_>, addr: u64, data: &[u8]) -> Result<(), RunError> {
    memory
        .write(addr, data, Access::WRITE)
        .map_err(|error| RunError::Config(format!("the guest's memory is too small: {error}")))
}

fn put_words(memory: &AccessGuard<'_>, addr: u64, words: &[u64]) -> Result<(), RunError> {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    put(memory, addr, &bytes)
}

/// Writes the tables into RAM and sets the vCPU's registers.
///
/// # Errors
/// RAM is too small, or KVM refuses a register.
pub(super) fn prepare(region: &Arc<Region>, vcpu: &VcpuFd, entry: &Entry) -> Result<(), RunError> {
    let mut memory = handle(region)?;
    let memory = memory.enter();
    page_tables(&memory, region.size())?;
    let area = cpu_area(entry.cpu);
    put_words(&memory, area, &descriptors(area + TSS_AT))?;
    if let Some(stubs) = &entry.stubs {
        put_words(&memory, IDT, &interrupt_table(stubs))?;
    }
    // The task state holds only the stack for ring 0; the I/O permission map starts behind its end.
    put(&memory, area + TSS_AT + 4, &ring0_stack(entry.cpu).to_le_bytes())?;
    put(&memory, area + TSS_AT + 0x66, &((TSS_LIMIT + 1) as u16).to_le_bytes())?;
    registers(vcpu, entry).map_err(|error| RunError::Os {
        what: "set the vCPU's registers",
        source: std::io::Error::from_raw_os_error(error.errno()),
    })
}

fn page_tables(memory: &AccessGuard<'_>, ram: u64) -> Result<(), RunError> {
    put_words(memory, PML4, &[PDPT | TABLE])?;
    let directories: Vec<u64> = (0..4).map(|gib| (DIRECTORIES + gib * 0x1000) | TABLE).collect();
    put_words(memory, PDPT, &directories)?;
    let large: Vec<u64> = (0..4 * GIB / MIB2)
        .map(|page| page * MIB2)
        .map(|addr| match addr {
            0 => LOW_TABLE | TABLE,
            _ if addr < ram.min(3 * GIB) => addr | LARGE,
            _ if addr >= 3 * GIB => addr | LARGE | UNCACHED,
            _ => 0,
        })
        .collect();
    put_words(memory, DIRECTORIES, &large)?;
    let low: Vec<u64> = (0..512).map(|page| if page == 0 { 0 } else { page << 12 | TABLE }).collect();
    put_words(memory, LOW_TABLE, &low)
}

fn interrupt_table(stubs: &ImageHeader) -> Vec<u64> {
    let mut table = vec![0; 512];
    let mut gate = |vector: usize, stub: u64, kind: u16| {
        table[2 * vector] =
            stub & 0xffff | u64::from(RING0_CODE) << 16 | u64::from(kind) << 32 | (stub >> 16 & 0xffff) << 48;
        table[2 * vector + 1] = stub >> 32;
    };
    let stride = u64::from(stubs.stub_stride);
    for exception in 0..32 {
        gate(exception, stubs.exception_stubs.wrapping_add(exception as u64 * stride), GATE);
    }
    for number in 0..INTERRUPTS {
        let stub = stubs.irq_stubs.wrapping_add(number as u64 * stride);
        gate(usize::from(IRQ_VECTOR_BASE) + number, stub, GATE);
    }
    gate(usize::from(WAIT_VECTOR), stubs.wait_stub, GATE_FROM_RING3);
    table
}

fn registers(vcpu: &VcpuFd, entry: &Entry) -> Result<(), kvm_ioctls::Error> {
    let mut sregs = vcpu.get_sregs()?;
    sregs.cr0 = CR0;
    sregs.cr3 = PML4;
    sregs.cr4 = CR4;
    sregs.efer = EFER;
    let area = cpu_area(entry.cpu);
    sregs.gdt.base = area;
    sregs.gdt.limit = (size_of_val(&descriptors(0)) - 1) as u16;
    sregs.idt.base = IDT;
    sregs.idt.limit = 0xfff;
    let dpl = if entry.ring3 { 3 } else { 0 };
    let code = kvm_segment {
        limit: u32::MAX,
        selector: if entry.ring3 { RING3_CODE } else { RING0_CODE },
        // Code, readable, accessed.
        type_: 11,
        present: 1,
        dpl,
        s: 1,
        l: 1,
        g: 1,
        ..Default::default()
    };
    let data = kvm_segment {
        selector: if entry.ring3 { RING3_DATA } else { RING0_CODE + 8 },
        // Data, writable, accessed.
        type_: 3,
        l: 0,
        db: 1,
        ..code
    };
    sregs.cs = code;
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.tr = kvm_segment {
        base: area + TSS_AT,
        limit: TSS_LIMIT,
        selector: TASK,
        // A busy 64-bit task.
        type_: 11,
        present: 1,
        ..Default::default()
    };
    // Where the stubs count; nothing else uses this segment.
    let stubs = entry.stubs.unwrap_or_default();
    sregs.gs.base = stubs.counters.wrapping_add(stubs.counters_stride.wrapping_mul(entry.cpu));
    vcpu.set_sregs(&sregs)?;
    vcpu.set_mp_state(kvm_mp_state { mp_state: KVM_MP_STATE_RUNNABLE })?;
    vcpu.set_regs(&kvm_regs {
        rip: entry.rip,
        rsp: entry.rsp,
        rdi: entry.rdi,
        rsi: entry.cpu,
        rflags: RFLAGS,
        ..Default::default()
    })?;
    let mut lapic = vcpu.get_lapic()?;
    // Spurious-interrupt vector register: enabled, vector 0xff. Both local lines masked: nothing
    // but messages, the I/O APIC's and the devices', interrupts this guest.
    for (register, value) in [(0xf0, 0x1ff_u32), (0x350, 0x1_0000), (0x360, 0x1_0000)] {
        for (byte, value) in lapic.regs[register..].iter_mut().zip(value.to_le_bytes()) {
            *byte = value.cast_signed();
        }
    }
    vcpu.set_lapic(&lapic)
}

const _: () =
    assert!(ring0_stack(MAX_CPUS as u64 - 1) <= 0xa_0000, "the areas end below the first hole of a PC");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gate_holds_its_stub() {
        let stubs = ImageHeader {
            stub_stride: 16,
            exception_stubs: 0x1_2345_6000,
            irq_stubs: 0x10_0800,
            wait_stub: 0x10_1000,
            ..Default::default()
        };
        let table = interrupt_table(&stubs);
        assert_eq!(table[2 * 14], 0x2345_8e00_0008_60e0);
        assert_eq!(table[2 * 14 + 1], 1);
        assert_eq!(table[2 * 0x45], 0x0010_8e00_0008_0850);
        assert_eq!(table[2 * 3], 0x0010_ee00_0008_1000);
        assert_eq!(table[2 * 0x30], 0);
    }

    #[test]
    fn the_task_descriptor_names_the_task() {
        assert_eq!(descriptors(0xa000)[5], 0x0000_8900_a000_0067);
        assert_eq!(descriptors(cpu_area(63) + TSS_AT)[5], 0x0000_8909_e100_0067);
        assert_eq!(usize::from(TASK), 5 * 8);
    }
}
