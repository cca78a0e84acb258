//! Pauses between failed attempts.
use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

/// First pause.
pub(super) const SHORTEST: Duration = Duration::from_millis(250);
/// Longest pause, without jitter.
pub(super) const LONGEST: Duration = Duration::from_secs(4);

/// Pauses that double, with up to 25 % of jitter against simultaneous retries.
#[derive(Debug, Default)]
pub(super) struct Backoff {
    failures: u32,
}

impl Backoff {
    /// Records a failed attempt; returns the pause before the next.
    pub(super) fn pause(&mut self) -> Duration {
        self.jittered(RandomState::new().hash_one(self.failures) as u32)
    }

    fn jittered(&mut self, random: u32) -> Duration {
        let pause = SHORTEST.saturating_mul(1 << self.failures.min(16)).min(LONGEST);
        self.failures = self.failures.saturating_add(1);
        // 0 to 1/2.
        let part = f64::from(random) / f64::from(u32::MAX) / 2.0;
        pause.mul_f64(0.75 + part)
    }

    /// Allows the next attempt at once.
    pub(super) fn reset(&mut self) {
        self.failures = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest_and_begin_anew() {
        let mut backoff = Backoff::default();
        let mut pauses = |random| -> Vec<_> {
            let pauses = (0..100).map(|_| backoff.jittered(random).as_millis()).collect();
            backoff.reset();
            pauses
        };
        let shortest = pauses(0);
        assert_eq!(shortest[..6], [187, 375, 750, 1500, 3000, 3000]);
        assert_eq!(shortest[99], 3000);
        assert_eq!(pauses(u32::MAX)[..6], [312, 625, 1250, 2500, 5000, 5000]);
    }
}
