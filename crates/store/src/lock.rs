//! Locks without poison.
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks `mutex`, also after a panic in another thread.
///
/// For state that is whole after each change. A guest may run as a thread of this process: if it panics in
/// a register access, devices still stop in order.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
