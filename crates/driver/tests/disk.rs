//! The block driver with an honest device.
mod fake;
#[path = "../examples/polled_blk.rs"]
#[allow(dead_code, unreachable_pub, unused_attributes, reason = "an example; the test uses a part of it")]
mod polled_blk;

use fake::{Answer, Device, SECTORS};
use paravane_driver::DriverError;
use paravane_driver::blk::{Blk, Done, Request};
use paravane_driver::mmio::Mmio;
use paravane_spec::{blk, feature, mmio, status};

/// Submits one request, has it served, and takes the result.
fn one(device: &Device, disk: &mut Blk<Mmio<Device>>, request: Request) -> Result<u8, DriverError> {
    assert!(disk.submit(request, 7)?);
    disk.kick();
    device.serve(Answer::Honest);
    let done = disk.complete()?.expect("it was served");
    assert_eq!(done.tag, 7);
    assert_eq!(disk.complete()?, None);
    Ok(done.status)
}

#[test]
fn set_up_follows_the_order_of_the_specification() {
    let (device, mut pool) = Device::disk();
    let disk = Blk::new(device.transport(), 16, &mut pool).unwrap();
    assert_eq!(disk.capacity(), SECTORS);
    assert_eq!(disk.block_size(), 4096);
    assert!(!disk.read_only());
    assert_eq!(disk.slots(), 16);
    let state = device.0.borrow();
    let statuses: Vec<u32> =
        state.writes.iter().filter(|(offset, _)| *offset == mmio::STATUS).map(|(_, value)| *value).collect();
    let (ack, driver) = (status::ACKNOWLEDGE, status::ACKNOWLEDGE | status::DRIVER);
    let features = driver | status::FEATURES_OK;
    assert_eq!(statuses, [0, ack, driver, features, features | status::DRIVER_OK]);
    let place = |offset| state.writes.iter().position(|&(at, _)| at == offset).unwrap();
    assert!(place(mmio::QUEUE_SEL) < place(mmio::QUEUE_DESC_LOW));
    assert!(place(mmio::QUEUE_DEVICE_HIGH) < place(mmio::QUEUE_READY));
    assert_eq!(state.driver_features, disk.features());
    assert_ne!(disk.features() & feature::EVENT_IDX, 0);
}

#[test]
fn what_is_written_is_read_back() {
    for dropped in
        [0, feature::INDIRECT_DESC, feature::EVENT_IDX, feature::INDIRECT_DESC | feature::EVENT_IDX]
    {
        let (device, mut pool) = Device::disk();
        device.0.borrow_mut().features &= !dropped;
        let mut disk = Blk::new(device.transport(), 4, &mut pool).unwrap();
        let (source, destination) = (device.buffer(0, 2048), device.buffer(1, 2048));
        assert!(source.area.write(0, &[0x5a; 2048]));
        let write = Request::Write { sector: 3, buffer: source };
        assert_eq!(one(&device, &mut disk, write), Ok(blk::S_OK));
        assert_eq!(device.0.borrow().disk[3 * 512..7 * 512], [0x5a; 2048]);
        let read = Request::Read { sector: 3, buffer: destination };
        assert_eq!(one(&device, &mut disk, read), Ok(blk::S_OK));
        let mut data = [0; 2048];
        assert!(destination.area.read(0, &mut data));
        assert_eq!(data, [0x5a; 2048]);
    }
}

#[test]
fn with_version_3_a_reset_may_take_a_while() {
    let (device, mut pool) = Device::disk();
    (device.0.borrow_mut().version, device.0.borrow_mut().slow_reset) = (mmio::VERSION_3, 500_000);
    for round in 0..2 {
        let mut disk = Blk::new(device.transport(), 4, &mut pool).unwrap();
        let buffer = device.buffer(0, 512);
        assert!(buffer.area.write(0, &[round; 512]));
        assert_eq!(one(&device, &mut disk, Request::Write { sector: 0, buffer }), Ok(blk::S_OK));
        assert_eq!(device.0.borrow().disk[..512], [round; 512]);
    }
}

#[test]
fn every_other_request_reaches_the_device() {
    let (device, mut pool) = Device::disk();
    let mut disk = Blk::new(device.transport(), 4, &mut pool).unwrap();
    device.0.borrow_mut().disk.fill(1);
    assert_eq!(one(&device, &mut disk, Request::Flush), Ok(blk::S_OK));
    assert_eq!(one(&device, &mut disk, Request::Discard { sector: 1, sectors: 2 }), Ok(blk::S_OK));
    let zero = Request::WriteZeroes { sector: 5, sectors: 1, unmap: true };
    assert_eq!(one(&device, &mut disk, zero), Ok(blk::S_OK));
    let zeroes = |sector: usize| device.0.borrow().disk[sector * 512..(sector + 1) * 512] == [0; 512];
    let found: Vec<bool> = (0..7).map(zeroes).collect();
    assert_eq!(found, [false, true, true, false, false, true, false]);
    let buffer = device.buffer(0, 32);
    assert_eq!(one(&device, &mut disk, Request::GetId { buffer }), Ok(blk::S_OK));
    let mut id = [0; 11];
    assert!(buffer.area.read(0, &mut id));
    assert_eq!(&id, b"a fake disk");
}

#[test]
fn slots_are_used_up_given_back_and_keep_their_tags() {
    for dropped in [0, feature::INDIRECT_DESC] {
        let (device, mut pool) = Device::disk();
        device.0.borrow_mut().features &= !dropped;
        let mut disk = Blk::new(device.transport(), 5, &mut pool).unwrap();
        for round in 0..100u64 {
            for n in 0..5 {
                let buffer = device.buffer(n as usize, 512);
                assert!(disk.submit(Request::Read { sector: n, buffer }, round * 10 + n).unwrap());
            }
            let buffer = device.buffer(5, 512);
            assert!(!disk.submit(Request::Read { sector: 0, buffer }, 99).unwrap(), "a sixth slot");
            assert_eq!(disk.in_flight(), 5);
            disk.kick();
            device.serve(Answer::Honest);
            let mut tags: Vec<u64> =
                std::iter::from_fn(|| disk.complete().unwrap()).map(|done: Done| done.tag).collect();
            tags.sort_unstable();
            assert_eq!(tags, (0..5).map(|n| round * 10 + n).collect::<Vec<_>>());
            assert_eq!(disk.in_flight(), 0);
        }
    }
}

#[test]
fn a_small_queue_means_fewer_slots() {
    let (device, mut pool) = Device::disk();
    device.0.borrow_mut().queue_max = 8;
    assert_eq!(Blk::new(device.transport(), 64, &mut pool).unwrap().slots(), 8);
    let (device, mut pool) = Device::disk();
    device.0.borrow_mut().queue_max = 8;
    device.0.borrow_mut().features &= !feature::INDIRECT_DESC;
    assert_eq!(Blk::new(device.transport(), 64, &mut pool).unwrap().slots(), 2);
}

#[test]
fn interrupts_come_when_armed_and_only_then() {
    for dropped in [0, feature::EVENT_IDX] {
        let (device, mut pool) = Device::disk();
        device.0.borrow_mut().features &= !dropped;
        let mut disk = Blk::new(device.transport(), 4, &mut pool).unwrap();
        let read = Request::Read { sector: 0, buffer: device.buffer(0, 512) };
        disk.disable_interrupts();
        assert!(disk.submit(read, 0).unwrap());
        assert!(disk.kick());
        assert!(!device.serve(Answer::Honest), "interrupts are off");
        assert!(disk.enable_interrupts(), "something is there: the caller must not sleep");
        assert!(disk.complete().unwrap().is_some());
        assert!(!disk.enable_interrupts());
        assert!(disk.submit(read, 1).unwrap());
        disk.kick();
        assert!(device.serve(Answer::Honest));
        assert_eq!(disk.interrupt(), Ok(mmio::INT_USED_BUFFER));
        assert_eq!(device.0.borrow().acknowledged, mmio::INT_USED_BUFFER);
        assert_eq!(disk.interrupt(), Ok(0));
        assert!(disk.complete().unwrap().is_some());
    }
}

#[test]
fn a_kick_is_written_only_if_the_device_wants_it() {
    let (device, mut pool) = Device::disk();
    let mut disk = Blk::new(device.transport(), 4, &mut pool).unwrap();
    let read = Request::Read { sector: 0, buffer: device.buffer(0, 512) };
    assert!(!disk.kick(), "there is nothing to publish");
    assert!(disk.submit(read, 0).unwrap());
    assert!(disk.kick());
    assert!(disk.submit(read, 1).unwrap());
    assert!(!disk.kick(), "the device has not armed its kicks again");
    assert_eq!(device.0.borrow().kicks, 1);
}

#[test]
fn a_changed_capacity_is_read_at_the_interrupt() {
    let (device, mut pool) = Device::disk();
    let mut disk = Blk::new(device.transport(), 4, &mut pool).unwrap();
    device.change_capacity(64);
    assert_eq!(disk.capacity(), SECTORS);
    assert_eq!(disk.interrupt(), Ok(mmio::INT_CONFIG_CHANGE));
    assert_eq!(disk.capacity(), 64);
}

#[test]
fn an_error_of_the_device_is_a_status_and_not_the_end() {
    let (device, mut pool) = Device::disk();
    let mut disk = Blk::new(device.transport(), 4, &mut pool).unwrap();
    let beyond = Request::Read { sector: SECTORS, buffer: device.buffer(0, 512) };
    assert_eq!(one(&device, &mut disk, beyond), Ok(blk::S_IOERR));
    let inside = Request::Read { sector: 0, buffer: device.buffer(0, 512) };
    assert_eq!(one(&device, &mut disk, inside), Ok(blk::S_OK));
}

#[test]
fn requests_that_cannot_be_are_refused_without_the_device() {
    let (device, mut pool) = Device::disk();
    let missing = blk::F_FLUSH | blk::F_DISCARD | blk::F_WRITE_ZEROES;
    device.0.borrow_mut().features &= !missing;
    let mut disk = Blk::new(device.transport(), 4, &mut pool).unwrap();
    for request in [
        Request::Flush,
        Request::Discard { sector: 0, sectors: 1 },
        Request::WriteZeroes { sector: 0, sectors: 1, unmap: false },
        Request::Read { sector: 0, buffer: device.buffer(0, 0) },
        Request::Read { sector: 0, buffer: device.buffer(0, 511) },
        Request::Write { sector: 0, buffer: device.buffer(0, 513) },
        Request::GetId { buffer: device.buffer(0, 19) },
    ] {
        let refused = disk.submit(request, 0);
        assert!(matches!(refused, Err(DriverError::Request(_))), "{request:?}: {refused:?}");
    }
    assert_eq!(disk.in_flight(), 0);
    // A refusal is no failure of the device: the driver goes on.
    let inside = Request::Read { sector: 0, buffer: device.buffer(0, 512) };
    assert_eq!(one(&device, &mut disk, inside), Ok(blk::S_OK));
}

#[test]
fn ranges_beyond_the_device_s_limits_are_refused() {
    let (device, mut pool) = Device::disk();
    let mut disk = Blk::new(device.transport(), 4, &mut pool).unwrap();
    for request in [
        Request::Discard { sector: 0, sectors: 0 },
        Request::Discard { sector: 0, sectors: 65 },
        Request::WriteZeroes { sector: 0, sectors: 33, unmap: false },
    ] {
        assert!(matches!(disk.submit(request, 0), Err(DriverError::Request(_))), "{request:?}");
    }
}

#[test]
fn a_read_only_disk_is_not_written_to() {
    let (device, mut pool) = Device::disk();
    device.0.borrow_mut().features |= blk::F_RO;
    let mut disk = Blk::new(device.transport(), 4, &mut pool).unwrap();
    assert!(disk.read_only());
    let write = Request::Write { sector: 0, buffer: device.buffer(0, 512) };
    assert!(matches!(disk.submit(write, 0), Err(DriverError::Request(_))));
    assert!(matches!(
        disk.submit(Request::Discard { sector: 0, sectors: 1 }, 0),
        Err(DriverError::Request(_))
    ));
    assert_eq!(one(&device, &mut disk, Request::Flush), Ok(blk::S_OK));
}

#[test]
fn the_polled_example_reads_sectors() {
    let (device, mut pool) = Device::disk();
    {
        let mut state = device.0.borrow_mut();
        state.serves_kicks = true;
        state.disk[3 * 512..5 * 512].fill(0x5a);
    }
    let mut sectors = [0; 1024];
    assert_eq!(polled_blk::read(device.transport(), &mut pool, 3, &mut sectors), Ok(()));
    assert_eq!(sectors, [0x5a; 1024]);
    let beyond = polled_blk::read(device.transport(), &mut pool, SECTORS, &mut sectors);
    assert!(matches!(beyond, Err(DriverError::Request(_))), "{beyond:?}");
}
