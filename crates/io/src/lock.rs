//! Locks.
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks `mutex`, also after a panic in another thread.
///
/// No change of ours is left half done.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
