//! The split layout (section 2.7): sizes, shared by both sides.
pub(crate) mod chain;
pub(crate) mod device;
pub(crate) mod driver;

use paravane_spec::split::{AVAIL_ENTRY, AVAIL_RING, DESC_SIZE, USED_ENTRY, USED_RING};

/// Bytes of the descriptor table.
pub(crate) const fn desc_bytes(size: u16) -> usize {
    DESC_SIZE * size as usize
}

/// Bytes of the available ring.
///
/// `used_event` is counted without EVENT_IDX too, as in section 2.7.
pub(crate) const fn avail_bytes(size: u16) -> usize {
    used_event(size) + 2
}

/// Bytes of the used ring.
///
/// `avail_event` is counted without EVENT_IDX too, as in section 2.7.
pub(crate) const fn used_bytes(size: u16) -> usize {
    avail_event(size) + 2
}

/// Offset of `used_event` in the available ring.
pub(crate) const fn used_event(size: u16) -> usize {
    AVAIL_RING + AVAIL_ENTRY * size as usize
}

/// Offset of `avail_event` in the used ring.
pub(crate) const fn avail_event(size: u16) -> usize {
    USED_RING + USED_ENTRY * size as usize
}

/// A descriptor (section 2.7.5).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Descriptor {
    /// The address.
    pub(crate) addr: u64,
    /// The length.
    pub(crate) len: u32,
    /// Flags in the low half, then next.
    pub(crate) rest: u32,
}

impl Descriptor {
    /// Index of the next descriptor, if the flags say that there is one.
    #[inline(always)]
    pub(crate) fn next(self) -> u16 {
        (self.rest >> 16) as u16
    }
}

impl crate::chain::Descriptor for Descriptor {
    #[inline(always)]
    fn addr(self) -> u64 {
        self.addr
    }

    #[inline(always)]
    fn len(self) -> u32 {
        self.len
    }

    #[inline(always)]
    fn flags(self) -> u16 {
        self.rest as u16
    }

    #[inline(always)]
    fn has(self, flags: u16) -> bool {
        self.rest & u32::from(flags) == flags.into()
    }
}

/// A descriptor as two words, of an indirect table, and for the driver.
///
/// It says the same as a [`Descriptor`]. A walk through a table has no register left for a third part;
/// in the ring, where a descriptor is mostly alone, three parts need no shifts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    /// The address.
    pub(crate) addr: u64,
    /// Length in the low half, then flags, then next.
    pub(crate) meta: u64,
}

impl Entry {
    /// Puts one together.
    #[inline(always)]
    pub(crate) fn new(addr: u64, len: u32, flags: u16, next: u16) -> Self {
        Self { addr, meta: u64::from(len) | u64::from(flags) << 32 | u64::from(next) << 48 }
    }

    /// Index of the next descriptor, if the flags say that there is one.
    #[inline(always)]
    pub(crate) fn next(self) -> u16 {
        (self.meta >> 48) as u16
    }
}

impl crate::chain::Descriptor for Entry {
    #[inline(always)]
    fn addr(self) -> u64 {
        self.addr
    }

    #[inline(always)]
    fn len(self) -> u32 {
        self.meta as u32
    }

    #[inline(always)]
    fn flags(self) -> u16 {
        (self.meta >> 32) as u16
    }

    #[inline(always)]
    fn has(self, flags: u16) -> bool {
        let flags = u64::from(flags) << 32;
        self.meta & flags == flags
    }
}
