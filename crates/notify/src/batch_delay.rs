//! How long to leave work alone while it comes fast, so that more of it is taken at once: a policy beside [`PollWindow`].
//!
//! ```text
//!   measuring, no pauses --an epoch--> fast? --yes--> gathering, a pause after each turn --an epoch--> as fast as without?
//!      ^      ^                  | no                    ^                                              | yes | no
//!      |      '------------------'                       '----------------------------------------------'     |
//!      '-- after many epochs: once more ---------------------------------------------- the pauses cost: rest --'
//! ```
//! Each look at a ring takes a cache line from the side that is about to write it, and so does each buffer given back. A side
//! that is slower than its peer is made slower still by a peer that looks all the time and takes one buffer at a time. So a
//! queue's owner may wait until a good number has come. What that costs is bounded: a pause is [`LONGEST`] at most, and there is
//! none unless the last turn brought some, and work comes so fast that a pause preferred_batch many.
//!
//! Where the other side waits for what it is to get back, a pause makes it slower instead. So it is measured: an epoch that
//! is slower than one without pauses ends them, for longer each time in a row.
//!
//! [`PollWindow`]: crate::PollWindow
use std::time::Duration;

/// Longest pause.
const LONGEST: Duration = Duration::from_micros(10);
/// What the longest pause is to gather at least. Where work comes slower there is none.
const LEAST: u32 = 16;
/// A turn that brought less is followed by none: the rush may be over.
const SOME: u32 = 8;
/// Work in an epoch.
const EPOCH: u32 = 1024;
/// A longer turn says something of a side that was idle, or was not running, and nothing of pauses.
const IDLE: Duration = Duration::from_micros(100);
/// Epochs with pauses until it is measured again how fast it goes without.
const RUN: u32 = 64;
/// Epochs in a row that must have been slower: a single one may have been the work of others on this processor.
const SLOW: u32 = 4;
/// Longest rest, in epochs.
const LONGEST_REST: u32 = 1024;

/// How long one queue is left alone after a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchDelay {
    wanted: u32,
    stage: Stage,
    /// Epochs of this stage that are left.
    left: u32,
    /// Of this epoch so far.
    count: u32,
    time: Duration,
    /// The pause after a turn.
    pause: Duration,
    /// Time in which an epoch's work comes without pauses.
    without: Duration,
    /// Epochs in a row that were slower than that.
    slow: u32,
    /// Epochs of the last rest, 0 after a good run.
    rest: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Measuring,
    Gathering,
}

impl BatchDelay {
    /// For a queue of whose work it is good to take `wanted` at once; 0: it is never left alone.
    #[must_use]
    pub fn new(wanted: u32) -> Self {
        let (count, time, pause) = (0, Duration::ZERO, Duration::ZERO);
        let (stage, without) = (Stage::Measuring, Duration::ZERO);
        Self { wanted, stage, left: 1, count, time, pause, without, slow: 0, rest: 0 }
    }

    /// What a turn may end with: once less than this is there at a time, the rest may come in a pause. 0: the turn ends with a
    /// look that finds nothing.
    #[must_use]
    pub fn enough(&self) -> u32 {
        if self.stage == Stage::Gathering { self.wanted } else { 0 }
    }

    /// A turn brought `taken`, and ended `elapsed` after the end of the one before. How long to leave it alone now.
    pub fn turn(&mut self, taken: u32, elapsed: Duration) -> Duration {
        if self.wanted == 0 || elapsed > IDLE {
            return Duration::ZERO;
        }
        self.count += taken;
        self.time += elapsed;
        if self.count >= EPOCH {
            // No more than was taken in two turns or so.
            let time = self.time * EPOCH / self.count;
            (self.count, self.time) = (0, Duration::ZERO);
            self.epoch(time);
        }
        if self.stage == Stage::Gathering && taken >= SOME { self.pause } else { Duration::ZERO }
    }

    /// An epoch's work has come in `time`.
    fn epoch(&mut self, time: Duration) {
        self.left -= 1;
        let slower = self.stage == Stage::Gathering && time > self.without + self.without / 8;
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
                    (self.stage, self.left) = (Stage::Gathering, RUN);
                }
            }
            Stage::Gathering if self.slow == SLOW => {
                self.rest = (self.rest * 2).clamp(1, LONGEST_REST);
                (self.stage, self.left) = (Stage::Measuring, self.rest);
            }
            Stage::Gathering => {
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

    /// Lets `turns` pass of a side that makes one each `each` nanoseconds, but has no more than `most` under way, and needs
    /// `back` nanoseconds until it goes on. Work and time in all, and the longest pause.
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
            // A look and what is done with what it finds take some time, too.
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
        // A slower one, too, for no longer than is said.
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
        // It has 32 under way and makes the next 32 when it has got them back.
        let mut window = BatchDelay::new(64);
        let (work, time, longest) = play(&mut window, 400_000, 20, 32, 2000);
        let (alone, time_alone, _) = play(&mut BatchDelay::new(0), 400_000, 20, 32, 2000);
        assert!(!longest.is_zero(), "it was not even tried");
        let rate = |work: u64, time: Duration| work as f64 / time.as_secs_f64();
        let ratio = rate(work, time) / rate(alone, time_alone);
        assert!(ratio > 0.97, "{ratio}");
    }
}
