//! Locks that outlive a panic.
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks `mutex`, also after a panic in another thread.
///
/// The guest program may run as a thread of this process. If it panics, the devices must still shut
/// down cleanly.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
