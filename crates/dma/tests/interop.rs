//! Guest memory in crates that only know vm-memory.
#![cfg(not(any(miri, loom)))]
use linux_loader::loader::{KernelLoader, elf::Elf};
use paravane_dma::interop::View;
use paravane_dma::{Access, Backing, DirtyLog, DirtyPages, Memory, Region, RegionConfig};
use std::io::Cursor;
use std::sync::Arc;
use std::time::Duration;
use vm_memory::{
    Bytes, GuestAddress, GuestAddressSpace, GuestMemoryBackend, GuestMemoryError, GuestMemoryRegion,
};

const PAGE: u64 = 4096;
const NOW: Duration = Duration::from_secs(60);

fn memory() -> Memory {
    let region = |gpa, size| {
        Region::new(RegionConfig { gpa, size, backing: Backing::Pages, writable: true }).expect("guest RAM")
    };
    Memory::new(vec![region(0x10_0000, 16 * PAGE), region(0, 8 * PAGE), region(8 * PAGE, 8 * PAGE)])
        .expect("a map")
}

fn dirty(memory: &Memory) -> Vec<u64> {
    let mut pages = DirtyPages::new(0, memory.end(), PAGE).expect("pages");
    memory.log().expect("a log").harvest(&mut pages);
    pages.iter().collect()
}

/// ELF file of one segment: `code` at guest-physical `at`, zeroes up to `size`.
fn elf(at: u64, code: &[u8], size: u64) -> Vec<u8> {
    let mut file = b"\x7fELF\x02\x01\x01".to_vec();
    file.resize(16, 0);
    // Executable, x86-64, version 1, entry.
    file.extend([2, 0, 62, 0, 1, 0, 0, 0]);
    file.extend(at.to_le_bytes());
    // Program headers behind the header, no sections, no flags; sizes and counts.
    file.extend(64_u64.to_le_bytes());
    file.extend([0; 12]);
    file.extend([64, 0, 56, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(file.len(), 64);
    // To be loaded, readable and executable; offset, addresses, sizes, alignment.
    file.extend([1, 0, 0, 0, 5, 0, 0, 0]);
    for word in [120, at, at, code.len() as u64, size, PAGE] {
        file.extend(word.to_le_bytes());
    }
    file.extend(code);
    file
}

#[test]
fn a_kernel_is_loaded_by_linux_loader() {
    let memory = memory();
    memory.start_log(DirtyLog::new(memory.end(), PAGE).expect("a log"), NOW).expect("nobody is inside");
    let view = View::new(&memory).expect("a view");
    let code: Vec<u8> = (0..PAGE + 100).map(|at| at as u8 | 1).collect();
    let image = elf(0x10_2000, &code, 3 * PAGE);
    let loaded = Elf::load(&view, None, &mut Cursor::new(image), None).expect("a kernel");
    assert_eq!(loaded.kernel_load, GuestAddress(0x10_2000));
    let mut found = vec![0; code.len()];
    memory.handle().enter().read(0x10_2000, &mut found, Access::READ).expect("RAM");
    assert!(found == code);
    let marked = dirty(&memory);
    assert!(marked.contains(&0x10_2000) && marked.contains(&0x10_3000), "{marked:x?}");
    assert!(marked.iter().all(|page| (0x10_2000..0x10_5000).contains(page)), "{marked:x?}");
}

#[test]
fn a_view_is_the_memory_and_its_writes_are_logged() {
    let memory = memory();
    let view = View::new(&memory).expect("a view");
    assert_eq!(view.num_regions(), 3);
    assert_eq!(view.iter().map(|region| region.start_addr().0).collect::<Vec<_>>(), [0, 8 * PAGE, 0x10_0000]);
    assert!(view.find_region(GuestAddress(16 * PAGE)).is_none());
    let last = view.find_region(GuestAddress(0x10_ffff)).expect("its last byte");
    assert_eq!(last.last_addr(), GuestAddress(0x10_ffff));
    let file = last.file_offset().expect("a file");
    assert_eq!((file.start(), file.file().metadata().expect("a file").len()), (0, 16 * PAGE));

    // Before there is a log, and across two regions.
    view.write_slice(b"across", GuestAddress(8 * PAGE - 3)).expect("RAM");
    let mut handle = memory.handle();
    assert_eq!(handle.enter().read_obj::<[u8; 6]>(8 * PAGE - 3, Access::READ), Ok(*b"across"));
    memory.start_log(DirtyLog::new(memory.end(), PAGE).expect("a log"), NOW).expect("nobody is inside");
    view.write_obj(0x1122_3344_u32, GuestAddress(8 * PAGE - 2)).expect("RAM");
    assert_eq!(dirty(&memory), [7 * PAGE, 8 * PAGE]);
    handle.enter().write(0x10_0008, b"ours", Access::WRITE).expect("RAM");
    assert_eq!(view.read_obj::<[u8; 4]>(GuestAddress(0x10_0008)).expect("RAM"), *b"ours");
    let outside = view.write_slice(&[1; 32], GuestAddress(0x10_fff0));
    assert!(matches!(outside, Err(GuestMemoryError::PartialBuffer { completed: 16, .. })), "{outside:?}");
}

/// Memory table that the crate vhost gives to the kernel's vhost devices.
#[test]
fn a_shared_view_is_an_address_space() {
    fn regions(space: &impl GuestAddressSpace<M = View>) -> usize {
        space.memory().num_regions()
    }
    assert_eq!(regions(&Arc::new(View::new(&memory()).expect("a view"))), 3);
}

#[test]
fn a_view_keeps_its_regions() {
    let memory = memory();
    let view = View::new(&memory).expect("a view");
    view.write_obj(7_u8, GuestAddress(5)).expect("RAM");
    memory.replace(Vec::new()).expect("nothing");
    assert_eq!(view.read_obj::<u8>(GuestAddress(5)).expect("still there"), 7);
    assert_eq!(View::new(&memory).expect("a view").num_regions(), 0);
}
