//! Publishing and refreshing under the model checker.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p paravane-dma --test loom --release`
#![cfg(loom)]
use loom::sync::atomic::{AtomicBool, Ordering};
use loom::thread;
use paravane_dma::{Access, AccessGuard, Backing, Memory, Region, RegionConfig};
use std::sync::{Arc, LazyLock};

const PAGE: u64 = 4096;

/// Three maps, distinguished by the address of their one page.
///
/// Made once: the checker runs the tests many times.
static PAGES: LazyLock<[Arc<Region>; 3]> = LazyLock::new(|| {
    [0, 1, 2].map(|i| {
        let config = RegionConfig { gpa: i * PAGE, size: PAGE, backing: Backing::Pages, writable: true };
        Region::new(config).expect("RAM")
    })
});

fn map(number: usize) -> Vec<Arc<Region>> {
    vec![Arc::clone(&PAGES[number])]
}

/// Number of the map that the access guard sees.
fn seen(handle: &AccessGuard<'_>) -> usize {
    let found: Vec<usize> =
        (0..3).filter(|&i| handle.map(i as u64 * PAGE, 1, Access::READ | Access::RELAXED).is_ok()).collect();
    assert_eq!(found.len(), 1, "a handle sees exactly one map");
    found[0]
}

#[test]
fn who_is_told_of_a_new_map_sees_it() {
    loom::model(|| {
        let memory = Memory::new(map(0)).expect("a map");
        let told = Arc::new(AtomicBool::new(false));
        let mut handle = memory.handle();
        let replacer = {
            let (memory, told) = (memory.clone(), Arc::clone(&told));
            thread::spawn(move || {
                memory.replace(map(1)).expect("a map");
                // Release: pairs with the Acquire load below.
                told.store(true, Ordering::Release);
            })
        };
        // Acquire: pairs with the Release store above.
        let was_told = told.load(Ordering::Acquire);
        let guard = handle.enter();
        let before = seen(&guard);
        if was_told {
            assert_eq!(before, 1);
        }
        replacer.join().unwrap();
        assert_eq!(seen(&guard), before, "the map of this batch");
        drop(guard);
        assert_eq!(seen(&handle.enter()), 1);
    });
}

#[test]
fn number_and_map_belong_together() {
    loom::model(|| {
        let memory = Memory::new(map(0)).expect("a map");
        let mut handle = memory.handle();
        let replacers: Vec<_> = (1..3)
            .map(|number| {
                let memory = memory.clone();
                thread::spawn(move || memory.replace(map(number)).expect("a map"))
            })
            .collect();
        seen(&handle.enter());
        for replacer in replacers {
            replacer.join().unwrap();
        }
        // Had an old map been pinned with a new number, this would not bring the newest.
        assert_eq!(memory.regions()[0].gpa(), seen(&handle.enter()) as u64 * PAGE);
    });
}

#[test]
fn a_region_goes_with_the_last_of_its_holders() {
    loom::model(|| {
        let region =
            Region::new(RegionConfig { gpa: 0, size: PAGE, backing: Backing::Pages, writable: true })
                .expect("RAM");
        let gone = Arc::downgrade(&region);
        let memory = Memory::new(vec![region]).expect("a map");
        let mut handle = memory.handle();
        let mapping = handle.enter().map(0, 1, Access::READ).expect("RAM");
        let replacer = {
            let memory = memory.clone();
            thread::spawn(move || memory.replace(map(1)).expect("a map"))
        };
        drop(handle.enter());
        assert!(gone.upgrade().is_some(), "the mapping holds it");
        drop(mapping);
        replacer.join().unwrap();
        drop(handle.enter());
        assert!(gone.upgrade().is_none());
    });
}
