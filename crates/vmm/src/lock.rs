//! Locks that outlive a panic.
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks `mutex`, also when a thread has panicked while it held it: the guest program may run as a
/// thread of this process, and its end must not take the devices' clean shutdown with it.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
