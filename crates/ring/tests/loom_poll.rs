//! Polls under loom: a poller beside the device and the consumer.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p paravane-ring --test loom_poll --release`
//!
//! Each model fails without the orderings that it lists, see `loom.rs`. Poller and consumer are
//! both CPUs, so barriers towards hardware matter where the device is at work.
#![cfg(loom)]
mod model;

use loom::thread;
use model::{Sides, explore, segment, sides, warm_up};
use paravane_ring::device::{self, Batch};
use paravane_ring::driver::poll::{Counting, Position, WrapCount};
use paravane_ring::driver::{Queue, Used};
use paravane_ring::{Area, Order};
use paravane_spec::feature::{IN_ORDER, RING_PACKED};

const PACKED_IN_ORDER: u64 = RING_PACKED | IN_ORDER;

models! {
    /// A buffer used before a poll is news, also when its slot is filled again.
    ///
    /// Notices: packed, the release in the driver's `publish`; the acquire of the flags; a count
    /// that is read before them.
    a_poll_beside_the_consumer[Smp] {
        split: 0, split_in_order: IN_ORDER, packed: RING_PACKED, packed_in_order: PACKED_IN_ORDER,
    }
    /// The same at the end of the ring, with a slot filled behind a withheld one.
    ///
    /// Notices: packed, the release of a slot that is filled again; the acquire of the flags.
    a_poll_beside_a_batch[Smp] { split: 0, packed: RING_PACKED, packed_in_order: PACKED_IN_ORDER }
    /// With the wrap counter, which notices a buffer at the end of the ring.
    ///
    /// Notices: the same.
    a_poll_of_a_wrap_counter_beside_a_batch[Smp] { packed: RING_PACKED, packed_in_order: PACKED_IN_ORDER }
    /// A poll with news sees the data, while device and consumer both work.
    ///
    /// Notices: the release in the device's `publish`; the acquires in the consumer and in the
    /// poller; the release and the acquire of the count.
    a_poll_has_its_data[Smp, Platform] { split: 0, packed: RING_PACKED, packed_in_order: PACKED_IN_ORDER }
    /// The same with the wrap counter, at the end of the ring.
    ///
    /// Notices: the release and the acquire of the wrap counter.
    a_poll_of_a_wrap_counter_has_its_data[Smp, Platform] { packed: RING_PACKED, packed_in_order: PACKED_IN_ORDER }
}

/// Serves one buffer, if there is one.
fn serve<O: Order>(device: &mut device::Queue<O>) -> bool {
    let mut batch = Batch::new(1);
    if device.pop(&mut batch, |_, _| false).unwrap() == 0 {
        return false;
    }
    device.complete(batch.chains()[0].head, 0).unwrap();
    device.publish().unwrap();
    true
}

fn a_poll_beside_the_consumer<O: Order>(features: u64) {
    explore(move || {
        let Sides { mut driver, poller, mut device, .. } = sides::<O, Position>(features);
        for i in 0..2 {
            driver.add(&[segment(i)], &[]).unwrap();
        }
        driver.publish();
        let token = driver.enable_interrupts();
        assert!(!poller.poll(token));
        assert!(serve(&mut device));
        let other = thread::spawn(move || {
            assert!(driver.pop_used().unwrap().is_some());
            driver.add(&[segment(2)], &[]).unwrap();
            driver.publish();
            driver
        });
        assert!(poller.poll(token), "the buffer was used before the poll");
        let driver = other.join().unwrap();
        assert!(poller.poll(token), "and taken back");
        assert!(driver.poll(token));
    });
}

/// Takes one used buffer back.
type Take<O, C> = fn(&mut Queue<O, C>) -> bool;

fn pop_one<O: Order, C: Counting>(driver: &mut Queue<O, C>) -> bool {
    driver.pop_used().unwrap().is_some()
}

fn take_one<O: Order, C: Counting>(driver: &mut Queue<O, C>) -> bool {
    driver.take_used(&mut [Used::default()]).unwrap() == 1
}

fn a_poll_beside_a_batch<O: Order>(features: u64) {
    beside_a_batch::<O, Position>(features, pop_one);
    beside_a_batch::<O, Position>(features, take_one);
}

fn a_poll_of_a_wrap_counter_beside_a_batch<O: Order>(features: u64) {
    beside_a_batch::<O, WrapCount>(features, pop_one);
    beside_a_batch::<O, WrapCount>(features, take_one);
}

fn beside_a_batch<O: Order, C: Counting>(features: u64, take: Take<O, C>) {
    explore(move || {
        let Sides { mut driver, poller, mut device, .. } = sides::<O, C>(features);
        for i in 0..2 {
            driver.add(&[segment(i)], &[]).unwrap();
        }
        driver.publish();
        assert!(serve(&mut device) && take(&mut driver));
        let token = driver.enable_interrupts();
        assert!(!poller.poll(token));
        assert!(serve(&mut device));
        let other = thread::spawn(move || {
            assert!(take(&mut driver));
            // The first one's flags are withheld, so the second one's are the first to be stored.
            for i in 2..4 {
                driver.add(&[segment(i)], &[]).unwrap();
            }
            driver.publish();
            driver
        });
        assert!(poller.poll(token), "the buffer was used before the poll");
        let driver = other.join().unwrap();
        assert!(poller.poll(token), "and taken back");
        assert!(driver.poll(token));
    });
}

fn a_poll_has_its_data<O: Order>(features: u64) {
    has_its_data::<O, Position>(features);
}

fn a_poll_of_a_wrap_counter_has_its_data<O: Order>(features: u64) {
    has_its_data::<O, WrapCount>(features);
}

fn has_its_data<O: Order, C: Counting>(features: u64) {
    explore(move || {
        let mut both = sides::<O, C>(features);
        warm_up(&mut both);
        let Sides { mut driver, poller, mut device, .. } = both;
        driver.add(&[], &[segment(0)]).unwrap();
        driver.publish();
        let token = driver.enable_interrupts();
        let mut batch = Batch::new(1);
        assert_eq!(device.pop(&mut batch, |_, _| false), Ok(1));
        let data = Area::halves(2);
        let device = thread::spawn(move || {
            assert!(data.write(0, &[7, 7]));
            device.complete(batch.chains()[0].head, 0).unwrap();
            device.publish().unwrap();
        });
        let consumer = thread::spawn(move || {
            if driver.pop_used().unwrap().is_some() {
                driver.add(&[], &[segment(1)]).unwrap();
                driver.publish();
            }
            driver
        });
        for _ in 0..2 {
            if poller.poll(token) {
                let mut bytes = [0; 2];
                assert!(data.read(0, &mut bytes));
                assert_eq!(bytes, [7, 7]);
            }
            thread::yield_now();
        }
        device.join().unwrap();
        let driver = consumer.join().unwrap();
        assert!(poller.poll(token) && driver.poll(token));
    });
}
