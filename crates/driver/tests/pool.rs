//! The pool of shared memory.
mod fake;

use fake::Device;
use paravane_driver::{DriverError, Pool};

#[test]
fn pieces_are_aligned_disjoint_and_inside() {
    let (device, _) = Device::disk();
    let memory = device.buffer(0, 16384);
    let mut pool = Pool::new(memory);
    let mut end = memory.addr;
    for (size, align) in [(1, 1), (3, 64), (4096, 4096), (0, 16), (10, 2)] {
        let piece = pool.take(size, align).unwrap();
        assert!(piece.addr.is_multiple_of(align as u64));
        assert!(piece.addr >= end);
        assert_eq!(piece.area.len(), size);
        end = piece.addr + size as u64;
    }
    assert_eq!(pool.free() as u64, memory.addr + 16384 - end);
}

#[test]
fn a_device_behind_an_iommu_is_given_its_own_addresses() {
    let (device, _) = Device::disk();
    let memory = device.buffer(0, 16384);
    let mut pool = Pool::new(memory);
    pool.take(100, 1).unwrap();
    pool.translate(0x7_0000_0000);
    let shared = pool.take(100, 64).unwrap();
    assert!(shared.addr.is_multiple_of(64) && shared.addr >= memory.addr + 0x7_0000_0000 + 100);
    let private = pool.take_private(100, 64).unwrap();
    assert!(private.addr >= memory.addr && private.addr < memory.addr + 16384);
    // The same place as the machine and as the device name it.
    assert_eq!(private.addr + 0x7_0000_0000, (shared.addr + 100).next_multiple_of(64));
    assert!(shared.area.write(0, b"here"));
    let mut found = [0; 4];
    assert!(memory.area.read((shared.addr - 0x7_0000_0000 - memory.addr) as usize, &mut found));
    assert_eq!(&found, b"here");
}

#[test]
fn what_does_not_fit_is_refused_and_takes_nothing() {
    let (device, _) = Device::disk();
    let mut pool = Pool::new(device.buffer(0, 100));
    pool.take(60, 1).unwrap();
    for (size, align) in [(41, 1), (1, 4096), (usize::MAX, 1), (usize::MAX, 4096)] {
        assert_eq!(
            pool.take(size, align).map(|_| ()),
            Err(DriverError::Memory { needed: size, free: 40 }),
            "{size} {align}"
        );
    }
    assert!(pool.take(40, 1).is_ok());
    assert_eq!(pool.free(), 0);
}

#[test]
fn the_end_of_the_address_space_is_no_panic() {
    let (device, _) = Device::disk();
    let mut memory = device.buffer(0, 64);
    memory.addr = u64::MAX - 32;
    let mut pool = Pool::new(memory);
    assert!(pool.take(64, 4096).is_err());
    assert!(pool.take(16, 1).is_ok());
}
