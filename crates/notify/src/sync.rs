//! Synchronization primitives, which the model checker replaces.
#[cfg(loom)]
pub(crate) use loom::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicPtr, AtomicU16, AtomicU32, AtomicU64},
};
#[cfg(not(loom))]
pub(crate) use std::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicPtr, AtomicU16, AtomicU32, AtomicU64},
};

use std::sync::atomic::Ordering;

/// Stores a pointer in a place where other threads exchange it.
pub(crate) fn store_pointer<T>(place: &AtomicPtr<T>, value: *mut T, order: Ordering) {
    #[cfg(not(loom))]
    place.store(value, order);
    // The checker would also order a store before an exchange that has not read it.
    #[cfg(loom)]
    place.swap(value, order);
}
