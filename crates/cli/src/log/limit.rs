//! How many lines a device may log: a burst, then so many a second. What one device logs leaves the room of others alone.
//!
//! Errors have room of their own, so that a client that causes warnings hides none. Lines that name no device share one room.
use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The burst: lines at once, in seconds of the rate.
const BURST: u32 = 20;
/// Devices with room of their own. A daemon has fewer; names that went by are forgotten first.
const DEVICES: usize = 4096;

/// Which room of a device a line takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Severity {
    Error,
    Other,
}

/// What becomes of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It is written; so many of its kind were left out since the last one.
    Write { left_out: u64 },
    /// It is counted; whether it is the first one.
    LeaveOut { first: bool },
}

/// The room of all devices.
#[derive(Debug)]
pub(super) struct Limiter {
    /// Time that a line takes; `None`: no limit.
    period: Option<Duration>,
    open: AtomicBool,
    rooms: Mutex<Rooms>,
}

#[derive(Debug, Default)]
struct Rooms {
    devices: HashMap<Box<str>, [Room; 2]>,
    /// Of lines without a device.
    shared: [Room; 2],
    /// Rooms whose lines were left out and not told of.
    owing: usize,
}

#[derive(Clone, Copy, Debug, Default)]
struct Room {
    /// When the lines so far have taken all their time; `None`: none came.
    busy_until: Option<Instant>,
    left_out: u64,
    /// The last line that was left out.
    refused: Option<Instant>,
}

impl Room {
    /// Whether a line finds room.
    fn admits(&self, now: Instant, period: Duration) -> bool {
        self.busy_until.is_none_or(|until| until.saturating_duration_since(now) <= period * (BURST - 1))
    }

    /// Nothing is remembered of it.
    fn is_idle(&self, now: Instant) -> bool {
        self.left_out == 0 && self.busy_until.is_none_or(|until| until <= now)
    }
}

impl Limiter {
    /// Of so many lines a second and device; `None`: no limit.
    pub(super) fn new(rate: Option<NonZeroU32>) -> Self {
        let period = rate.map(|rate| Duration::from_secs(1) / rate.get());
        Self { period, open: AtomicBool::new(false), rooms: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Rooms> {
        // What is half done costs a line or a count.
        self.rooms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a line may be written.
    pub(super) fn admit(&self, device: Option<&str>, severity: Severity, now: Instant) -> Verdict {
        let Some(period) = self.period else { return Verdict::Write { left_out: 0 } };
        let mut rooms = self.lock();
        let room = rooms.room(device, severity, now);
        // Relaxed: it is set once, by the thread that writes the last lines.
        if !self.open.load(Ordering::Relaxed) && !room.admits(now, period) {
            room.left_out += 1;
            room.refused = Some(now);
            let first = room.left_out == 1;
            rooms.owing += usize::from(first);
            return Verdict::LeaveOut { first };
        }
        room.busy_until = Some(room.busy_until.map_or(now, |until| until.max(now)) + period);
        let left_out = std::mem::take(&mut room.left_out);
        rooms.owing -= usize::from(left_out > 0);
        Verdict::Write { left_out }
    }

    /// Whether lines were left out and not told of.
    pub(super) fn owes(&self) -> bool {
        self.lock().owing > 0
    }

    /// Rooms that would admit a line again, and had none left out for `pause`: whose they are.
    pub(super) fn overdue(&self, now: Instant, pause: Duration) -> Vec<(Option<Box<str>>, Severity)> {
        let Some(period) = self.period else { return Vec::new() };
        let quiet = |room: &Room| room.refused.is_some_and(|at| now.saturating_duration_since(at) >= pause);
        self.lock().owing(|room| quiet(room) && room.admits(now, period))
    }

    /// Ends the limit, and returns all rooms whose lines were left out and not told of.
    pub(super) fn open(&self) -> Vec<(Option<Box<str>>, Severity)> {
        self.open.store(true, Ordering::Relaxed);
        self.lock().owing(|_| true)
    }
}

impl Rooms {
    fn room(&mut self, device: Option<&str>, severity: Severity, now: Instant) -> &mut Room {
        let Some(device) = device else { return &mut self.shared[severity as usize] };
        if !self.devices.contains_key(device) {
            if self.devices.len() >= DEVICES {
                self.devices.retain(|_, rooms| !rooms.iter().all(|room| room.is_idle(now)));
            }
            if self.devices.len() >= DEVICES {
                return &mut self.shared[severity as usize];
            }
        }
        &mut self.devices.entry(device.into()).or_default()[severity as usize]
    }

    fn owing(&self, due: impl Fn(&Room) -> bool) -> Vec<(Option<Box<str>>, Severity)> {
        if self.owing == 0 {
            return Vec::new();
        }
        let due = |room: &Room| room.left_out > 0 && due(room);
        let named = self.devices.iter().map(|(name, rooms)| (Some(name.clone()), rooms));
        let all = named.chain([(None, &self.shared)]);
        let each = all.flat_map(|(name, rooms)| {
            [Severity::Error, Severity::Other]
                .into_iter()
                .filter(|&severity| due(&rooms[severity as usize]))
                .map(move |severity| (name.clone(), severity))
        });
        each.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::Severity::{Error, Other};
    use super::Verdict::{LeaveOut, Write};
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn limiter() -> (Limiter, Instant) {
        (Limiter::new(NonZeroU32::new(1)), Instant::now())
    }

    /// How many of so many lines at `now` are written.
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
        assert_eq!(limiter.lock().devices.len(), DEVICES);
        // Those that are quiet make room.
        assert_eq!(limiter.admit(Some("new"), Other, start + SECOND), Write { left_out: 0 });
        assert_eq!(limiter.lock().devices.len(), 1);
    }

    #[test]
    fn no_limit_leaves_nothing_out() {
        let limiter = Limiter::new(None);
        assert_eq!(written(&limiter, "a", Instant::now(), 10_000), 10_000);
        assert!(!limiter.owes());
    }
}
