//! The registers of a device as a driver in this process reaches them.
use crate::AttachedDevice;
use paravane_driver::mmio::Registers;
use std::time::Duration;

/// Registers of a device behind virtio-mmio, for programs without a guest.
///
/// Each write is an exit: kicks do not pass by ioeventfds.
impl Registers for &AttachedDevice {
    fn read32(&self, offset: u64) -> u32 {
        u32::from_le_bytes(bytes(self, offset))
    }

    fn write32(&self, offset: u64, value: u32) {
        self.write(offset, &value.to_le_bytes());
    }

    fn read16(&self, offset: u64) -> u16 {
        u16::from_le_bytes(bytes(self, offset))
    }

    fn read8(&self, offset: u64) -> u8 {
        u8::from_le_bytes(bytes(self, offset))
    }

    fn pause(&self) {
        std::thread::sleep(Duration::from_micros(10));
    }

    fn window(&self) -> u64 {
        self.window_size()
    }
}

fn bytes<const N: usize>(device: &AttachedDevice, offset: u64) -> [u8; N] {
    let mut data = [0; N];
    device.read(offset, &mut data);
    data
}
