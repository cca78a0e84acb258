//! Our driver side and our device side on one queue.
#![cfg(not(loom))]
mod memory;

use memory::{BASE, Memory};
use paravane_ring::Segment;
use paravane_ring::device::{self, Batch};
use paravane_ring::driver::{DriverConfig, Full, Queue, Used};
use paravane_spec::feature::{EVENT_IDX, IN_ORDER, INDIRECT_DESC, RING_PACKED};

const DATA: u64 = 0x9000_0000;

fn seg(i: u64, len: u32) -> Segment {
    Segment { addr: DATA + i * 4096, len }
}

fn pair(size: u16, indirect: u16, features: u64) -> (Memory, Queue, paravane_ring::device::Queue) {
    let layout = DriverConfig::new(size, indirect, features).unwrap();
    let memory = Memory::new(layout.memory());
    let (driver, addresses) = Queue::new(layout, memory.dma()).unwrap();
    let device = memory.activate(addresses, features);
    (memory, driver, device)
}

/// These features with each layout that completes in the order of requests.
fn layouts(features: &[u64]) -> Vec<u64> {
    features.iter().flat_map(|&features| [features, features | RING_PACKED]).collect()
}

#[test]
fn a_buffer_goes_over_and_comes_back() {
    for features in layouts(&[0, INDIRECT_DESC, EVENT_IDX, INDIRECT_DESC | EVENT_IDX]) {
        let (memory, mut driver, mut device) = pair(8, 4, features);
        let mut batch = Batch::new(4);
        let fetch = |addr, out: &mut [u8]| memory.fetch(addr, out);
        assert_eq!(device.pop(&mut batch, fetch), Ok(0));

        let single = driver.add(&[seg(0, 16)], &[]).unwrap();
        let double = driver.add(&[seg(1, 16)], &[seg(2, 512), seg(3, 1)]).unwrap();
        assert_eq!(device.pop(&mut batch, fetch), Ok(0), "nothing before publish");
        assert!(driver.publish(), "a new queue wants the first kick");
        assert!(!driver.publish(), "nothing new");

        assert_eq!(device.pop(&mut batch, fetch), Ok(2));
        let chains = batch.chains();
        assert_eq!(batch.readable(&chains[0]), [seg(0, 16)]);
        assert_eq!(batch.writable(&chains[0]), []);
        assert_eq!(batch.readable(&chains[1]), [seg(1, 16)]);
        assert_eq!(batch.writable(&chains[1]), [seg(2, 512), seg(3, 1)]);
        assert_eq!((chains[1].readable_len(), chains[1].writable_len()), (16, 513));
        assert_eq!((device.in_flight(), driver.in_flight()), (2, 2));

        device.complete(chains[1].head, 600).unwrap();
        assert_eq!(driver.pop_used(), Ok(None), "nothing before publish");
        assert_eq!(device.publish(), Ok(true));
        assert_eq!(device.publish(), Ok(false), "nothing new");
        let used = driver.pop_used().unwrap().unwrap();
        assert_eq!((used.id, used.len), (double, 513), "the length is clamped");
        device.complete(chains[0].head, 0).unwrap();
        device.publish().unwrap();
        let used = driver.pop_used().unwrap().unwrap();
        assert_eq!((used.id, used.len), (single, 0));
        assert_eq!((device.in_flight(), driver.in_flight()), (0, 0));
        assert_eq!(driver.room(), 8);
    }
}

#[test]
fn a_device_that_polls_sees_what_there_is() {
    for features in layouts(&[0, EVENT_IDX]) {
        let (memory, mut driver, mut device) = pair(4, 0, features);
        let mut batch = Batch::new(1);
        let fetch = |addr, out: &mut [u8]| memory.fetch(addr, out);
        // More than once around, so that what is left of the lap before is no answer.
        for _ in 0..9 {
            device.disable_kicks();
            assert!(!device.has_available());
            driver.add(&[seg(0, 16)], &[]).unwrap();
            assert!(!device.has_available(), "nothing before publish");
            driver.publish();
            assert!(device.has_available() && device.has_available(), "looking takes nothing");
            assert_eq!(device.pop(&mut batch, fetch), Ok(1));
            assert!(!device.has_available());
            device.complete(batch.chains()[0].head, 0).unwrap();
            device.publish().unwrap();
            assert!(!device.has_available(), "what is used is not available");
            driver.pop_used().unwrap().unwrap();
        }
        driver.add(&[seg(0, 16)], &[]).unwrap();
        driver.publish();
        device.fail(paravane_ring::QueueError::NotInFlight { id: 0 });
        assert!(!device.has_available(), "a queue that has latched has nothing");
    }
}

#[test]
fn a_full_queue_says_how_full() {
    let (_memory, mut driver, _device) = pair(4, 0, 0);
    driver.add(&[seg(0, 1), seg(1, 1)], &[seg(2, 1)]).unwrap();
    assert_eq!(driver.room(), 1);
    assert_eq!(driver.add(&[seg(0, 1)], &[seg(2, 1)]), Err(Full { needed: 2, free: 1 }));
    driver.add(&[seg(0, 1)], &[]).unwrap();
    assert_eq!(driver.room(), 0);
    assert_eq!(driver.add(&[seg(0, 1)], &[]), Err(Full { needed: 1, free: 0 }));

    let (_memory, mut driver, _device) = pair(4, 3, INDIRECT_DESC);
    for _ in 0..4 {
        assert!(driver.room() >= 3);
        driver.add(&[seg(0, 1)], &[seg(2, 1), seg(3, 1)]).unwrap();
    }
    assert_eq!(driver.room(), 0);
}

#[test]
fn batches_of_every_size_take_all() {
    let orders = layouts(&[0, IN_ORDER]);
    for (slots, features) in (0..=9).flat_map(|slots| orders.iter().map(move |&features| (slots, features))) {
        let (_memory, mut driver, mut device) = pair(8, 0, features);
        for i in 0..8 {
            driver.add(&[seg(i, 8)], &[]).unwrap();
        }
        driver.publish();
        let mut batch = Batch::new(slots);
        let mut seen = 0;
        while device.pop(&mut batch, |_, _| false).unwrap() > 0 {
            assert!(batch.chains().len() <= slots.max(1));
            for chain in batch.chains() {
                assert_eq!(batch.readable(chain), [seg(seen, 8)]);
                seen += 1;
            }
        }
        assert_eq!(seen, 8);
    }
}

#[test]
fn a_batch_takes_no_more_than_its_limit() {
    for features in layouts(&[]) {
        let (_memory, mut driver, mut device) = pair(8, 0, features);
        for i in 0..6 {
            driver.add(&[], &[seg(i, 64)]).unwrap();
        }
        driver.publish();
        let mut batch = Batch::new(4);
        let taken = [3, 1, 0, 100].map(|limit| {
            batch.limit(limit);
            device.pop(&mut batch, |_, _| false).unwrap()
        });
        assert_eq!(taken, [3, 1, 1, 1], "the last one was all there was, of a batch of 4");
    }
}

#[test]
fn kicks_are_asked_for_only_while_armed() {
    for features in layouts(&[0, EVENT_IDX, IN_ORDER]) {
        let (_memory, mut driver, mut device) = pair(8, 0, features);
        let mut batch = Batch::new(8);
        let mut push = |device: &mut paravane_ring::device::Queue| {
            driver.add(&[seg(0, 8)], &[]).unwrap();
            let kick = driver.publish();
            device.pop(&mut batch, |_, _| false).unwrap();
            device.complete(batch.chains()[0].head, 0).unwrap();
            device.publish().unwrap();
            driver.pop_used().unwrap().unwrap();
            kick
        };
        assert!(push(&mut device), "born armed");
        device.disable_kicks();
        assert!(!push(&mut device));
        assert!(!push(&mut device));
        assert_eq!(device.arm_kicks(), Ok(false));
        assert!(push(&mut device));
        device.disable_kicks();
        assert!(!push(&mut device));
    }
}

/// One question after several publications covers all of them.
///
/// A device that has gone to sleep meanwhile is woken, and one that is awake is left alone.
#[test]
fn the_question_for_a_kick_can_wait() {
    // Up to five laps, and where 16 bits end; for miri, around one lap and two.
    let before: Vec<u32> =
        if cfg!(miri) { vec![0, 1, 3, 4, 5, 8] } else { (0..=20).chain(65_534..65_537).collect() };
    for features in layouts(&[0, EVENT_IDX, IN_ORDER, IN_ORDER | EVENT_IDX]) {
        let (_memory, mut driver, mut device) = pair(4, 0, features);
        let mut batch = Batch::new(4);
        let mut push = |driver: &mut Queue, device: &mut device::Queue| {
            driver.add(&[seg(0, 8)], &[]).unwrap();
            driver.publish_unasked();
            assert_eq!(device.pop(&mut batch, |_, _| false), Ok(1));
            device.complete(batch.chains()[0].head, 0).unwrap();
            device.publish().unwrap();
            driver.pop_used().unwrap().unwrap();
        };
        for &before in &before {
            assert!(!driver.wants_kick(), "nothing was published");
            device.disable_kicks();
            for _ in 0..before {
                push(&mut driver, &mut device);
            }
            assert_eq!(device.arm_kicks(), Ok(false));
            driver.add(&[seg(0, 8)], &[]).unwrap();
            if before % 2 == 0 {
                driver.publish_unasked();
                assert!(driver.wants_kick(), "{before} before");
            } else {
                assert!(driver.publish(), "{before} before");
            }
            assert!(!driver.wants_kick() && !driver.publish(), "asked already");
            device.disable_kicks();
            driver.add(&[seg(0, 8)], &[]).unwrap();
            driver.publish_unasked();
            assert!(!driver.wants_kick(), "awake");
            let mut batch = Batch::new(2);
            assert_eq!(device.pop(&mut batch, |_, _| false), Ok(2));
            device.complete_all(batch.chains().iter().map(|chain| (chain.head, 0))).unwrap();
            device.publish().unwrap();
            assert_eq!(driver.take_used(&mut [Used::default(); 4]), Ok(2));
        }
    }
}

#[test]
fn arming_kicks_sees_what_came_before() {
    for features in layouts(&[0, EVENT_IDX]) {
        let (_memory, mut driver, mut device) = pair(8, 0, features);
        driver.add(&[seg(0, 8)], &[]).unwrap();
        driver.publish();
        assert_eq!(device.arm_kicks(), Ok(true));
    }
}

#[test]
fn interrupts_are_asked_for_only_while_enabled() {
    for features in layouts(&[0, EVENT_IDX]) {
        let (_memory, mut driver, mut device) = pair(8, 0, features);
        let mut batch = Batch::new(8);
        let mut push = |driver: &mut Queue| {
            driver.add(&[seg(0, 8)], &[]).unwrap();
            driver.publish();
            device.pop(&mut batch, |_, _| false).unwrap();
            device.complete(batch.chains()[0].head, 0).unwrap();
            device.publish().unwrap()
        };
        assert!(push(&mut driver), "born enabled");
        driver.pop_used().unwrap().unwrap();
        driver.disable_interrupts();
        assert!(!push(&mut driver));
        driver.pop_used().unwrap().unwrap();
        let token = driver.enable_interrupts();
        assert!(!driver.poll(token));
        assert!(push(&mut driver));
        assert!(driver.poll(token));
        driver.pop_used().unwrap().unwrap();
        assert!(driver.poll(token), "it was consumed, which is news too");
        driver.disable_interrupts();
        assert!(!push(&mut driver));
    }
}

#[test]
fn the_rings_lie_where_the_transport_is_told() {
    let layout = DriverConfig::new(256, 16, INDIRECT_DESC).unwrap();
    let memory = Memory::new(layout.memory());
    let (_queue, addresses) = Queue::new(layout, memory.dma()).unwrap();
    assert_eq!(addresses.desc, BASE);
    assert!(addresses.driver >= addresses.desc + 16 * 256);
    assert!(addresses.device >= addresses.driver + 6 + 2 * 256);
    assert!(layout.memory() as u64 >= addresses.device - BASE + 6 + 8 * 256 + 256 * 16 * 16);
}
