//! Tells a thread that sleeps while others sleep that one of them has woken.
//!
//! ```text
//!   an I/O thread:  awake = true;  fence; is the watcher asleep? -> wake it
//!   the watcher:    asleep = true; fence; is a thread awake?     -> go on
//! ```
//! One of the two sees the other. A wake-up costs a fence and a load while the watcher is awake.
use parking_lot::{Condvar, Mutex};
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::time::Duration;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Activity {
    asleep: AtomicBool,
    /// Protects nothing but the wait.
    waiting: Mutex<()>,
    woken: Condvar,
}

impl Activity {
    /// Wakes the watcher, if it sleeps. The caller has set its mark before.
    pub(crate) fn wake(&self) {
        // Pairs with the fence in `sleep`: either this load sees that the watcher sleeps, or it sees
        // the caller's mark.
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed) {
            let _waiting = self.waiting.lock();
            // Relaxed: the lock orders.
            self.asleep.store(false, Ordering::Relaxed);
            self.woken.notify_all();
        }
    }

    /// Sleeps until somebody wakes the watcher, unless `is_busy`.
    pub(crate) fn sleep(&self, is_busy: impl Fn() -> bool) {
        let mut waiting = self.waiting.lock();
        self.asleep.store(true, Ordering::Relaxed);
        // Pairs with the fence in `wake`.
        fence(Ordering::SeqCst);
        if is_busy() {
            self.asleep.store(false, Ordering::Relaxed);
        }
        while self.asleep.load(Ordering::Relaxed) {
            self.woken.wait(&mut waiting);
        }
    }

    /// Waits for `time`, or until somebody calls [`Activity::interrupt`].
    pub(crate) fn pause(&self, time: Duration) {
        self.woken.wait_for(&mut self.waiting.lock(), time);
    }

    /// Ends a sleep or a pause.
    pub(crate) fn interrupt(&self) {
        let _waiting = self.waiting.lock();
        self.asleep.store(false, Ordering::Relaxed);
        self.woken.notify_all();
    }
}
