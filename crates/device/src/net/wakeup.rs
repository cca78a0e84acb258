//! Wakes another thread if, and only if, it has said that it will sleep.
//!
//! ```text
//!   sleeper: arm, look once more, sleep          ringer: change what the sleeper looks at, ring
//! ```
use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// An eventfd that is written only while someone waits for it.
#[derive(Debug)]
pub(super) struct Wakeup {
    event: OwnedFd,
    armed: AtomicBool,
}

impl Wakeup {
    pub(super) fn new() -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { event, armed: AtomicBool::new(false) })
    }

    /// The next [`Wakeup::wake`] makes the descriptor readable. The caller looks once more before it sleeps.
    pub(super) fn arm(&self) {
        // EAGAIN means that it was not readable, which is what we want.
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
        // Acquire: pairs with the release of the exchange in `ring`. Of two exchanges one comes first. If it is the
        // ringer's, this one reads what it left, or what other exchanges made of that, and the sleeper's look sees the
        // change; if it is this one, the ringer reads it and writes.
        self.armed.swap(true, Ordering::Acquire);
    }

    /// Wakes the sleeper, if there is one. What it waits for was changed before.
    pub(super) fn wake(&self) {
        // Release: what was changed before; pairs with the acquire in `arm`.
        if self.armed.swap(false, Ordering::Release) {
            // The counter cannot overflow: it is read before each arming, and written once after it.
            let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
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
    use crate::rig::readable;
    use std::sync::atomic::AtomicU64;

    /// A ring that gets lost between the sleeper's look and its sleep keeps it asleep for ever.
    #[test]
    fn no_ring_is_lost() {
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
                    assert!(readable(mine.as_fd(), 20), "player {player} sleeps on at {now}");
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
    fn a_bell_that_nobody_waits_for_makes_no_noise() {
        let wakeup = Wakeup::new().unwrap();
        wakeup.wake();
        assert!(!readable(wakeup.as_fd(), 0));
        wakeup.arm();
        wakeup.wake();
        wakeup.wake();
        assert!(readable(wakeup.as_fd(), 0));
        wakeup.arm();
        assert!(!readable(wakeup.as_fd(), 0));
    }
}
