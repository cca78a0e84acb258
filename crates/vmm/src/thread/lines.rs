//! Interrupts of a guest that is a thread: counts, and a wake-up that cannot be lost.
use paravane_notify::InterruptSink;
use paravane_spec::builtin::IRQ_COUNT;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::Thread;

#[derive(Default)]
struct Line {
    enabled: AtomicBool,
    taken: AtomicU64,
}

/// All lines of the machine, and the stop request, which wakes the guest just as well.
#[derive(Default)]
pub(super) struct Lines {
    lines: [Line; IRQ_COUNT],
    taken: AtomicU64,
    stop: AtomicBool,
    guest: OnceLock<Thread>,
}

impl Lines {
    /// The line of `gsi`, as its device sees it.
    pub(super) fn line(lines: &Arc<Self>, gsi: u32) -> Arc<dyn InterruptSink> {
        Arc::new(LineSink { lines: Arc::clone(lines), gsi })
    }

    /// The calling thread is the guest.
    pub(super) fn attach(&self) {
        self.guest.get_or_init(std::thread::current);
    }

    /// Lets the line of `gsi` through. As on an I/O APIC, an edge before that is lost.
    pub(super) fn enable(&self, gsi: u32) {
        if let Some(line) = self.get(gsi) {
            line.enabled.store(true, Ordering::SeqCst);
        }
    }

    fn get(&self, gsi: u32) -> Option<&Line> {
        self.lines.get(usize::try_from(gsi).ok()?)
    }

    fn raise(&self, gsi: u32) {
        let Some(line) = self.get(gsi).filter(|line| line.enabled.load(Ordering::SeqCst)) else { return };
        // Release, both: what the device published before is seen by a guest that sees the count (`taken`,
        // `taken_on`), and a guest that sees the sum sees the line's count.
        line.taken.fetch_add(1, Ordering::Release);
        self.taken.fetch_add(1, Ordering::Release);
        self.wake();
    }

    fn wake(&self) {
        if let Some(guest) = self.guest.get() {
            // Leaves a token that the next park takes, so a guest about to park does not sleep.
            guest.unpark();
        }
    }

    /// Interrupts taken on all lines.
    pub(super) fn taken(&self) -> u64 {
        // Pairs with the release in `raise`.
        self.taken.load(Ordering::Acquire)
    }

    /// Interrupts taken on the line of `gsi`.
    pub(super) fn taken_on(&self, gsi: u32) -> u64 {
        // Pairs with the release in `raise`.
        self.get(gsi).map_or(0, |line| line.taken.load(Ordering::Acquire))
    }

    /// Sleeps until the sum is no longer `seen`, or a stop was asked for. The guest's thread only.
    pub(super) fn wait(&self, seen: u64) {
        while self.taken() == seen && !self.stopping() {
            std::thread::park();
        }
    }

    /// Asks the guest to stop.
    pub(super) fn stop(&self) {
        // Release, pairs with `stopping`; the unpark orders it for a guest that sleeps.
        self.stop.store(true, Ordering::Release);
        self.wake();
    }

    /// Whether a stop was asked for.
    pub(super) fn stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }
}

struct LineSink {
    lines: Arc<Lines>,
    gsi: u32,
}

impl InterruptSink for LineSink {
    fn raise(&self) {
        self.lines.raise(self.gsi);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_per_line_and_loses_what_is_not_enabled() {
        let lines = Arc::new(Lines::default());
        lines.attach();
        let five = Lines::line(&lines, 5);
        let six = Lines::line(&lines, 6);
        five.raise();
        assert_eq!(lines.taken(), 0);
        lines.enable(5);
        lines.enable(6);
        lines.enable(4000);
        five.raise();
        five.raise();
        six.raise();
        Lines::line(&lines, 4000).raise();
        assert_eq!((lines.taken(), lines.taken_on(5), lines.taken_on(6), lines.taken_on(4000)), (3, 2, 1, 0));
        lines.wait(2);
    }

    #[test]
    fn no_wake_up_is_lost() {
        const ROUNDS: u64 = 20_000;
        let lines = Arc::new(Lines::default());
        lines.enable(5);
        let guest = {
            let lines = Arc::clone(&lines);
            std::thread::spawn(move || {
                lines.attach();
                let mut seen = 0;
                while seen < ROUNDS {
                    lines.wait(seen);
                    seen = lines.taken();
                }
                seen
            })
        };
        while lines.guest.get().is_none() {
            std::thread::yield_now();
        }
        let sink = Lines::line(&lines, 5);
        for _ in 0..ROUNDS {
            sink.raise();
        }
        assert_eq!(guest.join().unwrap(), ROUNDS);
    }

    #[test]
    fn a_stop_wakes_a_sleeper() {
        let lines = Arc::new(Lines::default());
        let guest = {
            let lines = Arc::clone(&lines);
            std::thread::spawn(move || {
                lines.attach();
                lines.wait(0);
                lines.stopping()
            })
        };
        while lines.guest.get().is_none() {
            std::thread::yield_now();
        }
        lines.stop();
        assert!(guest.join().unwrap());
    }
}
