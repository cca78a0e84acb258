//! The entropy driver.
mod fake;

use fake::{Answer, Device};
use paravane_driver::DriverError;
use paravane_driver::mmio::Mmio;
use paravane_driver::rng::Rng;
use paravane_ring::QueueError;
use paravane_spec::{device_id, feature, mmio};

fn source() -> (Device, Rng<Mmio<Device>>) {
    let (device, mut pool) = Device::new(device_id::RNG, feature::VERSION_1 | feature::EVENT_IDX);
    let rng = Rng::new(device.transport(), 256, &mut pool).unwrap();
    (device, rng)
}

#[test]
fn bytes_come_and_are_copied() {
    let (device, mut rng) = source();
    let mut out = [0xff; 256];
    for _ in 0..70 {
        assert_eq!(rng.poll(&mut out), Ok(None));
        assert!(rng.request(100).unwrap());
        device.serve(Answer::Honest);
        assert_eq!(rng.poll(&mut out), Ok(Some(100)));
        assert_eq!(out[..100], std::array::from_fn::<u8, 100, _>(|n| n as u8));
    }
    assert_eq!(out[100..], [0xff; 156]);
}

#[test]
fn a_second_request_and_impossible_lengths_are_refused() {
    let (_device, mut rng) = source();
    assert!(matches!(rng.request(0), Err(DriverError::Request(_))));
    assert!(matches!(rng.request(257), Err(DriverError::Request(_))));
    assert!(rng.request(256).is_ok());
    assert!(matches!(rng.request(1), Err(DriverError::Request(_))));
}

#[test]
fn a_device_that_claims_more_bytes_than_asked_for_is_clamped() {
    let (device, mut rng) = source();
    rng.request(8).unwrap();
    device.forge_used(0, u32::MAX, 1);
    let mut out = [0; 256];
    assert_eq!(rng.poll(&mut out), Ok(Some(8)));
}

#[test]
fn a_short_destination_takes_what_it_holds() {
    let (device, mut rng) = source();
    rng.request(64).unwrap();
    device.serve(Answer::Honest);
    let mut out = [0; 10];
    assert_eq!(rng.poll(&mut out), Ok(Some(10)));
}

#[test]
fn an_answer_to_nothing_latches() {
    let (device, mut rng) = source();
    device.forge_used(0, 8, 1);
    let mut out = [0; 8];
    let error = rng.poll(&mut out).unwrap_err();
    assert!(matches!(error, DriverError::Ring(QueueError::UsedIndex { .. })), "{error:?}");
    assert_eq!(rng.request(8), Err(error));
    assert!(rng.enable_interrupts(), "a caller must not sleep on a driver that has failed");
}

#[test]
fn interrupts_are_acknowledged() {
    let (device, mut rng) = source();
    assert!(!rng.enable_interrupts());
    rng.request(8).unwrap();
    assert!(device.serve(Answer::Honest));
    assert_eq!(rng.interrupt(), Ok(mmio::INT_USED_BUFFER));
    device.ask_for_reset();
    assert_eq!(rng.interrupt(), Err(DriverError::NeedsReset));
    assert_eq!(rng.request(8), Err(DriverError::NeedsReset));
}

#[test]
fn a_disk_is_no_entropy_source() {
    let (device, mut pool) = Device::disk();
    let error = Rng::new(device.transport(), 8, &mut pool).map(|_| ()).unwrap_err();
    assert_eq!(error, DriverError::DeviceId { wanted: device_id::RNG, found: device_id::BLK });
}
