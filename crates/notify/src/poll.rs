//! How long it is worth looking for work before sleeping: the policy of adaptive busy polling.
//!
//! ```text
//!   work has run dry --> poll for `length` --> sleep --> work: `slept(gap)`
//!                             |                             gap <= length   it was found polling, or might have been
//!                             v                             gap <= longest  a longer poll would have found it: grow
//!                           work: nothing to learn          gap >  longest  no poll would have: shrink
//!
//!   length:   0 --grow--> first --grow, twice as long--> ... longest
//!             0 <--shrink-- first <--shrink, half as long-- ...
//! ```
//! A gap is the time from when a queue's work ran dry to when there was some again. What a poll can cost is bounded by
//! `longest` a gap. A queue that is idle for long sleeps after its last poll, and each of its wake-ups halves the next one, so it
//! soon costs nothing. A queue starts without polling.
//!
//! Only lengths and gaps come in here, and no clock: whoever waits for the kicks of queues has one.
use std::time::Duration;

/// Shortest poll that is worth it: a few kicks' worth. Below it a queue is not polled.
const FIRST: Duration = Duration::from_micros(4);

/// How long one queue is polled before its owner sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PollWindow {
    length: Duration,
    longest: Duration,
}

impl PollWindow {
    /// Not polled yet, and never for longer than `longest` at a time; 0: never at all.
    #[must_use]
    pub fn new(longest: Duration) -> Self {
        Self { length: Duration::ZERO, longest }
    }

    /// Whether it may ever be polled.
    #[must_use]
    pub fn enabled(&self) -> bool {
        !self.longest.is_zero()
    }

    /// How long to poll now.
    #[must_use]
    pub fn length(&self) -> Duration {
        self.length
    }

    /// Its owner slept, and there was work again `gap` after it had run dry.
    pub fn slept(&mut self, gap: Duration) {
        if gap <= self.length {
            return;
        }
        let half = self.length / 2;
        self.length = if gap <= self.longest {
            (self.length * 2).max(FIRST).min(self.longest)
        } else if half >= FIRST {
            half
        } else {
            Duration::ZERO
        };
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const LONGEST: Duration = Duration::from_micros(64);

    fn micros(count: u64) -> Duration {
        Duration::from_micros(count)
    }

    /// The same thing told by a list of all lengths, in microseconds.
    const LENGTHS: [u64; 6] = [0, 4, 8, 16, 32, 64];

    #[test]
    fn it_grows_and_shrinks_as_the_list_says() {
        let mut state = 1_u64;
        for most in [10, 70, 100, 1000] {
            let (mut window, mut at) = (PollWindow::new(LONGEST), 0_usize);
            for step in 0..10_000 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let gap = (state >> 33) % most;
                window.slept(micros(gap));
                at = match gap {
                    gap if gap <= LENGTHS[at] => at,
                    ..=64 => (at + 1).min(5),
                    _ => at.saturating_sub(1),
                };
                assert_eq!(window.length(), micros(LENGTHS[at]), "step {step}, gap {gap}");
            }
        }
    }

    /// What polling costs and finds when the gaps are these, as an owner goes about it: time polled, and gaps in
    /// which it found work.
    fn play(longest: Duration, gaps: impl Iterator<Item = Duration>) -> (Duration, u32) {
        let mut window = PollWindow::new(longest);
        let (mut polled, mut found) = (Duration::ZERO, 0);
        for gap in gaps {
            if gap <= window.length() {
                (polled, found) = (polled + gap, found + 1);
            } else {
                polled += window.length();
                window.slept(gap);
            }
        }
        (polled, found)
    }

    #[test]
    fn work_that_comes_soon_is_found_after_a_few_times() {
        for gap in [1, 5, 20, 49] {
            let (_, found) = play(LONGEST, std::iter::repeat_n(micros(gap), 1000));
            assert!(found >= 995, "{found} of gaps of {gap} µs");
        }
    }

    #[test]
    fn a_queue_with_rare_work_is_not_polled() {
        assert_eq!(play(LONGEST, std::iter::repeat_n(micros(65), 1000)), (Duration::ZERO, 0));
        // And one whose work becomes rare stops soon: all the polls that find nothing are less than two long ones.
        let gaps = std::iter::repeat_n(micros(1), 50).chain(std::iter::repeat_n(micros(40), 50));
        let (before, _) = play(LONGEST, gaps.clone());
        let (after, _) = play(LONGEST, gaps.chain(std::iter::repeat_n(micros(10_000), 1000)));
        assert!(after - before < 2 * LONGEST, "{:?}", after - before);
    }

    #[test]
    fn none_at_all_where_none_is_wanted() {
        assert!(!PollWindow::new(Duration::ZERO).enabled());
        let (polled, found) = play(Duration::ZERO, (0..100).map(micros));
        // A gap of nothing is found without polling.
        assert_eq!((polled, found), (Duration::ZERO, 1));
    }

    #[test]
    fn a_poll_shorter_than_the_first_is_the_longest_then() {
        let (_, found) = play(micros(2), std::iter::repeat_n(micros(2), 10));
        assert_eq!(found, 9);
    }
}
