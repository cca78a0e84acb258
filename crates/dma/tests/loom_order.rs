//! Promises of [`Access`] as litmus tests under the model checker.
//!
//! The guards are real, and the memory is modelled.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p paravane-dma --test loom_order --release`
//!
//! The device is the code under test. The driver stands for a guest: relaxed accesses, and its own
//! fences. Each test collects the outcomes of every interleaving and states which must never occur,
//! and which must: the same program without the order has to show the weak outcome, or the test
//! would prove nothing. Besides, each fence in `access.rs` was taken out once; the tests name those
//! without which they fail.
//!
//! Loom makes loads and stores of one thread in their order, so it cannot show a load that is held
//! back behind a later store. So these tests do not cover that a buffer is not read any more after
//! `unmap`.
#![cfg(loom)]
use loom::sync::atomic::Ordering::{Acquire, Release, SeqCst};
use loom::sync::atomic::fence;
use loom::thread;
use paravane_dma::{Access, AccessGuard, Backing, Memory, Region, RegionConfig, Segment};
use std::collections::BTreeSet;
use std::sync::{Arc, LazyLock, Mutex};

const DATA: u64 = 0;
const FLAG: u64 = 64;
const BY_DIRECTION: Access = Access::empty();
const RELAXED: Access = Access::RELAXED;
const FULL: Access = Access::FULL;

/// Made once, because the checker runs the tests many times.
///
/// Only the addresses are used.
static PAGE: LazyLock<Arc<Region>> = LazyLock::new(|| {
    let config = RegionConfig { gpa: 0, size: 4096, backing: Backing::Pages, writable: true };
    Region::new(config).expect("RAM")
});

/// A guest's view of the same memory: ordered by its own fences only.
struct Driver<'a>(AccessGuard<'a>);

impl Driver<'_> {
    fn load(&self, addr: u64) -> u64 {
        self.0.read_obj(addr, RELAXED).expect("RAM")
    }

    fn store(&self, addr: u64, value: u64) {
        self.0.write_obj(addr, &value, RELAXED).expect("RAM");
    }
}

fn read(device: &AccessGuard<'_>, addr: u64, access: Access) -> u64 {
    device.read_obj(addr, access).expect("RAM")
}

fn write(device: &AccessGuard<'_>, addr: u64, value: u64, access: Access) {
    device.write_obj(addr, &value, access).expect("RAM");
}

type Outcome = (u64, u64);

/// Outcomes of every interleaving with at most 3 involuntary thread switches.
///
/// PARAVANE_LOOM_PREEMPTIONS changes the number.
///
/// Device and driver run on a thread each; the outcome is what both return.
fn outcomes<A, B>(
    device: fn(&AccessGuard<'_>, Access) -> A,
    access: Access,
    driver: fn(&Driver<'_>) -> B,
) -> BTreeSet<(A, B)>
where
    A: Ord + Send + 'static,
    B: Ord + Send + 'static,
{
    let seen = Arc::new(Mutex::new(BTreeSet::new()));
    let mut builder = loom::model::Builder::new();
    let wish = std::env::var("PARAVANE_LOOM_PREEMPTIONS");
    builder.preemption_bound = Some(wish.map_or(3, |n| n.parse().expect("a number of switches")));
    let note = Arc::clone(&seen);
    builder.check(move || {
        let memory = Memory::new(vec![Arc::clone(&PAGE)]).expect("a map");
        let (mut handle, mut guest) = (memory.handle(), memory.handle());
        // Zero, and known to both, before either starts.
        let guard = handle.enter();
        for addr in [DATA, FLAG] {
            write(&guard, addr, 0, RELAXED);
        }
        let other = thread::spawn(move || driver(&Driver(guest.enter())));
        let mine = device(&guard, access);
        let outcome = (mine, other.join().unwrap());
        note.lock().unwrap().insert(outcome);
    });
    std::mem::take(&mut *seen.lock().unwrap())
}

/// The driver looks once at the flag and then, behind its barrier, at the data.
///
/// It never waits.
fn looks(driver: &Driver<'_>) -> Outcome {
    let flag = driver.load(FLAG);
    fence(Acquire);
    (flag, driver.load(DATA))
}

/// The driver writes data and then, behind its store barrier, the flag.
fn publishes(driver: &Driver<'_>) {
    driver.store(DATA, 1);
    fence(Release);
    driver.store(FLAG, 1);
}

/// A thread that sees a written value sees what was written before it.
///
/// Fails without: the Release fence in `begin`.
#[test]
fn a_write_releases() {
    let device = |guard: &AccessGuard<'_>, access| {
        write(guard, DATA, 1, RELAXED);
        write(guard, FLAG, 1, access);
    };
    for access in [BY_DIRECTION, FULL] {
        let seen = outcomes(device, access, looks);
        assert_eq!(seen, BTreeSet::from([((), (0, 0)), ((), (0, 1)), ((), (1, 1))]), "{access:?}");
    }
    assert!(outcomes(device, RELAXED, looks).contains(&((), (1, 0))));
}

/// The same for all bytes of a long write, for `fill` and for a buffer in pieces.
///
/// Fails without: the Release fence in `begin`.
#[test]
fn every_kind_of_write_releases() {
    let long = |guard: &AccessGuard<'_>, access| {
        write(guard, DATA, 1, RELAXED);
        // The flag is the second of three words.
        let words = [0_u64, 1, 0].map(u64::to_le_bytes).concat();
        guard.write(FLAG - 8, &words, access).expect("RAM");
    };
    let fill = |guard: &AccessGuard<'_>, access| {
        write(guard, DATA, 1, RELAXED);
        guard.fill(FLAG, 1, 8, access).expect("RAM");
    };
    let pieces = |guard: &AccessGuard<'_>, access| {
        write(guard, DATA, 1, RELAXED);
        let list = [Segment { addr: 256, len: 8 }, Segment { addr: FLAG, len: 8 }];
        guard.write_segments(&list, 0, &[1; 16], access).expect("RAM");
    };
    for device in [long, fill, pieces] {
        let weak =
            |access| outcomes(device, access, looks).iter().any(|&((), (flag, data))| flag != 0 && data == 0);
        assert!(!weak(BY_DIRECTION));
        assert!(weak(RELAXED));
    }
}

/// What follows a read sees what was written before the value that it read.
///
/// Fails without: the Acquire fence in `end`.
#[test]
fn a_read_acquires() {
    let device = |guard: &AccessGuard<'_>, access| (read(guard, FLAG, access), read(guard, DATA, RELAXED));
    for access in [BY_DIRECTION, FULL] {
        let seen = outcomes(device, access, publishes);
        assert_eq!(seen, BTreeSet::from([((0, 0), ()), ((0, 1), ()), ((1, 1), ())]), "{access:?}");
    }
    assert!(outcomes(device, RELAXED, publishes).contains(&((1, 0), ())));
}

/// The same for all bytes of a long read, and for a buffer in pieces.
///
/// Fails without: the Acquire fence in `end`.
#[test]
fn every_kind_of_read_acquires() {
    let long = |guard: &AccessGuard<'_>, access| {
        let mut words = [0; 24];
        guard.read(FLAG - 8, &mut words, access).expect("RAM");
        (u64::from(words[8]), read(guard, DATA, RELAXED))
    };
    let pieces = |guard: &AccessGuard<'_>, access| {
        let list = [Segment { addr: 256, len: 8 }, Segment { addr: FLAG, len: 8 }];
        let mut words = [0; 16];
        guard.read_segments(&list, 0, &mut words, access).expect("RAM");
        (u64::from(words[8]), read(guard, DATA, RELAXED))
    };
    for device in [long, pieces] {
        let weak = |access| outcomes(device, access, publishes).contains(&((1, 0), ()));
        assert!(!weak(BY_DIRECTION));
        assert!(weak(RELAXED));
    }
}

/// Store buffering: each side stores, then loads what the other one stores.
///
/// With a full barrier on both, one of them sees the other's store; the directions alone do not
/// give that. Fails without: the SeqCst fence in `begin` (a weaker one is not enough).
#[test]
fn only_full_keeps_a_load_behind_an_earlier_store() {
    let device = |guard: &AccessGuard<'_>, access| {
        write(guard, DATA, 1, BY_DIRECTION);
        read(guard, FLAG, access)
    };
    let driver = |driver: &Driver<'_>| {
        driver.store(FLAG, 1);
        fence(SeqCst);
        driver.load(DATA)
    };
    let strong = BTreeSet::from([(0, 1), (1, 0), (1, 1)]);
    for access in [FULL, FULL | RELAXED] {
        assert_eq!(outcomes(device, access, driver), strong, "{access:?}");
    }
    for access in [BY_DIRECTION, RELAXED] {
        assert!(outcomes(device, access, driver).contains(&(0, 0)), "{access:?}");
    }
}

/// A mapping with FULL keeps loads through it behind an earlier store.
///
/// Fails without: the SeqCst fence in `map`.
#[test]
fn a_full_mapping_keeps_its_loads_behind_an_earlier_store() {
    let device = |guard: &AccessGuard<'_>, access| {
        write(guard, DATA, 1, BY_DIRECTION);
        let _window = guard.map(FLAG, 8, access | Access::READ).expect("RAM");
        // Raw accesses through the mapping have no order.
        read(guard, FLAG, RELAXED)
    };
    let driver = |driver: &Driver<'_>| {
        driver.store(FLAG, 1);
        fence(SeqCst);
        driver.load(DATA)
    };
    assert!(!outcomes(device, FULL, driver).contains(&(0, 0)));
    assert!(outcomes(device, BY_DIRECTION, driver).contains(&(0, 0)));
}

/// What is read through a mapping is as new as what this thread had seen before.
///
/// Fails without: the AcqRel fence in `map` (its acquire).
#[test]
fn mapping_acquires() {
    let device = |guard: &AccessGuard<'_>, access| {
        // For example an available index.
        let flag = read(guard, FLAG, RELAXED);
        let _window = guard.map(DATA, 8, access | Access::READ).expect("RAM");
        (flag, read(guard, DATA, RELAXED))
    };
    assert!(!outcomes(device, BY_DIRECTION, publishes).contains(&((1, 0), ())));
    assert!(outcomes(device, RELAXED, publishes).contains(&((1, 0), ())));
}

/// What is written through a mapping comes after earlier writes.
///
/// Fails without: the AcqRel fence in `map` (its release).
#[test]
fn mapping_releases() {
    let device = |guard: &AccessGuard<'_>, access| {
        write(guard, DATA, 1, RELAXED);
        let _window = guard.map(FLAG, 8, access | Access::WRITE).expect("RAM");
        write(guard, FLAG, 1, RELAXED);
    };
    assert!(!outcomes(device, BY_DIRECTION, looks).contains(&((), (1, 0))));
    assert!(outcomes(device, RELAXED, looks).contains(&((), (1, 0))));
}

/// A store after the end of a mapping comes after the mapping's writes.
///
/// Fails without: the AcqRel fence in `unmap` (its release).
#[test]
fn unmapping_releases() {
    let device = |guard: &AccessGuard<'_>, access| {
        // A mapping for writing also has a full fence, for the dirty log.
        let window = guard.map(DATA, 8, access | Access::READ).expect("RAM");
        write(guard, DATA, 1, RELAXED);
        drop(window);
        // For example a used index.
        write(guard, FLAG, 1, RELAXED);
    };
    assert!(!outcomes(device, BY_DIRECTION, looks).contains(&((), (1, 0))));
    assert!(outcomes(device, RELAXED, looks).contains(&((), (1, 0))));
}

/// After a mapping, reads are at least as new as the data read through it.
///
/// Fails without: the AcqRel fence in `unmap` (its acquire).
#[test]
fn unmapping_acquires() {
    let device = |guard: &AccessGuard<'_>, access| {
        let window = guard.map(FLAG, 8, access | Access::READ).expect("RAM");
        let flag = read(guard, FLAG, RELAXED);
        drop(window);
        (flag, read(guard, DATA, RELAXED))
    };
    assert!(!outcomes(device, BY_DIRECTION, publishes).contains(&((1, 0), ())));
    assert!(outcomes(device, RELAXED, publishes).contains(&((1, 0), ())));
}

/// An access in both directions has both orders.
///
/// It acquires what it read, and releases for later stores.
///
/// Fails without: the Acquire fence in `end`, or the Release fence in `begin`.
#[test]
fn both_directions_are_both_orders() {
    let acquires = |guard: &AccessGuard<'_>, access| {
        let flag = read(guard, FLAG, access);
        (flag, read(guard, DATA, RELAXED))
    };
    assert!(!outcomes(acquires, Access::WRITE, publishes).contains(&((1, 0), ())));
    let releases = |guard: &AccessGuard<'_>, access| {
        write(guard, DATA, 1, RELAXED);
        write(guard, FLAG, 1, access);
    };
    assert!(!outcomes(releases, Access::READ, looks).contains(&((), (1, 0))));
    // A driver that answers: what it wrote before its answer is seen after a write that also reads.
    let answered = |guard: &AccessGuard<'_>, access| {
        let flag = read(guard, FLAG, RELAXED);
        write(guard, 128, 1, access);
        (flag, read(guard, DATA, RELAXED))
    };
    assert!(!outcomes(answered, Access::READ, publishes).contains(&((1, 0), ())));
    assert!(outcomes(answered, BY_DIRECTION, publishes).contains(&((1, 0), ())));
}
