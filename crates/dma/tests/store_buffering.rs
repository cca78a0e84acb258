//! Store buffering on real CPUs, with real guards.
//!
//! It is the one reordering of x86, and the purpose of `FULL`.
//!
//! ```text
//! device, on one CPU                  driver, on another
//! write(request, n)                   answer = n
//! read(answer, ACCESS)                full barrier
//!                                     read request
//! ```
//! Each side must see the other's store, or have its own seen. With `FULL` one of them always does.
//! Without it the device's store can still be in its CPU's store buffer when its load is done, and
//! both miss.
//!
//! It shows in optimised code only (the workspace requests that): unoptimised code stores so much
//! on its stack between the two accesses that the request leaves the store buffer.
#![cfg(not(any(miri, loom)))]

use paravane_dma::{Access, Backing, Handle, Memory, Region, RegionConfig};
use paravane_test_support::{patience, skip};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Instant;

const REQUEST: u64 = 0;
const ANSWER: u64 = 1024;
/// Number of rounds per run of the two threads.
const ROUNDS: u64 = 20_000;

/// Two CPUs that this process may use.
fn two_cpus() -> Option<[usize; 2]> {
    let set = sched_getaffinity(None).ok()?;
    let mut cpus = (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu));
    Some([cpus.next()?, cpus.next()?])
}

fn pin(cpu: usize) {
    let mut set = CpuSet::new();
    set.set(cpu);
    // If refused, the threads merely meet less often.
    let _ = sched_setaffinity(None, &set);
}

/// Barrier between the two threads, so that each round starts at the same time.
#[repr(align(128))]
struct Meeting(AtomicU64);

impl Meeting {
    /// Waits until both have arrived for the `n`th time.
    fn meet(&self, n: u64) {
        // AcqRel: what each has stored before is seen by both afterwards; so the stores of one
        // round come before those of the next.
        self.0.fetch_add(1, Ordering::AcqRel);
        let mut spins = 0_u32;
        while self.0.load(Ordering::Acquire) < 2 * n {
            spins += 1;
            if spins > 10_000 {
                // The other thread is not running.
                std::thread::yield_now();
            }
            std::hint::spin_loop();
        }
    }
}

/// Number of rounds of [`ROUNDS`] in which neither saw the other.
fn both_missed(device: &mut Handle, driver: &mut Handle, cpus: [usize; 2], access: Access) -> u64 {
    let meeting = Meeting(AtomicU64::new(0));
    let mut mapped = |addr| driver.enter().map(addr, 8, Access::READ | Access::WRITE).expect("RAM");
    let (request, answer) = (mapped(REQUEST), mapped(ANSWER));
    // SAFETY: eight aligned bytes of guest memory, mapped as long as the guards live, which is
    // longer than the threads do; all accesses are atomic or by an access guard.
    let [request, answer] =
        [&request, &answer].map(|window| unsafe { AtomicU64::from_ptr(window.host().as_ptr().cast()) });
    for cell in [request, answer] {
        cell.store(0, Ordering::Relaxed);
    }
    std::thread::scope(|scope| {
        let device = scope.spawn(|| {
            pin(cpus[0]);
            let device = device.enter();
            (1..=ROUNDS)
                .map(|n| {
                    meeting.meet(2 * n - 1);
                    device.write_obj(REQUEST, &n, access).expect("RAM");
                    let seen: u64 = device.read_obj(ANSWER, access).expect("RAM");
                    meeting.meet(2 * n);
                    seen == n
                })
                .collect::<Vec<bool>>()
        });
        let driver = scope.spawn(|| {
            pin(cpus[1]);
            (1..=ROUNDS)
                .map(|n| {
                    meeting.meet(2 * n - 1);
                    answer.store(n, Ordering::Relaxed);
                    // Pairs with the device's full barrier, if it has one.
                    fence(Ordering::SeqCst);
                    let seen = request.load(Ordering::Relaxed);
                    meeting.meet(2 * n);
                    seen == n
                })
                .collect::<Vec<bool>>()
        });
        let (device, driver) = (device.join().unwrap(), driver.join().unwrap());
        device.iter().zip(&driver).filter(|&(&device, &driver)| !device && !driver).count() as u64
    })
}

#[test]
fn the_reordering_shows_without_full_and_never_with_it() {
    let Some(cpus) = two_cpus() else {
        skip("store_buffering", "it takes two CPUs");
        return;
    };
    let config = RegionConfig { gpa: 0, size: 4096, backing: Backing::Pages, writable: true };
    let memory = Memory::new(vec![Region::new(config).expect("RAM")]).expect("a map");
    let (mut device, mut driver) = (memory.handle(), memory.handle());
    let started = Instant::now();
    let mut goes = 0;
    let mut missed = 0;
    // It shows in the first thousands of rounds if the two threads run at the same time. On a busy machine that may
    // take longer.
    // Until it has been seen a few times: then as many rounds with FULL would show it too.
    while missed < 10 {
        assert!(
            started.elapsed() < 2 * patience(),
            "both sides missed only {missed} times in {} rounds without a full barrier, so this machine cannot show \
             what one is for",
            goes * ROUNDS
        );
        missed += both_missed(&mut device, &mut driver, cpus, Access::empty());
        goes += 1;
        // Interleaved, so that disturbances of the machine affect both.
        assert_eq!(
            both_missed(&mut device, &mut driver, cpus, Access::FULL),
            0,
            "a full barrier did not hold"
        );
    }
    for _ in 0..goes {
        assert_eq!(
            both_missed(&mut device, &mut driver, cpus, Access::FULL),
            0,
            "a full barrier did not hold"
        );
    }
    eprintln!(
        "without FULL both sides missed {missed} times in {} rounds, with it never in {}",
        goes * ROUNDS,
        2 * goes * ROUNDS
    );
}
