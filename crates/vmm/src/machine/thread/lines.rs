//! Interrupts of a guest on a thread: counters, and a wake-up without a race.
//!
//! ```text
//! line of a GSI        --.--> the count of its number (if enabled, as by an I/O APIC) --> the sum --> unpark
//! message              --'    `arch` knows the number that it stands for
//! ```
use crate::arch::interrupt;
use paravane_notify::msi::{MsiController, MsiMessage, MsiSink};
use paravane_notify::{InterruptSink, NotifyError};
use paravane_spec::builtin::{INTERRUPTS, IRQ_COUNT};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::Thread;

/// Processor of a line that is not enabled.
const NOWHERE: usize = usize::MAX;

/// Lines and messages of the machine, and its stop request.
///
/// Each of them wakes a processor.
pub(super) struct Lines {
    /// The processor of each line.
    to: [AtomicUsize; IRQ_COUNT],
    cpus: Vec<Cpu>,
    stop: AtomicBool,
}

/// Interrupts of one processor, in cache lines of their own.
#[repr(align(128))]
struct Cpu {
    /// Interrupts taken, by number.
    taken_on: [AtomicU64; INTERRUPTS],
    taken: AtomicU64,
    thread: OnceLock<Thread>,
}

impl Cpu {
    fn new() -> Self {
        Self {
            taken_on: [const { AtomicU64::new(0) }; INTERRUPTS],
            taken: AtomicU64::new(0),
            thread: OnceLock::new(),
        }
    }

    fn wake(&self) {
        if let Some(thread) = self.thread.get() {
            // Leaves a token that the next park takes, so a guest about to park does not sleep.
            thread.unpark();
        }
    }
}

impl Lines {
    /// Of a machine with this number of processors.
    pub(super) fn new(cpus: u16) -> Self {
        Self {
            to: [const { AtomicUsize::new(NOWHERE) }; IRQ_COUNT],
            cpus: (0..cpus.max(1)).map(|_| Cpu::new()).collect(),
            stop: AtomicBool::new(false),
        }
    }

    /// Number of processors.
    pub(super) fn cpus(&self) -> u16 {
        self.cpus.len() as u16
    }

    /// The line of `gsi`, as its device sees it.
    pub(super) fn line(lines: &Arc<Self>, gsi: u32) -> Arc<dyn InterruptSink> {
        Arc::new(LineSink { lines: Arc::clone(lines), gsi })
    }

    /// Delivers messages to the guest.
    pub(super) fn messages(lines: &Arc<Self>) -> Arc<dyn MsiController> {
        Arc::new(Messages(Arc::clone(lines)))
    }

    /// The calling thread is this processor.
    pub(super) fn attach(&self, cpu: usize) {
        if let Some(cpu) = self.cpus.get(cpu) {
            cpu.thread.get_or_init(std::thread::current);
        }
    }

    /// Makes the line of `gsi` interrupt a processor.
    ///
    /// As on an I/O APIC, an earlier edge is lost.
    pub(super) fn enable(&self, gsi: u32, cpu: usize) {
        if let Some(to) = self.to.get(gsi as usize) {
            to.store(cpu, Ordering::SeqCst);
        }
    }

    fn raise(&self, gsi: u32) {
        if let Some(to) = self.to.get(gsi as usize) {
            self.deliver(to.load(Ordering::SeqCst), gsi as usize);
        }
    }

    /// A processor takes interrupt `number`.
    ///
    /// A message to a processor that is not there, or to a vector that the guest has no handler for,
    /// goes nowhere.
    pub(super) fn deliver(&self, cpu: usize, number: usize) {
        let Some(cpu) = self.cpus.get(cpu) else { return };
        let Some(taken) = cpu.taken_on.get(number) else { return };
        // Release, both: what the device published before is seen by a guest that sees the count
        // (`taken`, `taken_on`), and a guest that sees the sum sees the number's count.
        taken.fetch_add(1, Ordering::Release);
        cpu.taken.fetch_add(1, Ordering::Release);
        cpu.wake();
    }

    /// Interrupts that a processor has taken, all numbers together.
    pub(super) fn taken(&self, cpu: usize) -> u64 {
        // Pairs with the release in `deliver`.
        self.cpus.get(cpu).map_or(0, |cpu| cpu.taken.load(Ordering::Acquire))
    }

    /// Interrupts that a processor has taken on one number: a GSI, or what a message's vector stands for.
    pub(super) fn taken_on(&self, cpu: usize, number: u32) -> u64 {
        let taken = self.cpus.get(cpu).and_then(|cpu| cpu.taken_on.get(number as usize));
        // Pairs with the release in `deliver`.
        taken.map_or(0, |taken| taken.load(Ordering::Acquire))
    }

    /// Sleeps until the sum of a processor differs from `seen`, or a stop is requested.
    ///
    /// For the processor's thread only.
    pub(super) fn wait(&self, cpu: usize, seen: u64) {
        while self.taken(cpu) == seen && !self.stopping() {
            std::thread::park();
        }
    }

    /// Asks the guest to stop.
    pub(super) fn stop(&self) {
        // Release, pairs with `stopping`; the unpark orders it for a guest that sleeps.
        self.stop.store(true, Ordering::Release);
        self.cpus.iter().for_each(Cpu::wake);
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
        interrupt(message).map(|_| ())
    }

    fn fire(&self, message: MsiMessage) {
        // `route` accepted it, so it is an interrupt.
        if let Ok(Some((cpu, number))) = interrupt(message) {
            self.0.deliver(cpu, number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use paravane_spec::builtin::{IRQ_VECTOR_BASE, message_address};

    #[test]
    fn a_message_is_counted_by_its_vector() {
        let lines = Arc::new(Lines::new(2));
        let sink = Lines::messages(&lines).sink().unwrap();
        let to = |vector: u8| MsiMessage { address: 0xfee0_0000, data: u32::from(vector), device: 0 };
        for (vector, number) in [(IRQ_VECTOR_BASE + 30, 30), (IRQ_VECTOR_BASE + 24, 24)] {
            sink.route(to(vector)).unwrap();
            sink.fire(to(vector));
            assert_eq!(lines.taken_on(0, number), 1);
        }
        for nowhere in [0, 0x3f, 0xff] {
            sink.route(to(nowhere)).unwrap();
            sink.fire(to(nowhere));
        }
        assert_eq!(lines.taken(0), 2);
        assert!(sink.route(MsiMessage { address: 0x1000, data: 0x60, device: 0 }).is_err());
        assert!(sink.route(MsiMessage { address: 0x1_fee0_0000, data: 0x60, device: 0 }).is_err());
    }

    #[test]
    fn a_message_and_a_line_reach_the_processor_that_they_name() {
        let lines = Arc::new(Lines::new(2));
        let sink = Lines::messages(&lines).sink().unwrap();
        for (cpu, times) in [(0, 1), (1, 2), (2, 3), (255, 4)] {
            let message = MsiMessage {
                address: message_address(cpu),
                data: u32::from(IRQ_VECTOR_BASE) + 30,
                device: 0,
            };
            (0..times).for_each(|_| sink.fire(message));
        }
        lines.enable(5, 1);
        Lines::line(&lines, 5).raise();
        assert_eq!([0, 1, 2].map(|cpu| lines.taken_on(cpu, 30)), [1, 2, 0]);
        assert_eq!([0, 1].map(|cpu| lines.taken(cpu)), [1, 3]);
    }

    #[test]
    fn counts_per_line_and_loses_what_is_not_enabled() {
        let lines = Arc::new(Lines::new(2));
        lines.attach(0);
        let five = Lines::line(&lines, 5);
        let six = Lines::line(&lines, 6);
        five.raise();
        assert_eq!(lines.taken(0), 0);
        lines.enable(5, 0);
        lines.enable(6, 0);
        lines.enable(4000, 0);
        five.raise();
        five.raise();
        six.raise();
        Lines::line(&lines, 4000).raise();
        assert_eq!(
            (lines.taken(0), lines.taken_on(0, 5), lines.taken_on(0, 6), lines.taken_on(0, 4000)),
            (3, 2, 1, 0)
        );
        lines.wait(0, 2);
    }

    #[test]
    fn no_wake_up_is_lost() {
        const ROUNDS: u64 = 20_000;
        let lines = Arc::new(Lines::new(2));
        lines.enable(5, 0);
        let guest = {
            let lines = Arc::clone(&lines);
            std::thread::spawn(move || {
                lines.attach(0);
                let mut seen = 0;
                while seen < ROUNDS {
                    lines.wait(0, seen);
                    seen = lines.taken(0);
                }
                seen
            })
        };
        while lines.cpus[0].thread.get().is_none() {
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
        let lines = Arc::new(Lines::new(2));
        let guest = {
            let lines = Arc::clone(&lines);
            std::thread::spawn(move || {
                lines.attach(0);
                lines.wait(0, 0);
                lines.stopping()
            })
        };
        while lines.cpus[0].thread.get().is_none() {
            std::thread::yield_now();
        }
        lines.stop();
        assert!(guest.join().unwrap());
    }
}
