//! One contiguous piece of memory that the other side may change at any time.
use core::ptr::NonNull;

/// A piece of shared memory. Copies name the same memory; every access is a volatile or atomic one
/// through a raw pointer, checked against the length, so that no data race is undefined behaviour.
#[derive(Clone, Copy, Debug)]
pub struct Area {
    ptr: NonNull<u8>,
    len: usize,
}

// SAFETY: an Area is only a place; every access through it is atomic.
unsafe impl Send for Area {}
// SAFETY: as above.
unsafe impl Sync for Area {}

impl Area {
    /// Names `len` bytes at `ptr`.
    ///
    /// # Safety
    /// The bytes must stay mapped, readable and writable for as long as any copy of the result, or of a
    /// part of it, is used; Rust references to them must not exist in that time.
    pub const unsafe fn new(ptr: NonNull<u8>, len: usize) -> Self {
        Self { ptr, len }
    }

    /// Length in bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there is nothing.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// First byte.
    #[must_use]
    pub const fn as_ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    /// A part of this area, or `None` if it does not lie inside.
    #[must_use]
    pub fn slice(&self, offset: usize, len: usize) -> Option<Self> {
        let _ = (offset, len);
        todo!()
    }

    /// Copies `out.len()` bytes at `offset` out of the area (relaxed). `false`, and nothing copied, if they do not lie inside.
    #[must_use]
    pub fn read(&self, offset: usize, out: &mut [u8]) -> bool {
        let _ = (offset, out);
        todo!()
    }

    /// Copies `data` into the area at `offset` (relaxed). `false`, and nothing copied, if it does not fit.
    #[must_use]
    pub fn write(&self, offset: usize, data: &[u8]) -> bool {
        let _ = (offset, data);
        todo!()
    }

    /// Reads a little-endian u64 (relaxed), `None` if it is outside or `offset` makes it misaligned.
    #[must_use]
    pub fn load_u64(&self, offset: usize) -> Option<u64> {
        let _ = offset;
        todo!()
    }

    /// Stores a little-endian u64 (relaxed); `false` if it is outside or misaligned.
    #[must_use]
    pub fn store_u64(&self, offset: usize, value: u64) -> bool {
        let _ = (offset, value);
        todo!()
    }
}

/// Memory that a driver shares with a device: an [`Area`], and the address by which the device knows it.
#[derive(Clone, Copy, Debug)]
pub struct DmaArea {
    /// The memory.
    pub area: Area,
    /// Address of its first byte in the device's address space.
    pub addr: u64,
}

impl DmaArea {
    /// A part of it, or `None` if it does not lie inside.
    #[must_use]
    pub fn slice(&self, offset: usize, len: usize) -> Option<Self> {
        Some(Self { area: self.area.slice(offset, len)?, addr: self.addr.checked_add(offset as u64)? })
    }
}
