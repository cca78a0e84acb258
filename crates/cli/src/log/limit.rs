//! Limits the log lines of each device by token buckets: a burst, then a rate.
//!
//! Devices do not affect each other.
//!
//! Errors and slow requests have a bucket each: neither a client that causes warnings nor a slow disk
//! hides errors, and a slow disk hides no warnings. Lines without a device share buckets.
use parking_lot::Mutex;
use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Target of the lines of the slow-request log, which have a limit apart from other lines.
pub(crate) const SLOW_REQUESTS: &str = "paravane::slow_requests";

/// Burst in multiples of the rate per second.
const BURST: u32 = 20;
/// Maximum number of devices with their own buckets. Idle ones are removed first.
const DEVICES: usize = 4096;

/// Which bucket of a device a line takes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum LineKind {
    Error,
    /// Of the slow-request log.
    SlowRequest,
    Other,
}

impl LineKind {
    const ALL: [Self; 3] = [Self::Error, Self::SlowRequest, Self::Other];
}

/// The buckets of one device, by kind of line.
type Kinds = [Bucket; LineKind::ALL.len()];

/// The decision on a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Write it. `left_out`: number of lines suppressed since the last one.
    Write { left_out: u64 },
    /// Suppress it. `first`: it is the first one.
    LeaveOut { first: bool },
}

/// The buckets of all devices.
#[derive(Debug)]
pub(super) struct Limiter {
    /// Time to earn a line, in nanoseconds; 0: no limit.
    period: AtomicU64,
    open: AtomicBool,
    buckets: Mutex<Buckets>,
}

#[derive(Debug, Default)]
struct Buckets {
    devices: HashMap<Box<str>, Kinds>,
    /// Lines without a device.
    shared: Kinds,
    /// Number of buckets with unreported suppressed lines.
    owing: usize,
}

#[derive(Clone, Copy, Debug, Default)]
struct Bucket {
    /// When the lines so far are paid for; `None`: no lines yet.
    busy_until: Option<Instant>,
    left_out: u64,
    /// Time of the last suppressed line.
    refused: Option<Instant>,
}

impl Bucket {
    /// Whether the bucket has a token.
    fn admits(&self, now: Instant, period: Duration) -> bool {
        self.busy_until.is_none_or(|until| until.saturating_duration_since(now) <= period * (BURST - 1))
    }

    /// Whether the bucket has no state worth keeping.
    fn is_idle(&self, now: Instant) -> bool {
        self.left_out == 0 && self.busy_until.is_none_or(|until| until <= now)
    }
}

impl Limiter {
    /// `rate`: lines per second and device; `None`: no limit.
    pub(super) fn new(rate: Option<NonZeroU32>) -> Self {
        let limiter =
            Self { period: AtomicU64::new(0), open: AtomicBool::new(false), buckets: Mutex::default() };
        limiter.set_rate(rate);
        limiter
    }

    /// Changes the rate; see [`Limiter::new`].
    pub(super) fn set_rate(&self, rate: Option<NonZeroU32>) {
        let period = rate.map_or(Duration::ZERO, |rate| Duration::from_secs(1) / rate.get());
        // At most a second. Relaxed: it orders nothing.
        self.period.store(period.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Time to earn a line; `None`: no limit.
    fn period(&self) -> Option<Duration> {
        Some(self.period.load(Ordering::Relaxed)).filter(|nanos| *nanos > 0).map(Duration::from_nanos)
    }

    /// Whether a line may be written.
    pub(super) fn admit(&self, device: Option<&str>, kind: LineKind, now: Instant) -> Verdict {
        let Some(period) = self.period() else { return Verdict::Write { left_out: 0 } };
        let mut buckets = self.buckets.lock();
        let bucket = buckets.bucket(device, kind, now);
        // Relaxed: set once, by the thread that writes the last lines.
        if !self.open.load(Ordering::Relaxed) && !bucket.admits(now, period) {
            bucket.left_out += 1;
            bucket.refused = Some(now);
            let first = bucket.left_out == 1;
            buckets.owing += usize::from(first);
            return Verdict::LeaveOut { first };
        }
        bucket.busy_until = Some(bucket.busy_until.map_or(now, |until| until.max(now)) + period);
        let left_out = std::mem::take(&mut bucket.left_out);
        buckets.owing -= usize::from(left_out > 0);
        Verdict::Write { left_out }
    }

    /// Whether there are unreported suppressed lines.
    pub(super) fn owes(&self) -> bool {
        self.buckets.lock().owing > 0
    }

    /// Owners of buckets with unreported lines that were quiet for `pause`.
    ///
    /// Only of those that admit a line again.
    pub(super) fn overdue(&self, now: Instant, pause: Duration) -> Vec<(Option<Box<str>>, LineKind)> {
        let Some(period) = self.period() else { return Vec::new() };
        let quiet =
            |bucket: &Bucket| bucket.refused.is_some_and(|at| now.saturating_duration_since(at) >= pause);
        self.buckets.lock().owing(|bucket| quiet(bucket) && bucket.admits(now, period))
    }

    /// Ends the limit. Returns the owners of all buckets with unreported lines.
    pub(super) fn open(&self) -> Vec<(Option<Box<str>>, LineKind)> {
        self.open.store(true, Ordering::Relaxed);
        self.buckets.lock().owing(|_| true)
    }
}

impl Buckets {
    fn bucket(&mut self, device: Option<&str>, kind: LineKind, now: Instant) -> &mut Bucket {
        let Some(device) = device else { return &mut self.shared[kind as usize] };
        if !self.devices.contains_key(device) {
            if self.devices.len() >= DEVICES {
                self.devices.retain(|_, buckets| !buckets.iter().all(|bucket| bucket.is_idle(now)));
            }
            if self.devices.len() >= DEVICES {
                return &mut self.shared[kind as usize];
            }
        }
        &mut self.devices.entry(device.into()).or_default()[kind as usize]
    }

    fn owing(&self, due: impl Fn(&Bucket) -> bool) -> Vec<(Option<Box<str>>, LineKind)> {
        if self.owing == 0 {
            return Vec::new();
        }
        let due = |bucket: &Bucket| bucket.left_out > 0 && due(bucket);
        let named = self.devices.iter().map(|(name, buckets)| (Some(name.clone()), buckets));
        let all = named.chain([(None, &self.shared)]);
        let each = all.flat_map(|(name, buckets)| {
            LineKind::ALL
                .into_iter()
                .filter(|&kind| due(&buckets[kind as usize]))
                .map(move |kind| (name.clone(), kind))
        });
        each.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::LineKind::{Error, Other, SlowRequest};
    use super::Verdict::{LeaveOut, Write};
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn limiter() -> (Limiter, Instant) {
        (Limiter::new(NonZeroU32::new(1)), Instant::now())
    }

    /// Number of lines written of `lines` at `now`.
    fn written(limiter: &Limiter, device: &str, now: Instant, lines: usize) -> usize {
        (0..lines).filter(|_| matches!(limiter.admit(Some(device), Other, now), Write { .. })).count()
    }

    #[test]
    fn a_device_logs_a_burst_then_a_line_a_second_and_tells_what_it_left_out() {
        let (limiter, start) = limiter();
        assert_eq!(written(&limiter, "a", start, 58_000), 20);
        assert_eq!(limiter.admit(Some("a"), Other, start + SECOND), Write { left_out: 57_980 });
        assert_eq!(limiter.admit(Some("a"), Other, start + SECOND), LeaveOut { first: true });
        assert_eq!(written(&limiter, "a", start + 11 * SECOND, 100), 10);
        assert_eq!(limiter.admit(Some("a"), Other, start + 12 * SECOND), Write { left_out: 90 });
        assert_eq!(limiter.admit(Some("a"), Other, start + 13 * SECOND), Write { left_out: 0 });
        // A long pause earns no more than a burst.
        assert_eq!(written(&limiter, "a", start + 10_000 * SECOND, 100), 20);
    }

    #[test]
    fn neither_other_devices_nor_errors_pay_for_it() {
        let (limiter, now) = limiter();
        assert_eq!(written(&limiter, "a", now, 1000), 20);
        assert_eq!(limiter.admit(Some("a"), Error, now), Write { left_out: 0 });
        assert_eq!(limiter.admit(Some("a"), SlowRequest, now), Write { left_out: 0 });
        assert_eq!(limiter.admit(Some("b"), Other, now), Write { left_out: 0 });
        assert_eq!(limiter.admit(None, Other, now), Write { left_out: 0 });
    }

    #[test]
    fn what_was_left_out_is_told_after_a_pause_and_at_the_end() {
        let (limiter, start) = limiter();
        assert!(!limiter.owes());
        written(&limiter, "a", start, 25);
        assert!(limiter.owes());
        assert_eq!(limiter.overdue(start, SECOND), [], "it still comes");
        let now = start + SECOND;
        assert_eq!(limiter.overdue(now, SECOND), [(Some("a".into()), Other)]);
        assert_eq!(limiter.admit(Some("a"), Other, now), Write { left_out: 5 });
        assert!(!limiter.owes() && limiter.overdue(now + SECOND, SECOND).is_empty());
        for _ in 0..21 {
            limiter.admit(None, Error, now);
        }
        assert_eq!(limiter.open(), [(None, Error)]);
        assert_eq!(limiter.admit(None, Error, now), Write { left_out: 1 });
        assert_eq!(written(&limiter, "a", now, 100), 100, "the last lines are not limited");
    }

    #[test]
    fn names_take_a_bounded_amount_of_memory() {
        let (limiter, start) = limiter();
        for number in 0..2 * DEVICES {
            let _ = limiter.admit(Some(&number.to_string()), Other, start);
        }
        assert_eq!(limiter.buckets.lock().devices.len(), DEVICES);
        // Those that are quiet make bucket.
        assert_eq!(limiter.admit(Some("new"), Other, start + SECOND), Write { left_out: 0 });
        assert_eq!(limiter.buckets.lock().devices.len(), 1);
    }

    #[test]
    fn no_limit_leaves_nothing_out() {
        let limiter = Limiter::new(None);
        assert_eq!(written(&limiter, "a", Instant::now(), 10_000), 10_000);
        assert!(!limiter.owes());
    }
}
