//! The guest's view of physical addresses, for tests that drive devices.
use crate::machine::bus::Bus;
use paravane_attach::LocalIoEventFds;
use paravane_driver::pci::Space;
use std::sync::Arc;

/// Reads and writes are the bus's, but for kicks that an ioeventfd catches.
#[derive(Clone)]
pub(crate) struct Addresses {
    pub(crate) bus: Arc<Bus>,
    pub(crate) fds: Arc<LocalIoEventFds>,
}

impl Addresses {
    fn read<const N: usize>(&self, addr: u64) -> [u8; N] {
        let mut data = [0; N];
        self.bus.read(addr, &mut data);
        data
    }

    fn write<const N: usize>(&self, addr: u64, data: [u8; N]) {
        if !self.fds.signal(addr, &data) {
            assert!(self.bus.write(addr, &data).is_none());
        }
    }
}

impl Space for Addresses {
    fn read8(&self, addr: u64) -> u8 {
        u8::from_le_bytes(self.read(addr))
    }
    fn read16(&self, addr: u64) -> u16 {
        u16::from_le_bytes(self.read(addr))
    }
    fn read32(&self, addr: u64) -> u32 {
        u32::from_le_bytes(self.read(addr))
    }
    fn write8(&self, addr: u64, value: u8) {
        self.write(addr, value.to_le_bytes());
    }
    fn write16(&self, addr: u64, value: u16) {
        self.write(addr, value.to_le_bytes());
    }
    fn write32(&self, addr: u64, value: u32) {
        self.write(addr, value.to_le_bytes());
    }
}
