//! Writes of a hostile driver to the memory of a split queue.
use arbitrary::{Result, Unstructured};
use paravane_spec::split::{
    AVAIL_ENTRY, AVAIL_FLAGS, AVAIL_IDX, AVAIL_RING, DESC_SIZE, USED_ENTRY, USED_RING,
};
use std::ops::Range;

/// Device address of the first byte of the memory.
pub(crate) const BASE: u64 = 0x1_0000;

/// Offsets of a queue and its buffers in the memory, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rings {
    pub(crate) size: u16,
    pub(crate) desc: usize,
    pub(crate) avail: usize,
    pub(crate) used: usize,
    /// Indirect tables.
    pub(crate) tables: usize,
    /// Buffers.
    pub(crate) data: usize,
    /// End of the memory.
    pub(crate) end: usize,
}

/// Bytes of `Rings::tables`.
const TABLES: usize = 64 * DESC_SIZE;
/// Unused bytes between two parts.
const GAP: usize = 32;

impl Rings {
    pub(crate) fn new(size: u16, data: usize) -> Self {
        let entries = usize::from(size);
        let desc = GAP;
        let avail = desc + entries * DESC_SIZE + GAP;
        let used = (avail + AVAIL_RING + entries * AVAIL_ENTRY + 2 + GAP).next_multiple_of(16);
        let tables = (used + USED_RING + entries * USED_ENTRY + 2 + GAP).next_multiple_of(16);
        let buffers = tables + TABLES + GAP;
        Self { size, desc, avail, used, tables, data: buffers, end: buffers + data }
    }

    /// The range that the device may write.
    pub(crate) fn used_ring(&self) -> Range<usize> {
        self.used..self.used + USED_RING + usize::from(self.size) * USED_ENTRY + 2
    }

    /// Offset of `used_event`.
    pub(crate) fn used_event(&self) -> usize {
        self.avail + AVAIL_RING + usize::from(self.size) * AVAIL_ENTRY
    }

    /// Offset of `avail_event`.
    pub(crate) fn avail_event(&self) -> usize {
        self.used + USED_RING + usize::from(self.size) * USED_ENTRY
    }

    /// One write of the driver: offset and data. `avail_idx` is its current index.
    pub(crate) fn poke(&self, avail_idx: u16, u: &mut Unstructured<'_>) -> Result<(usize, Vec<u8>)> {
        Ok(match u.arbitrary::<u8>()? % 9 {
            0 | 1 => (self.desc + self.index(u)? * DESC_SIZE, self.descriptor(u)?.to_vec()),
            2 => {
                let slot = self.index(u)?;
                (self.avail + AVAIL_RING + slot * AVAIL_ENTRY, self.number(u)?.to_le_bytes().to_vec())
            }
            3 => {
                let idx = avail_idx.wrapping_add(1 + self.index(u)? as u16);
                (self.avail + AVAIL_IDX, idx.to_le_bytes().to_vec())
            }
            4 => (self.avail + AVAIL_IDX, u.arbitrary::<u16>()?.to_le_bytes().to_vec()),
            5 => (self.avail + AVAIL_FLAGS, vec![u.arbitrary()?, 0]),
            6 => (self.used_event(), u.arbitrary::<u16>()?.to_le_bytes().to_vec()),
            7 => {
                let at = usize::from(u.arbitrary::<u8>()?) % (TABLES / DESC_SIZE);
                (self.tables + at * DESC_SIZE, self.descriptor(u)?.to_vec())
            }
            _ => {
                let at = usize::from(u.arbitrary::<u16>()?) % self.end;
                (at, u.arbitrary::<u16>()?.to_le_bytes().to_vec())
            }
        })
    }

    /// An index below the size.
    fn index(&self, u: &mut Unstructured<'_>) -> Result<usize> {
        Ok(usize::from(u.arbitrary::<u8>()?) % usize::from(self.size))
    }

    /// An index that is mostly valid.
    fn number(&self, u: &mut Unstructured<'_>) -> Result<u16> {
        let byte = u.arbitrary::<u8>()?;
        if byte == u8::MAX { u.arbitrary() } else { Ok(u16::from(byte) % (self.size + 1)) }
    }

    fn descriptor(&self, u: &mut Unstructured<'_>) -> Result<[u8; DESC_SIZE]> {
        let addr = match u.arbitrary::<u8>()? % 8 {
            0..4 => BASE + self.data as u64 + u64::from(u.arbitrary::<u16>()?),
            4 | 5 => BASE + (self.tables + usize::from(u.arbitrary::<u8>()? % 64) * DESC_SIZE) as u64,
            6 => u64::MAX - u64::from(u.arbitrary::<u8>()?),
            _ => u.arbitrary()?,
        };
        let len = match u.arbitrary::<u8>()? % 8 {
            0..3 => u32::from(u.arbitrary::<u8>()?),
            3 => u32::from(u.arbitrary::<u8>()?) * 16,
            4 | 5 => u32::from(u.arbitrary::<u8>()?) * 512,
            6 => u32::MAX - u32::from(u.arbitrary::<u8>()?),
            _ => u.arbitrary()?,
        };
        let flags = u16::from(u.arbitrary::<u8>()? % 8);
        let next = self.number(u)?;
        let mut bytes = [0; DESC_SIZE];
        bytes[..8].copy_from_slice(&addr.to_le_bytes());
        bytes[8..12].copy_from_slice(&len.to_le_bytes());
        bytes[12..14].copy_from_slice(&flags.to_le_bytes());
        bytes[14..].copy_from_slice(&next.to_le_bytes());
        Ok(bytes)
    }
}
