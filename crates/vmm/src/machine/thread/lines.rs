//! Interrupts of a guest on a thread: counters, and a wake-up without a race.
//!
//! ```text
//! line of a GSI        --.--> the count of its number (if enabled, as by an I/O APIC) --> the sum --> unpark
//! message              --'    `arch` knows the number that it stands for
//! ```
use crate::arch::interrupt_number;
use paravane_notify::msi::{MsiController, MsiMessage, MsiSink};
use paravane_notify::{InterruptSink, NotifyError};
use paravane_spec::builtin::{INTERRUPTS, IRQ_COUNT};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::Thread;

/// Lines and messages of the machine, and its stop request.
///
/// Each of them wakes the guest.
pub(super) struct Lines {
    enabled: [AtomicBool; IRQ_COUNT],
    /// Interrupts taken, by number.
    taken_on: [AtomicU64; INTERRUPTS],
    taken: AtomicU64,
    stop: AtomicBool,
    guest: OnceLock<Thread>,
}

impl Default for Lines {
    fn default() -> Self {
        Self {
            enabled: [const { AtomicBool::new(false) }; IRQ_COUNT],
            taken_on: [const { AtomicU64::new(0) }; INTERRUPTS],
            taken: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            guest: OnceLock::new(),
        }
    }
}

impl Lines {
    /// The line of `gsi`, as its device sees it.
    pub(super) fn line(lines: &Arc<Self>, gsi: u32) -> Arc<dyn InterruptSink> {
        Arc::new(LineSink { lines: Arc::clone(lines), gsi })
    }

    /// Delivers messages to the guest.
    pub(super) fn messages(lines: &Arc<Self>) -> Arc<dyn MsiController> {
        Arc::new(Messages(Arc::clone(lines)))
    }

    /// The calling thread is the guest.
    pub(super) fn attach(&self) {
        self.guest.get_or_init(std::thread::current);
    }

    /// Enables the line of `gsi`.
    ///
    /// As on an I/O APIC, an earlier edge is lost.
    pub(super) fn enable(&self, gsi: u32) {
        if let Some(enabled) = self.enabled.get(gsi as usize) {
            enabled.store(true, Ordering::SeqCst);
        }
    }

    fn raise(&self, gsi: u32) {
        if self.enabled.get(gsi as usize).is_some_and(|enabled| enabled.load(Ordering::SeqCst)) {
            self.deliver(gsi as usize);
        }
    }

    /// Takes interrupt `number`.
    ///
    /// A message to a vector that the guest has no handler for goes nowhere.
    fn deliver(&self, number: usize) {
        let Some(taken) = self.taken_on.get(number) else { return };
        // Release, both: what the device published before is seen by a guest that sees the count
        // (`taken`, `taken_on`), and a guest that sees the sum sees the number's count.
        taken.fetch_add(1, Ordering::Release);
        self.taken.fetch_add(1, Ordering::Release);
        self.wake();
    }

    fn wake(&self) {
        if let Some(guest) = self.guest.get() {
            // Leaves a token that the next park takes, so a guest about to park does not sleep.
            guest.unpark();
        }
    }

    /// Interrupts taken, all numbers together.
    pub(super) fn taken(&self) -> u64 {
        // Pairs with the release in `deliver`.
        self.taken.load(Ordering::Acquire)
    }

    /// Interrupts taken on one number: a GSI, or what a message's vector stands for.
    pub(super) fn taken_on(&self, number: u32) -> u64 {
        // Pairs with the release in `deliver`.
        self.taken_on.get(number as usize).map_or(0, |taken| taken.load(Ordering::Acquire))
    }

    /// Sleeps until the sum differs from `seen`, or a stop is requested.
    ///
    /// For the guest's thread only.
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

    /// Whether a stop was requested.
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

/// Message delivery: there is nothing to set up.
struct Messages(Arc<Lines>);

impl MsiController for Messages {
    fn sink(&self) -> Result<Box<dyn MsiSink>, NotifyError> {
        Ok(Box::new(Self(Arc::clone(&self.0))))
    }
}

impl MsiSink for Messages {
    fn route(&self, message: MsiMessage) -> Result<(), NotifyError> {
        interrupt_number(message).map(|_| ())
    }

    fn fire(&self, message: MsiMessage) {
        // `route` accepted it, so it is an interrupt.
        if let Ok(Some(number)) = interrupt_number(message) {
            self.0.deliver(number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use paravane_spec::builtin::IRQ_VECTOR_BASE;

    #[test]
    fn a_message_is_counted_by_its_vector() {
        let lines = Arc::new(Lines::default());
        let sink = Lines::messages(&lines).sink().unwrap();
        let to = |vector: u8| MsiMessage { address: 0xfee0_0000, data: u32::from(vector), device: 0 };
        for (vector, number) in [(IRQ_VECTOR_BASE + 30, 30), (IRQ_VECTOR_BASE + 24, 24)] {
            sink.route(to(vector)).unwrap();
            sink.fire(to(vector));
            assert_eq!(lines.taken_on(number), 1);
        }
        for nowhere in [0, 0x3f, 0xff] {
            sink.route(to(nowhere)).unwrap();
            sink.fire(to(nowhere));
        }
        assert_eq!(lines.taken(), 2);
        assert!(sink.route(MsiMessage { address: 0x1000, data: 0x60, device: 0 }).is_err());
        assert!(sink.route(MsiMessage { address: 0x1_fee0_0000, data: 0x60, device: 0 }).is_err());
    }

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
