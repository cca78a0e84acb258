//! The state in which the guest starts: page tables, descriptor tables, registers.
//!
//! ```text
//! 0x02000 PML4   0x03000 PDPT   0x04000 four page directories (GiB 0 to 3)
//! 0x08000 GDT    0x09000 IDT    0x0a000 TSS    0x0b000 page table of the first 2 MiB
//! 0x0c000 ring-0 stack, to 0x20000
//! ```
//! RAM is identity-mapped in 2 MiB pages, user-accessible. So is the fourth GiB, uncached, with the
//! devices and interrupt controllers. Page 0 and everything else is unmapped: a stray pointer is a
//! page fault with a crash report.
use crate::error::RunError;
use kvm_bindings::{kvm_regs, kvm_segment};
use kvm_ioctls::VcpuFd;
use paravane_dma::{Access, AccessGuard, Handle, Memory, Region};
use paravane_spec::builtin::{BOOT_INFO, INTERRUPTS, IRQ_VECTOR_BASE, ImageHeader, STACK_TOP, WAIT_VECTOR};
use std::sync::Arc;

const PML4: u64 = 0x2000;
const PDPT: u64 = 0x3000;
const DIRECTORIES: u64 = 0x4000;
const GDT: u64 = 0x8000;
const IDT: u64 = 0x9000;
const TSS: u64 = 0xa000;
const LOW_TABLE: u64 = 0xb000;
/// Top of the ring-0 stack.
pub(super) const RING0_STACK: u64 = 0x2_0000;

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
/// Null; ring-0 code and data; ring-3 code and data; the TSS (two entries).
const GDT_ENTRIES: [u64; 7] = [
    0,
    0x00af_9b00_0000_ffff,
    0x00cf_9300_0000_ffff,
    0x00af_fb00_0000_ffff,
    0x00cf_f300_0000_ffff,
    0x0000_8900_0000_0000 | TSS_LIMIT as u64 | TSS << 16,
    0,
];

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
    /// Whether it starts in ring 3.
    pub(super) ring3: bool,
    /// Interrupt stubs; `None`: an empty interrupt descriptor table.
    pub(super) stubs: Option<ImageHeader>,
}

/// Makes `vcpu` start with the built-in guest.
///
/// # Errors
/// There is no image in this build, RAM is too small, or KVM refuses a register.
pub(crate) fn start_builtin(region: &Arc<Region>, vcpu: &VcpuFd) -> Result<(), RunError> {
    prepare(region, vcpu, &load(region)?)
}

/// Copies the built-in image into RAM.
fn load(region: &Arc<Region>) -> Result<Entry, RunError> {
    let image = super::image::builtin().map_err(|error| RunError::Config(error.to_string()))?;
    let mut memory = handle(region)?;
    let memory = memory.enter();
    put(&memory, paravane_spec::builtin::IMAGE_BASE, image.bytes)?;
    Ok(Entry {
        rip: image.header.entry,
        rsp: STACK_TOP - 8,
        rdi: BOOT_INFO,
        ring3: true,
        stubs: Some(image.header),
    })
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
    put_words(&memory, GDT, &GDT_ENTRIES)?;
    if let Some(stubs) = &entry.stubs {
        put_words(&memory, IDT, &interrupt_table(stubs))?;
    }
    // The task state holds only the stack for ring 0; the I/O permission map starts behind its end.
    put(&memory, TSS + 4, &RING0_STACK.to_le_bytes())?;
    put(&memory, TSS + 0x66, &((TSS_LIMIT + 1) as u16).to_le_bytes())?;
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
    sregs.gdt.base = GDT;
    sregs.gdt.limit = (size_of_val(&GDT_ENTRIES) - 1) as u16;
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
        base: TSS,
        limit: TSS_LIMIT,
        selector: TASK,
        // A busy 64-bit task.
        type_: 11,
        present: 1,
        ..Default::default()
    };
    vcpu.set_sregs(&sregs)?;
    vcpu.set_regs(&kvm_regs {
        rip: entry.rip,
        rsp: entry.rsp,
        rdi: entry.rdi,
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
        assert_eq!(GDT_ENTRIES[5], 0x0000_8900_a000_0067);
        assert_eq!(usize::from(TASK), 5 * 8);
    }
}
