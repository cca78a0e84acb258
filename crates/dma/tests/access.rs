//! Every accessor, at every edge: holes, ends, borders, permissions.
use paravane_dma::{
    Access, Backing, DmaError, DmaFault, Handle, HostSlice, Memory, MemoryError, Region, RegionConfig,
    Segment,
};
use std::sync::Arc;

const PAGE: u64 = 4096;
const READ: Access = Access::READ;
const WRITE: Access = Access::WRITE;

fn region(gpa: u64, size: u64, writable: bool) -> Arc<Region> {
    Region::new(RegionConfig { gpa, size, backing: Backing::Pages, writable }).expect("guest RAM")
}

/// RAM with a hole and a read-only part.
///
/// RAM in [0x1000, 0x3000), adjacent RAM in [0x3000, 0x4000), a hole, and read-only memory in
/// [0x5000, 0x6000).
fn handle() -> Handle {
    let regions =
        vec![region(0x5000, PAGE, false), region(0x1000, 2 * PAGE, true), region(0x3000, PAGE, true)];
    Memory::new(regions).expect("a map").handle()
}

#[test]
fn a_region_must_be_of_whole_pages_and_not_empty() {
    for (gpa, size) in [(0, 0), (0, 1), (0, 4095), (0, 4097), (1, 4096), (0x800, 4096)] {
        let config = RegionConfig { gpa, size, backing: Backing::Pages, writable: true };
        assert!(
            matches!(Region::new(config), Err(MemoryError::Unaligned { gpa: g, size: s, align: 4096 }) if (g, s) == (gpa, size))
        );
    }
    let config = RegionConfig { gpa: 0, size: 4096, backing: Backing::HugePages, writable: true };
    assert!(matches!(Region::new(config), Err(MemoryError::Unaligned { align: 0x20_0000, .. })));
}

#[test]
fn a_region_may_end_at_the_end_of_the_address_space_but_not_wrap() {
    let last = u64::MAX - 4095;
    let config = RegionConfig { gpa: last, size: 2 * PAGE, backing: Backing::Pages, writable: true };
    assert!(matches!(Region::new(config), Err(MemoryError::Wraps { gpa, size: 8192 }) if gpa == last));

    let mut handle = Memory::new(vec![region(last, PAGE, true)]).expect("a map").handle();
    let handle = handle.enter();
    handle.write(u64::MAX - 3, b"last", WRITE).expect("the last bytes of all");
    assert_eq!(handle.read_obj::<[u8; 4]>(u64::MAX - 3, READ), Ok(*b"last"));
    assert_eq!(
        handle.read_obj::<[u8; 5]>(u64::MAX - 3, READ),
        Err(DmaError { addr: u64::MAX - 3, len: 5, done: 0, fault: DmaFault::Wraps })
    );
}

#[test]
#[cfg(not(miri))]
fn a_size_that_no_host_has_is_an_error() {
    let config = RegionConfig { gpa: 0, size: 1 << 62, backing: Backing::Pages, writable: true };
    assert!(matches!(Region::new(config), Err(MemoryError::Os { size, .. }) if size == 1 << 62));
}

#[test]
#[cfg(not(miri))]
fn missing_huge_pages_are_refused_with_the_remedy() {
    // More than any pool holds (8 TiB), so that no machine's configuration decides the outcome.
    let config = RegionConfig { gpa: 0, size: 8 << 40, backing: Backing::HugePages, writable: true };
    let error = Region::new(config).expect_err("8 TiB of huge pages").to_string();
    assert!(error.contains("sysctl vm.nr_hugepages=4194"), "{error}");
}

#[test]
#[cfg(not(miri))]
fn the_file_is_the_memory_and_its_size_is_sealed() {
    use std::os::unix::fs::FileExt;
    let ram = region(0, PAGE, true);
    let mut handle = Memory::new(vec![Arc::clone(&ram)]).expect("a map").handle();
    let handle = handle.enter();
    handle.write(10, b"shared", WRITE).expect("RAM");
    let file = std::fs::File::from(ram.fd().expect("a memfd").try_clone_to_owned().expect("a descriptor"));
    let mut seen = [0; 6];
    file.read_exact_at(&mut seen, 10).expect("the memfd");
    assert_eq!(&seen, b"shared");
    assert!(file.set_len(0).is_err(), "another process could pull the memory from under us");
    assert!(file.set_len(2 * PAGE).is_err());
}

#[test]
#[cfg(not(miri))]
fn memory_begins_at_a_huge_page_and_private_memory_has_no_file() {
    const HUGE: u64 = 2 << 20;
    for backing in [Backing::Pages, Backing::Private] {
        let ram = Region::new(RegionConfig { gpa: HUGE, size: 2 * HUGE + PAGE, backing, writable: true });
        let ram = ram.expect("guest RAM");
        assert!((ram.host().as_ptr() as u64).is_multiple_of(HUGE), "{:p}", ram.host());
        assert_eq!(ram.fd().is_none(), backing == Backing::Private);
        let mut handle = Memory::new(vec![Arc::clone(&ram)]).expect("a map").handle();
        let handle = handle.enter();
        for at in [HUGE, 3 * HUGE + PAGE - 8] {
            handle.write_obj(at, &at, WRITE).expect("RAM");
            ram.populate().expect("memory");
            assert_eq!(handle.read_obj(at, READ), Ok(at));
        }
    }
}

#[test]
fn overlapping_regions_are_refused_and_the_old_map_stays() {
    let memory = Memory::new(vec![region(0x1000, 2 * PAGE, true)]).expect("a map");
    let mut handle = memory.handle();
    let clash = vec![region(0x2000, PAGE, true), region(0x1000, 2 * PAGE, true)];
    assert!(matches!(memory.replace(clash), Err(MemoryError::Overlap { first: 0x1000, second: 0x2000 })));
    assert_eq!(memory.regions().len(), 1);
    handle.enter().write(0x1000, b"x", WRITE).expect("the old map");
    let same = region(0, PAGE, true);
    assert!(matches!(
        Memory::new(vec![Arc::clone(&same), same]),
        Err(MemoryError::Overlap { first: 0, second: 0 })
    ));
}

#[test]
fn a_map_without_regions_holds_nothing() {
    let mut handle = Memory::new(Vec::new()).expect("an empty map").handle();
    let handle = handle.enter();
    assert_eq!(
        handle.read_obj::<u8>(0, READ),
        Err(DmaError { addr: 0, len: 1, done: 0, fault: DmaFault::Unmapped })
    );
    assert_eq!(handle.read(0, &mut [], READ), Ok(()));
}

#[test]
fn what_is_written_is_read() {
    let mut handle = handle();
    let handle = handle.enter();
    for access in [Access::empty(), Access::RELAXED, Access::FULL, Access::FULL | Access::RELAXED] {
        handle.write(0x1ff9, b"across a page", access).expect("RAM");
        let mut back = [0; 13];
        handle.read(0x1ff9, &mut back, access).expect("RAM");
        assert_eq!(&back, b"across a page");
        handle.write_obj(0x1100, &0x1122_3344_5566_7788_u64, access).expect("RAM");
        assert_eq!(handle.read_obj::<u64>(0x1100, access), Ok(0x1122_3344_5566_7788));
        handle.fill(0x1100, 0xa5, 3, access).expect("RAM");
        assert_eq!(handle.read_obj::<u64>(0x1100, access), Ok(0x1122_3344_55a5_a5a5));
    }
}

#[test]
fn memory_starts_zeroed() {
    assert_eq!(handle().enter().read_obj::<[u8; 64]>(0x2fe0, READ), Ok([0; 64]));
}

#[test]
fn adjoining_regions_are_crossed() {
    let mut handle = handle();
    let handle = handle.enter();
    handle.write(0x2ffc, b"abcdefgh", WRITE).expect("both sides of the border");
    assert_eq!(handle.read_obj::<[u8; 8]>(0x2ffc, READ), Ok(*b"abcdefgh"));
    handle.fill(0x2f00, 7, 0x200, WRITE).expect("both sides of the border");
    assert_eq!(handle.read_obj::<[u8; 2]>(0x2fff, READ), Ok([7, 7]));
}

#[test]
fn an_access_ends_at_a_hole_and_says_how_far_it_came() {
    let mut handle = handle();
    let handle = handle.enter();
    let hole = DmaError { addr: 0x4000, len: 16, done: 8, fault: DmaFault::Unmapped };
    assert_eq!(handle.write(0x3ff8, &[9; 16], WRITE), Err(hole));
    let mut out = [1; 16];
    assert_eq!(handle.read(0x3ff8, &mut out, READ), Err(hole));
    assert_eq!(out, [9, 9, 9, 9, 9, 9, 9, 9, 1, 1, 1, 1, 1, 1, 1, 1]);
    assert_eq!(handle.fill(0x3ff8, 0, 16, WRITE), Err(hole));
    assert_eq!((hole.addr, hole.done), (0x4000, 8));
    assert_eq!(
        handle.read_obj::<u8>(0xfff, READ),
        Err(DmaError { addr: 0xfff, len: 1, done: 0, fault: DmaFault::Unmapped })
    );
    assert_eq!(
        handle.read_obj::<u8>(0x4000, READ),
        Err(DmaError { addr: 0x4000, len: 1, done: 0, fault: DmaFault::Unmapped })
    );
    assert!(hole.to_string().contains("0x4000: no memory there (16 bytes wanted, 8 done)"));
}

#[test]
fn a_device_may_not_write_where_it_may_only_read() {
    let mut handle = handle();
    let handle = handle.enter();
    let denied = DmaError { addr: 0x5000, len: 4, done: 0, fault: DmaFault::Denied(WRITE) };
    assert_eq!(handle.read_obj::<u32>(0x5000, READ), Ok(0));
    assert_eq!(handle.write(0x5000, &[1; 4], WRITE), Err(denied));
    assert_eq!(handle.fill(0x5000, 1, 4, WRITE), Err(denied));
    // Also if the caller names another direction: the accessor adds its own.
    assert_eq!(handle.write(0x5000, &[1; 4], READ), Err(denied));
    assert_eq!(handle.map(0x5000, 4, WRITE).err(), Some(denied));
    assert_eq!(handle.map(0x5000, 4, READ | WRITE).err(), Some(denied));
    assert!(handle.map(0x5000, 4, READ).is_ok());
    assert_eq!(handle.read_obj::<u32>(0x5000, READ), Ok(0), "nothing was written");
}

#[test]
fn an_access_of_nothing_succeeds_anywhere() {
    let mut handle = handle();
    let handle = handle.enter();
    for addr in [0, 0x1000, 0x4800, u64::MAX] {
        assert_eq!(handle.read(addr, &mut [], READ), Ok(()));
        assert_eq!(handle.write(addr, &[], WRITE), Ok(()));
        assert_eq!(handle.fill(addr, 0, 0, WRITE), Ok(()));
        assert!(handle.map(addr, 0, READ | WRITE).is_ok_and(|m| m.is_empty()));
    }
}

#[test]
fn a_mapping_is_the_memory() {
    let mut handle = handle();
    let handle = handle.enter();
    let mapping = handle.map(0x1010, 0x20, READ | WRITE).expect("RAM");
    assert_eq!(mapping.len(), 0x20);
    // SAFETY: inside the mapping; nothing else uses this memory.
    unsafe { mapping.host().as_ptr().add(3).write_volatile(0x77) };
    drop(mapping);
    assert_eq!(handle.read_obj::<u8>(0x1013, READ), Ok(0x77));
}

#[test]
fn one_piece_across_a_border_or_a_hole_is_not_mapped() {
    let mut handle = handle();
    let handle = handle.enter();
    assert_eq!(
        handle.map(0x2ffe, 4, READ).err(),
        Some(DmaError { addr: 0x2ffe, len: 4, done: 0, fault: DmaFault::NotContiguous })
    );
    assert_eq!(
        handle.map(0x3ffe, 4, READ).err(),
        Some(DmaError { addr: 0x4000, len: 4, done: 2, fault: DmaFault::Unmapped })
    );
    assert_eq!(
        handle.map(u64::MAX, 2, READ).err(),
        Some(DmaError { addr: u64::MAX, len: 2, done: 0, fault: DmaFault::Wraps })
    );
    assert!(handle.map(0x2ffe, 2, READ).is_ok());
}

#[test]
fn a_span_is_the_memory_of_one_piece() {
    let mut handle = handle();
    let handle = handle.enter();
    let span = handle.write_span(0x1010, 32).expect("RAM");
    span.expect();
    span.write(0, b"head");
    span.write(4, b"a longer tail, 28 bytes long");
    span.write_obj(4, &u32::from_ne_bytes(*b"in p"));
    let span = handle.read_span(0x1010, 32).expect("RAM");
    span.expect();
    let mut out = [0; 28];
    span.read(4, &mut out);
    assert_eq!(&out, b"in pnger tail, 28 bytes long");
    assert_eq!(span.read_obj::<[u8; 4]>(0), *b"head");
    assert_eq!(span.from(30).expect("two bytes").read_obj::<[u8; 2]>(0), *b"ng");
    assert!(span.from(32).is_none() && span.from(usize::MAX).is_none());
    assert_eq!(handle.read_obj::<[u8; 8]>(0x1010, READ), Ok(*b"headin p"));
    // A border, a hole, nothing, no memory, the end of the address space.
    for (addr, len) in
        [(0x2ffe, 4), (0x3ffe, 4), (0x1000, 0), (0x4000, 1), (u64::MAX, 2), (0x1000, usize::MAX)]
    {
        assert!(handle.read_span(addr, len).is_none(), "{len} bytes at {addr:#x}");
        assert!(handle.write_span(addr, len).is_none(), "{len} bytes at {addr:#x}");
    }
    assert!(handle.read_span(0x5000, 4).is_some() && handle.write_span(0x5000, 4).is_none(), "read-only");
}

#[test]
fn an_access_beyond_a_span_is_stopped() {
    let mut handle = handle();
    let handle = handle.enter();
    let (from, to) = (handle.read_span(0x1000, 8).expect("RAM"), handle.write_span(0x1000, 8).expect("RAM"));
    for (at, len) in [(0, 9), (8, 1), (9, 0), (usize::MAX, 2)] {
        let read = std::panic::AssertUnwindSafe(|| from.read(at, &mut vec![0; len]));
        assert!(std::panic::catch_unwind(read).is_err(), "{len} bytes at {at}");
        let write = std::panic::AssertUnwindSafe(|| to.write(at, &vec![0; len]));
        assert!(std::panic::catch_unwind(write).is_err(), "{len} bytes at {at}");
    }
    from.read(8, &mut []);
    to.write(8, &[]);
}

fn segments(list: &[(u64, u32)]) -> Vec<Segment> {
    list.iter().map(|&(addr, len)| Segment { addr, len }).collect()
}

#[test]
fn a_buffer_in_pieces_is_one_sequence_of_bytes() {
    let mut handle = handle();
    let handle = handle.enter();
    // Backwards, with empty pieces and one that crosses the border.
    let buffer = segments(&[(0x2ffe, 4), (0, 0), (0x1000, 3), (u64::MAX, 0), (0x1800, 3)]);
    handle.write_segments(&buffer, 0, b"0123456789", WRITE).expect("RAM");
    assert_eq!(handle.read_obj::<[u8; 4]>(0x2ffe, READ), Ok(*b"0123"));
    assert_eq!(handle.read_obj::<[u8; 3]>(0x1000, READ), Ok(*b"456"));
    assert_eq!(handle.read_obj::<[u8; 3]>(0x1800, READ), Ok(*b"789"));
    for skip in 0..=10 {
        for len in 0..=10 - skip {
            let mut out = vec![0; len];
            handle.read_segments(&buffer, skip as u64, &mut out, READ).expect("inside");
            assert_eq!(out, b"0123456789"[skip..skip + len]);
        }
    }
}

#[test]
fn a_buffer_that_is_too_short_ends_at_its_end() {
    let mut handle = handle();
    let handle = handle.enter();
    let buffer = segments(&[(0x1000, 4), (0x2000, 4)]);
    let mut out = [0; 16];
    let end = |done| Err(DmaError { addr: 0x2004, len: 16, done, fault: DmaFault::Unmapped });
    assert_eq!(handle.read_segments(&buffer, 0, &mut out, READ), end(8));
    assert_eq!(handle.read_segments(&buffer, 6, &mut out, READ), end(2));
    assert_eq!(handle.read_segments(&buffer, 8, &mut out, READ), end(0));
    assert_eq!(handle.read_segments(&buffer, u64::MAX, &mut out, READ), end(0));
    assert_eq!(handle.write_segments(&buffer, 6, &out, WRITE), end(2));
    assert_eq!(
        handle.read_segments(&[], 0, &mut out, READ),
        Err(DmaError { addr: 0, len: 16, done: 0, fault: DmaFault::Unmapped })
    );
    // Skipping past the end for no bytes reads nothing.
    assert_eq!(handle.read_segments(&buffer, 100, &mut [], READ), Ok(()));
}

#[test]
fn a_fault_in_a_later_piece_counts_the_earlier_ones() {
    let mut handle = handle();
    let handle = handle.enter();
    let mut out = [0; 12];
    let hole = segments(&[(0x1000, 4), (0x3ffe, 8)]);
    assert_eq!(
        handle.read_segments(&hole, 0, &mut out, READ),
        Err(DmaError { addr: 0x4000, len: 12, done: 6, fault: DmaFault::Unmapped })
    );
    let wrap = segments(&[(0x1000, 4), (u64::MAX - 1, 8)]);
    assert_eq!(
        handle.read_segments(&wrap, 0, &mut out, READ),
        Err(DmaError { addr: u64::MAX - 1, len: 12, done: 4, fault: DmaFault::Wraps })
    );
    // The skipped part may reach past the end of the address space too.
    assert_eq!(
        handle.read_segments(&wrap[1..], 4, &mut out[..2], READ),
        Err(DmaError { addr: u64::MAX - 1, len: 2, done: 0, fault: DmaFault::Wraps })
    );
    let denied = segments(&[(0x1000, 4), (0x5000, 8)]);
    assert_eq!(
        handle.write_segments(&denied, 0, &out, WRITE),
        Err(DmaError { addr: 0x5000, len: 12, done: 4, fault: DmaFault::Denied(WRITE) })
    );
}

#[test]
fn mapped_segments_are_the_bytes_in_order() {
    let mut handle = handle();
    let handle = handle.enter();
    let buffer = segments(&[(0x2ffe, 4), (0, 0), (0x1000, 3), (0x1800, 3)]);
    handle.write_segments(&buffer, 0, b"0123456789", WRITE).expect("RAM");
    let mut out = Vec::new();
    let mapping_guard = handle.map_segments(&buffer, 1, 8, READ, &mut out).expect("inside");
    assert_eq!(out.iter().map(|s| s.len).collect::<Vec<_>>(), [1, 2, 3, 2]);
    let bytes: Vec<u8> = out
        .iter()
        // SAFETY: the mapping guard keeps the slices mapped, and nothing writes to them.
        .flat_map(|s| (0..s.len).map(|i| unsafe { s.ptr.add(i).read_volatile() }))
        .collect();
    assert_eq!(bytes, b"12345678");
    drop(mapping_guard);
}

#[test]
fn nothing_is_appended_on_an_error() {
    let mut handle = handle();
    let handle = handle.enter();
    let dummy = HostSlice { ptr: std::ptr::null_mut(), len: 3 };
    let mut out = vec![dummy];
    let buffer = segments(&[(0x1000, 4), (0x4000, 4)]);
    let error = handle.map_segments(&buffer, 0, 8, READ, &mut out).err();
    assert_eq!(error, Some(DmaError { addr: 0x4000, len: 8, done: 4, fault: DmaFault::Unmapped }));
    let error = handle.map_segments(&buffer[..1], 0, u64::MAX, READ, &mut out).err();
    assert_eq!(error, Some(DmaError { addr: 0x1004, len: usize::MAX, done: 4, fault: DmaFault::Unmapped }));
    let error = handle.map_segments(&segments(&[(0x5000, 4)]), 0, 4, READ | WRITE, &mut out).err();
    assert_eq!(error, Some(DmaError { addr: 0x5000, len: 4, done: 0, fault: DmaFault::Denied(WRITE) }));
    assert_eq!(out, [dummy]);
    assert!(handle.map_segments(&buffer, 100, 0, READ, &mut out).is_ok());
    assert_eq!(out, [dummy]);
}

#[test]
fn many_regions_are_found_by_halving() {
    // Every other page, so that each region has a hole after it.
    let regions = (0..32).map(|i| region(2 * i * PAGE, PAGE, true)).collect();
    let mut handle = Memory::new(regions).expect("a map").handle();
    let handle = handle.enter();
    for i in 0..32 {
        handle.write_obj(2 * i * PAGE + 8, &i, WRITE).expect("RAM");
        let hole = (2 * i + 1) * PAGE;
        assert_eq!(
            handle.read_obj::<u8>(hole, READ),
            Err(DmaError { addr: hole, len: 1, done: 0, fault: DmaFault::Unmapped })
        );
    }
    for i in 0..32 {
        assert_eq!(handle.read_obj::<u64>(2 * i * PAGE + 8, READ), Ok(i));
    }
}

#[test]
#[cfg(not(miri))]
fn a_host_slice_is_an_iovec() {
    use std::io::IoSlice;
    // IoSlice is guaranteed to have the layout of iovec on Unix.
    assert_eq!(size_of::<HostSlice>(), size_of::<IoSlice<'_>>());
    assert_eq!(align_of::<HostSlice>(), align_of::<IoSlice<'_>>());
    assert_eq!(std::mem::offset_of!(HostSlice, ptr), 0);
    assert_eq!(std::mem::offset_of!(HostSlice, len), size_of::<*mut u8>());
}

#[test]
fn handles_and_guards_go_from_thread_to_thread() {
    fn send<T: Send>(_: &T) {}
    let mut handle = handle();
    send(&handle);
    let handle = handle.enter();
    let mapping = handle.map(0x1000, 8, WRITE).expect("RAM");
    let mapping_guard = handle.map_segments(&[], 0, 0, READ, &mut Vec::new()).expect("nothing");
    std::thread::spawn(move || {
        // SAFETY: inside the mapping, which nothing else uses.
        unsafe { mapping.host().as_ptr().write_volatile(1) };
        drop((mapping, mapping_guard));
    })
    .join()
    .expect("the thread");
    assert_eq!(handle.read_obj::<u8>(0x1000, READ), Ok(1));
}

#[test]
fn what_is_mapped_can_be_copied_from_and_to() {
    let mut handle = handle();
    let segments = [Segment { addr: 0x1ffe, len: 3 }, Segment { addr: 0x3005, len: 4000 }];
    let mut pieces: Vec<HostSlice> = Vec::new();
    let mapping_guard =
        handle.enter().map_segments(&segments, 0, 4003, READ | WRITE, &mut pieces).expect("mapped");
    let data: Vec<u8> = (0..4003).map(|at| (at * 7 + at / 256) as u8).collect();
    let (mut from, mut back) = (data.as_slice(), vec![0; 4003]);
    let mut to = back.as_mut_slice();
    for piece in &pieces {
        let (now, rest) = from.split_at(piece.len);
        // SAFETY: the mapping guard lives, and the length is the piece's.
        unsafe { piece.write(now) };
        from = rest;
    }
    for piece in &pieces {
        let (now, rest) = to.split_at_mut(piece.len);
        // SAFETY: as above.
        unsafe { piece.read(now) };
        to = rest;
    }
    assert!(from.is_empty() && to.is_empty() && back == data);
    drop(mapping_guard);
    let mut seen = vec![0; 4003];
    handle.enter().read_segments(&segments, 0, &mut seen, READ).expect("readable");
    assert_eq!(seen, data);
}
