//! One device's registers, seen through the platform.
use crate::Platform;
use paravane_driver::mmio::Registers;

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
