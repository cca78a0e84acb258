//! Our rings against Linux's.
//!
//! Its driver side (`virtio_ring`, split and packed) against our device side, and its device side
//! (`vringh`, split) against our driver side.
//!
//! Linux's code runs in a separate process, which `scripts/linux-virtio` builds from Debian's
//! kernel source package; `PARAVANE_LINUX_VIRTIO` names the folder. It shares memory with the test, and
//! does a step for each command from a pipe. So every step's answer can be compared
//! with a plain model: what was handed over, what came back, what it says, and whether a
//! notification was asked for.
//!
//! Then both sides run at the same time, and sleep when they have nothing to do: a lost
//! notification stops them, and a byte that is seen before it was written is the wrong one.
#![cfg(all(not(loom), not(miri)))]
mod model;
mod our_driver;
mod peer;
mod their_driver;
mod wish;

use model::{Op, ops};
use paravane_ring::driver::DriverConfig;
use paravane_spec::feature::{EVENT_IDX, INDIRECT_DESC, RING_PACKED};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

/// One side is ours and the other is Linux's.
trait Pair {
    /// Does one step, and compares.
    fn step(&mut self, op: &Op);
    /// Completes all that is in flight.
    fn drain(&mut self);
}

/// Every combination of the features that matter to a ring.
fn features(packed: bool) -> Vec<u64> {
    let layouts: &[u64] = if packed { &[0, RING_PACKED] } else { &[0] };
    let mut all = Vec::new();
    for layout in layouts {
        for indirect in [0, INDIRECT_DESC] {
            for event_idx in [0, EVENT_IDX] {
                all.push(layout | indirect | event_idx);
            }
        }
    }
    all
}

/// Waits for a while that differs from call to call.
///
/// A notification gets lost when a side has found nothing, and has not asked for one yet.
fn linger(seed: u64) {
    for _ in 0..seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 52 {
        std::hint::spin_loop();
    }
}

/// How many random cases a test runs.
fn cases() -> u32 {
    std::env::var("PARAVANE_LINUX_CASES").map_or(60, |cases| cases.parse().unwrap())
}

/// Random steps on queues of random sizes.
///
/// Packed ones need not have a power of two.
fn run_random<P: Pair>(features: Vec<u64>, new: impl Fn(u16, u64) -> P) {
    let config = ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() };
    let size = prop::sample::select(vec![1u16, 2, 4, 8, 32, 256]);
    let cases = (prop::sample::select(features), size, ops());
    TestRunner::new(config)
        .run(&cases, |(features, size, ops)| {
            let size = if features & RING_PACKED != 0 { size - size / 4 } else { size };
            let mut pair = new(size, features);
            for op in &ops {
                pair.step(op);
            }
            pair.drain();
            Ok(())
        })
        .unwrap();
}

/// Random steps around the place where 16-bit positions start again.
fn run_around_the_wrap<P: Pair>(features: Vec<u64>, new: impl Fn(u16, u64) -> P) {
    for features in features {
        for size in [32, 256] {
            let mut pair = new(size, features);
            let batch = usize::from(size);
            // One segment a buffer, so positions count buffers in either layout.
            for _ in 0..(65_536 - 2 * batch) / batch {
                pair.step(&Op::Bulk { count: size });
            }
            let mut runner = TestRunner::deterministic();
            for _ in 0..10 {
                let ops = ops().new_tree(&mut runner).unwrap().current();
                for op in &ops {
                    pair.step(op);
                }
            }
            pair.drain();
            for _ in 0..70_000 / batch {
                pair.step(&Op::Bulk { count: size });
            }
            pair.drain();
        }
    }
}

#[test]
fn linux_drives_our_device() {
    if !peer::here("linux_drives_our_device") {
        return;
    }
    run_random(features(true), their_driver::Pair::new);
}

#[test]
fn linux_drives_our_device_around_the_wrap() {
    if !peer::here("linux_drives_our_device_around_the_wrap") {
        return;
    }
    run_around_the_wrap(features(true), their_driver::Pair::new);
}

#[test]
fn linux_drives_our_device_while_both_run() {
    if !peer::here("linux_drives_our_device_while_both_run") {
        return;
    }
    for features in features(true) {
        for size in [2, 128] {
            their_driver::stream(size, features, 500 * u64::from(cases()));
        }
    }
}

#[test]
fn our_driver_drives_vringh() {
    if !peer::here("our_driver_drives_vringh") {
        return;
    }
    run_random(features(false), our_driver::Pair::new);
}

#[test]
fn our_driver_drives_vringh_around_the_wrap() {
    if !peer::here("our_driver_drives_vringh_around_the_wrap") {
        return;
    }
    run_around_the_wrap(features(false), our_driver::Pair::new);
}

#[test]
fn our_driver_drives_vringh_while_both_run() {
    if !peer::here("our_driver_drives_vringh_while_both_run") {
        return;
    }
    for features in features(false) {
        for size in [2, 128] {
            our_driver::stream(size, features, 500 * u64::from(cases()));
        }
    }
}
