//! Words of guest memory in the loom model checker: one cell per object.
//!
//! The first access to an object creates its cell, as 0; the cell lives until the execution ends.
//! An object must always be accessed in one size: the model cannot tell the behaviour of
//! hardware otherwise, and panics.
use super::Word;
use loom::sync::atomic::{AtomicU64, Ordering};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Objects by address: their size, and the cell.
type Cells = Mutex<BTreeMap<usize, (usize, Arc<AtomicU64>)>>;

loom::lazy_static! {
    static ref CELLS: Cells = Mutex::new(BTreeMap::new());
}

/// Cell of the object of `size` bytes at `at`.
fn cell(at: usize, size: usize) -> Arc<AtomicU64> {
    // Not a lock of the model: no operation of the model happens under it.
    let mut cells = CELLS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((before, (length, _))) = cells.range(..at + size).next_back() {
        let same = (*before, *length) == (at, size);
        assert!(same || before + length <= at, "{size} bytes at {at:#x} overlap another object");
    }
    let (_, cell) = cells.entry(at).or_insert_with(|| (size, Arc::new(AtomicU64::new(0))));
    Arc::clone(cell)
}

macro_rules! word {
    ($int:ty) => {
        impl Word for $int {
            unsafe fn load(guest: *const u8, own: *mut u8) {
                let value = cell(guest.addr(), size_of::<$int>()).load(Ordering::Relaxed) as $int;
                // SAFETY: the caller promises that `own` may be written.
                unsafe { own.cast::<$int>().write_unaligned(value) };
            }

            unsafe fn store(guest: *mut u8, own: *const u8) {
                // SAFETY: the caller promises that `own` may be read.
                let value = unsafe { own.cast::<$int>().read_unaligned() };
                cell(guest.addr(), size_of::<$int>()).store(value.into(), Ordering::Relaxed);
            }
        }
    };
}
word!(u8);
word!(u16);
word!(u32);
word!(u64);
