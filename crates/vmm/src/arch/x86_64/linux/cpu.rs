//! The processor at Linux's entry: long mode, identity map, interrupts off.
//!
//! See Documentation/arch/x86/boot.rst, "64-bit Boot Protocol".
use super::layout::{BOOT_PARAMS, GDT, PML4};
use kvm_bindings::{kvm_regs, kvm_segment};
use kvm_ioctls::VcpuFd;
use paravane_dma::{Access, AccessGuard, DmaError};

const PDPT: u64 = PML4 + 0x1000;
const DIRECTORIES: u64 = PDPT + 0x1000;
const MIB2: u64 = 2 << 20;
/// Present, writable.
const TABLE: u64 = 3;
/// Present, writable, a 2 MiB page.
const LARGE: u64 = TABLE | 0x80;

/// Selectors that the boot protocol requires.
const CODE: u16 = 0x10;
const DATA: u16 = 0x18;
/// Two empty entries; code; data.
const GDT_ENTRIES: [u64; 4] = [0, 0, 0x00af_9b00_0000_ffff, 0x00cf_9300_0000_ffff];

/// CR0: protection, extension type, paging.
const CR0: u64 = 0x8000_0011;
/// CR4: physical address extension.
const CR4: u64 = 0x20;
/// Long mode, enabled and active.
const EFER: u64 = 0x500;

/// Writes page and descriptor tables.
///
/// # Errors
/// RAM is too small.
pub(super) fn put_tables(memory: &AccessGuard<'_>) -> Result<(), DmaError> {
    let put = |addr: u64, words: &mut dyn Iterator<Item = u64>| {
        let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        memory.write(addr, &bytes, Access::WRITE)
    };
    put(GDT, &mut GDT_ENTRIES.into_iter())?;
    put(PML4, &mut std::iter::once(PDPT | TABLE))?;
    put(PDPT, &mut (0..4).map(|gib| (DIRECTORIES + 0x1000 * gib) | TABLE))?;
    put(DIRECTORIES, &mut (0..4 * 512).map(|page| (page * MIB2) | LARGE))
}

/// Sets the registers, so that the vCPU starts at `entry`.
///
/// # Errors
/// KVM refuses.
pub(super) fn set_up(vcpu: &VcpuFd, entry: u64) -> Result<(), kvm_ioctls::Error> {
    let mut sregs = vcpu.get_sregs()?;
    (sregs.cr0, sregs.cr3, sregs.cr4, sregs.efer) = (CR0, PML4, CR4, EFER);
    sregs.gdt.base = GDT;
    sregs.gdt.limit = (size_of_val(&GDT_ENTRIES) - 1) as u16;
    // Code, readable, accessed.
    let code = kvm_segment {
        limit: u32::MAX,
        selector: CODE,
        type_: 11,
        present: 1,
        s: 1,
        l: 1,
        g: 1,
        ..Default::default()
    };
    // Data, writable, accessed.
    let data = kvm_segment { selector: DATA, type_: 3, l: 0, db: 1, ..code };
    sregs.cs = code;
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    // A busy 64-bit task. Nothing reads it.
    sregs.tr = kvm_segment { limit: 0x67, type_: 11, present: 1, ..Default::default() };
    vcpu.set_sregs(&sregs)?;
    // Bit 1 of the flags is always set; interrupts are off.
    vcpu.set_regs(&kvm_regs { rip: entry, rsi: BOOT_PARAMS, rflags: 2, ..Default::default() })
}
