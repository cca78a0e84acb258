//! How long a reply that has begun is waited for before the thread sleeps.
//!
//! ```text
//!   nothing there, amid a reply:  lingers -- more comes --> fruitful: the pause is over
//!                                    '----- LINGER has passed --> sleeps; the next ones pause: 1, 3, 7, ... 63
//! ```
//! A server sends a reply in parts: a header, then its data, piece by piece as fast as it copies. A
//! thread that slept would be woken for each, which costs the server, too. Where the rest takes longer,
//! because the link is slow, it soon sleeps at once. Where threads are not to poll, it always does.
use std::time::{Duration, Instant};

/// Longest time that a thread lingers, by default.
pub(super) const LINGER: Duration = Duration::from_micros(15);
/// Most replies for which it does not after it was in vain.
const LONGEST_PAUSE: u32 = 63;

/// See the module.
#[derive(Clone, Copy, Debug)]
pub(super) struct Linger {
    longest: Duration,
    since: Option<Instant>,
    /// Length of the last pause.
    pause: u32,
    /// What is left of it.
    left: u32,
}

impl Linger {
    /// 0: never.
    pub(super) fn new(longest: Duration) -> Self {
        Self { longest, since: None, pause: 0, left: 0 }
    }

    /// Nothing more is there, amid a reply. Whether to look again at once.
    pub(super) fn looks_again(&mut self) -> bool {
        if self.longest.is_zero() {
            return false;
        }
        if self.left > 0 {
            self.left -= 1;
            return false;
        }
        let now = Instant::now();
        if now - *self.since.get_or_insert(now) < self.longest {
            std::hint::spin_loop();
            return true;
        }
        self.since = None;
        self.pause = (2 * self.pause + 1).min(LONGEST_PAUSE);
        self.left = self.pause;
        false
    }

    /// More has come.
    pub(super) fn moved(&mut self) {
        if self.since.take().is_some() {
            self.pause = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lingers to its end. Returns whether it did at all.
    fn in_vain(linger: &mut Linger) -> bool {
        std::iter::from_fn(|| linger.looks_again().then_some(())).count() > 0
    }

    #[test]
    fn a_slow_link_is_seldom_waited_for() {
        let mut linger = Linger::new(LINGER);
        let tries: Vec<bool> = (0..200).map(|_| in_vain(&mut linger)).collect();
        let at: Vec<usize> = (0..200).filter(|&n| tries[n]).collect();
        assert_eq!(at, [0, 2, 6, 14, 30, 62, 126, 190]);
    }

    #[test]
    fn a_reply_that_goes_on_ends_the_pause() {
        let mut linger = Linger::new(LINGER);
        while in_vain(&mut linger) || linger.left > 0 {
            if linger.pause > 10 && linger.left == 0 {
                break;
            }
        }
        assert!(linger.looks_again());
        linger.moved();
        assert!(in_vain(&mut linger), "it lingers for the next one");
        assert_eq!(linger.left, 1);
        // What comes without a wait says nothing.
        linger.moved();
        assert_eq!(linger.left, 1);
    }

    #[test]
    fn who_is_not_to_poll_never_does() {
        let mut linger = Linger::new(Duration::ZERO);
        assert!(!in_vain(&mut linger) && !in_vain(&mut linger));
    }
}
