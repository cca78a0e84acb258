//! What a device means to do with memory, and in which order.
use bitflags::bitflags;

bitflags! {
    /// Direction and order of an access. Without an order flag the order follows from the direction: a read
    /// acquires (what is read later is at least as new), a write releases (it is seen after everything before it).
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
