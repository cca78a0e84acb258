//! The map is replaced while other threads use it.
use paravane_dma::{Access, Backing, DmaError, DmaFault, Memory, Region, RegionConfig};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};

const PAGE: u64 = 4096;
const REPLACEMENTS: u64 = if cfg!(miri) { 10 } else { 2000 };

/// Second position of a page's mark, besides its start.
const LINES: [u64; 4] = [8, 1024, 2048, PAGE - 8];

/// Page filled with the number of its map.
fn marked(gpa: u64, mark: u64) -> Arc<Region> {
    let region =
        Region::new(RegionConfig { gpa, size: PAGE, backing: Backing::Pages, writable: true }).expect("RAM");
    let mut handle = Memory::new(vec![Arc::clone(&region)]).expect("a map").handle();
    let handle = handle.enter();
    for at in std::iter::once(0).chain(LINES) {
        handle.write_obj(gpa + at, &mark, Access::WRITE).expect("RAM");
    }
    region
}

#[test]
fn holders_keep_their_map_until_they_open_anew() {
    let first = marked(0, 0);
    let gone = Arc::downgrade(&first);
    let memory = Memory::new(vec![first]).expect("a map");
    let mut slow = memory.handle();
    let mapping = slow.enter().map(0, 8, Access::READ).expect("RAM");
    drop(slow);

    let stop = Arc::new(AtomicBool::new(false));
    let start = Arc::new(Barrier::new(3));
    let users: Vec<_> = (0..2)
        .map(|_| {
            let (mut handle, stop, start) = (memory.handle(), Arc::clone(&stop), Arc::clone(&start));
            std::thread::spawn(move || {
                start.wait();
                let mut newest = 0;
                let mut batches = 0_u64;
                loop {
                    // Acquire: pairs with the Release store below, made after the last replacement.
                    let last = stop.load(Ordering::Acquire);
                    let handle = handle.enter();
                    let mark: u64 = handle.read_obj(0, Access::READ).expect("some map");
                    assert!(mark >= newest, "map {mark} after map {newest}");
                    newest = mark;
                    // The rest of the batch sees the same map, whatever is published meanwhile.
                    for at in LINES {
                        assert_eq!(handle.read_obj::<u64>(at, Access::READ), Ok(mark));
                    }
                    batches += 1;
                    if last {
                        return (newest, batches);
                    }
                }
            })
        })
        .collect();

    start.wait();
    for mark in 1..=REPLACEMENTS {
        memory.replace(vec![marked(0, mark)]).expect("a map");
    }
    // Release: pairs with the Acquire load in the users.
    stop.store(true, Ordering::Release);
    for user in users {
        let (newest, batches) = user.join().expect("a user");
        assert_eq!(newest, REPLACEMENTS, "after {batches} batches");
    }

    // One mapping of the first map is left: it is readable, and it alone keeps the region.
    assert!(gone.upgrade().is_some());
    // SAFETY: inside the mapping; nothing writes to the first region.
    assert_eq!(unsafe { mapping.host().cast::<u64>().as_ptr().read_volatile() }, 0);
    drop(mapping);
    assert!(gone.upgrade().is_none(), "the first region is still mapped");
}

#[test]
fn a_region_that_stays_is_not_mapped_anew() {
    let stays = marked(0, 7);
    let goes = marked(PAGE, 8);
    let memory = Memory::new(vec![Arc::clone(&stays), Arc::clone(&goes)]).expect("a map");
    let mut handle = memory.handle();
    let guard = handle.enter();
    memory.replace(vec![Arc::clone(&stays)]).expect("a map");
    assert_eq!(guard.read_obj::<u64>(PAGE, Access::READ), Ok(8), "pinned until the next batch");
    drop(guard);
    let handle = handle.enter();
    assert_eq!(
        handle.read_obj::<u64>(PAGE, Access::READ),
        Err(DmaError { addr: PAGE, len: 8, done: 0, fault: DmaFault::Unmapped })
    );
    let mapping = handle.map(0, 8, Access::READ).expect("RAM");
    assert_eq!(mapping.host(), stays.host());
    assert_eq!(Arc::strong_count(&goes), 1, "nothing holds what has gone");
}

#[test]
fn a_hold_outlives_its_handle_and_its_memory() {
    let region = marked(0, 5);
    let gone = Arc::downgrade(&region);
    let memory = Memory::new(vec![region]).expect("a map");
    let mut handle = memory.handle();
    let mut out = Vec::new();
    let segment = paravane_dma::Segment { addr: 1024, len: 8 };
    let guard = handle.enter().map_segments(&[segment], 0, 8, Access::READ, &mut out).expect("RAM");
    drop(handle);
    drop(memory);
    // SAFETY: the mapping guard keeps the slice mapped; nothing writes to it.
    assert_eq!(unsafe { out[0].ptr.cast::<u64>().read_volatile() }, 5);
    drop(guard);
    assert!(gone.upgrade().is_none());
}

#[test]
fn clones_are_the_same_memory() {
    let memory = Memory::new(Vec::new()).expect("a map");
    let mut handle = memory.handle();
    memory.clone().replace(vec![marked(0, 3)]).expect("a map");
    assert_eq!(handle.enter().read_obj::<u64>(0, Access::READ), Ok(3));
}
