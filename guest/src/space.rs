//! Device memory, through the platform.
use crate::platform::Platform;

/// The device memory of a platform.
pub(crate) struct Space<'p, P>(pub(crate) &'p P);

impl<P> Clone for Space<'_, P> {
    fn clone(&self) -> Self {
        Self(self.0)
    }
}

impl<P: Platform> paravane_driver::Space for Space<'_, P> {
    fn read8(&self, addr: u64) -> u8 {
        self.0.mmio_read8(addr)
    }
    fn read16(&self, addr: u64) -> u16 {
        self.0.mmio_read16(addr)
    }
    fn read32(&self, addr: u64) -> u32 {
        self.0.mmio_read32(addr)
    }
    fn write8(&self, addr: u64, value: u8) {
        self.0.mmio_write8(addr, value);
    }
    fn write16(&self, addr: u64, value: u16) {
        self.0.mmio_write16(addr, value);
    }
    fn write32(&self, addr: u64, value: u32) {
        self.0.mmio_write32(addr, value);
    }
}
