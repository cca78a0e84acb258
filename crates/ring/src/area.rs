//! Shared memory: a contiguous range that the other side may change at any time.
//!
//! What stands behind [`Area`] is exchanged under `cfg(loom)`: the same ring code then runs over
//! cells of the loom model checker, which explores the orders that the memory model permits.
#[cfg(loom)]
mod model;
#[cfg(not(loom))]
mod real;

#[cfg(loom)]
pub use model::Area;
#[cfg(loom)]
pub(crate) use model::{Cells, fence};
#[cfg(not(loom))]
pub use real::Area;
#[cfg(not(loom))]
pub(crate) use real::{Cells, fence};

/// Simulates a crash after a number of stores, for tests of recovery.
#[cfg(all(test, not(loom)))]
pub(crate) mod fuse {
    extern crate std;
    use core::cell::Cell;

    /// What unwinds then.
    pub(crate) struct Blown;

    std::thread_local! {
        static LEFT: Cell<Option<u64>> = const { Cell::new(None) };
    }

    /// Limits the stores that this thread has left; `None`: no limit.
    pub(crate) fn set(left: Option<u64>) {
        LEFT.set(left);
    }

    /// Lifts the limit. Returns the stores that were left.
    pub(crate) fn take() -> Option<u64> {
        LEFT.take()
    }

    /// Before each store.
    pub(crate) fn burn() {
        match LEFT.get() {
            None => {}
            Some(0) => std::panic::resume_unwind(alloc::boxed::Box::new(Blown)),
            Some(left) => LEFT.set(Some(left - 1)),
        }
    }
}

/// Memory that a driver shares with a device, and the device's address of it.
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
