//! Queues with more than the plain features.
//!
//! Other layouts, notification data, resets of one queue, pollers.
mod fake;

use fake::{Answer, DISK_FEATURES, Device, Lie};
use paravane_driver::blk::{Blk, Done, Request};
use paravane_driver::mmio::Mmio;
use paravane_driver::{DriverError, Pool, Virtio};
use paravane_ring::Segment;
use paravane_ring::driver::Queue;
use paravane_spec::{blk, device_id, feature, mmio};

fn kicks(device: &Device) -> Vec<u32> {
    let state = device.0.borrow();
    state.writes.iter().filter(|(offset, _)| *offset == mmio::QUEUE_NOTIFY).map(|(_, value)| *value).collect()
}

/// A disk works with whatever layout the device offers, and does not know which.
#[test]
fn a_disk_on_every_layout() {
    let bits = [feature::RING_PACKED, feature::IN_ORDER, feature::NOTIFICATION_DATA];
    for set in 0..8 {
        let extra = (0..3).filter(|bit| set >> bit & 1 == 1).map(|bit| bits[bit]).sum::<u64>();
        for ring in
            [extra, extra | feature::INDIRECT_DESC, extra | feature::INDIRECT_DESC | feature::EVENT_IDX]
        {
            let plain = DISK_FEATURES & !(feature::INDIRECT_DESC | feature::EVENT_IDX);
            let (device, mut pool) = Device::new(device_id::BLK, plain | ring);
            let mut disk = Blk::new(device.transport(), 4, &mut pool).unwrap();
            assert_eq!(disk.features() & (extra | ring), ring);
            for round in 0..40u64 {
                let buffers = [0, 1, 2].map(|number| device.buffer(number, 512));
                for (tag, buffer) in (0..).zip(buffers) {
                    assert!(buffer.area.write(0, &[(round + tag) as u8; 512]));
                    assert!(disk.submit(Request::Write { sector: tag, buffer }, tag).unwrap());
                }
                disk.kick();
                device.serve(Answer::Honest);
                for tag in 0..3 {
                    assert_eq!(disk.complete().unwrap(), Some(Done { tag, status: blk::S_OK }));
                }
                assert_eq!(disk.complete().unwrap(), None);
                assert!(disk.submit(Request::Read { sector: 1, buffer: buffers[0] }, 7).unwrap());
                disk.kick();
                device.serve(Answer::Honest);
                assert_eq!(disk.complete().unwrap(), Some(Done { tag: 7, status: blk::S_OK }));
                let mut bytes = [0; 512];
                assert!(buffers[0].area.read(0, &mut bytes));
                assert_eq!(bytes, [(round + 1) as u8; 512]);
            }
            let position = kicks(&device).iter().any(|value| value >> 16 != 0);
            assert_eq!(
                position,
                extra & feature::NOTIFICATION_DATA != 0,
                "the kick says how far the queue is"
            );
        }
    }
}

fn transport(device: &Device, features: u64) -> Virtio<Mmio<Device>> {
    let mut transport = Virtio::probe(device.transport(), device_id::BLK).unwrap();
    assert_eq!(transport.negotiate(features, 0), Ok(features));
    transport
}

fn flush(queue: &mut Queue, device: &Device) {
    let slot = device.buffer(0, 32);
    let mut header = [0; 16];
    header[0] = blk::T_FLUSH as u8;
    assert!(slot.area.write(0, &header));
    queue.add(&[Segment { addr: slot.addr, len: 16 }], &[Segment { addr: slot.addr + 16, len: 1 }]).unwrap();
}

/// Packed: index, then offset and wrap counter; split: the available index.
///
/// {vq_index: 16, next_off: 15, next_wrap: 1} (section 2.9).
#[test]
fn notification_data_names_the_queue_and_the_next_place() {
    let cases = [(0, [1, 2, 3, 4, 5, 6]), (feature::RING_PACKED, [0x8002, 0, 2, 0x8000, 0x8002, 0])];
    for (layout, expected) in cases {
        let features = feature::VERSION_1 | feature::NOTIFICATION_DATA | layout;
        let (device, mut pool) = Device::new(device_id::BLK, features);
        let mut transport = transport(&device, features);
        let mut queue = transport.start_queue(0, 4, 0, &mut pool).unwrap();
        transport.driver_ok().unwrap();
        for _ in expected {
            flush(&mut queue, &device);
            assert!(queue.publish());
            transport.notify(0, &queue);
            transport.notify(3, &queue);
            device.serve(Answer::Honest);
            queue.pop_used().unwrap().unwrap();
        }
        let values = expected.into_iter().flat_map(|next: u32| [next << 16, next << 16 | 3]);
        assert_eq!(kicks(&device), values.collect::<Vec<_>>());
    }
}

/// A queue is reset with requests in flight and starts again, many times.
///
/// On the same memory.
#[test]
fn a_queue_is_reset_and_started_again() {
    for layout in [0, feature::RING_PACKED, feature::IN_ORDER, feature::RING_PACKED | feature::IN_ORDER] {
        let features = feature::VERSION_1 | feature::RING_RESET | feature::EVENT_IDX | layout;
        let (device, mut pool) = Device::new(device_id::BLK, features);
        let mut transport = transport(&device, features);
        let (mut queue, mut poller) = transport.start_polled_queue(0, 8, 0, &mut pool).unwrap();
        transport.driver_ok().unwrap();
        let free = pool.free();
        for round in 0..20 {
            for _ in 0..round % 5 {
                flush(&mut queue, &device);
                queue.publish();
                device.serve(Answer::Honest);
                assert!(queue.pop_used().unwrap().is_some());
            }
            // In flight, used and not taken back, and added only.
            flush(&mut queue, &device);
            queue.publish();
            if round % 2 == 0 {
                device.serve(Answer::Honest);
            }
            flush(&mut queue, &device);
            let token = queue.enable_interrupts();
            let memory = transport.reset_queue(0, queue).unwrap();
            assert!(poller.poll(token), "a poller has news of a queue that is gone");
            assert!(device.0.borrow().ready == 0);
            let size = if round % 3 == 0 { 4 } else { 8 };
            (queue, poller) = transport.start_queue_again(0, size, 0, memory).unwrap();
            assert_eq!((queue.size(), queue.in_flight(), queue.room()), (size, 0, size.into()));
            assert_eq!(queue.pop_used(), Ok(None));
            let token = queue.enable_interrupts();
            assert!(!poller.poll(token));
        }
        assert_eq!(pool.free(), free, "no memory was used up");
    }
}

#[test]
fn a_queue_reset_that_fails() {
    let features = feature::VERSION_1 | feature::RING_RESET;
    for lie in [Lie::QueueResetHangs, Lie::QueueStaysReady] {
        let (device, mut pool) = Device::new(device_id::BLK, features);
        let mut transport = transport(&device, features);
        let queue = transport.start_queue(0, 8, 0, &mut pool).unwrap();
        transport.driver_ok().unwrap();
        device.0.borrow_mut().lie = lie;
        let failed = transport.reset_queue(0, queue).unwrap_err();
        assert_eq!(failed.error, DriverError::QueueReset(0));
        // With the device its memory is free again.
        device.0.borrow_mut().lie = Lie::None;
        let mut transport = self::transport(&device, features);
        let memory = failed.queue.into_memory();
        assert!(transport.start_queue_again(0, 8, 0, memory).is_ok());
    }
}

#[test]
fn a_queue_reset_that_was_not_negotiated() {
    let (device, mut pool): (Device, Pool) = Device::new(device_id::BLK, feature::VERSION_1);
    let mut transport = transport(&device, feature::VERSION_1);
    let mut queue = transport.start_queue(0, 8, 0, &mut pool).unwrap();
    transport.driver_ok().unwrap();
    flush(&mut queue, &device);
    queue.publish();
    let refused = transport.reset_queue(0, queue).unwrap_err();
    assert_eq!(refused.error, DriverError::Features(feature::RING_RESET));
    assert!(!device.0.borrow().writes.iter().any(|(offset, _)| *offset == mmio::QUEUE_RESET));
    // Nothing has happened to the queue.
    let mut queue = refused.queue;
    assert_eq!(queue.in_flight(), 1);
    device.serve(Answer::Honest);
    assert!(queue.pop_used().unwrap().is_some());
    flush(&mut queue, &device);
    queue.publish();
    device.serve(Answer::Honest);
    assert!(queue.pop_used().unwrap().is_some());
}
