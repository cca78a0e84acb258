//! Wakes another thread if, and only if, it is about to sleep.
//!
//! ```text
//!   sleeper: arm, check once more, sleep          waker: change what the sleeper checks, wake
//! ```
use paravane_store::{clear, eventfd, signal};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// An eventfd that is written only while a thread waits for it.
#[derive(Debug)]
pub(crate) struct Wakeup {
    /// Its descriptor.
    pub(crate) event: Arc<OwnedFd>,
    armed: AtomicBool,
}

impl Wakeup {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { event: eventfd()?, armed: AtomicBool::new(false) })
    }

    /// Makes the next [`Wakeup::wake`] signal the descriptor.
    ///
    /// The caller checks once more before it sleeps.
    pub(crate) fn arm(&self) {
        // EAGAIN means that it was not readable, which is what we want.
        clear(&self.event);
        // Acquire: pairs with the release of the exchange in `wake`. One of two exchanges is first.
        // If it is the waker's, this one reads its value, or that of a later exchange, and the
        // sleeper's check sees the change. If it is this one, the waker reads `true` and writes the
        // eventfd.
        self.armed.swap(true, Ordering::Acquire);
    }

    /// Wakes the sleeper, if there is one. Change what it checks before.
    pub(crate) fn wake(&self) {
        // Release: for the change before; pairs with the acquire in `arm`.
        if self.armed.swap(false, Ordering::Release) {
            // The counter cannot overflow: it is read before each arming, and written once after
            // it.
            signal(&self.event);
        }
    }
}

impl AsFd for Wakeup {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rig::{becomes_readable, readable};
    use std::sync::atomic::AtomicU64;

    /// A wake-up lost between the sleeper's check and its sleep is never made up.
    #[test]
    fn no_wake_up_is_lost() {
        const ROUNDS: u64 = 50_000;
        let (wakeups, turn) = ([Wakeup::new().unwrap(), Wakeup::new().unwrap()], AtomicU64::new(0));
        let play = |player: u64| {
            let (mine, theirs) = (&wakeups[player as usize], &wakeups[1 - player as usize]);
            while turn.load(Ordering::Relaxed) < ROUNDS {
                let now = turn.load(Ordering::Relaxed);
                if now % 2 == player {
                    turn.store(now + 1, Ordering::Relaxed);
                    theirs.wake();
                    continue;
                }
                mine.arm();
                let now = turn.load(Ordering::Relaxed);
                if now % 2 != player && now < ROUNDS {
                    assert!(becomes_readable(mine.as_fd()), "player {player} sleeps on at {now}");
                }
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| play(1));
            play(0);
        });
        assert_eq!(turn.load(Ordering::Relaxed), ROUNDS);
    }

    #[test]
    fn a_wake_up_that_nobody_waits_for_signals_nothing() {
        let wakeup = Wakeup::new().unwrap();
        wakeup.wake();
        assert!(!readable(wakeup.as_fd()));
        wakeup.arm();
        wakeup.wake();
        wakeup.wake();
        assert!(readable(wakeup.as_fd()));
        wakeup.arm();
        assert!(!readable(wakeup.as_fd()));
    }
}
