//! Poll window: how long to poll a queue before sleeping (adaptive busy polling).
use std::time::Duration;

/// Shortest poll that pays: the time of a few kicks.
///
/// Below it a queue is not polled.
const SHORTEST: Duration = Duration::from_micros(4);
/// Most consecutive polls that may find nothing.
const MAX_MISSES: u8 = 4;
/// Number of gaps without polling after that.
const REST: u8 = 100;

/// Decides how long to poll one queue before its owner sleeps.
///
/// ```text
///   no work left --> poll for `length` --> sleep --> work: `slept(gap)`
///                        |                     gap <= length   a poll could find it: same length
///                        v                     gap <= longest  a longer poll could: twice the gap
///                   work: `found`              gap >  longest  no poll could: half the length or 0
///
///   4 polls in a row that found nothing: none for the next 100 gaps
/// ```
/// A gap is the time from when a queue has no work left to its next work. A queue starts without
/// polling.
///
/// The cost of polling is limited: to `longest` per gap; to twice that when a queue with frequent
/// work becomes idle, since each poll that ends in a long sleep halves the next; and to 4
/// polls in 104 gaps, when gaps look as if polling could find their end and it never
/// does. That happens where a poll itself keeps the other side from working: two threads on one
/// core.
///
/// The policy sees only lengths and gaps: its caller has the clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PollWindow {
    length: Duration,
    longest: Duration,
    /// Consecutive polls that found nothing.
    missed: u8,
    /// Gaps left without polling.
    rest: u8,
}

impl PollWindow {
    /// Makes a window of 0 that grows to `longest` at most; 0 disables polling.
    #[must_use]
    pub fn new(longest: Duration) -> Self {
        Self { length: Duration::ZERO, longest, missed: 0, rest: 0 }
    }

    /// Whether polling is enabled.
    #[must_use]
    pub fn enabled(&self) -> bool {
        !self.longest.is_zero()
    }

    /// How long to poll now.
    #[must_use]
    pub fn length(&self) -> Duration {
        self.length
    }

    /// Records a poll that found work.
    pub fn found(&mut self) {
        self.missed = 0;
    }

    /// Records a sleep after the poll: work arrived after `gap`.
    ///
    /// `gap` counts from when there was no work left.
    pub fn slept(&mut self, gap: Duration) {
        if self.rest > 0 {
            self.rest -= 1;
            return;
        }
        if gap <= self.length {
            return;
        }
        if !self.length.is_zero() {
            self.missed += 1;
        }
        let half = self.length / 2;
        self.length = if self.missed == MAX_MISSES {
            (self.missed, self.rest) = (0, REST);
            Duration::ZERO
        } else if gap <= self.longest {
            (gap * 2).max(SHORTEST).min(self.longest)
        } else if half >= SHORTEST {
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

    /// Simulates an owner that polls, with gaps from `gap`.
    ///
    /// Returns the time polled, and the number of gaps in which a poll found work.
    fn play(longest: Duration, gaps: u32, mut gap: impl FnMut(PollWindow) -> Duration) -> (Duration, u32) {
        let mut window = PollWindow::new(longest);
        let (mut polled, mut found) = (Duration::ZERO, 0);
        for _ in 0..gaps {
            assert!(window.length() <= longest);
            let gap = gap(window);
            if !window.length().is_zero() && gap <= window.length() {
                (polled, found) = (polled + gap, found + 1);
                window.found();
            } else {
                polled += window.length();
                window.slept(gap);
            }
        }
        (polled, found)
    }

    /// Gaps one after another.
    fn each(gaps: &[(u32, u64)]) -> (Duration, u32) {
        let mut all = gaps.iter().flat_map(|&(count, gap)| std::iter::repeat_n(micros(gap), count as usize));
        play(LONGEST, gaps.iter().map(|(count, _)| count).sum(), |_| all.next().unwrap())
    }

    #[test]
    fn work_that_comes_soon_is_found_from_the_second_time_on() {
        for gap in [1, 5, 20, 63, 64] {
            assert_eq!(each(&[(1000, gap)]), (micros(999 * gap), 999), "gaps of {gap} µs");
        }
        // Also if each gap is a little longer.
        let mut gap = 0;
        let slower = |_| {
            gap += 1;
            micros(gap)
        };
        assert_eq!(play(LONGEST, 64, slower).1, 64 - 5, "a miss at each doubling");
    }

    #[test]
    fn a_queue_with_rare_work_is_not_polled() {
        assert_eq!(each(&[(1000, 65)]), (Duration::ZERO, 0));
        // A queue whose work becomes rare stops soon: all the polls that find nothing are less than
        // two long ones.
        let (before, _) = each(&[(50, 1), (50, 40)]);
        let (after, _) = each(&[(50, 1), (50, 40), (1000, 10_000)]);
        assert!(after > before && after - before < 2 * LONGEST, "{:?}", after - before);
        // A queue that has stopped begins again.
        let (_, found) = each(&[(50, 1), (1000, 10_000), (200, 30)]);
        assert!(found > 49 + 90, "{found}");
    }

    #[test]
    fn work_that_always_comes_a_little_later_is_given_up() {
        const GAPS: u32 = 10_000;
        let later = |window: PollWindow| window.length() + micros(1);
        let (polled, found) = play(LONGEST, GAPS, later);
        assert_eq!(found, 0);
        let most = (GAPS / u32::from(MAX_MISSES + REST) + 1) * u32::from(MAX_MISSES) * LONGEST;
        assert!(Duration::ZERO < polled && polled <= most, "{polled:?} of {most:?}");
    }

    #[test]
    fn a_find_now_and_then_is_enough() {
        // Every third gap is too long for any poll, and the one after it begins anew.
        let mut turn = 0;
        let (_, found) = play(LONGEST, 3000, |_| {
            turn += 1;
            micros(if turn % 3 == 0 { 70 } else { 1 })
        });
        assert!(found > 900, "{found}");
    }

    #[test]
    fn none_at_all_where_none_is_wanted() {
        assert!(!PollWindow::new(Duration::ZERO).enabled());
        let mut gap = 0;
        let any = |_| {
            gap += 1;
            micros(gap - 1)
        };
        assert_eq!(play(Duration::ZERO, 100, any), (Duration::ZERO, 0));
    }

    #[test]
    fn a_poll_shorter_than_the_first_is_the_longest_then() {
        let (_, found) = play(micros(2), 10, |_| micros(2));
        assert_eq!(found, 9);
    }
}
