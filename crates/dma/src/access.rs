//! What a device means to do with memory, and in which order.
//!
//! # Guarantees
//!
//! Guest memory is shared with vCPUs (and with threads that play a guest), which write at any time. The order
//! flags say what an access promises them and what it may assume. "Before" and "after" are in the program order
//! of the thread that makes the access; "sees" is what any CPU can observe.
//!
//! | flags | promise |
//! |---|---|
//! | `READ` | acquire: a value read *after* this access sees every write that the writer of the value which it read had made before (behind its own store barrier). |
//! | `WRITE` | release: whoever has seen a value that this access wrote (and then has a read barrier of its own) sees every write that this thread made *before* it. |
//! | `READ \| WRITE` | both of the above (a mapping that is used in both directions). |
//! | `RELAXED` | none. The caller orders by other means, for example one fence for a batch. |
//! | `FULL` | as by direction, and besides: if the other side has a full barrier between a store and a load of its own, then its load sees every write that this thread made before this access, or this access and all after it see its store (or both). It is the only level that keeps a load behind an earlier store, and what QEMU does for every access since 2012. |
//!
//! By direction costs no instruction on x86-64, which keeps loads in order and stores in order by itself; it holds
//! back the compiler. `FULL` is one locked instruction; `paravane bench barrier` says what that costs. Each promise is a
//! litmus test in `tests/loom_order.rs`; `tests/store_buffering.rs` shows on real CPUs what `FULL` is for.
//!
//! `FULL` wins over `RELAXED`. An aligned object of 1, 2, 4 or 8 bytes is never torn. Larger or unaligned accesses
//! are not atomic as a whole, and their bytes are moved in no particular order; the guarantees above hold for all
//! of their bytes together.
//!
//! A mapping is a window of accesses: mapping gives the order above to everything that is done through it, seen
//! from before the mapping; ending it is a release (what was done through it is seen before any later store) and,
//! for `READ`, an acquire (what was read through it is read before any later access).
use crate::sync::fence;
use bitflags::bitflags;
use std::sync::atomic::Ordering;

bitflags! {
    /// Direction and order of an access. Without an order flag the order follows from the direction: a read
    /// acquires (what is read later is at least as new), a write releases (it is seen after everything before it).
    ///
    /// Each accessor adds its own direction, so that `Access::empty()` is a plain ordered access and
    /// `Access::RELAXED` an unordered one. A further direction bit asks for that permission and that order as well.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Access: u32 {
        /// The device reads.
        const READ = 1;
        /// The device writes.
        const WRITE = 2;
        /// No order at all: the caller orders by other means.
        const RELAXED = 4;
        /// A full barrier before the access: the only order that keeps a load behind an earlier store.
        const FULL = 8;
    }
}

impl Access {
    /// Whether the order follows from the direction.
    const fn ordered(self) -> bool {
        self.contains(Self::FULL) || !self.contains(Self::RELAXED)
    }

    /// To be called before the first byte is moved.
    #[inline(always)]
    pub(crate) fn begin(self) {
        if self.contains(Self::FULL) {
            // Pairs with the full barrier that the driver has between its own store and its load of what we
            // stored before this (the store-buffering shape: each side must see at least one of the stores).
            fence(Ordering::SeqCst);
        } else if self.contains(Self::WRITE) && self.ordered() {
            // Pairs with the driver's acquire (its read barrier) after it has read what the relaxed stores
            // behind this fence write: it then sees all that this thread did before.
            fence(Ordering::Release);
        }
    }

    /// To be called after the last byte was moved.
    #[inline(always)]
    pub(crate) fn end(self) {
        if self.contains(Self::READ) && self.ordered() {
            // Pairs with the driver's release (its store barrier) before the store that the relaxed loads
            // ahead of this fence have read: what the driver wrote before is seen by what follows here.
            fence(Ordering::Acquire);
        }
    }

    /// To be called when a mapping starts: the accesses themselves come later, through raw pointers and system
    /// calls, and nobody can put a fence between them.
    #[inline(always)]
    pub(crate) fn map(self) {
        if self.contains(Self::FULL) {
            // Pairs as in `begin`.
            fence(Ordering::SeqCst);
        } else if self.ordered() {
            // Acquire: pairs with the driver's release before the store (an available index, say) that this
            // thread loaded before, so that what is read through the mapping is at least that new. Release:
            // as in `begin`, for what is written through it. One fence for both: on x86-64 no instruction.
            fence(Ordering::AcqRel);
        }
    }

    /// To be called when a mapping ends.
    #[inline(always)]
    pub(crate) fn unmap(self) {
        if self.ordered() {
            // Release: pairs with the driver's acquire after it has read a later store of this thread (a used
            // index): it then sees what was written through the mapping, and what it writes into the buffer
            // from then on was not read here. Acquire: as in `end`, for what was read through the mapping.
            fence(Ordering::AcqRel);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_wins_over_relaxed() {
        assert!(Access::READ.ordered());
        assert!(!(Access::READ | Access::RELAXED).ordered());
        assert!((Access::READ | Access::RELAXED | Access::FULL).ordered());
    }
}
