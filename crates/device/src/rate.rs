//! Rate limits in bytes and operations a second, for a device and all its queues.
//!
//! ```text
//!             free_at <= now                 charge: free_at = max(free_at, now - burst) + cost
//!   open ------------------------> serve one ---------------------------------------------------> open, or held
//!   held --- timer, at free_at ---> open
//! ```
//! A token bucket, kept as one number: the time at which the next request may begin (GCRA, ITU-T
//! I.371). A queue that finds it past serves one request of any size, and advances it by the
//! request's cost; it never lies further back than the burst. So a bucket is one word, queues share
//! it without a lock, and no request is larger than the bucket. Queues that check at the same
//! moment each serve one; the next one waits until that debt is paid.
//!
//! The caller passes the time, so that a model needs no clock.
//!
//! A limit may change while queues use it ([`Limiter::set`]). A queue without a limit has no [`Brake`],
//! and asks no limiter: it is told of a new one ([`QueueHandler::renew`](crate::QueueHandler::renew)).
use crate::Rest;
use paravane_store::clear;
use rustix::time::{
    ClockId, Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, clock_gettime,
    timerfd_create, timerfd_settime,
};
use std::io;
use std::num::NonZeroU64;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A rate limit for one unit: bytes or operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Units a second, on average.
    pub per_second: NonZeroU64,
    /// Units beyond the average, saved up while less is used. 0 spaces requests evenly.
    pub burst: u64,
}

/// The rate limits of a device \[none\].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RateLimit {
    /// Bytes of data, of both directions.
    pub bytes: Option<Rate>,
    /// Requests or frames.
    pub ops: Option<Rate>,
}

/// Enforces a rate limit. Shared by the queues of one or several devices.
#[derive(Debug)]
pub struct Limiter {
    bytes: Bucket,
    ops: Bucket,
    held: AtomicU64,
}

/// Nanoseconds of CLOCK_MONOTONIC.
pub(crate) type Time = u64;

const SECOND: u64 = 1_000_000_000;

/// Longest extra sleep of a held queue, to wake up for more than one request.
const DOZE: Time = 1_000_000;

/// The present time.
pub(crate) fn now() -> Time {
    let now = clock_gettime(ClockId::Monotonic);
    // The clock counts from the start of the host: neither is negative, nor is the sum near the end
    // of 64 bits.
    now.tv_sec.cast_unsigned().wrapping_mul(SECOND).wrapping_add(now.tv_nsec.cast_unsigned())
}

#[derive(Debug)]
struct Bucket {
    /// Of its [`Rate`]; 0: no limit.
    per_second: AtomicU64,
    /// Of its [`Rate`].
    burst: AtomicU64,
    /// Time at which the next request may begin.
    free_at: AtomicU64,
}

impl Bucket {
    fn new(rate: Option<Rate>) -> Self {
        let per_second = AtomicU64::new(rate.map_or(0, |rate| rate.per_second.get()));
        let burst = AtomicU64::new(rate.map_or(0, |rate| rate.burst));
        Self { per_second, burst, free_at: AtomicU64::new(0) }
    }

    /// The rate; `None`: no limit.
    ///
    /// While it changes, it may have one number of each.
    fn rate(&self) -> Option<Rate> {
        // Relaxed, both: the numbers order nothing.
        let per_second = NonZeroU64::new(self.per_second.load(Ordering::Relaxed))?;
        Some(Rate { per_second, burst: self.burst.load(Ordering::Relaxed) })
    }

    /// Changes the rate. Time that is owed by the old one is forgiven.
    fn set(&self, rate: Option<Rate>, now: Time) {
        if self.rate() == rate {
            return;
        }
        // Relaxed, all: as above.
        self.burst.store(rate.map_or(0, |rate| rate.burst), Ordering::Relaxed);
        self.per_second.store(rate.map_or(0, |rate| rate.per_second.get()), Ordering::Relaxed);
        self.free_at.fetch_min(now, Ordering::Relaxed);
    }

    fn free_at(&self) -> Time {
        // Relaxed: the number orders nothing else.
        self.free_at.load(Ordering::Relaxed)
    }

    fn charge(&self, now: Time, units: u64) {
        let Some(rate) = self.rate() else { return };
        let oldest = now.saturating_sub(rate.time(rate.burst));
        let cost = rate.time(units);
        let moved = |free_at: Time| Some(free_at.max(oldest).saturating_add(cost));
        // Relaxed: as above. It cannot fail, since `moved` never refuses.
        let _ = self.free_at.fetch_update(Ordering::Relaxed, Ordering::Relaxed, moved);
    }
}

impl Rate {
    /// Time that `units` take, at most the end of the clock.
    fn time(self, units: u64) -> Time {
        let time = (u128::from(units) * u128::from(SECOND)).div_ceil(self.per_second.get().into());
        Time::try_from(time).unwrap_or(Time::MAX)
    }
}

impl Limiter {
    /// Creates a limiter with full buckets. One without a limit holds nothing.
    #[must_use]
    pub fn new(limit: RateLimit) -> Arc<Self> {
        let (bytes, ops) = (Bucket::new(limit.bytes), Bucket::new(limit.ops));
        Arc::new(Self { bytes, ops, held: AtomicU64::new(0) })
    }

    /// The limit that it enforces.
    #[must_use]
    pub fn limit(&self) -> RateLimit {
        RateLimit { bytes: self.bytes.rate(), ops: self.ops.rate() }
    }

    /// Changes the limit. What has been used beyond the old one is forgiven.
    ///
    /// Then have live queues look ([`QueueHandler::renew`](crate::QueueHandler::renew)): one may be held
    /// by the old limit, or not ask at all.
    pub fn set(&self, limit: RateLimit) {
        let now = now();
        self.bytes.set(limit.bytes, now);
        self.ops.set(limit.ops, now);
    }

    /// Whether there is a limit.
    pub(crate) fn is_on(&self) -> bool {
        self.limit() != RateLimit::default()
    }

    /// Number of times that it has held a queue.
    #[must_use]
    pub fn times_held(&self) -> u64 {
        // Relaxed: a statistic.
        self.held.load(Ordering::Relaxed)
    }

    /// Time at which the next request may begin; at once, if that is past.
    pub(crate) fn free_at(&self) -> Time {
        self.bytes.free_at().max(self.ops.free_at())
    }

    /// Charges a request of `bytes` that begins now.
    pub(crate) fn charge(&self, now: Time, bytes: u64) {
        self.bytes.charge(now, bytes);
        self.ops.charge(now, 1);
    }

    /// Extra sleep of a held queue that costs it none of its rate.
    fn doze(&self) -> Time {
        let rates = [self.bytes.rate(), self.ops.rate()].into_iter().flatten();
        rates.map(|rate| rate.time(rate.burst) / 2).min().unwrap_or(0).min(DOZE)
    }
}

/// A queue's handle to a limiter, with the timer that wakes it.
#[derive(Debug)]
pub(crate) struct Brake {
    limiter: Arc<Limiter>,
    /// Time until which the queue is held.
    held: Option<Time>,
    /// Becomes readable when the wait is over.
    pub(crate) timer: Arc<OwnedFd>,
    /// The timer has been set since it was last cleared.
    armed: bool,
}

impl Brake {
    /// For a queue of a device with a limit.
    pub(crate) fn new(limiter: Arc<Limiter>) -> io::Result<Self> {
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        Ok(Self { limiter, held: None, timer: Arc::new(timer), armed: false })
    }

    /// Whether a request may begin. If not, the queue is held.
    pub(crate) fn lets_go(&mut self, now: Time) -> bool {
        if self.held.is_some_and(|until| until > now) {
            return false;
        }
        // Other queues may have used the rate meanwhile.
        let free_at = self.limiter.free_at();
        self.held = (free_at > now).then(|| free_at.saturating_add(self.limiter.doze()));
        if self.held.is_some() {
            // Relaxed: a statistic.
            self.limiter.held.fetch_add(1, Ordering::Relaxed);
        }
        self.held.is_none()
    }

    /// See [`Limiter::charge`].
    pub(crate) fn charge(&self, now: Time, bytes: u64) {
        self.limiter.charge(now, bytes);
    }

    /// Holds the queue no more: the limit has changed.
    pub(crate) fn release(&mut self) {
        self.held = None;
    }

    /// Whether the limit holds the queue.
    pub(crate) fn holds(&self) -> bool {
        self.held.is_some()
    }

    /// Whether the wait of a held queue is over, or it is not held.
    pub(crate) fn is_over(&self) -> bool {
        self.held.is_none_or(|until| until <= now())
    }

    /// See [`QueueHandler::rest`](crate::QueueHandler::rest): a held queue waits for no kicks.
    pub(crate) fn rest(&mut self, arm: bool) -> Rest {
        let over = if arm { self.listen() } else { self.holds() && self.is_over() };
        Rest::serve_if(over).with_kicks(!self.holds())
    }

    /// Sets the timer of a held queue; clears it for one that is not held.
    ///
    /// `true` if the wait is over already.
    fn listen(&mut self) -> bool {
        let Some(until) = self.held else {
            if self.armed {
                // EAGAIN: it was not readable, which is fine. It may signal once more, without
                // effect.
                clear(&self.timer);
                self.armed = false;
            }
            return false;
        };
        if until <= now() {
            return true;
        }
        let value = Timespec { tv_sec: (until / SECOND) as i64, tv_nsec: (until % SECOND) as i64 };
        let interval = Timespec { tv_sec: 0, tv_nsec: 0 };
        // Setting it clears it.
        let set = timerfd_settime(
            &self.timer,
            TimerfdTimerFlags::ABSTIME,
            &Itimerspec { it_interval: interval, it_value: value },
        );
        self.armed = true;
        match set {
            Ok(_) => false,
            Err(error) => {
                // Spinning is better than sleeping forever.
                tracing::error!(%error, "cannot set the timer of a rate-limited queue; the queue is polled");
                true
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rig::{becomes_readable, readable};
    use proptest::prelude::*;

    fn rate(per_second: u64, burst: u64) -> Rate {
        Rate { per_second: NonZeroU64::new(per_second).unwrap(), burst }
    }

    fn limiter(bytes: Option<Rate>, ops: Option<Rate>) -> Arc<Limiter> {
        Limiter::new(RateLimit { bytes, ops })
    }

    /// Serves requests of `bytes()` as soon as the limit allows, from `start` to `end`.
    ///
    /// When each began.
    fn serve_all(
        limiter: &Limiter,
        start: Time,
        end: Time,
        mut bytes: impl FnMut() -> u64,
    ) -> Vec<(Time, u64)> {
        let mut served = Vec::new();
        let mut now = start;
        loop {
            now = now.max(limiter.free_at());
            if now >= end {
                return served;
            }
            let bytes = bytes();
            limiter.charge(now, bytes);
            served.push((now, bytes));
        }
    }

    #[test]
    fn who_has_saved_up_may_use_its_burst_at_once_and_no_more() {
        let limiter = limiter(None, Some(rate(1000, 10)));
        let served = serve_all(&limiter, 5 * SECOND, 6 * SECOND, || 1 << 30);
        // The one that empties the bucket may begin as well: its debt is paid before the next.
        let at_once = served.iter().filter(|(at, _)| *at == 5 * SECOND).count();
        assert_eq!(at_once, 10 + 1);
        assert_eq!(served.len(), 1000 + 10);
    }

    #[test]
    fn without_a_burst_requests_keep_their_distance() {
        let limiter = limiter(Some(rate(4096 * 100, 0)), None);
        let served = serve_all(&limiter, SECOND, 2 * SECOND, || 4096);
        assert_eq!(served.len(), 100);
        assert!(served.windows(2).all(|pair| pair[1].0 - pair[0].0 == SECOND / 100));
    }

    #[test]
    fn a_request_that_is_larger_than_the_bucket_is_served_and_paid_for() {
        let limiter = limiter(Some(rate(1000, 10)), None);
        limiter.charge(SECOND, 5000);
        assert_eq!(limiter.free_at(), 6 * SECOND - 10 * (SECOND / 1000));
        limiter.charge(7 * SECOND, 0);
        assert!(limiter.free_at() <= 7 * SECOND);
    }

    #[test]
    fn the_tighter_limit_holds() {
        let both = limiter(Some(rate(1 << 20, 0)), Some(rate(100, 0)));
        assert_eq!(serve_all(&both, SECOND, 2 * SECOND, || 512).len(), 100);
        assert_eq!(serve_all(&both, 10 * SECOND, 11 * SECOND, || 1 << 18).len(), 4);
        let limit = both.limit();
        assert_eq!((limit.bytes, limit.ops), (Some(rate(1 << 20, 0)), Some(rate(100, 0))));
    }

    #[test]
    fn no_number_is_too_large() {
        for limit in [rate(u64::MAX, u64::MAX), rate(1, u64::MAX), rate(1, 0), rate(u64::MAX, 0)] {
            let limiter = limiter(Some(limit), Some(limit));
            for now in [0, 1, u64::MAX - 1, u64::MAX] {
                limiter.charge(now, u64::MAX);
                limiter.charge(now, 0);
            }
            assert!(limiter.doze() <= DOZE);
        }
        assert_eq!(limiter(None, None).free_at(), 0);
    }

    proptest! {
        /// In no stretch of time is more begun than rate, burst and one request.
        #[test]
        fn no_stretch_of_time_has_more_than_its_share(
            per_second in 1..10_000_000_u64,
            burst in 0..100_000_u64,
            requests in prop::collection::vec((0..20_000_000_u64, 0..50_000_u64), 1..60),
        ) {
            let limiter = limiter(Some(rate(per_second, burst)), None);
            let (mut now, mut served) = (SECOND, Vec::new());
            for (pause, bytes) in requests {
                now = (now + pause).max(limiter.free_at());
                limiter.charge(now, bytes);
                served.push((now, bytes));
            }
            for from in 0..served.len() {
                let mut sum = 0;
                for to in from..served.len() {
                    // What began before the last one of the stretch: that one is paid for later.
                    let time = u128::from(served[to].0 - served[from].0);
                    let share = u128::from(per_second) * time / u128::from(SECOND) + u128::from(burst) + 1;
                    prop_assert!(u128::from(sum) <= share, "{} bytes, {}", sum, share);
                    sum += served[to].1;
                }
            }
        }

        /// A queue that always has requests gets the whole rate.
        #[test]
        fn the_whole_rate_can_be_used(
            per_second in 1000..1_000_000_000_u64,
            burst in 0..100_000_u64,
            bytes in 1..10_000_u64,
        ) {
            let limiter = limiter(Some(rate(per_second, burst)), None);
            let time = 2 * SECOND.max(bytes * SECOND / per_second);
            // Each request's time is rounded up to nanoseconds.
            let exact = bytes * SECOND / per_second;
            prop_assume!(exact > 1000 && time / exact < 100_000);
            let sum: u64 = serve_all(&limiter, SECOND, SECOND + time, || bytes).iter().map(|(_, bytes)| bytes).sum();
            let share = u128::from(per_second) * u128::from(time) / u128::from(SECOND);
            prop_assert!(u128::from(sum) * 1002 / 1000 >= share, "{sum} of {share}");
        }
    }

    #[test]
    fn a_limit_that_changes_forgives_what_is_owed() {
        let limiter = limiter(Some(rate(1, 0)), Some(rate(1000, 0)));
        let start = now();
        limiter.charge(start, 1_000_000);
        assert!(limiter.free_at() >= start + 1_000_000 * SECOND);
        let mut brake = Brake::new(limiter.clone()).unwrap();
        assert!(!brake.lets_go(start + SECOND));
        let limit = RateLimit { bytes: Some(rate(1 << 30, 0)), ops: Some(rate(1000, 0)) };
        limiter.set(limit);
        assert_eq!(limiter.limit(), limit);
        assert!(!brake.lets_go(now() + SECOND), "held until it is told");
        brake.release();
        assert!(brake.lets_go(now() + SECOND));
        // The limit that stays has its debt still.
        limiter.charge(now() + 3600 * SECOND, 0);
        limiter.set(RateLimit { bytes: None, ..limit });
        assert!(limiter.free_at() > now() + 1800 * SECOND && limiter.is_on());
        limiter.set(RateLimit::default());
        assert!(limiter.free_at() <= now() && !limiter.is_on());
        limiter.charge(now(), u64::MAX);
        assert!(limiter.free_at() <= now() && limiter.doze() == 0);
    }

    #[test]
    fn queues_share_a_bucket() {
        let limiter = limiter(None, Some(rate(1_000_000, 0)));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..10_000).for_each(|_| limiter.charge(SECOND, 0)));
            }
        });
        assert_eq!(limiter.free_at(), SECOND + 40_000 * 1000);
    }

    #[test]
    fn a_brake_holds_until_its_time_and_wakes_then() {
        let (limiter, start) = (limiter(None, Some(rate(100, 0))), now());
        let mut brake = Brake::new(limiter.clone()).unwrap();
        assert!(brake.lets_go(start) && !brake.holds() && !brake.listen() && brake.is_over());
        brake.charge(start, 0);
        assert!(!brake.lets_go(start) && brake.holds());
        assert!(!brake.lets_go(start + SECOND / 100 - 1));
        // On a busy host it may be over before the test listens.
        if !brake.listen() {
            assert!(becomes_readable(&brake.timer));
        }
        assert!(now() >= start + SECOND / 100 && brake.is_over());
        assert!(brake.lets_go(now()) && !brake.holds());
        assert!(!brake.listen() && !readable(&brake.timer), "what is over wakes nobody");
        // Another queue is faster.
        limiter.charge(now() + 3600 * SECOND, 0);
        assert!(!brake.lets_go(now()) && !brake.is_over());
    }
}
