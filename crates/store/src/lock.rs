//! Locks without poison.
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks, ignoring poison.
///
/// For state that is whole after each change: nothing panics under these locks.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
