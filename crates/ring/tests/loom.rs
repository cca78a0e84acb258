//! The ring's orderings under the loom model checker: the real code of both sides, over modelled memory.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p paravane-ring --test loom --release`
//!
//! Every test names the orderings and fences without which it fails. For split queues each was taken out once to
//! see that.
#![cfg(loom)]

use loom::sync::Arc;
use loom::sync::atomic::AtomicUsize;
use loom::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use loom::thread;
use paravane_ring::device::{Batch, QueueConfig};
use paravane_ring::driver::{Layout, Queue};
use paravane_ring::{Area, DmaArea, Segment, device};
use paravane_spec::feature::{EVENT_IDX, INDIRECT_DESC, RING_PACKED};

const BASE: u64 = 0x1000;

/// Explores every interleaving with at most so many involuntary switches of threads: 3, or what
/// PARAVANE_LOOM_PREEMPTIONS says. With 4 some of the packed models take minutes.
fn explore(f: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    let wish = std::env::var("PARAVANE_LOOM_PREEMPTIONS");
    builder.preemption_bound = Some(wish.map_or(3, |n| n.parse().expect("a number of switches")));
    builder.max_branches = 10_000;
    builder.check(f);
}

/// Both sides of a queue of two descriptors, and its memory.
fn pair(features: u64) -> (Queue, device::Queue, Area) {
    let layout = Layout::new(2, 2, features).unwrap();
    let area = Area::model(layout.memory());
    let (driver, addresses) = Queue::new(layout, DmaArea { area, addr: BASE }).unwrap();
    let config = QueueConfig::new(addresses, 2, features).unwrap();
    let [desc, avail, used] =
        config.areas().map(|part| area.slice((part.addr - BASE) as usize, part.len).unwrap());
    // SAFETY: modelled memory is never given back.
    let device = unsafe { config.activate(desc, avail, used) }.unwrap();
    (driver, device, area)
}

fn segment(i: u64) -> Segment {
    Segment { addr: 0x1_0001 * (i + 1), len: 0x2_0003 * (i as u32 + 1) }
}

/// One buffer over and back, so that both event words have been passed and bring nothing more.
fn warm_up(driver: &mut Queue, device: &mut device::Queue) {
    driver.add(&[segment(0)], &[]).unwrap();
    assert!(driver.publish());
    let mut batch = Batch::new(2);
    assert_eq!(device.pop(&mut batch, |_, _| false), Ok(1));
    device.complete(batch.chains()[0].head, 0).unwrap();
    assert_eq!(device.publish(), Ok(true));
    assert!(driver.pop_used().unwrap().is_some());
}

/// Fails without: Release of avail.idx in the driver's `publish`; Acquire of avail.idx in the device's `pop`.
#[test]
fn the_device_sees_whole_what_the_driver_published() {
    the_device_sees_whole(0);
}

/// Fails without: Release of the flags in the driver's `publish`; Acquire of them in the device's `pop`.
#[test]
fn packed_the_device_sees_whole_what_the_driver_published() {
    the_device_sees_whole(RING_PACKED);
}

fn the_device_sees_whole(features: u64) {
    explore(move || {
        let (mut driver, mut device, _) = pair(features);
        let other = thread::spawn(move || {
            for i in 0..2 {
                driver.add(&[segment(i)], &[]).unwrap();
                driver.publish();
            }
        });
        let mut batch = Batch::new(2);
        let mut seen = 0;
        for _ in 0..3 {
            device.pop(&mut batch, |_, _| false).unwrap();
            for chain in batch.chains() {
                assert_eq!(batch.readable(chain), [segment(seen)]);
                seen += 1;
            }
        }
        other.join().unwrap();
    });
}

/// Fails without: Release of avail.idx in the driver's `publish`; Acquire of avail.idx in the device's `pop`.
#[test]
fn the_device_sees_whole_an_indirect_table() {
    explore(|| {
        let (mut driver, mut device, area) = pair(INDIRECT_DESC);
        let other = thread::spawn(move || {
            driver.add(&[segment(0)], &[segment(1)]).unwrap();
            driver.publish();
        });
        let mut batch = Batch::new(1);
        for _ in 0..2 {
            let fetch = |addr: u64, out: &mut [u8]| area.read((addr - BASE) as usize, out);
            if device.pop(&mut batch, fetch).unwrap() == 1 {
                assert_eq!(batch.readable(&batch.chains()[0]), [segment(0)]);
                assert_eq!(batch.writable(&batch.chains()[0]), [segment(1)]);
            }
        }
        other.join().unwrap();
    });
}

/// Fails without: Release of used.idx in the device's `publish`; Acquire of used.idx in the driver's `look`.
#[test]
fn the_driver_sees_whole_what_the_device_published() {
    the_driver_sees_whole(0);
}

/// It still passes without the Release in the device's `publish`; `packed_a_descriptor_goes_through_both_laps`
/// does not.
#[test]
fn packed_the_driver_sees_whole_what_the_device_published() {
    the_driver_sees_whole(RING_PACKED);
}

fn the_driver_sees_whole(features: u64) {
    explore(move || {
        let (mut driver, mut device, _) = pair(features);
        let ids = [0, 1].map(|i| driver.add(&[], &[segment(i)]).unwrap());
        driver.publish();
        let data = Area::model(4);
        let other = thread::spawn(move || {
            let mut batch = Batch::new(2);
            assert_eq!(device.pop(&mut batch, |_, _| false), Ok(2));
            for (i, chain) in batch.chains().iter().enumerate() {
                assert!(data.write(2 * i, &[7, 7]));
                device.complete(chain.head, 7 + i as u32).unwrap();
                device.publish().unwrap();
            }
        });
        let mut seen = 0;
        for _ in 0..3 {
            while let Some(used) = driver.pop_used().unwrap() {
                assert_eq!((used.id, used.len), (ids[seen], 7 + seen as u32));
                let mut bytes = [0; 2];
                assert!(data.read(2 * seen, &mut bytes));
                assert_eq!(bytes, [7, 7], "what was written before is there");
                seen += 1;
            }
        }
        other.join().unwrap();
    });
}

/// Fails without: Release of used.idx in the device's `publish`; Acquire of used.idx in the driver's `poll`.
#[test]
fn what_poll_tells_of_has_its_data() {
    explore(|| {
        let (mut driver, mut device, _) = pair(0);
        driver.add(&[], &[segment(0)]).unwrap();
        driver.publish();
        let token = driver.enable_notifications();
        let data = Area::model(2);
        let other = thread::spawn(move || {
            let mut batch = Batch::new(2);
            device.pop(&mut batch, |_, _| false).unwrap();
            assert!(data.write(0, &[7, 7]));
            device.complete(batch.chains()[0].head, 2).unwrap();
            device.publish().unwrap();
        });
        if driver.poll(token) {
            let mut bytes = [0; 2];
            assert!(data.read(0, &mut bytes));
            assert_eq!(bytes, [7, 7]);
        }
        other.join().unwrap();
    });
}

/// The device sleeps after `arm_kicks` has found nothing and no kick is pending. Then all is done, or a kick
/// comes after all.
fn no_kick_is_lost(features: u64) {
    const BUFFERS: usize = 2;
    explore(move || {
        let (mut driver, mut device, _) = pair(features);
        warm_up(&mut driver, &mut device);
        device.disable_kicks();
        let kicks = Arc::new(AtomicUsize::new(0));
        let bell = Arc::clone(&kicks);
        let other = thread::spawn(move || {
            for i in 0..BUFFERS {
                driver.add(&[segment(i as u64)], &[]).unwrap();
                if driver.publish() {
                    bell.fetch_add(1, Release);
                }
            }
        });
        let mut batch = Batch::new(2);
        let mut served = 0;
        loop {
            served += device.pop(&mut batch, |_, _| false).unwrap();
            // A kick that is pending wakes it again.
            if !device.arm_kicks().unwrap() && kicks.swap(0, Acquire) == 0 {
                break;
            }
            device.disable_kicks();
        }
        other.join().unwrap();
        assert!(served == BUFFERS || kicks.load(Relaxed) > 0, "asleep with {served} of {BUFFERS} served");
    });
}

/// Fails without: the fence in the driver's `publish`; the fence in the device's `arm_kicks`.
#[test]
fn no_kick_is_lost_with_flags() {
    no_kick_is_lost(0);
}

/// Fails without: the fence in the driver's `publish`; the fence in the device's `arm_kicks`.
#[test]
fn no_kick_is_lost_with_event_idx() {
    no_kick_is_lost(EVENT_IDX);
}

/// The driver sleeps after `poll` has found nothing and no interrupt is pending. Then it has taken all back,
/// or an interrupt comes after all.
fn no_completion_is_lost(features: u64) {
    const BUFFERS: usize = 2;
    explore(move || {
        let (mut driver, mut device, _) = pair(features);
        warm_up(&mut driver, &mut device);
        driver.disable_notifications();
        for i in 0..BUFFERS {
            driver.add(&[segment(i as u64)], &[]).unwrap();
        }
        driver.publish();
        let interrupts = Arc::new(AtomicUsize::new(0));
        let line = Arc::clone(&interrupts);
        let other = thread::spawn(move || {
            let mut batch = Batch::new(2);
            device.pop(&mut batch, |_, _| false).unwrap();
            for chain in batch.chains() {
                device.complete(chain.head, 0).unwrap();
                if device.publish().unwrap() {
                    line.fetch_add(1, Release);
                }
            }
        });
        let mut taken = 0;
        loop {
            while driver.pop_used().unwrap().is_some() {
                taken += 1;
            }
            let token = driver.enable_notifications();
            // An interrupt that is pending wakes it again.
            if !driver.poll(token) && interrupts.swap(0, Acquire) == 0 {
                break;
            }
            driver.disable_notifications();
        }
        other.join().unwrap();
        assert!(taken == BUFFERS || interrupts.load(Relaxed) > 0, "asleep with {taken} of {BUFFERS} taken");
    });
}

/// Fails without: the fence in the device's `publish`; the fence in the driver's `enable_notifications`.
#[test]
fn no_completion_is_lost_with_flags() {
    no_completion_is_lost(0);
}

/// Fails without: the fence in the device's `publish`; the fence in the driver's `enable_notifications`.
#[test]
fn no_completion_is_lost_with_event_idx() {
    no_completion_is_lost(EVENT_IDX);
}

// Packed queues. After `warm_up` both sides stand before the ring's last descriptor, so what follows goes
// through the change of the wrap counters.

/// Fails without: the fence in the driver's `publish`; the fence in the device's `arm_kicks`.
#[test]
fn packed_no_kick_is_lost_with_flags() {
    no_kick_is_lost(RING_PACKED);
}

/// Fails without: the fence in the driver's `publish`; the fence in the device's `arm_kicks`.
#[test]
fn packed_no_kick_is_lost_with_event_idx() {
    no_kick_is_lost(RING_PACKED | EVENT_IDX);
}

/// Fails without: the fence in the device's `publish`; the fence in the driver's `enable_notifications`.
#[test]
fn packed_no_completion_is_lost_with_flags() {
    no_completion_is_lost(RING_PACKED);
}

/// Fails without: the fence in the device's `publish`; the fence in the driver's `enable_notifications`.
#[test]
fn packed_no_completion_is_lost_with_event_idx() {
    no_completion_is_lost(RING_PACKED | EVENT_IDX);
}

/// A batch that goes around the end of the ring appears whole: the first used descriptor's flags come last.
/// It still passes without the Release in the device's `publish`; the test below does not.
#[test]
fn packed_a_batch_around_the_end_appears_whole() {
    explore(|| {
        let (mut driver, mut device, _) = pair(RING_PACKED);
        warm_up(&mut driver, &mut device);
        let ids = [0, 1].map(|i| driver.add(&[], &[segment(i)]).unwrap());
        driver.publish();
        let other = thread::spawn(move || {
            let mut batch = Batch::new(2);
            assert_eq!(device.pop(&mut batch, |_, _| false), Ok(2));
            device.complete_all(batch.iter().map(|(chain, ..)| (chain.head, 7))).unwrap();
            device.publish().unwrap();
        });
        if let Some(used) = driver.pop_used().unwrap() {
            assert_eq!((used.id, used.len), (ids[0], 7));
            let used = driver.pop_used().unwrap().expect("one publish shows both");
            assert_eq!((used.id, used.len), (ids[1], 7));
        }
        other.join().unwrap();
    });
}

/// A descriptor that is consumed and refilled: in the other lap, whole again, and never taken for what it was.
/// Fails without: Release of the flags in the device's `publish` (tried).
#[test]
fn packed_a_descriptor_goes_through_both_laps() {
    explore(|| {
        let (mut driver, mut device, _) = pair(RING_PACKED);
        // Both descriptors in one chain: every chain is a lap.
        driver.add(&[segment(0)], &[segment(1)]).unwrap();
        driver.publish();
        let other = thread::spawn(move || {
            for _ in 0..2 {
                if let Some(used) = driver.pop_used().unwrap() {
                    assert_eq!(used.len, 1);
                    driver.add(&[segment(2)], &[segment(3)]).unwrap();
                    driver.publish();
                }
            }
        });
        let mut batch = Batch::new(2);
        let mut seen = 0;
        for _ in 0..3 {
            device.pop(&mut batch, |_, _| false).unwrap();
            for (chain, readable, writable) in &batch {
                assert_eq!((readable, writable), (&[segment(seen)][..], &[segment(seen + 1)][..]));
                device.complete(chain.head, 1).unwrap();
                seen += 2;
            }
            device.publish().unwrap();
        }
        other.join().unwrap();
    });
}
