//! Starts of queues.
use super::*;
use paravane_dma::DmaFault;
use paravane_dma::{Backing, Memory, Region, RegionConfig};
use paravane_spec::feature;

const BASE: u64 = 0x10_0000;
const SIZE: u64 = 0x1_0000;
const READ_ONLY: u64 = BASE + SIZE;

/// One region to write to and, right behind it, one to read only.
fn memory() -> Memory {
    let region = |gpa, writable| {
        Region::new(RegionConfig { gpa, size: SIZE, backing: Backing::Pages, writable }).unwrap()
    };
    Memory::new(vec![region(BASE, true), region(READ_ONLY, false)]).unwrap()
}

fn good() -> QueueAddresses {
    QueueAddresses { size: 16, desc: BASE, driver: BASE + 0x1000, device: BASE + 0x2000 }
}

fn start(addresses: QueueAddresses) -> Result<MappedQueue, StartError> {
    MappedQueue::start(addresses, 64, feature::VERSION_1, memory().handle())
}

#[test]
fn a_good_queue_starts_and_outlives_the_machines_memory() {
    let mut queue = start(good()).unwrap();
    // `memory()` has been dropped; the rings are still there.
    let mut batch = queue.begin_batch();
    assert_eq!(batch.queue.size(), 16);
    assert_eq!(batch.pop(), Ok(0));
    assert_eq!(batch.queue.publish(), Ok(false));
    assert_eq!(batch.queue.arm_kicks(), Ok(false));
    assert_eq!(batch.queue.in_flight(), 0);
    drop(batch);
    assert_eq!(queue.queue().error(), None);
}

#[test]
fn a_queue_that_was_swapped_keeps_its_memory() {
    let (mut first, mut second) = (start(good()).unwrap(), start(good()).unwrap());
    std::mem::swap(first.begin_batch().queue, second.begin_batch().queue);
    drop(second);
    // Its own areas went with `second`'s memory, unless the queue keeps them.
    let mut batch = first.begin_batch();
    assert_eq!(batch.pop(), Ok(0));
    assert_eq!(batch.queue.arm_kicks(), Ok(false));
}

#[test]
fn a_queue_rests_and_goes_on_where_it_is_told() {
    let memory = memory();
    let started = MappedQueue::start(good(), 64, feature::VERSION_1, memory.handle()).unwrap();
    let parked = started.park().unwrap();
    assert_eq!(parked.state(), State::Split { avail: 0 });
    // The whole of the used ring and the event index behind it.
    assert_eq!(parked.areas().map(|area| area.len), [256, 38, 134]);
    // As if another had served four buffers.
    let mut handle = memory.handle();
    for at in [BASE + 0x1002, BASE + 0x2002] {
        handle.enter().write_obj(at, &4_u16, Access::WRITE).unwrap();
    }
    let resumed = parked.resume(State::Split { avail: 4 }).unwrap();
    assert_eq!(resumed.park().unwrap().state(), State::Split { avail: 4 });
    // A position that the ring does not show is not believed.
    let resumed = MappedQueue::resume(
        good(),
        64,
        feature::VERSION_1,
        memory.handle(),
        Some(State::Split { avail: 9 }),
        None,
    );
    assert!(matches!(resumed, Err(StartError::State(_))), "{resumed:?}");
}

#[test]
fn a_ring_outside_memory_does_not_start() {
    for (part, addresses) in [
        ("desc", QueueAddresses { desc: 0, ..good() }),
        ("driver", QueueAddresses { driver: BASE - 0x1000, ..good() }),
        ("device", QueueAddresses { device: READ_ONLY + SIZE, ..good() }),
        ("desc", QueueAddresses { desc: READ_ONLY + SIZE - 16, ..good() }),
    ] {
        let error = start(addresses).unwrap_err();
        assert!(matches!(error, StartError::Memory { .. }), "{part}: {error}");
    }
}

#[test]
fn only_the_device_area_must_be_writable() {
    let read_only = QueueAddresses { desc: READ_ONLY, driver: READ_ONLY + 0x1000, ..good() };
    assert!(start(read_only).is_ok());
    let error = start(QueueAddresses { device: READ_ONLY, ..good() }).unwrap_err();
    assert!(
        matches!(error, StartError::Memory { source: DmaError { fault: DmaFault::Denied(_), .. }, .. }),
        "{error}"
    );
}

#[test]
fn a_ring_across_two_regions_does_not_start() {
    let error = start(QueueAddresses { desc: READ_ONLY - 64, ..good() }).unwrap_err();
    assert!(
        matches!(error, StartError::Memory { source: DmaError { fault: DmaFault::NotContiguous, .. }, .. }),
        "{error}"
    );
}

#[test]
fn a_bad_configuration_does_not_start() {
    for addresses in [
        QueueAddresses { size: 0, ..good() },
        QueueAddresses { size: 12, ..good() },
        QueueAddresses { size: 128, ..good() },
        QueueAddresses { desc: BASE + 8, ..good() },
        QueueAddresses { device: BASE + 0x2001, ..good() },
        QueueAddresses { driver: u64::MAX - 1, ..good() },
    ] {
        let error = start(addresses).unwrap_err();
        assert!(matches!(error, StartError::Config(_)), "{error}");
    }
}
