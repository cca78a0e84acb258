//! Synchronization primitives, which the model checker replaces.
#[cfg(not(loom))]
pub(crate) use real::*;
#[cfg(loom)]
pub(crate) use replaced::*;

#[cfg(not(loom))]
mod real {
    pub(crate) use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, fence};
    pub(crate) use std::sync::{Mutex, MutexGuard};

    use std::time::{Duration, Instant};

    /// Deadline of a wait, and its state: spinning, yielding, sleeping.
    pub(crate) struct Deadline {
        started: Instant,
        timeout: Duration,
        rounds: u32,
    }

    impl Deadline {
        /// Number of rounds of spinning, then of yielding, before the waits become sleeps.
        const SPIN: u32 = 64;
        const GIVE_WAY: u32 = 80;
        /// Longest sleep.
        const SLEEP: Duration = Duration::from_millis(1);

        pub(crate) fn new(timeout: Duration) -> Self {
            Self { started: Instant::now(), timeout, rounds: 0 }
        }

        /// Waits a little; `false` when the time is over.
        pub(crate) fn wait(&mut self) -> bool {
            self.rounds += 1;
            match self.rounds {
                ..Self::SPIN => std::hint::spin_loop(),
                Self::SPIN..Self::GIVE_WAY => std::thread::yield_now(),
                _ => {
                    let left = self.timeout.saturating_sub(self.started.elapsed());
                    if left.is_zero() {
                        return false;
                    }
                    let steps = (self.rounds - Self::GIVE_WAY).min(10);
                    std::thread::sleep(Duration::from_micros(1 << steps).min(Self::SLEEP).min(left));
                }
            }
            true
        }
    }
}

#[cfg(loom)]
mod replaced {
    pub(crate) use loom::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, fence};
    pub(crate) use loom::sync::{Mutex, MutexGuard};

    /// A model has no clock: a wait lasts until its condition holds.
    pub(crate) struct Deadline;

    impl Deadline {
        pub(crate) fn new(_timeout: std::time::Duration) -> Self {
            Self
        }

        pub(crate) fn wait(&mut self) -> bool {
            loom::thread::yield_now();
            true
        }
    }
}
