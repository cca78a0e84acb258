//! Guest memory for tests: one block, at device addresses from [`BASE`] on.
#![allow(dead_code, reason = "each test uses its part")]
use paravane_ring::device::{self, QueueConfig};
use paravane_ring::{Area, DmaArea, QueueAddresses};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

/// Device address of the first byte.
pub(crate) const BASE: u64 = 0x4000_0000;
const ALIGN: usize = 4096;

/// The block.
pub(crate) struct Memory {
    ptr: NonNull<u8>,
    layout: Layout,
}

impl Memory {
    /// `len` zero bytes, page-aligned.
    pub(crate) fn new(len: usize) -> Self {
        let layout = Layout::from_size_align(len.max(1), ALIGN).unwrap();
        // SAFETY: the layout has at least one byte.
        let ptr = NonNull::new(unsafe { alloc_zeroed(layout) }).expect("out of memory");
        Self { ptr, layout }
    }

    /// All of it, as the driver knows it.
    pub(crate) fn dma(&self) -> DmaArea {
        // SAFETY: every test keeps the block until its queues are gone, and takes no references to
        // it.
        DmaArea { area: unsafe { Area::new(self.ptr, self.layout.size()) }, addr: BASE }
    }

    /// `len` bytes at a device address.
    pub(crate) fn at(&self, addr: u64, len: usize) -> Option<Area> {
        self.dma().area.slice(usize::try_from(addr.checked_sub(BASE)?).ok()?, len)
    }

    /// Copies out of the block, as a device's `fetch` does.
    pub(crate) fn fetch(&self, addr: u64, out: &mut [u8]) -> bool {
        self.at(addr, out.len()).is_some_and(|area| area.read(0, out))
    }

    /// Writes a little-endian value of up to 8 bytes at a device address.
    pub(crate) fn put(&self, addr: u64, len: usize, value: u64) {
        assert!(self.at(addr, len).unwrap().write(0, &value.to_le_bytes()[..len]));
    }

    /// Reads a little-endian value of up to 8 bytes at a device address.
    pub(crate) fn get(&self, addr: u64, len: usize) -> u64 {
        let mut bytes = [0; 8];
        assert!(self.at(addr, len).unwrap().read(0, &mut bytes[..len]));
        u64::from_le_bytes(bytes)
    }

    /// Activates the device side of the queue at `addresses`.
    pub(crate) fn activate(&self, addresses: QueueAddresses, features: u64) -> device::Queue {
        let config = QueueConfig::new(addresses, 32768, features).unwrap();
        let [desc, driver, device] = config.areas().map(|area| self.at(area.addr, area.len).unwrap());
        // SAFETY: the areas are the ones that were asked for; the block outlives the queue in every
        // test.
        unsafe { config.activate(desc, driver, device) }.unwrap()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.ptr.as_ptr(), self.layout) };
    }
}
