//! Direction and order of an access to guest memory.
use crate::sync::fence;
use bitflags::bitflags;
use std::sync::atomic::Ordering;

bitflags! {
    /// Direction and order of an access.
    ///
    /// Without an order flag the order follows from the direction: a read acquires (later reads are
    /// at least as new), a write releases (it is seen after everything before it).
    ///
    /// Each accessor adds its own direction, so `Access::empty()` is a plain ordered access and
    /// `Access::RELAXED` an unordered one. An additional direction bit asks for that permission and
    /// that order too.
    ///
    /// # Guarantees
    ///
    /// vCPUs (and threads that stand in for a guest) share guest memory and write it at any time.
    /// The order flags state what an access promises them and what it may assume. "Before" and
    /// "after" refer to the program order of the thread that makes the access; "sees" refers to
    /// what any CPU can observe.
    ///
    /// | flags | promise |
    /// |---|---|
    /// | `READ` | acquire: a value read *after* this access sees every write that the writer of the value read here made before it (with its own store barrier in between). |
    /// | `WRITE` | release: a thread that sees a value written by this access (and then has its own read barrier) sees every write that this thread made *before* it. |
    /// | `READ \| WRITE` | both of the above (a mapping used in both directions). |
    /// | `RELAXED` | none. The caller orders by other means, for example one fence for a batch. |
    /// | `FULL` | the order of the direction, and: if the other side has a full barrier between a store and a load, then its load sees every write that this thread made before this access, or this access and all later ones see its store (or both). This is the only level that keeps a load behind an earlier store. QEMU's patch "Add a memory barrier to DMA functions" (2012) used it for every access. |
    ///
    /// The order of a direction costs no instruction on x86-64, whose loads stay in order among
    /// themselves, as do its stores; it restrains the compiler. `FULL` is one locked instruction;
    /// `paravane bench barrier` measures it. Each promise is a litmus test in
    /// `tests/loom_order.rs`; `tests/store_buffering.rs` shows on real CPUs why `FULL` exists.
    ///
    /// `FULL` overrides `RELAXED`. An aligned object of 1, 2, 4 or 8 bytes is never torn. Larger or
    /// unaligned accesses are not atomic as a whole, and their bytes move in no particular order;
    /// the guarantees hold for all of their bytes together.
    ///
    /// A mapping is a series of accesses. Its start gives this order to everything that is done
    /// through it, relative to what came before the start. Its end is a release (what was done
    /// through it is seen before any later store) and, for `READ`, an acquire (what was read
    /// through it is read before any later access).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Access: u32 {
        /// The device reads.
        const READ = 1;
        /// The device writes.
        const WRITE = 2;
        /// No order: the caller orders by other means.
        const RELAXED = 4;
        /// A full barrier before the access.
        ///
        /// The only order that keeps a load behind an earlier store.
        const FULL = 8;
    }
}

impl Access {
    /// Whether the order follows from the direction.
    const fn ordered(self) -> bool {
        self.contains(Self::FULL) || !self.contains(Self::RELAXED)
    }

    /// Orders an access. Call it before the first byte moves.
    #[inline(always)]
    pub(crate) fn begin(self) {
        if self.contains(Self::FULL) {
            // Pairs with the full barrier that the driver has between its own store and its load of
            // what we stored before this (the store-buffering shape: each side must see at least
            // one of the stores).
            fence(Ordering::SeqCst);
        } else if self.contains(Self::WRITE) && self.ordered() {
            // Pairs with the driver's acquire (its read barrier) after it has read what the relaxed
            // stores behind this fence write: it then sees all that this thread did before.
            fence(Ordering::Release);
        }
    }

    /// Orders an access. Call it after the last byte moved.
    #[inline(always)]
    pub(crate) fn end(self) {
        if self.contains(Self::READ) && self.ordered() {
            // Pairs with the driver's release (its store barrier) before the store that the relaxed
            // loads ahead of this fence have read: what the driver wrote before it is seen by what
            // follows here.
            fence(Ordering::Acquire);
        }
    }

    /// Orders the start of a mapping.
    ///
    /// Its accesses come later, through raw pointers and system calls, so that no fence can stand
    /// between them.
    #[inline(always)]
    pub(crate) fn map(self) {
        if self.contains(Self::FULL) {
            // Pairs as in `begin`.
            fence(Ordering::SeqCst);
        } else if self.ordered() {
            // Acquire: pairs with the driver's release before the store (an available index, say)
            // that this thread loaded before, so that what is read through the mapping is at least
            // that new. Release: as in `begin`, for what is written through it. One fence for both:
            // no instruction on x86-64.
            fence(Ordering::AcqRel);
        }
    }

    /// Orders the end of a mapping.
    #[inline(always)]
    pub(crate) fn unmap(self) {
        if self.ordered() {
            // Release: pairs with the driver's acquire after it has read a later store of this
            // thread (a used index): it then sees what was written through the mapping, and what it
            // writes into the buffer from then on was not read here. Acquire: as in `end`, for what
            // was read through the mapping.
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
