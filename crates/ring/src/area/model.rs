//! Areas in the memory of the loom model checker: an array of 16-bit cells. Wider accesses are several
//! relaxed ones, so they may tear, which real hardware does not do: the model is the more hostile.
use alloc::boxed::Box;
use loom::sync::atomic::AtomicU16;
use loom::sync::atomic::Ordering::{self, Acquire, Relaxed, Release};

pub(crate) use loom::sync::atomic::fence;

/// A piece of modelled memory. Offsets and lengths are in bytes, and even.
#[derive(Clone, Copy, Debug)]
pub struct Area {
    cells: &'static [AtomicU16],
}

impl Area {
    /// `len` zero bytes. They are leaked: a model's queues are small and its executions end with the process.
    #[must_use]
    pub fn model(len: usize) -> Self {
        let cells: Box<[AtomicU16]> = (0..len.div_ceil(2)).map(|_| AtomicU16::new(0)).collect();
        Self { cells: Box::leak(cells) }
    }

    /// Length in bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.cells.len() * 2
    }

    /// Whether there is nothing.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.cells.is_empty()
    }

    /// A part of this area, or `None` if it does not lie inside.
    #[must_use]
    pub fn slice(&self, offset: usize, len: usize) -> Option<Self> {
        assert!(offset.is_multiple_of(2) && len.is_multiple_of(2), "modelled memory has 16-bit cells");
        Some(Self { cells: self.cells.get(offset / 2..offset.checked_add(len)? / 2)? })
    }

    /// Copies `out.len()` bytes at `offset` out of the area (relaxed). `false`, and nothing copied, if they do not lie inside.
    #[must_use]
    pub fn read(&self, offset: usize, out: &mut [u8]) -> bool {
        let Some(part) = self.slice(offset, out.len()) else { return false };
        for (cell, bytes) in part.cells.iter().zip(out.chunks_exact_mut(2)) {
            bytes.copy_from_slice(&cell.load(Relaxed).to_le_bytes());
        }
        true
    }

    /// Copies `data` into the area at `offset` (relaxed). `false`, and nothing copied, if it does not fit.
    #[must_use]
    pub fn write(&self, offset: usize, data: &[u8]) -> bool {
        let Some(part) = self.slice(offset, data.len()) else { return false };
        for (cell, bytes) in part.cells.iter().zip(data.as_chunks::<2>().0) {
            cell.store(u16::from_le_bytes(*bytes), Relaxed);
        }
        true
    }

    /// Nothing to do: a queue is laid out in fresh cells, and every store would cost the model a step.
    pub(crate) fn zero(&self) {}

    /// Modelled memory has no addresses; it is aligned to whatever is asked for.
    pub(crate) fn is_aligned(&self, _align: usize) -> bool {
        true
    }

    /// The memory for code that has checked its offsets once and for all; here they are checked again.
    pub(crate) fn cells(&self) -> Cells {
        Cells { cells: self.cells }
    }
}

/// As the real ones, over the model's cells. The functions are unsafe for the sake of the same signatures.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cells {
    cells: &'static [AtomicU16],
}

impl Cells {
    /// # Safety
    /// None is needed.
    pub(crate) unsafe fn offset(self, offset: usize) -> Self {
        Self { cells: &self.cells[offset / 2..] }
    }

    /// # Safety
    /// None is needed.
    pub(crate) unsafe fn load_u16(self, offset: usize, order: Ordering) -> u16 {
        self.cells[offset / 2].load(order)
    }

    /// # Safety
    /// None is needed.
    pub(crate) unsafe fn store_u16(self, offset: usize, value: u16, order: Ordering) {
        self.cells[offset / 2].store(value, order);
    }

    /// # Safety
    /// None is needed.
    pub(crate) unsafe fn load_u32(self, offset: usize) -> u32 {
        (0..2).fold(0, |value, i| value | u32::from(self.cells[offset / 2 + i].load(Relaxed)) << (16 * i))
    }

    /// # Safety
    /// None is needed.
    pub(crate) unsafe fn store_u32(self, offset: usize, value: u32) {
        for i in 0..2 {
            self.cells[offset / 2 + i].store((value >> (16 * i)) as u16, Relaxed);
        }
    }

    /// # Safety
    /// None is needed.
    pub(crate) unsafe fn load_u64(self, offset: usize) -> u64 {
        (0..4).fold(0, |value, i| value | u64::from(self.cells[offset / 2 + i].load(Relaxed)) << (16 * i))
    }

    /// The last cell first, with acquire: it holds what is waited for (a packed descriptor's flags). The rest
    /// may then be older or newer than it only as far as that permits.
    ///
    /// # Safety
    /// None is needed.
    pub(crate) unsafe fn load_u64_acquire(self, offset: usize) -> u64 {
        let last = self.cells[offset / 2 + 3].load(Acquire);
        (0..3).fold(u64::from(last) << 48, |value, i| {
            value | u64::from(self.cells[offset / 2 + i].load(Relaxed)) << (16 * i)
        })
    }

    /// The last cell last, with release.
    ///
    /// # Safety
    /// None is needed.
    pub(crate) unsafe fn store_u64_release(self, offset: usize, value: u64) {
        for i in 0..3 {
            self.cells[offset / 2 + i].store((value >> (16 * i)) as u16, Relaxed);
        }
        self.cells[offset / 2 + 3].store((value >> 48) as u16, Release);
    }

    /// # Safety
    /// None is needed.
    pub(crate) unsafe fn store_u64(self, offset: usize, value: u64) {
        for i in 0..4 {
            self.cells[offset / 2 + i].store((value >> (16 * i)) as u16, Relaxed);
        }
    }
}
