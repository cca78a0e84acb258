//! Domains: translated accesses, waiting for holders, and the dirty log.
use paravane_dma::{
    Access, Backing, Busy, BusyWith, DirtyLog, DirtyPages, DmaError, DmaFault, Domain, DomainError, Memory,
    Miss, Region, RegionConfig,
};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const PAGE: u64 = 4096;
const BOTH: Access = Access::READ.union(Access::WRITE);
const NOW: Duration = Duration::from_millis(if cfg!(miri) { 1 } else { 20 });
const LONG: Duration = Duration::from_secs(60);

/// RAM in the first 16 pages, read-only memory in the next.
fn memory() -> Memory {
    let region = |gpa, size, writable| {
        Region::new(RegionConfig { gpa, size, backing: Backing::Pages, writable }).expect("guest RAM")
    };
    Memory::new(vec![region(0, 16 * PAGE, true), region(16 * PAGE, PAGE, false)]).expect("a map")
}

fn logged(memory: &Memory) -> Vec<u64> {
    let mut pages = DirtyPages::new(0, memory.end(), PAGE).expect("pages");
    memory.log().expect("a log").harvest(&mut pages);
    pages.iter().collect()
}

fn start_log(memory: &Memory) {
    memory.start_log(DirtyLog::new(memory.end(), PAGE).expect("a log"), LONG).expect("it starts");
}

#[test]
fn addresses_are_translated_and_limited() {
    let memory = memory();
    let domain = Domain::new(&memory);
    domain.map(0x7000_0000, 3 * PAGE, 2 * PAGE, BOTH).expect("free");
    domain.map(0x7000_2000, 9 * PAGE, PAGE, Access::READ).expect("free");
    domain.map(0x7000_3000, 10 * PAGE, PAGE, Access::WRITE).expect("free");
    assert_eq!(domain.mapped(), 4 * PAGE);

    let mut handle = domain.handle();
    let guard = handle.enter();
    guard.write(0x7000_0ffe, b"abcd", BOTH).expect("both pages are mapped");
    assert_eq!(guard.read_obj::<[u8; 4]>(0x7000_0ffe, BOTH), Ok(*b"abcd"));
    assert_eq!(memory.handle().enter().read_obj::<[u8; 4]>(4 * PAGE - 2, BOTH), Ok(*b"abcd"));
    assert_eq!(
        guard.read_obj::<u8>(3 * PAGE, BOTH),
        Err(DmaError { addr: 3 * PAGE, len: 1, done: 0, fault: DmaFault::Untranslated })
    );
    assert_eq!(
        guard.write(0x7000_1fff, &[1, 2], Access::empty()),
        Err(DmaError { addr: 0x7000_2000, len: 2, done: 1, fault: DmaFault::Denied(Access::WRITE) })
    );
    assert_eq!(
        guard.read_obj::<u16>(0x7000_2fff, Access::empty()),
        Err(DmaError { addr: 0x7000_3000, len: 2, done: 1, fault: DmaFault::Denied(Access::READ) })
    );
    assert_eq!(
        guard.write(0x7000_3ffe, &[0; 4], Access::empty()),
        Err(DmaError { addr: 0x7000_4000, len: 4, done: 2, fault: DmaFault::Untranslated })
    );
}

#[test]
fn what_a_domain_allows_the_region_may_still_forbid() {
    let memory = memory();
    let domain = Domain::new(&memory);
    domain.map(0, 15 * PAGE, 4 * PAGE, BOTH).expect("free");
    let mut handle = domain.handle();
    let guard = handle.enter();
    assert_eq!(guard.read_obj::<u8>(PAGE, BOTH - Access::WRITE), Ok(0));
    assert_eq!(
        guard.fill(PAGE - 1, 7, 2, Access::empty()),
        Err(DmaError { addr: PAGE, len: 2, done: 1, fault: DmaFault::Denied(Access::WRITE) })
    );
    assert_eq!(
        guard.read_obj::<u8>(2 * PAGE, Access::READ),
        Err(DmaError { addr: 2 * PAGE, len: 1, done: 0, fault: DmaFault::Unmapped })
    );
}

#[test]
fn what_is_contiguous_for_device_and_guest_is_one_mapping() {
    let memory = memory();
    let domain = Domain::new(&memory);
    for page in 0..8 {
        domain.map((100 + page) * PAGE, (2 + page) * PAGE, PAGE, BOTH).expect("free");
    }
    domain.map(108 * PAGE, 2 * PAGE, PAGE, BOTH).expect("free");
    let mut handle = domain.handle();
    let guard = handle.enter();
    let mapping = guard.map(100 * PAGE + 8, 5 * PAGE as usize, BOTH).expect("one piece");
    assert_eq!(mapping.range().gpa, 2 * PAGE + 8);
    assert_eq!(
        guard.map(107 * PAGE, 2 * PAGE as usize, BOTH).err(),
        Some(DmaError { addr: 107 * PAGE, len: 2 * PAGE as usize, done: 0, fault: DmaFault::NotContiguous })
    );
    let mut out = Vec::new();
    let segments = [paravane_dma::Segment { addr: 101 * PAGE, len: 8 * PAGE as u32 }];
    guard.map_segments(&segments, 0, 8 * PAGE, BOTH, &mut out).expect("mapped");
    assert_eq!(out.iter().map(|slice| slice.len as u64 / PAGE).collect::<Vec<_>>(), [7, 1]);
}

#[test]
fn bad_requests_change_nothing() {
    let domain = Domain::new(&memory());
    domain.map(4 * PAGE, 0, 4 * PAGE, BOTH).expect("free");
    for (addr, gpa, size) in [(1, 0, PAGE), (0, 1, PAGE), (0, 0, 1), (0, 0, 0)] {
        assert!(matches!(domain.map(addr, gpa, size, BOTH), Err(DomainError::Unaligned { .. })));
    }
    let last = u64::MAX - PAGE + 1;
    for (addr, gpa) in [(last, 0), (0, last)] {
        assert!(matches!(domain.map(addr, gpa, 2 * PAGE, BOTH), Err(DomainError::Wraps { .. })));
    }
    let overlap = domain.map(0, 0, 5 * PAGE, BOTH);
    assert_eq!(overlap, Err(DomainError::Overlap { addr: 4 * PAGE }));
    assert_eq!(domain.mapped(), 4 * PAGE);
    assert!(matches!(domain.unmap(1, PAGE, NOW), Err(DomainError::Unaligned { .. })));
    assert_eq!(domain.unmap(8 * PAGE, PAGE, NOW), Ok(0));
}

#[test]
fn the_tables_have_a_limit() {
    // Miri takes seconds for each table.
    let limit = if cfg!(miri) { 30 } else { 100 };
    let domain = Domain::with_limit(&memory(), limit << 12);
    let mut mapped = 0;
    let error = loop {
        match domain.map(mapped << 40, 0, PAGE, BOTH) {
            Ok(()) => mapped += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(error, DomainError::Full { .. }));
    assert!((limit / 10..limit).contains(&mapped), "{mapped}");
    assert!(domain.table_bytes() <= limit << 12);
    assert_eq!(domain.clear(NOW), Ok(mapped * PAGE));
    assert!(domain.table_bytes() <= 1 << 12, "all but the root is free again");
    domain.map(1 << 40, 0, PAGE, BOTH).expect("there is room again");
}

#[test]
fn a_handle_outside_a_batch_delays_no_unmapping_and_finds_the_change() {
    let domain = Domain::new(&memory());
    domain.map(0, 0, 4 * PAGE, BOTH).expect("free");
    let mut handle = domain.handle();
    assert_eq!(handle.enter().read_obj::<u8>(PAGE, BOTH), Ok(0));
    assert_eq!(domain.unmap(PAGE, PAGE, LONG), Ok(PAGE));
    let guard = handle.enter();
    assert!(matches!(guard.read_obj::<u8>(PAGE, BOTH), Err(DmaError { fault: DmaFault::Untranslated, .. })));
    assert_eq!(guard.read_obj::<u8>(2 * PAGE, BOTH), Ok(0));
    domain.map(PAGE, 5 * PAGE, PAGE, BOTH).expect("free again");
    assert_eq!(guard.read_obj::<u8>(PAGE, BOTH), Ok(0), "a new translation is found at once");
}

#[test]
fn a_guard_delays_an_unmapping_and_is_named() {
    let domain = Domain::new(&memory());
    domain.map(0, 0, PAGE, BOTH).expect("free");
    let mut handle = domain.handle().named("disk 0, queue 1");
    let guard = handle.enter();
    assert_eq!(guard.read_obj::<u8>(0, BOTH), Ok(0));
    let expected = Busy { holder: "disk 0, queue 1".into(), with: BusyWith::Batch, timeout: NOW };
    assert_eq!(domain.unmap(0, PAGE, NOW), Err(DomainError::Busy(expected)));
    assert_eq!(guard.read_obj::<u8>(0, BOTH), Ok(0), "until the batch ends");
    drop(guard);
    assert_eq!(domain.unmap(0, PAGE, NOW), Ok(0), "nothing was left, and nothing uses it");
    assert!(handle.enter().read_obj::<u8>(0, BOTH).is_err());
}

#[test]
fn a_mapping_delays_the_unmapping_of_what_it_covers_and_of_nothing_else() {
    let domain = Domain::new(&memory());
    domain.map(0, 0, 8 * PAGE, BOTH).expect("free");
    let mut handle = domain.handle().named("net");
    let mapping = handle.enter().map(2 * PAGE + 100, 200, Access::READ).expect("mapped");
    assert_eq!(domain.unmap(3 * PAGE, PAGE, LONG), Ok(PAGE));
    assert_eq!(domain.unmap(PAGE, PAGE, LONG), Ok(PAGE));
    let busy = domain.unmap(0, 8 * PAGE, NOW);
    let with = BusyWith::Mapping { addr: 2 * PAGE + 100, len: 200 };
    assert_eq!(busy, Err(DomainError::Busy(Busy { holder: "net".into(), with, timeout: NOW })));
    let dropper = std::thread::spawn(move || {
        std::thread::sleep(NOW);
        drop(mapping);
    });
    assert_eq!(domain.unmap(0, 8 * PAGE, LONG), Ok(0));
    dropper.join().expect("the thread");
}

#[test]
fn another_domain_waits_for_no_guard_of_this_one() {
    let memory = memory();
    let (first, second) = (Domain::new(&memory), Domain::new(&memory));
    first.map(0, 0, PAGE, BOTH).expect("free");
    second.map(0, PAGE, PAGE, BOTH).expect("free");
    let mut handle = first.handle();
    let _guard = handle.enter();
    assert_eq!(second.unmap(0, PAGE, NOW), Ok(PAGE));
}

#[test]
fn misses_are_told() {
    let domain = Domain::new(&memory());
    domain.map(0, 0, PAGE, Access::READ).expect("free");
    let told = Arc::new(Mutex::new(Vec::new()));
    let list = Arc::clone(&told);
    domain.on_miss(move |miss| list.lock().expect("a list").push(miss));
    let mut handle = domain.handle();
    let guard = handle.enter();
    guard.read_obj::<u8>(0, BOTH - Access::WRITE).expect("mapped");
    guard.write(8, &[1], Access::empty()).expect_err("read only");
    guard.read_obj::<u16>(PAGE - 1, Access::READ).expect_err("half of it");
    let denied = Miss { addr: 8, access: Access::WRITE, denied: true };
    let missed = Miss { addr: PAGE, access: Access::READ, denied: false };
    assert_eq!(*told.lock().expect("a list"), [denied, missed]);
}

#[test]
fn it_can_be_asked_what_is_translated_before_anything_is_accessed() {
    let domain = Domain::new(&memory());
    domain.map(0, 0, PAGE, Access::READ).expect("free");
    let told = Arc::new(Mutex::new(Vec::new()));
    let list = Arc::clone(&told);
    // A translation that is added while it is reported missing, for the first page only.
    let mapper = Arc::new(Mutex::new(Some(domain.clone())));
    let other = Arc::clone(&mapper);
    domain.on_miss(move |miss| {
        list.lock().expect("a list").push(miss.addr);
        if let (PAGE, Some(domain)) = (miss.addr, &*other.lock().expect("a domain")) {
            domain.map(PAGE, 5 * PAGE, PAGE, BOTH).expect("free");
        }
    });
    let mut handle = domain.handle();
    let guard = handle.enter();
    let translates = |addr, len| guard.translates(addr, len, Access::WRITE);
    // A forbidden page is translated: the access itself reports it.
    assert!(translates(8, 100) && translates(0, PAGE as usize) && translates(9 * PAGE, 0));
    assert!(translates(u64::MAX, 2), "the access itself finds that it wraps");
    assert!(told.lock().expect("a list").is_empty());
    assert!(translates(PAGE - 1, 2), "it came while it was told");
    assert!(!translates(PAGE, 2 * PAGE as usize));
    assert_eq!(*told.lock().expect("a list"), [PAGE, 2 * PAGE]);
    // A domain that its own hook holds would never be dropped.
    mapper.lock().expect("a domain").take();
}

#[test]
fn writes_through_a_domain_are_logged_where_they_land() {
    let memory = memory();
    let domain = Domain::new(&memory);
    domain.map(0x1234_5000, 6 * PAGE, 2 * PAGE, BOTH).expect("free");
    start_log(&memory);
    let mut handle = domain.handle();
    {
        let guard = handle.enter();
        guard.write(0x1234_5800, &[1; 16], BOTH).expect("mapped");
        guard.read_obj::<u64>(0x1234_6000, BOTH - Access::WRITE).expect("mapped");
    }
    assert_eq!(logged(&memory), [6 * PAGE]);
    assert_eq!(logged(&memory), [0_u64; 0], "harvested");
    let done = handle.enter().write(0x1234_6ff0, &[1; 64], BOTH).expect_err("it ends there").done;
    assert_eq!(done, 16);
    assert_eq!(logged(&memory), [7 * PAGE], "what was written before the fault counts");
    handle.enter().fill(0x1234_7000, 0, 1, BOTH).expect_err("not mapped");
    assert_eq!(logged(&memory), [0_u64; 0]);
}

#[test]
fn a_span_is_logged_where_it_is_written_and_when() {
    let memory = memory();
    let domain = Domain::new(&memory);
    domain.map(0x1234_5000, 6 * PAGE, 2 * PAGE, BOTH).expect("free");
    start_log(&memory);
    for (mut handle, addr) in [(domain.handle(), 0x1234_5000), (memory.handle(), 6 * PAGE)] {
        let guard = handle.enter();
        let span = guard.write_span(addr + 8, 4096 - 8).expect("one page");
        assert_eq!(guard.read_span(addr, 8).expect("mapped").read_obj::<u8>(0), 0);
        // A look at another page of the domain may take the place of this one in the cache. More notes
        // than a handle keeps are marked, and may be harvested, before the batch ends.
        (0..1000).for_each(|_| guard.write_obj(addr + PAGE, &0_u8, BOTH).expect("mapped"));
        span.write(0, &[1; 8]);
        drop(guard);
        assert_eq!(logged(&memory), [6 * PAGE, 7 * PAGE]);
        let guard = handle.enter();
        let span = guard.write_span(addr + 8, 4096 - 8).expect("one page");
        (0..1000).for_each(|_| guard.write_obj(addr + PAGE, &0_u8, BOTH).expect("mapped"));
        logged(&memory);
        span.write(0, &[1; 8]);
        drop(guard);
        assert!(logged(&memory).contains(&(6 * PAGE)), "it was found before the harvest, and written after");
    }
    let mut handle = memory.handle();
    let guard = handle.enter();
    guard.write_span(6 * PAGE, 8192).expect("one region").write(4092, &[1; 8]);
    drop(guard);
    assert_eq!(logged(&memory), [6 * PAGE, 7 * PAGE]);
}

/// Writes more pages than an access guard notes.
///
/// So some are marked before the batch ends, and may be harvested.
///
/// Later writes to them must be in the next harvest.
#[test]
fn a_page_that_was_marked_within_the_batch_is_marked_again() {
    // More than a handle notes.
    const MANY: u64 = 300;
    let region = RegionConfig { gpa: 0, size: MANY * PAGE, backing: Backing::Pages, writable: true };
    let memory = Memory::new(vec![Region::new(region).expect("guest RAM")]).expect("a map");
    start_log(&memory);
    let domain = Domain::new(&memory);
    // Adjacent for the device, but not for the guest.
    let gpa = |page: u64| page * 7 % MANY * PAGE;
    (0..MANY).for_each(|page| domain.map(page * PAGE, gpa(page), PAGE, BOTH).expect("free"));
    for mut handle in [domain.handle(), memory.handle()] {
        let guard = handle.enter();
        let write = |page: u64| guard.write_obj(page * PAGE + 8, &page, BOTH).expect("RAM");
        (0..MANY).for_each(write);
        let early = logged(&memory);
        assert!(!early.is_empty() && early.len() < MANY as usize, "{} pages", early.len());
        (0..MANY).for_each(write);
        // A look at another page replaces one that was written.
        (0..MANY).for_each(|page| assert_eq!(guard.read_obj(page * PAGE + 8, BOTH), Ok(page)));
        let middle = logged(&memory);
        write(0);
        drop(guard);
        let late = logged(&memory);
        assert!(late.contains(&gpa(0)), "the last write was to it");
        let mut second: Vec<u64> = middle.into_iter().chain(late).collect();
        second.sort_unstable();
        second.dedup();
        assert_eq!(second.len(), MANY as usize, "each was written after the first harvest");
    }
}

#[test]
fn a_hold_is_logged_when_it_ends_in_the_log_that_is_on_then() {
    let memory = memory();
    let mut handle = memory.handle();
    let mut out = Vec::new();
    let segments =
        [paravane_dma::Segment { addr: PAGE, len: 8 }, paravane_dma::Segment { addr: 5 * PAGE - 4, len: 8 }];
    let written = handle.enter().map_segments(&segments, 0, 16, Access::WRITE, &mut out).expect("RAM");
    let read = handle.enter().map(9 * PAGE, 8, Access::READ).expect("RAM");
    start_log(&memory);
    assert_eq!(logged(&memory), [0_u64; 0]);
    drop((written, read));
    assert_eq!(logged(&memory), [PAGE, 4 * PAGE, 5 * PAGE]);

    let mapping = handle.enter().map(9 * PAGE, 8, BOTH).expect("RAM");
    let guard = handle.enter();
    guard.mark(mapping.range());
    drop(guard);
    assert_eq!(logged(&memory), [9 * PAGE], "as the owner said");
    drop(mapping);
    assert_eq!(logged(&memory), [9 * PAGE], "and at its end");
}

#[test]
fn a_log_goes_on_and_off_while_handles_live() {
    let memory = memory();
    let mut handle = memory.handle();
    handle.enter().write(0, &[1], BOTH).expect("RAM");
    start_log(&memory);
    handle.enter().write(PAGE, &[1], BOTH).expect("RAM");
    assert_eq!(logged(&memory), [PAGE]);
    let log = memory.stop_log(LONG).expect("nobody is inside").expect("it was on");
    handle.enter().write(2 * PAGE, &[1], BOTH).expect("RAM");
    let mut pages = DirtyPages::new(0, memory.end(), PAGE).expect("pages");
    log.harvest(&mut pages);
    assert_eq!(pages.count(), 0);

    let guard = handle.enter();
    let busy = memory.start_log(log, NOW);
    assert!(matches!(busy, Err(paravane_dma::LogError::Busy(_))), "{busy:?}");
    drop(guard);
    memory.synchronize(NOW).expect("the guard is shut");
    let short = memory.start_log(DirtyLog::new(PAGE, PAGE).expect("a log"), NOW);
    // The first word has room for 64 pages.
    assert!(short.is_ok());
}

#[test]
fn a_log_must_reach_as_far_as_the_memory() {
    let region = |gpa| {
        let config = RegionConfig { gpa, size: PAGE, backing: Backing::Pages, writable: true };
        Region::new(config).expect("guest RAM")
    };
    let memory = Memory::new(vec![region(100 * PAGE)]).expect("a map");
    let log = DirtyLog::new(64 * PAGE, PAGE).expect("a log");
    let short = memory.start_log(log, NOW);
    assert!(matches!(short, Err(paravane_dma::LogError::TooShort { .. })), "{short:?}");
    assert!(memory.log().is_none());
    start_log(&memory);
    let beyond = memory.replace(vec![region(1000 * PAGE)]);
    assert!(matches!(beyond, Err(paravane_dma::MemoryError::BeyondLog { .. })), "{beyond:?}");
    assert_eq!(memory.end(), 101 * PAGE);
}
