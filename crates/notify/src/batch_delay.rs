//! Batch delay: lets work accumulate while it arrives fast.
use std::time::Duration;

/// Longest pause.
const LONGEST: Duration = Duration::from_micros(10);
/// Fewest buffers that the longest pause must collect.
///
/// There is no pause if work arrives more slowly.
const LEAST: u32 = 16;
/// Fewest buffers in a turn before a pause.
///
/// After fewer, the burst may be over.
const SOME: u32 = 8;
/// Buffers per epoch.
const EPOCH: u32 = 1024;
/// A longer turn means that a side was idle or not running. It is not measured.
const IDLE: Duration = Duration::from_micros(100);
/// Epochs with pauses before the rate without them is measured again.
const RUN: u32 = 64;
/// Consecutive slower epochs that end batching.
///
/// A single one may be due to other work on this processor.
const SLOW: u32 = 4;
/// Longest rest, in epochs.
const LONGEST_REST: u32 = 1024;

/// Decides how long to delay one queue after a turn.
///
/// Complements [`PollWindow`].
///
/// ```text
///        an epoch, not fast                   an epoch as fast as without
///             .----.                                 .----.
///             |    v                                 |    v
///   measuring, no pauses --an epoch, fast--> batching, a pause after each turn
///      ^          ^                              |               |
///      |          '------ after many epochs -----'               | pauses cost time
///      '------------------------- rest <-------------------------'
/// ```
/// Each look at a ring takes a cache line from the side that is about to write it, and so does each
/// returned buffer. A peer that looks all the time and takes one buffer at a time slows down a side
/// that is slower than itself. So the owner of a queue may wait until a good number of buffers has
/// arrived. The cost is limited: a pause lasts at most 10 µs, and there is none unless the
/// last turn brought work, and work arrives fast enough for a pause to collect a batch.
///
/// A side that waits for its buffers gets slower by a pause. So the effect is measured: epochs that
/// are slower than one without pauses end them, for longer each time in a row.
///
/// [`PollWindow`]: crate::PollWindow
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchDelay {
    wanted: u32,
    stage: Stage,
    /// Epochs left in this stage.
    left: u32,
    /// Buffers in this epoch so far.
    count: u32,
    time: Duration,
    /// Pause after a turn.
    pause: Duration,
    /// Duration of an epoch without pauses.
    without: Duration,
    /// Consecutive epochs that were slower than that.
    slow: u32,
    /// Epochs of the last rest, 0 after a good run.
    rest: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Measuring,
    Batching,
}

impl BatchDelay {
    /// Makes a delay for a queue with this preferred batch size; 0 disables it.
    #[must_use]
    pub fn new(wanted: u32) -> Self {
        let (count, time, pause) = (0, Duration::ZERO, Duration::ZERO);
        let (stage, without) = (Stage::Measuring, Duration::ZERO);
        Self { wanted, stage, left: 1, count, time, pause, without, slow: 0, rest: 0 }
    }

    /// Number of buffers below which a turn may end.
    ///
    /// The rest may arrive in a pause.
    ///
    /// 0 if the turn must end with a look that finds nothing.
    #[must_use]
    pub fn enough(&self) -> u32 {
        if self.stage == Stage::Batching { self.wanted } else { 0 }
    }

    /// Records a turn that took `taken` buffers and ended `elapsed` after the last one.
    ///
    /// Returns the pause.
    pub fn turn(&mut self, taken: u32, elapsed: Duration) -> Duration {
        if self.wanted == 0 || elapsed > IDLE {
            return Duration::ZERO;
        }
        self.count += taken;
        self.time += elapsed;
        if self.count >= EPOCH {
            // No more than was taken in about two turns.
            let time = self.time * EPOCH / self.count;
            (self.count, self.time) = (0, Duration::ZERO);
            self.epoch(time);
        }
        if self.stage == Stage::Batching && taken >= SOME { self.pause } else { Duration::ZERO }
    }

    /// Records an epoch that lasted `time`.
    fn epoch(&mut self, time: Duration) {
        self.left -= 1;
        let slower = self.stage == Stage::Batching && time > self.without + self.without / 8;
        self.slow = if slower { self.slow + 1 } else { 0 };
        match self.stage {
            Stage::Measuring => {
                if self.left > 0 {
                    return;
                }
                self.left = 1;
                if time <= LONGEST * (EPOCH / LEAST) {
                    self.without = time;
                    self.pause = (time * self.wanted / EPOCH).min(LONGEST);
                    (self.stage, self.left) = (Stage::Batching, RUN);
                }
            }
            Stage::Batching if self.slow == SLOW => {
                self.rest = (self.rest * 2).clamp(1, LONGEST_REST);
                (self.stage, self.left) = (Stage::Measuring, self.rest);
            }
            Stage::Batching => {
                if self.left == 0 {
                    (self.slow, self.rest) = (0, 0);
                    (self.stage, self.left) = (Stage::Measuring, 1);
                }
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Simulates `turns` turns.
    ///
    /// The other side makes a buffer each `each` ns, but has at most `most` in flight, and takes
    /// `back` ns to continue. Returns the work and time in all, and the longest pause.
    fn play(
        window: &mut BatchDelay,
        turns: u32,
        each: u64,
        most: u64,
        back: u64,
    ) -> (u64, Duration, Duration) {
        let (mut work, mut sum, mut longest) = (0, Duration::ZERO, Duration::ZERO);
        let mut pause = Duration::ZERO;
        for _ in 0..turns {
            // A look and the work on what it finds take time too.
            let elapsed = pause + Duration::from_nanos(back);
            let taken = (elapsed.as_nanos() as u64 / each).clamp(1, most);
            let elapsed = elapsed.max(Duration::from_nanos(each));
            pause = window.turn(taken as u32, elapsed);
            (work, sum, longest) = (work + taken, sum + elapsed, longest.max(pause));
        }
        (work, sum, longest)
    }

    #[test]
    fn a_stream_is_taken_in_good_portions() {
        let mut window = BatchDelay::new(64);
        let (work, _, longest) = play(&mut window, 10_000, 50, u64::MAX, 500);
        assert_eq!(longest, Duration::from_nanos(64 * 50));
        assert!(work / 10_000 > 60, "{}", work / 10_000);
        // Also a slower one, for no longer than the limit.
        let (work, _, longest) = play(&mut window, 10_000, 250, u64::MAX, 2000);
        assert_eq!(longest, LONGEST);
        assert!(work / 10_000 > 40, "{}", work / 10_000);
    }

    #[test]
    fn what_comes_slowly_or_one_by_one_is_never_left_alone() {
        for (each, most, back) in [(700, u64::MAX, 500), (2000, 1, 2000), (20, 1, 1000), (100_000, 64, 5)] {
            let mut window = BatchDelay::new(64);
            assert_eq!(play(&mut window, 50_000, each, most, back).2, Duration::ZERO, "{each} {most} {back}");
        }
        let mut window = BatchDelay::new(0);
        assert_eq!(play(&mut window, 50_000, 50, u64::MAX, 500).2, Duration::ZERO);
    }

    #[test]
    fn the_end_of_a_stream_ends_the_pauses_at_once() {
        let mut window = BatchDelay::new(64);
        assert_eq!(window.enough(), 0);
        assert!((0..10_000).any(|_| !window.turn(64, Duration::from_micros(4)).is_zero()));
        assert_eq!(window.enough(), 64);
        assert_eq!(window.turn(1, Duration::from_micros(2)), Duration::ZERO);
        assert_eq!(window.turn(64, Duration::from_micros(500)), Duration::ZERO, "a burst after a silence");
    }

    #[test]
    fn a_side_that_waits_for_us_is_not_made_slower() {
        // It has 32 in flight, and makes the next 32 once it has them back.
        let mut window = BatchDelay::new(64);
        let (work, time, longest) = play(&mut window, 400_000, 20, 32, 2000);
        let (alone, time_alone, _) = play(&mut BatchDelay::new(0), 400_000, 20, 32, 2000);
        assert!(!longest.is_zero(), "it was not even tried");
        let rate = |work: u64, time: Duration| work as f64 / time.as_secs_f64();
        let ratio = rate(work, time) / rate(alone, time_alone);
        assert!(ratio > 0.97, "{ratio}");
    }
}
