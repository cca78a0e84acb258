//! Time limits that only end a hang.
use rustix::time::{ClockId, clock_gettime};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Limit on a machine that does nothing else.
const QUIET: Duration = Duration::from_secs(60);
/// Longest limit.
const LONGEST: Duration = Duration::from_secs(600);
/// CPU time that the first call measures the machine with.
const SAMPLE: Duration = Duration::from_millis(10);
/// Interval at which the load average is read again.
const INTERVAL: Duration = Duration::from_secs(1);

/// Time after which a test that waits for an event may call it lost: 60 s to 600 s.
///
/// Grows with the number of threads that compete for each CPU: the load average, and what the first
/// call in the process measures. It never shrinks in a process, so `start.elapsed() < patience()`
/// also holds for a machine that has become busy meanwhile.
///
/// A test passes or fails by what it waits for, never by how long that took.
#[must_use]
pub fn patience() -> Duration {
    static FIRST: OnceLock<(Instant, f64)> = OnceLock::new();
    static NEXT_READ_NS: AtomicU64 = AtomicU64::new(0);
    static LIMIT_NS: AtomicU64 = AtomicU64::new(0);
    if cfg!(miri) {
        // It has no clock of a thread's CPU time.
        return LONGEST;
    }
    let (first, share) = FIRST.get_or_init(|| (Instant::now(), competitors_of_a_sample()));
    let now = first.elapsed();
    if now.as_nanos() as u64 >= NEXT_READ_NS.load(Ordering::Relaxed) {
        NEXT_READ_NS.store((now + INTERVAL).as_nanos() as u64, Ordering::Relaxed);
        let limit = scaled(share.max(load_per_cpu()));
        LIMIT_NS.fetch_max(limit.as_nanos() as u64, Ordering::Relaxed);
    }
    // Another thread may be about to store the first limit.
    Duration::from_nanos(LIMIT_NS.load(Ordering::Relaxed)).max(QUIET)
}

/// Polls until `poll` returns a value, and returns it.
///
/// `state` describes what is tested: its report, the end of its log.
///
/// # Panics
/// [`patience`] is over: prints `what` and `state`.
#[track_caller]
pub fn wait_for<T>(what: &str, state: impl FnOnce() -> String, mut poll: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = poll() {
            return value;
        }
        assert!(start.elapsed() < patience(), "{}", too_long(what, start.elapsed(), &state()));
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Polls until `condition` holds.
///
/// # Panics
/// [`patience`] is over: prints `what`.
#[track_caller]
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    wait_for(what, String::new, || condition().then_some(()));
}

fn too_long(what: &str, time: Duration, state: &str) -> String {
    let load = load_average().map_or("unknown".to_owned(), |load| load.to_string());
    format!("waited {time:.0?}: {what} (load average {load}) {state}")
}

fn scaled(competitors: f64) -> Duration {
    QUIET.mul_f64(competitors.clamp(1.0, LONGEST.as_secs_f64() / QUIET.as_secs_f64()))
}

/// Threads that this one shares its CPU with, itself included: wall-clock time by CPU time.
fn competitors_of_a_sample() -> f64 {
    let (start, used) = (Instant::now(), cpu_time());
    while cpu_time().saturating_sub(used) < SAMPLE && start.elapsed() < Duration::from_secs(5) {
        std::hint::spin_loop();
    }
    start.elapsed().as_secs_f64() / SAMPLE.as_secs_f64()
}

fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}

fn load_per_cpu() -> f64 {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    load_average().unwrap_or(0.0) / cpus as f64
}

/// Threads that have run or waited for a CPU or a disk, on average over a minute.
fn load_average() -> Option<f64> {
    std::fs::read_to_string("/proc/loadavg").ok()?.split(' ').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_machine_has_longer_limits_with_a_bound() {
        assert_eq!(scaled(0.0), QUIET);
        assert_eq!(scaled(0.9), QUIET);
        assert_eq!(scaled(2.5), QUIET * 5 / 2);
        assert_eq!(scaled(1e9), LONGEST);
        let first = patience();
        assert!((QUIET..=LONGEST).contains(&first) && patience() >= first);
    }

    #[test]
    fn a_failure_names_the_event_and_the_state() {
        let text = too_long("the client", Duration::from_secs(61), "no client has connected");
        assert!(text.starts_with("waited 61s: the client (load average "), "{text}");
        assert!(text.ends_with(") no client has connected"), "{text}");
        let mut count = 0;
        let third = || {
            count += 1;
            (count == 3).then_some(count)
        };
        assert_eq!(wait_for("the third poll", String::new, third), 3);
    }
}
