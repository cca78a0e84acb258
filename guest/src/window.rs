//! Devices' registers, seen through the platform.
use crate::Platform;
use paravane_driver::mmio::Registers;
use paravane_driver::pci;

/// The register window at a guest-physical address.
pub(crate) struct Window<'p, P> {
    platform: &'p P,
    base: u64,
    size: u64,
}

impl<'p, P> Window<'p, P> {
    pub(crate) fn new(platform: &'p P, base: u64, size: u64) -> Self {
        Self { platform, base, size }
    }
}

impl<P: Platform> Registers for Window<'_, P> {
    fn read32(&self, offset: u64) -> u32 {
        self.platform.mmio_read32(self.base.wrapping_add(offset))
    }

    fn write32(&self, offset: u64, value: u32) {
        self.platform.mmio_write32(self.base.wrapping_add(offset), value);
    }

    fn read16(&self, offset: u64) -> u16 {
        self.platform.mmio_read16(self.base.wrapping_add(offset))
    }

    fn read8(&self, offset: u64) -> u8 {
        self.platform.mmio_read8(self.base.wrapping_add(offset))
    }

    fn window(&self) -> u64 {
        self.size
    }
}

/// All of what is not RAM, for PCI.
pub(crate) struct Space<'p, P>(pub(crate) &'p P);

impl<P> Clone for Space<'_, P> {
    fn clone(&self) -> Self {
        Self(self.0)
    }
}

impl<P: Platform> pci::Space for Space<'_, P> {
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
