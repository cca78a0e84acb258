//! Polls from elsewhere under the loom model checker: a poller beside the device and the consumer.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p paravane-ring --test loom_poll --release`
#![cfg(loom)]

use loom::thread;
use paravane_ring::device::{Batch, QueueConfig};
use paravane_ring::driver::poll::Poller;
use paravane_ring::driver::{Layout, PollToken, Queue};
use paravane_ring::{Area, DmaArea, Segment, device};
use paravane_spec::feature::{IN_ORDER, RING_PACKED};

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

fn segment(i: u64) -> Segment {
    Segment { addr: 0x1_0001 * (i + 1), len: 0x2_0003 * (i as u32 + 1) }
}

/// A queue's poller, with both sides.
fn polled(features: u64) -> (Queue, Poller, device::Queue) {
    let layout = Layout::new(2, 2, features).unwrap();
    let area = Area::model(layout.memory());
    let (mut driver, addresses) = Queue::new(layout, DmaArea { area, addr: BASE }).unwrap();
    let poller = driver.poller().unwrap();
    let config = QueueConfig::new(addresses, 2, features).unwrap();
    let [desc, avail, used] =
        config.areas().map(|part| area.slice((part.addr - BASE) as usize, part.len).unwrap());
    // SAFETY: modelled memory is never given back.
    let device = unsafe { config.activate(desc, avail, used) }.unwrap();
    (driver, poller, device)
}

/// Serves one buffer, if there is one.
fn serve(device: &mut device::Queue) -> bool {
    let mut batch = Batch::new(1);
    if device.pop(&mut batch, |_, _| false).unwrap() == 0 {
        return false;
    }
    device.complete(batch.chains()[0].head, 0).unwrap();
    device.publish().unwrap();
    true
}

/// One thread polls while another consumes and a third (the device, done before) has used a buffer: the poller
/// sees it, though the consumer takes it back and fills its slot again at the same time.
fn a_poll_beside_the_consumer(features: u64) {
    explore(move || {
        let (mut driver, poller, mut device) = polled(features);
        for i in 0..2 {
            driver.add(&[segment(i)], &[]).unwrap();
        }
        driver.publish();
        let token = driver.enable_notifications();
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

/// Fails if the count is read before the flags. (The release store of a slot that is filled again is argued for
/// in `driver::poll`; taking it out does not fail here.)
#[test]
fn a_poll_beside_the_consumer_packed() {
    a_poll_beside_the_consumer(RING_PACKED);
}

/// As above; the count is stored with the batch. Fails if the count is read before the flags.
#[test]
fn a_poll_beside_the_consumer_packed_in_order() {
    a_poll_beside_the_consumer(RING_PACKED | IN_ORDER);
}

#[test]
fn a_poll_beside_the_consumer_split() {
    a_poll_beside_the_consumer(0);
}

/// The poller is told of what comes, and has its data, while device and consumer both work.
fn a_poll_has_its_data(features: u64) {
    explore(move || {
        let (mut driver, poller, mut device) = polled(features);
        driver.add(&[], &[segment(0)]).unwrap();
        driver.publish();
        let token: PollToken = driver.enable_notifications();
        let data = Area::model(2);
        let device = thread::spawn(move || {
            assert!(data.write(0, &[7, 7]));
            assert!(serve(&mut device));
        });
        let consumer = thread::spawn(move || {
            if driver.pop_used().unwrap().is_some() {
                driver.add(&[], &[segment(1)]).unwrap();
                driver.publish();
            }
            driver
        });
        if poller.poll(token) {
            let mut bytes = [0; 2];
            assert!(data.read(0, &mut bytes));
            assert_eq!(bytes, [7, 7]);
        }
        device.join().unwrap();
        let driver = consumer.join().unwrap();
        assert!(poller.poll(token) && driver.poll(token));
    });
}

#[test]
fn a_poll_has_its_data_split() {
    a_poll_has_its_data(0);
}

#[test]
fn a_poll_has_its_data_packed() {
    a_poll_has_its_data(RING_PACKED);
}
