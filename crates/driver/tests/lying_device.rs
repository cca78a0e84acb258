//! A device that lies, one lie a test.
//!
//! The driver reports it, latches, and neither panics nor hangs.
mod fake;

use fake::{Answer, Device, Lie};
use paravane_driver::blk::{Blk, Done, Request};
use paravane_driver::mmio::Mmio;
use paravane_driver::{DriverError, Pool, Virtio};
use paravane_ring::QueueError;
use paravane_spec::{blk, device_id, feature, mmio, status};

/// The error of a set-up that must not succeed.
fn refused(device: &Device, mut pool: Pool) -> DriverError {
    let disk = Mmio::new(device.clone()).and_then(|transport| Blk::new(transport, 4, &mut pool));
    disk.map(|_| ()).unwrap_err()
}

/// A disk with one read of two sectors in flight.
fn reading() -> (Device, Blk<Mmio<Device>>) {
    let (device, mut pool) = Device::disk();
    let mut disk = Blk::new(device.transport(), 4, &mut pool).unwrap();
    let buffer = device.buffer(0, 1024);
    assert!(disk.submit(Request::Read { sector: 0, buffer }, 42).unwrap());
    disk.kick();
    (device, disk)
}

/// The driver has latched `error`: every call says so.
fn assert_latched(device: &Device, disk: &mut Blk<Mmio<Device>>, error: DriverError) {
    assert_eq!(disk.complete(), Err(error));
    assert_eq!(disk.submit(Request::Flush, 0), Err(error));
    assert_eq!(disk.interrupt(), Err(error));
    let kicks = device.0.borrow().kicks;
    assert!(!disk.kick());
    assert_eq!(device.0.borrow().kicks, kicks);
    assert!(disk.enable_interrupts(), "a caller must not sleep on a driver that has failed");
}

#[test]
fn wrong_magic() {
    let (device, pool) = Device::lying(Lie::Magic);
    assert_eq!(refused(&device, pool), DriverError::Magic(0x1234_5678));
    assert!(device.0.borrow().writes.is_empty(), "what is no device is not written to");
}

#[test]
fn wrong_version() {
    for version in [1, 4] {
        let (device, pool) = Device::disk();
        device.0.borrow_mut().version = version;
        assert_eq!(refused(&device, pool), DriverError::Version(version));
        assert!(device.0.borrow().writes.is_empty());
    }
}

#[test]
fn another_device_type_and_none() {
    for found in [device_id::NONE, device_id::NET] {
        let (device, pool) = Device::disk();
        device.0.borrow_mut().device_id = found;
        assert_eq!(refused(&device, pool), DriverError::DeviceId { wanted: device_id::BLK, found });
    }
}

#[test]
fn a_reset_that_never_finishes() {
    let (device, pool) = Device::lying(Lie::NeverResets);
    assert_eq!(refused(&device, pool), DriverError::Reset);
}

#[test]
fn version_1_not_offered() {
    let (device, pool) = Device::disk();
    device.0.borrow_mut().features &= !feature::VERSION_1;
    assert_eq!(refused(&device, pool), DriverError::Features(feature::VERSION_1));
    assert_ne!(device.status() & status::FAILED, 0);
}

#[test]
fn features_refused_after_they_were_offered() {
    let (device, pool) = Device::lying(Lie::RefusesFeatures);
    assert_eq!(refused(&device, pool), DriverError::FeaturesRefused);
    assert_ne!(device.status() & status::FAILED, 0);
}

#[test]
fn every_feature_offered() {
    let (device, mut pool) = Device::disk();
    device.0.borrow_mut().features = u64::MAX;
    let disk = Blk::new(device.transport(), 4, &mut pool).unwrap();
    let refused = feature::ORDER_PLATFORM | feature::RING_RESET | blk::F_MQ;
    assert_eq!(disk.features() & refused, 0, "what the driver does not understand is not accepted");
    // Section 6.1: a driver should accept this one; its addresses are the device's own by
    // construction (`DmaArea`).
    assert_ne!(disk.features() & feature::ACCESS_PLATFORM, 0);
}

#[test]
fn a_configuration_that_never_rests() {
    let (device, pool) = Device::lying(Lie::ConfigKeepsChanging);
    assert_eq!(refused(&device, pool), DriverError::ConfigUnstable);
    assert_ne!(device.status() & status::FAILED, 0);
    let (device, _) = Device::lying(Lie::ConfigKeepsChanging);
    let transport = Virtio::probe(device.transport(), device_id::BLK).unwrap();
    assert_eq!(transport.read_config(0, &mut [0; 24]), Err(DriverError::ConfigUnstable));
}

#[test]
fn a_configuration_that_stops_resting_later() {
    let (device, mut disk) = reading();
    device.0.borrow_mut().lie = Lie::ConfigKeepsChanging;
    device.change_capacity(1);
    assert_eq!(disk.interrupt(), Err(DriverError::ConfigUnstable));
    assert_latched(&device, &mut disk, DriverError::ConfigUnstable);
}

#[test]
fn the_configuration_is_read_whole() {
    let (device, _) = Device::disk();
    let transport = Virtio::probe(device.transport(), device_id::BLK).unwrap();
    let mut bytes = [0xff; 11];
    assert_eq!(transport.read_config(18, &mut bytes), Ok(()));
    assert_eq!(bytes, [0, 0, 0x00, 0x10, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn queue_sizes_from_nothing_to_absurd() {
    for (most, outcome) in [
        (0, Err(DriverError::Queue(0))),
        (1, Err(DriverError::Queue(0))),
        (2, Err(DriverError::Queue(0))),
        (4, Ok(4)),
        (5, Ok(4)),
        (0x1_0000, Ok(16)),
        (u32::MAX, Ok(16)),
    ] {
        let (device, mut pool) = Device::disk();
        device.0.borrow_mut().queue_max = most;
        let slots = Blk::new(device.transport(), 16, &mut pool).map(|disk| disk.slots());
        assert_eq!(slots, outcome, "{most}");
        assert_eq!(device.status() & status::FAILED != 0, outcome.is_err());
    }
}

#[test]
fn a_queue_that_is_in_use_already() {
    let (device, pool) = Device::lying(Lie::QueueAlreadyReady);
    assert_eq!(refused(&device, pool), DriverError::Queue(0));
}

#[test]
fn a_queue_that_does_not_become_ready() {
    let (device, pool) = Device::lying(Lie::QueueDoesNotTakeReady);
    assert_eq!(refused(&device, pool), DriverError::Queue(0));
}

#[test]
fn a_device_that_needs_a_reset_at_once() {
    let (device, pool) = Device::lying(Lie::NeedsResetAtOnce);
    assert_eq!(refused(&device, pool), DriverError::NeedsReset);
}

#[test]
fn a_device_that_needs_a_reset_later() {
    let (device, mut disk) = reading();
    device.ask_for_reset();
    assert_eq!(disk.interrupt(), Err(DriverError::NeedsReset));
    assert_latched(&device, &mut disk, DriverError::NeedsReset);
}

#[test]
fn too_little_memory() {
    let mut outcomes = Vec::new();
    for len in (0..=4096).step_by(64) {
        let (device, _) = Device::disk();
        let mut tiny = Pool::new(device.buffer(0, len));
        let made = Blk::new(device.transport(), 16, &mut tiny).map(|_| ());
        assert_eq!(device.status() & status::FAILED != 0, made.is_err());
        assert!(matches!(made, Ok(()) | Err(DriverError::Memory { .. })), "{len}: {made:?}");
        outcomes.push(made.is_ok());
    }
    assert!(outcomes.is_sorted(), "more memory never does worse");
    assert_eq!((outcomes[0], outcomes[64]), (false, true));
}

#[test]
fn a_status_that_does_not_exist() {
    let (device, mut disk) = reading();
    device.serve(Answer::Status(77));
    assert_eq!(disk.complete(), Ok(Some(Done { tag: 42, status: 77 })));
}

#[test]
fn a_status_that_is_not_written() {
    let (device, mut disk) = reading();
    device.serve(Answer::NoStatus);
    assert_eq!(disk.complete(), Ok(Some(Done { tag: 42, status: 0xff })));
}

#[test]
fn ok_with_too_little_written() {
    for len in [0, 1, 1024] {
        let (device, mut disk) = reading();
        device.serve(Answer::Length(len));
        let error = DriverError::ShortAnswer { expected: 1025, len };
        assert_eq!(disk.complete(), Err(error));
        assert_latched(&device, &mut disk, error);
    }
}

#[test]
fn ok_with_more_written_than_there_is_room() {
    let (device, mut disk) = reading();
    device.serve(Answer::Length(u32::MAX));
    assert_eq!(disk.complete(), Ok(Some(Done { tag: 42, status: blk::S_OK })));
}

#[test]
fn a_used_identifier_outside_the_queue() {
    for id in [4, 0xffff, 0x1_0000, u32::MAX] {
        let (device, mut disk) = reading();
        device.forge_used(id, 1, 1);
        let error = disk.complete().unwrap_err();
        assert!(matches!(error, DriverError::Ring(QueueError::DescIndex { .. })), "{id}: {error:?}");
        assert_latched(&device, &mut disk, error);
    }
}

#[test]
fn a_used_identifier_that_is_not_in_flight() {
    let (device, mut disk) = reading();
    device.forge_used(3, 1, 1);
    let error = disk.complete().unwrap_err();
    assert_eq!(error, DriverError::Ring(QueueError::NotInFlight { id: 3 }));
    assert_latched(&device, &mut disk, error);
}

#[test]
fn the_same_request_completed_twice() {
    let (device, mut disk) = reading();
    let buffer = device.buffer(1, 512);
    assert!(disk.submit(Request::Read { sector: 1, buffer }, 43).unwrap());
    disk.kick();
    device.forge_used(0, 1025, 1);
    device.forge_used(0, 1025, 1);
    // The first answer is believed as far as it goes: no status was written.
    assert_eq!(disk.complete(), Ok(Some(Done { tag: 42, status: 0xff })));
    let error = disk.complete().unwrap_err();
    assert_eq!(error, DriverError::Ring(QueueError::NotInFlight { id: 0 }));
    assert_latched(&device, &mut disk, error);
}

#[test]
fn a_used_index_that_jumps_ahead_or_back() {
    for step in [2, 100, 0x8000, 0xffff] {
        let (device, mut disk) = reading();
        device.forge_used(0, 1, step);
        let error = disk.complete().unwrap_err();
        assert!(matches!(error, DriverError::Ring(QueueError::UsedIndex { .. })), "{step}: {error:?}");
        assert_latched(&device, &mut disk, error);
    }
}

#[test]
fn interrupt_causes_that_do_not_exist() {
    let (device, mut disk) = reading();
    device.0.borrow_mut().interrupt = 0xffff_fffc;
    assert_eq!(disk.interrupt(), Ok(0));
    assert_eq!(device.0.borrow().acknowledged & !(mmio::INT_USED_BUFFER | mmio::INT_CONFIG_CHANGE), 0);
}
