//! Areas in the memory of the loom model checker.
//!
//! What is accessed with one instruction must not be seen in parts, and what is not must not be
//! ordered by lying in one cell. So there are two kinds of memory:
//!
//! * [`Area::halves`]: cells of 16 bits, as large as a split ring's indices and entries. Wider
//!   accesses are several relaxed ones, and may tear, which real hardware does not do: a split ring
//!   promises nothing there.
//! * [`Area::words`]: cells of 64 bits, as large as half a descriptor, which a packed ring takes
//!   whole.
//!
//! # What would not be explored
//! The checker runs an access earlier if the last access to the same cell conflicts with it: that
//! one alone. A thread that loads a cell and then stores to it, as both sides of a packed ring do,
//! hides behind its own load that another thread had loaded the cell before: the store is never
//! tried before that load, and a model may come down to a single execution. So each load comes with
//! a store to a cell that no thread loads. That orders nothing, and conflicts with every other
//! load.
//!
//! # Barriers
//! In [`Area::barriers_only`] every access is relaxed, whatever the ring asks for: order comes from
//! barriers alone. So a model can see whether each barrier towards hardware ([`crate::Platform`])
//! stands, and stands at its place; elsewhere the acquire or the release of the access beside it
//! would stand in for it.
use alloc::boxed::Box;
use loom::sync::atomic::Ordering::{self, Acquire, Relaxed, Release};
use loom::sync::atomic::{AtomicU16, AtomicU64};

pub(crate) use loom::sync::atomic::fence;

/// A piece of modelled memory.
///
/// It is leaked: a model's queues are small, and its executions end with the process.
#[derive(Clone, Copy, Debug)]
pub struct Area {
    cells: Cells,
    len: usize,
}

impl Area {
    /// `len` zero bytes in cells of 16 bits.
    #[must_use]
    pub fn halves(len: usize) -> Self {
        let cells: Box<[_]> = (0..len.div_ceil(2)).map(|_| Cell::of(AtomicU16::new(0))).collect();
        Self::new(Memory::Halves(Box::leak(cells)), len)
    }

    /// `len` zero bytes in cells of 64 bits.
    #[must_use]
    pub fn words(len: usize) -> Self {
        let cells: Box<[_]> = (0..len.div_ceil(8)).map(|_| Cell::of(AtomicU64::new(0))).collect();
        Self::new(Memory::Words(Box::leak(cells)), len)
    }

    fn new(memory: Memory, len: usize) -> Self {
        Self { cells: Cells { memory, start: 0, acquire: Acquire, release: Release }, len }
    }

    /// The same memory, but only barriers order anything.
    #[must_use]
    pub fn barriers_only(self) -> Self {
        Self { cells: Cells { acquire: Relaxed, release: Relaxed, ..self.cells }, ..self }
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

    /// A part of this area, or `None` if it does not lie inside.
    #[must_use]
    pub fn slice(&self, offset: usize, len: usize) -> Option<Self> {
        let start = self.cells.start + offset;
        (offset.checked_add(len)? <= self.len).then(|| Self { cells: Cells { start, ..self.cells }, len })
    }

    /// Copies `out.len()` bytes at `offset` out of the area (relaxed).
    ///
    /// Both are even. Returns `false`, and copies nothing, if they do not lie inside.
    #[must_use]
    pub fn read(&self, offset: usize, out: &mut [u8]) -> bool {
        let Some(part) = self.slice(offset, out.len()) else { return false };
        for (at, bytes) in (0..).step_by(2).zip(out.chunks_exact_mut(2)) {
            bytes.copy_from_slice(&part.cells.load(at, 2, Relaxed).to_le_bytes()[..2]);
        }
        true
    }

    /// Copies `data` into the area at `offset` (relaxed), both of them even.
    ///
    /// `false`, and nothing copied, if it does not fit.
    #[must_use]
    pub fn write(&self, offset: usize, data: &[u8]) -> bool {
        let Some(part) = self.slice(offset, data.len()) else { return false };
        for (at, bytes) in (0..).step_by(2).zip(data.as_chunks::<2>().0) {
            part.cells.store(at, 2, u16::from_le_bytes(*bytes).into(), Relaxed);
        }
        true
    }

    /// Does nothing.
    ///
    /// A queue is laid out in fresh cells, and every store would cost the model a step.
    pub(crate) fn zero(&self) {}

    /// Modelled memory has no addresses; it is aligned to whatever is asked for.
    pub(crate) fn is_aligned(&self, _align: usize) -> bool {
        true
    }

    /// The memory for code that has checked its offsets.
    ///
    /// Here they are checked again.
    pub(crate) fn cells(&self) -> Cells {
        self.cells
    }
}

/// A cell, and where loads of it announce themselves.
#[derive(Debug)]
struct Cell<T> {
    value: T,
    loads: AtomicU16,
}

impl<T> Cell<T> {
    fn of(value: T) -> Self {
        Self { value, loads: AtomicU16::new(0) }
    }

    /// To be loaded.
    fn to_load(&self) -> &T {
        self.loads.store(0, Relaxed);
        &self.value
    }
}

#[derive(Clone, Copy, Debug)]
enum Memory {
    Halves(&'static [Cell<AtomicU16>]),
    Words(&'static [Cell<AtomicU64>]),
}

/// As the real ones, over the model's cells.
///
/// The functions are unsafe for the sake of the same signatures.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cells {
    memory: Memory,
    /// Offset of the first byte.
    start: usize,
    /// Order of an acquire load.
    acquire: Ordering,
    /// Order of a release store.
    release: Ordering,
}

impl Cells {
    /// `len` bytes at `offset`.
    ///
    /// In several cells, the last one is loaded first, with `order`: it may hold what is waited
    /// for, and the rest may then be older or newer only as far as that permits.
    fn load(self, offset: usize, len: usize, order: Ordering) -> u64 {
        let at = self.start + offset;
        match self.memory {
            Memory::Halves(cells) => {
                let last = at / 2 + len / 2 - 1;
                let high = u64::from(cells[last].to_load().load(order)) << (8 * len - 16);
                (0..len / 2 - 1).fold(high, |value, i| {
                    value | u64::from(cells[at / 2 + i].to_load().load(Relaxed)) << (16 * i)
                })
            }
            Memory::Words(cells) => (cells[at / 8].to_load().load(order) >> shift(at, len)) & mask(len),
        }
    }

    /// Stores `len` bytes at `offset`.
    ///
    /// In several cells, the last one is stored last, with `order`.
    fn store(self, offset: usize, len: usize, value: u64, order: Ordering) {
        let at = self.start + offset;
        match self.memory {
            Memory::Halves(cells) => {
                for i in 0..len / 2 {
                    let order = if i == len / 2 - 1 { order } else { Relaxed };
                    cells[at / 2 + i].value.store((value >> (16 * i)) as u16, order);
                }
            }
            Memory::Words(cells) if len == 8 => cells[at / 8].value.store(value << shift(at, len), order),
            Memory::Words(cells) => {
                let (shift, mask) = (shift(at, len), mask(len));
                let store = |word| Some(word & !(mask << shift) | value << shift);
                cells[at / 8].value.fetch_update(order, Relaxed, store).expect("it always stores");
            }
        }
    }

    /// # Safety
    /// None is needed.
    pub(crate) unsafe fn offset(self, offset: usize) -> Self {
        Self { start: self.start + offset, ..self }
    }

    /// # Safety
    /// None is needed.
    pub(crate) unsafe fn back(self, offset: isize) -> Self {
        Self { start: self.start.strict_add_signed(offset), ..self }
    }

    /// Nothing: a hint orders nothing.
    pub(crate) fn expect_write(self, _offset: isize, _len: usize) {}

    /// # Safety
    /// None is needed.
    pub(crate) unsafe fn load_u16(self, offset: usize, order: Ordering) -> u16 {
        self.load(offset, 2, if order == Acquire { self.acquire } else { order }) as u16
    }

    /// # Safety
    /// None is needed.
    pub(crate) unsafe fn store_u16(self, offset: usize, value: u16, order: Ordering) {
        self.store(offset, 2, value.into(), if order == Release { self.release } else { order });
    }

    /// # Safety
    /// None is needed.
    pub(crate) unsafe fn load_u32(self, offset: usize) -> u32 {
        self.load(offset, 4, Relaxed) as u32
    }

    /// # Safety
    /// None is needed.
    pub(crate) unsafe fn store_u32(self, offset: usize, value: u32) {
        self.store(offset, 4, value.into(), Relaxed);
    }

    /// # Safety
    /// None is needed.
    pub(crate) unsafe fn load_u64(self, offset: usize) -> u64 {
        self.load(offset, 8, Relaxed)
    }

    /// # Safety
    /// None is needed.
    pub(crate) unsafe fn load_u64_acquire(self, offset: usize) -> u64 {
        self.load(offset, 8, self.acquire)
    }

    /// # Safety
    /// None is needed.
    pub(crate) unsafe fn store_u64_release(self, offset: usize, value: u64) {
        self.store(offset, 8, value, self.release);
    }

    /// # Safety
    /// None is needed.
    pub(crate) unsafe fn store_u64(self, offset: usize, value: u64) {
        self.store(offset, 8, value, Relaxed);
    }
}

/// Where `len` bytes at `at` lie in their word, in bits.
fn shift(at: usize, len: usize) -> usize {
    assert!(at % 8 + len <= 8, "{len} bytes at {at} lie in two words");
    8 * (at % 8)
}

/// `len` bytes of ones.
fn mask(len: usize) -> u64 {
    u64::MAX >> (64 - 8 * len)
}
