//! The ring's orderings under loom: the code of both sides, on modelled memory.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p paravane-ring --test loom --release`
//!
//! Each model runs with the order between CPUs ([`paravane_ring::Smp`]) and with barriers towards
//! hardware ([`paravane_ring::Platform`]). The latter run in memory where acquire and release mean
//! nothing, so what holds there holds by barriers alone.
//!
//! # What fails without what
//! `scripts/weaken` takes out every fence, barrier, acquire and release of the rings and of
//! `driver::poll`, one at a time, and fails if no model does. Beside each model stands what it
//! noticed; `Platform` notices the barriers, `before_release` and `after_acquire`, at the same
//! places, and the fences of `full` are noticed by both. Three orders of stores were taken out by
//! hand: the first flags of a batch last, on either side, and `driver::poll`'s ring before count.
//!
//! # What no model shows
//! * What instruction a barrier is: here it is loom's fence.
//! * That a load is overtaken by a store after it. Loom stores in the order of the program, so
//!   nobody can fill a descriptor again before the device's loads of it, whatever orders them; the
//!   release in the device's `publish` and the acquire in the driver's look at what was used do.
//! * That stores to a tracking region reach it in their order. No CPU looks at them while another
//!   one writes; the compiler must not exchange them, and `src/tracking/test.rs` cuts off after
//!   each.
//! * The acquire of used.idx where a device side takes over from another process, and the release
//!   of the count when a queue is closed. Nothing is read that they publish.
#![cfg(loom)]
mod model;

use loom::sync::Arc;
use loom::sync::atomic::AtomicUsize;
use loom::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use loom::thread;
use model::{BASE, Sides, explore, segment, sides, warm_up};
use paravane_ring::device::{self, Batch, Fetched, TranslationCheck};
use paravane_ring::driver::poll::Position;
use paravane_ring::driver::{Queue, Used};
use paravane_ring::{Area, Order, QueueError, Segment};
use paravane_spec::feature::{EVENT_IDX, IN_ORDER, INDIRECT_DESC, RING_PACKED};

const PACKED_EVENT_IDX: u64 = RING_PACKED | EVENT_IDX;
const PACKED_INDIRECT: u64 = RING_PACKED | INDIRECT_DESC;
const PACKED_IN_ORDER: u64 = RING_PACKED | IN_ORDER;

models! {
    /// Buffer after buffer: what the device finds available is there whole.
    ///
    /// Notices: the release in the driver's `publish`; the acquire in the device's `pop`.
    the_device_sees_whole[Smp, Platform] { split: 0, packed: RING_PACKED }
    /// The descriptors of a chain after the first, and tables.
    /// Notices: the same.
    the_device_sees_a_chain_whole[Smp, Platform] {
        split: 0, split_indirect: INDIRECT_DESC, packed: RING_PACKED, packed_indirect: PACKED_INDIRECT,
    }
    /// The same, for a device behind an IOMMU.
    ///
    /// Notices: the same, on the way that such a device pops.
    a_device_behind_an_iommu_sees_a_chain_whole[Smp, Platform] {
        split: 0, split_indirect: INDIRECT_DESC, packed: RING_PACKED, packed_indirect: PACKED_INDIRECT,
    }
    /// Two buffers and one publication: both are there, or none.
    ///
    /// Notices: the same; packed, first flags that do not come last.
    the_device_sees_a_batch_whole[Smp, Platform] { split: 0, packed: RING_PACKED }
    /// What the driver takes back is there whole, and what the device wrote before.
    ///
    /// Notices: the release in the device's `publish`; the acquire in the driver's `pop_used`.
    pop_used_sees_whole[Smp, Platform] {
        split: 0, split_in_order: IN_ORDER, packed: RING_PACKED, packed_in_order: PACKED_IN_ORDER,
    }
    /// The same in batches.
    ///
    /// Notices: the release in the device's `publish`; the acquire in the driver's `take_used`.
    take_used_sees_whole[Smp, Platform] {
        split: 0, split_in_order: IN_ORDER, packed: RING_PACKED, packed_in_order: PACKED_IN_ORDER,
    }
    /// Two completions and one publication: both are there, or none.
    ///
    /// Notices: as the two above; packed, first flags that do not come last.
    the_driver_sees_a_batch_whole[Smp, Platform] {
        split: 0, split_in_order: IN_ORDER, packed: RING_PACKED, packed_in_order: PACKED_IN_ORDER,
    }
    /// A poll with news sees the data, and what the device wrote before.
    ///
    /// Notices: the release in the device's `publish`; the acquire in `driver::poll`'s look at the
    /// ring.
    poll_sees_whole[Smp, Platform] { split: 0, packed: RING_PACKED }
    /// A descriptor that is consumed and filled again is whole, and is the new one.
    ///
    /// Notices: split, the release in the device's `publish`, and the acquire in the driver's look
    /// at used.idx. It is there for the wrap counters.
    a_descriptor_goes_round[Smp, Platform] { split: 0, packed: RING_PACKED }
    /// Nothing is made available without a kick while the device sleeps.
    ///
    /// Notices: the fences in the driver's `publish` and the device's `arm_kicks`.
    no_kick_is_lost[Smp, Platform] {
        split: 0, split_event_idx: EVENT_IDX, packed: RING_PACKED, packed_event_idx: PACKED_EVENT_IDX,
    }
    /// Nothing is used without an interrupt while the driver sleeps.
    ///
    /// Notices: the fences in the device's `publish` and the driver's `enable_interrupts`.
    no_completion_is_lost[Smp, Platform] {
        split: 0, split_event_idx: EVENT_IDX, packed: RING_PACKED, packed_event_idx: PACKED_EVENT_IDX,
    }
}

fn the_device_sees_whole<O: Order>(features: u64) {
    explore(move || {
        let Sides { mut driver, mut device, .. } = sides::<O, Position>(features);
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
            thread::yield_now();
        }
        other.join().unwrap();
    });
}

fn the_device_sees_a_chain_whole<O: Order>(features: u64) {
    sees_a_chain_whole::<O>(features, |device, batch, area| {
        device.pop(batch, |addr, out| area.read((addr - BASE) as usize, out))
    });
}

/// An IOMMU that knows all translations.
struct Known(Area);

impl TranslationCheck for Known {
    fn fetch(&mut self, addr: u64, table: &mut [u8]) -> Fetched {
        if self.0.read((addr - BASE) as usize, table) { Fetched::Done } else { Fetched::Never }
    }

    fn translates(&mut self, _readable: &[Segment], _writable: &[Segment]) -> bool {
        true
    }
}

fn a_device_behind_an_iommu_sees_a_chain_whole<O: Order>(features: u64) {
    sees_a_chain_whole::<O>(features, |device, batch, area| device.pop_translated(batch, &mut Known(area)));
}

/// `pop` takes chains from the device side; tables lie in the area.
fn sees_a_chain_whole<O: Order>(
    features: u64,
    pop: fn(&mut device::Queue<O>, &mut Batch, Area) -> Result<usize, QueueError>,
) {
    explore(move || {
        let Sides { mut driver, mut device, area, .. } = sides::<O, Position>(features);
        let other = thread::spawn(move || {
            driver.add(&[segment(0)], &[segment(1)]).unwrap();
            driver.publish();
        });
        let mut batch = Batch::new(1);
        for _ in 0..2 {
            if pop(&mut device, &mut batch, area).unwrap() == 1 {
                assert_eq!(batch.readable(&batch.chains()[0]), [segment(0)]);
                assert_eq!(batch.writable(&batch.chains()[0]), [segment(1)]);
            }
            thread::yield_now();
        }
        other.join().unwrap();
    });
}

fn the_device_sees_a_batch_whole<O: Order>(features: u64) {
    explore(move || {
        let mut both = sides::<O, Position>(features);
        warm_up(&mut both);
        let Sides { mut driver, mut device, .. } = both;
        let other = thread::spawn(move || {
            for i in 0..2 {
                driver.add(&[segment(i)], &[]).unwrap();
            }
            driver.publish();
        });
        let mut batch = Batch::new(2);
        for _ in 0..2 {
            if device.pop(&mut batch, |_, _| false).unwrap() > 0 {
                assert_eq!(batch.chains().len(), 2, "one publication shows both");
                for (i, (_, readable, _)) in (0..).zip(&batch) {
                    assert_eq!(readable, [segment(i)]);
                }
            }
            thread::yield_now();
        }
        other.join().unwrap();
    });
}

/// Takes used buffers back; how many.
type Take<O> = fn(&mut Queue<O>, &mut [Used; 2]) -> Result<usize, QueueError>;

fn pop_one<O: Order>(driver: &mut Queue<O>, out: &mut [Used; 2]) -> Result<usize, QueueError> {
    Ok(driver.pop_used()?.map_or(0, |used| {
        out[0] = used;
        1
    }))
}

fn take_all<O: Order>(driver: &mut Queue<O>, out: &mut [Used; 2]) -> Result<usize, QueueError> {
    driver.take_used(out)
}

fn pop_used_sees_whole<O: Order>(features: u64) {
    the_driver_sees_whole::<O>(features, pop_one);
}

fn take_used_sees_whole<O: Order>(features: u64) {
    the_driver_sees_whole::<O>(features, take_all);
}

fn the_driver_sees_whole<O: Order>(features: u64, take: Take<O>) {
    explore(move || {
        let Sides { mut driver, mut device, .. } = sides::<O, Position>(features);
        let ids = [0, 1].map(|i| driver.add(&[], &[segment(i)]).unwrap());
        driver.publish();
        let mut batch = Batch::new(2);
        assert_eq!(device.pop(&mut batch, |_, _| false), Ok(2));
        let data = Area::halves(4);
        let other = thread::spawn(move || {
            for (i, chain) in batch.chains().iter().enumerate() {
                assert!(data.write(2 * i, &[7, 7]));
                device.complete(chain.head, 7 + i as u32).unwrap();
                device.publish().unwrap();
            }
        });
        let mut taken = 0;
        let mut used = [Used::default(); 2];
        for _ in 0..3 {
            let count = take(&mut driver, &mut used).unwrap();
            for used in &used[..count] {
                assert_eq!((used.id, used.len), (ids[taken], 7 + taken as u32));
                let mut bytes = [0; 2];
                assert!(data.read(2 * taken, &mut bytes));
                assert_eq!(bytes, [7, 7], "what was written before is there");
                taken += 1;
            }
            thread::yield_now();
        }
        other.join().unwrap();
    });
}

fn the_driver_sees_a_batch_whole<O: Order>(features: u64) {
    explore(move || {
        let mut both = sides::<O, Position>(features);
        warm_up(&mut both);
        let Sides { mut driver, mut device, .. } = both;
        let ids = [0, 1].map(|i| driver.add(&[], &[segment(i)]).unwrap());
        driver.publish();
        let mut batch = Batch::new(2);
        assert_eq!(device.pop(&mut batch, |_, _| false), Ok(2));
        let lens = [0, 1].map(|i| segment(i).len);
        let other = thread::spawn(move || {
            device.complete_all(batch.chains().iter().map(|chain| chain.head).zip(lens)).unwrap();
            device.publish().unwrap();
        });
        for _ in 0..2 {
            if let Some(used) = driver.pop_used().unwrap() {
                assert_eq!((used.id, used.len), (ids[0], lens[0]));
                let used = driver.pop_used().unwrap().expect("one publication shows both");
                assert_eq!((used.id, used.len), (ids[1], lens[1]));
            }
            thread::yield_now();
        }
        other.join().unwrap();
    });
}

fn poll_sees_whole<O: Order>(features: u64) {
    explore(move || {
        let Sides { mut driver, mut device, .. } = sides::<O, Position>(features);
        driver.add(&[], &[segment(0)]).unwrap();
        driver.publish();
        let token = driver.enable_interrupts();
        let mut batch = Batch::new(2);
        device.pop(&mut batch, |_, _| false).unwrap();
        let data = Area::halves(2);
        let other = thread::spawn(move || {
            assert!(data.write(0, &[7, 7]));
            device.complete(batch.chains()[0].head, 2).unwrap();
            device.publish().unwrap();
        });
        for _ in 0..2 {
            if driver.poll(token) {
                let mut bytes = [0; 2];
                assert!(data.read(0, &mut bytes));
                assert_eq!(bytes, [7, 7]);
            }
            thread::yield_now();
        }
        other.join().unwrap();
    });
}

fn a_descriptor_goes_round<O: Order>(features: u64) {
    explore(move || {
        let Sides { mut driver, mut device, .. } = sides::<O, Position>(features);
        // Both descriptors in one chain: every chain is a lap.
        driver.add(&[segment(0)], &[segment(1)]).unwrap();
        driver.publish();
        let other = thread::spawn(move || {
            let mut next = 2;
            for _ in 0..2 {
                if let Some(used) = driver.pop_used().unwrap() {
                    assert_eq!(used.len, 1);
                    driver.add(&[segment(next)], &[segment(next + 1)]).unwrap();
                    next += 2;
                    driver.publish();
                }
                thread::yield_now();
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
            thread::yield_now();
        }
        other.join().unwrap();
    });
}

/// The device sleeps after `arm_kicks` has found nothing and no kick is pending.
///
/// Then all is done, or a kick comes after all.
fn no_kick_is_lost<O: Order>(features: u64) {
    const BUFFERS: usize = 2;
    explore(move || {
        let mut both = sides::<O, Position>(features);
        warm_up(&mut both);
        let Sides { mut driver, mut device, .. } = both;
        device.disable_kicks();
        let kicks = Arc::new(AtomicUsize::new(0));
        let kicked = Arc::clone(&kicks);
        let other = thread::spawn(move || {
            for i in 0..BUFFERS {
                driver.add(&[segment(i as u64)], &[]).unwrap();
                if driver.publish() {
                    kicked.fetch_add(1, Release);
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

/// The driver sleeps after `poll` has found nothing and no interrupt is pending.
///
/// Then it has taken all back, or an interrupt comes after all.
fn no_completion_is_lost<O: Order>(features: u64) {
    const BUFFERS: usize = 2;
    explore(move || {
        let mut both = sides::<O, Position>(features);
        warm_up(&mut both);
        let Sides { mut driver, mut device, .. } = both;
        driver.disable_interrupts();
        for i in 0..BUFFERS {
            driver.add(&[segment(i as u64)], &[]).unwrap();
        }
        driver.publish();
        let mut batch = Batch::new(2);
        assert_eq!(device.pop(&mut batch, |_, _| false), Ok(2));
        let interrupts = Arc::new(AtomicUsize::new(0));
        let line = Arc::clone(&interrupts);
        let other = thread::spawn(move || {
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
            let token = driver.enable_interrupts();
            // An interrupt that is pending wakes it again.
            if !driver.poll(token) && interrupts.swap(0, Acquire) == 0 {
                break;
            }
            driver.disable_interrupts();
        }
        other.join().unwrap();
        assert!(taken == BUFFERS || interrupts.load(Relaxed) > 0, "asleep with {taken} of {BUFFERS} taken");
    });
}
