//! Changes under the model checker: unmapping, starting the log, harvesting.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p paravane-dma --test loom_change --release`
//!
//! Memory that must not be touched any more is a cell that the checker watches: an access and the
//! unmapper's use of it that are not ordered are a data race, and fail. Each fence that the tests
//! name was taken out once; they failed then.
#![cfg(loom)]
use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU64, Ordering::Relaxed};
use loom::thread;
use paravane_dma::{Access, Backing, DirtyLog, DirtyPages, Domain, GuestRange, Memory, Region, RegionConfig};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

const PAGE: u64 = 4096;
const BOTH: Access = Access::READ.union(Access::WRITE);
const RELAXED: Access = Access::RELAXED;
/// A model has no time-out.
const EVER: Duration = Duration::MAX;

/// Made once, because the checker runs the tests many times.
///
/// Only the addresses are used.
static RAM: LazyLock<Arc<Region>> = LazyLock::new(|| {
    let config = RegionConfig { gpa: 0, size: 4 * PAGE, backing: Backing::Pages, writable: true };
    Region::new(config).expect("RAM")
});

fn memory() -> Memory {
    Memory::new(vec![Arc::clone(&RAM)]).expect("a map")
}

fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    let wish = std::env::var("PARAVANE_LOOM_PREEMPTIONS");
    builder.preemption_bound = Some(wish.map_or(3, |n| n.parse().expect("a number of switches")));
    builder.check(model);
}

/// As [`check`], and the model must see both answers.
///
/// A model that never finds the other thread at work proves nothing.
fn both_ways(model: impl Fn(&dyn Fn(bool)) + Sync + Send + 'static) {
    let seen = Arc::new(std::sync::Mutex::new(std::collections::BTreeSet::new()));
    let note = Arc::clone(&seen);
    check(move || {
        model(&|answer| {
            note.lock().unwrap().insert(answer);
        })
    });
    assert_eq!(seen.lock().unwrap().len(), 2, "only one of the two answers was seen");
}

/// Memory behind a translation.
struct Behind(UnsafeCell<u64>);

// SAFETY: the checker watches which thread uses it when; that is what the tests check.
unsafe impl Sync for Behind {}
// SAFETY: a number.
unsafe impl Send for Behind {}

impl Behind {
    fn new() -> Arc<Self> {
        Arc::new(Self(UnsafeCell::new(0)))
    }

    /// Access of a device. Others may access it at the same time.
    fn touched(&self) {
        self.0.with(|_| ());
    }

    /// Use by its next owner.
    fn given_away(&self) {
        self.0.with_mut(|_| ());
    }
}

/// `unmap` returns when no access lands in the range any more.
///
/// Earlier accesses have ended.
///
/// Fails without: either of the SeqCst fences in `enter` and `synchronize`, the Release store in
/// `leave`, the Acquire loads in `synchronize`.
#[test]
fn an_unmapping_waits_for_the_accesses() {
    both_ways(|note| {
        let domain = Domain::new(&memory());
        domain.map(0, 0, PAGE, BOTH).expect("free");
        let behind = Behind::new();
        let mut handle = domain.handle();
        let device = {
            let behind = Arc::clone(&behind);
            thread::spawn(move || {
                (0..2).fold(false, |missed, _| {
                    let guard = handle.enter();
                    let found = guard.read_obj::<u64>(0, RELAXED).is_ok();
                    if found {
                        behind.touched();
                    }
                    missed || !found
                })
            })
        };
        domain.unmap(0, PAGE, EVER).expect("everyone leaves");
        behind.given_away();
        note(device.join().unwrap());
    });
}

/// The same for mappings: a mapping guard may outlive the batch.
///
/// Fails without: the Release store in `release`.
#[test]
fn an_unmapping_waits_for_the_mappings() {
    both_ways(|note| {
        let domain = Domain::new(&memory());
        domain.map(0, 0, PAGE, BOTH).expect("free");
        let behind = Behind::new();
        let mut handle = domain.handle();
        let device = {
            let behind = Arc::clone(&behind);
            thread::spawn(move || {
                // Relaxed, so that the mapping's own order does not help.
                let mapping = handle.enter().map(8, 8, Access::READ | RELAXED);
                let found = mapping.is_ok();
                if let Ok(mapping) = mapping {
                    behind.touched();
                    drop(mapping);
                }
                found
            })
        };
        domain.unmap(0, PAGE, EVER).expect("everyone lets go");
        behind.given_away();
        note(device.join().unwrap());
    });
}

/// The same if the handle is gone and left its mapping behind.
///
/// Fails if its reader slot is not kept on the list, and without the Acquire in `is_any_pinned`.
#[test]
fn an_unmapping_waits_for_mappings_that_outlive_their_handle() {
    check(|| {
        let domain = Domain::new(&memory());
        domain.map(0, 0, PAGE, BOTH).expect("free");
        let behind = Behind::new();
        let mut handle = domain.handle();
        let mapping = handle.enter().map(8, 8, Access::READ | RELAXED).expect("mapped");
        drop(handle);
        let device = {
            let behind = Arc::clone(&behind);
            thread::spawn(move || {
                behind.touched();
                drop(mapping);
            })
        };
        // Another handle is made, which checks whether old slots are needed.
        let other = {
            let domain = domain.clone();
            thread::spawn(move || drop(domain.handle()))
        };
        domain.unmap(0, PAGE, EVER).expect("everyone lets go");
        behind.given_away();
        device.join().unwrap();
        other.join().unwrap();
    });
}

/// As above, if one thread releases an entry and another reuses it.
///
/// The reused entry is for bytes that are not waited for.
///
/// With stale numbers in the entry they would not be either. Fails without: the Release of `len`,
/// `addr` or `change` in `add`, the Acquire exchange in `pop`, the Release exchange in `release`,
/// the Release and the Acquire of the count.
#[test]
fn an_entry_that_passes_through_two_hands_hides_nothing() {
    check(|| {
        let domain = Domain::new(&memory());
        domain.map(0, 0, 2 * PAGE, BOTH).expect("free");
        let behind = Behind::new();
        let mut handle = domain.handle();
        let first = handle.enter().map(8, PAGE as usize, Access::READ | RELAXED).expect("mapped");
        let user = {
            let behind = Arc::clone(&behind);
            thread::spawn(move || {
                behind.touched();
                drop(first);
            })
        };
        let device = thread::spawn(move || drop(handle.enter().map(0, 8, Access::READ | RELAXED)));
        domain.unmap(PAGE, PAGE, EVER).expect("everyone lets go");
        behind.given_away();
        user.join().unwrap();
        device.join().unwrap();
    });
}

/// Reuse of an entry does not hide that its earlier bytes were released.
#[test]
fn an_entry_that_is_used_again_hides_nothing() {
    check(|| {
        let domain = Domain::new(&memory());
        domain.map(0, 0, 2 * PAGE, BOTH).expect("free");
        let behind = Behind::new();
        let mut handle = domain.handle();
        let first = handle.enter().map(8, 8, Access::READ | RELAXED).expect("mapped");
        let device = {
            let behind = Arc::clone(&behind);
            thread::spawn(move || {
                behind.touched();
                drop(first);
                drop(handle.enter().map(PAGE, 8, Access::READ | RELAXED));
            })
        };
        domain.unmap(0, PAGE, EVER).expect("everyone lets go");
        behind.given_away();
        device.join().unwrap();
    });
}

/// A thread that finds a translation sees what was done before it was made.
///
/// Fails without: the Release store of a leaf in `insert`.
#[test]
fn a_translation_brings_what_was_done_before_it() {
    both_ways(|note| {
        let domain = Domain::new(&memory());
        // So that the node exists already, and only the leaf is new.
        domain.map(0, 0, PAGE, BOTH).expect("free");
        let behind = Behind::new();
        let mut handle = domain.handle();
        let device = {
            let behind = Arc::clone(&behind);
            thread::spawn(move || {
                let found = handle.enter().read_obj::<u64>(PAGE, RELAXED).is_ok();
                if found {
                    behind.touched();
                }
                found
            })
        };
        behind.given_away();
        domain.map(PAGE, 0, PAGE, BOTH).expect("free");
        note(device.join().unwrap());
    });
}

/// An emptied node is freed once no walker is in it.
#[test]
fn nodes_are_freed_behind_the_walkers() {
    both_ways(|note| {
        let domain = Domain::new(&memory());
        // Two nodes below the root, one of which is removed.
        domain.map(0, 0, PAGE, BOTH).expect("free");
        domain.map(3 * PAGE, 0, PAGE, BOTH).expect("free");
        let mut handle = domain.handle();
        let device = thread::spawn(move || {
            // Miri and the checker's allocator would find a walk in freed memory.
            handle.enter().read_obj::<u64>(3 * PAGE, RELAXED).is_ok()
        });
        domain.unmap(3 * PAGE, PAGE, EVER).expect("everyone leaves");
        note(device.join().unwrap());
        assert!(domain.handle().enter().read_obj::<u64>(0, RELAXED).is_ok());
    });
}

fn dirty(log: &DirtyLog) -> bool {
    let mut pages = DirtyPages::new(0, PAGE, PAGE).expect("pages");
    log.harvest(&mut pages);
    pages.count() > 0
}

fn data(memory: &Memory) -> u64 {
    memory.handle().enter().read_obj(0, RELAXED).expect("RAM")
}

/// A memory with a log; the first word is written and copied already.
///
/// The bit is set again if `set`.
fn logged(set: bool) -> (Memory, Arc<DirtyLog>) {
    let memory = memory();
    let log = DirtyLog::new(memory.end(), PAGE).expect("a log");
    memory.start_log(Arc::clone(&log), EVER).expect("nobody is inside");
    memory.handle().enter().write_obj(0, &0_u64, RELAXED).expect("RAM");
    if !set {
        dirty(&log);
    }
    (memory, log)
}

/// Harvest, then copy: what the copy lacks is in a later harvest.
///
/// This holds whether the bit was set before (so that the mark is skipped) or not. Fails without:
/// the SeqCst fence in `PendingMarks::mark` or the one in `harvest`.
#[test]
fn no_write_is_missing_from_copy_and_harvests() {
    for set in [false, true] {
        both_ways(move |note| {
            let (memory, log) = logged(set);
            let mut handle = memory.handle();
            // Enters before anything else: entering has its own fence.
            let migration = {
                let (memory, log) = (memory.clone(), Arc::clone(&log));
                let mut reader = memory.handle();
                thread::spawn(move || {
                    let guard = reader.enter();
                    dirty(&log);
                    guard.read_obj::<u64>(0, RELAXED).expect("RAM")
                })
            };
            handle.enter().write_obj(0, &1_u64, RELAXED).expect("RAM");
            let copy = migration.join().unwrap();
            assert!(copy == 1 || dirty(&log), "the write is in neither");
            assert_eq!(data(&memory), 1);
            note(copy == 1);
        });
    }
}

/// Many pages at once are marked without waiting for the end of the batch.
///
/// Fails without: the SeqCst fence in `Handle::wrote_pages`.
#[test]
fn no_long_write_is_missing_from_copy_and_harvests() {
    both_ways(|note| {
        let (memory, log) = logged(true);
        let word = Arc::new(AtomicU64::new(0));
        let mut handle = memory.handle();
        let migration = {
            let word = Arc::clone(&word);
            let log = Arc::clone(&log);
            thread::spawn(move || {
                dirty(&log);
                word.load(Relaxed)
            })
        };
        {
            let guard = handle.enter();
            // As a system call writes to a mapping that stays alive.
            word.store(1, Relaxed);
            guard.mark(GuestRange { gpa: 0, len: 3 * PAGE as usize });
        }
        let copy = migration.join().unwrap();
        assert!(copy == 1 || dirty(&log), "the write is in neither");
        note(copy == 1);
    });
}

/// A write from before the log was on is in a copy from after it was on.
///
/// Fails without: the SeqCst fences in `enter` and `synchronize`.
#[test]
fn what_was_written_before_the_log_is_in_the_copy() {
    both_ways(|note| {
        let memory = memory();
        memory.handle().enter().write_obj(0, &0_u64, RELAXED).expect("RAM");
        let log = DirtyLog::new(memory.end(), PAGE).expect("a log");
        let mut handle = memory.handle();
        let device = thread::spawn(move || handle.enter().write_obj(0, &1_u64, RELAXED).expect("RAM"));
        memory.start_log(Arc::clone(&log), EVER).expect("everyone leaves");
        let copy = data(&memory);
        device.join().unwrap();
        assert!(copy == 1 || dirty(&log), "the write is in neither");
        note(copy == 1);
    });
}

/// The same for a mapping that was made before and ends later.
///
/// Fails without: the SeqCst fence in `MappingGuard::mark`.
#[test]
fn what_was_written_through_a_mapping_is_in_the_copy_or_the_log() {
    both_ways(|note| {
        let memory = memory();
        let log = DirtyLog::new(memory.end(), PAGE).expect("a log");
        let mapping = memory.handle().enter().map(0, 8, Access::WRITE).expect("RAM");
        let word = Arc::new(AtomicU64::new(0));
        let device = {
            let word = Arc::clone(&word);
            thread::spawn(move || {
                // As a system call writes to the memory.
                word.store(1, Relaxed);
                drop(mapping);
            })
        };
        memory.start_log(Arc::clone(&log), EVER).expect("nobody is inside");
        let copy = word.load(Relaxed);
        device.join().unwrap();
        assert!(copy == 1 || dirty(&log), "the write is in neither");
        note(copy == 1);
    });
}
