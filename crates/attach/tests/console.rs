//! A console behind virtio-mmio, with the driver of `paravane-driver` in the same process.
use paravane_attach::{AttachedDevice, InterruptFn};
use paravane_device::console::{BUFFER, BackEnd, Console, Window};
use paravane_dma::{Backing, Memory, Region, RegionConfig};
use paravane_driver::console::{Console as Driver, ConsoleOptions};
use paravane_driver::mmio::Mmio;
use paravane_driver::{Area, DmaArea, Pool};
use paravane_test_support::patience;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Instant;

const BASE: u64 = 0x4000_0000;
const SIZE: usize = 1 << 20;

/// Bytes that tell where they belong.
fn numbered(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at ^ (at >> 8) ^ (at >> 16)) as u8).collect()
}

#[test]
fn bytes_pass_both_ways_and_drivers_come_and_go() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("console.sock");
    let back_end = BackEnd::Socket(UnixListener::bind(&path).unwrap());
    let console = Console::new(back_end, Some(Window { columns: 132, rows: 43 }), BUFFER).unwrap();
    let region =
        Region::new(RegionConfig { gpa: BASE, size: SIZE as u64, backing: Backing::Pages, writable: true })
            .unwrap();
    let memory = Memory::new(vec![region.clone()]).unwrap();
    let device = AttachedDevice::builder(Box::new(console), &memory)
        .mmio(0xd000_0000, InterruptFn::new(|| ()))
        .unwrap();
    let client = UnixStream::connect(&path).unwrap();
    client.set_read_timeout(Some(patience())).unwrap();
    for round in 0..3 {
        // SAFETY: the region outlives the driver, and nobody makes references to its bytes.
        let area = unsafe { Area::new(region.host(), SIZE) };
        let mut pool = Pool::new(DmaArea { area, addr: BASE });
        let options = ConsoleOptions { slots: 3, slot: 100 };
        let mut driver = Driver::new(Mmio::new(&device).unwrap(), options, &mut pool).unwrap();
        assert_eq!(driver.window(), Some((132, 43)));
        let (sent, mut echoed) = (numbered(100_000 + round), Vec::<u8>::new());
        let mut far = client.try_clone().unwrap();
        let expected = sent.len();
        let echo = std::thread::spawn(move || {
            let mut all = vec![0; expected];
            far.read_exact(&mut all).unwrap();
            far.write_all(&all).unwrap();
        });
        let (start, mut written) = (Instant::now(), 0);
        while echoed.len() < sent.len() {
            written += driver.write(&sent[written..]).unwrap();
            let mut bytes = [0; 333];
            let read = driver.read(&mut bytes).unwrap();
            echoed.extend(&bytes[..read]);
            assert!(start.elapsed() < patience(), "{} of {} bytes", echoed.len(), sent.len());
            std::thread::yield_now();
        }
        echo.join().unwrap();
        assert!(echoed == sent, "round {round}");
        assert_eq!(device.counters().faults(), []);
    }
}
