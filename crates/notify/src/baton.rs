//! A value that its owner offers to others while it may block.
//!
//! ```text
//!   owner:   offer --------- may block -------- take: the value, or None: another thread owns it
//!   others:            take: the value -> they are the owner, with a baton of their own
//! ```
//! A baton serves one owner: the next one makes another. So an owner that wakes late takes nothing that
//! the next one has offered.
use crate::sync::{AtomicPtr, store_pointer};
use std::fmt;
use std::ptr;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// See the module.
pub struct Baton<T> {
    /// The value; null: the owner has it, or nobody will find it here again.
    offered: AtomicPtr<T>,
}

impl<T> Default for Baton<T> {
    fn default() -> Self {
        Self { offered: AtomicPtr::new(ptr::null_mut()) }
    }
}

impl<T: Send> Baton<T> {
    /// Offers the value. Only the owner, who has it, calls this.
    ///
    /// A value that is offered while another one still is replaces that, which is never freed.
    pub fn offer(&self, value: Box<T>) {
        // Pairs with the exchange in `take`: who takes the value sees what was done to it.
        store_pointer(&self.offered, Box::into_raw(value), Release);
    }

    /// Takes the value, if it is offered. One of all callers gets it.
    pub fn take(&self) -> Option<Box<T>> {
        // Pairs with the store in `offer`.
        let value = self.offered.swap(ptr::null_mut(), Acquire);
        // SAFETY: it was made by `Box::into_raw` in `offer`, and the exchange gives it to one caller. `T`
        // may move to this thread.
        (!value.is_null()).then(|| unsafe { Box::from_raw(value) })
    }
}

impl<T> Drop for Baton<T> {
    fn drop(&mut self) {
        // Relaxed: no other thread has the baton any more.
        let value = self.offered.swap(ptr::null_mut(), Relaxed);
        if !value.is_null() {
            // SAFETY: as in `take`.
            drop(unsafe { Box::from_raw(value) });
        }
    }
}

impl<T> fmt::Debug for Baton<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Baton").finish_non_exhaustive()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn a_value_is_taken_once_and_freed_if_nobody_takes_it() {
        let (value, baton) = (Arc::new(()), Baton::default());
        assert!(baton.take().is_none());
        baton.offer(Box::new(Arc::clone(&value)));
        assert!(baton.take().is_some() && baton.take().is_none());
        baton.offer(Box::new(Arc::clone(&value)));
        drop(baton);
        assert_eq!(Arc::strong_count(&value), 1);
    }
}
