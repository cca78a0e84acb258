//! What the processors share: who is ready, who is done, and the console.
use crate::console::{Console, milestone};
use crate::platform::Platform;
use crate::report::Failure;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use paravane_spec::builtin::{BootInfo, WAKE, completion, event, inject};

/// State of all processors.
///
/// Counts that reach 0 wake the processors that sleep. A processor looks at them again after it has
/// sampled its interrupts.
pub(crate) struct Shared<'p, P> {
    pub(super) platform: &'p P,
    pub(super) polling: bool,
    inject: u32,
    pub(super) cpus: usize,
    console: Console<'p, P>,
    /// Whether a processor prints.
    printing: AtomicBool,
    /// Whether the first request is out.
    started: AtomicBool,
    /// Whether a processor waits for the other to take a fence.
    fencing: Vec<AtomicBool>,
    /// Lanes on which the others cannot rely yet.
    unready: AtomicUsize,
    /// Lanes whose work has an end and is not done.
    left: AtomicUsize,
    /// Processors in a measured phase.
    measuring: AtomicUsize,
    /// Interrupts taken before the first measured phase; `u64::MAX` before it.
    taken_before: AtomicU64,
}

impl<'p, P: Platform> Shared<'p, P> {
    /// For processors with these numbers of lanes: all, and those whose work has an end.
    pub(crate) fn new(
        platform: &'p P,
        console: Console<'p, P>,
        info: &BootInfo,
        lanes: impl Iterator<Item = [usize; 2]>,
    ) -> Self {
        let mut sums = [0, 0];
        let cpus = lanes.map(|[all, ending]| sums = [sums[0] + all, sums[1] + ending]).count();
        let [unready, left] = sums.map(AtomicUsize::new);
        Self {
            platform,
            polling: info.completion == completion::POLL,
            inject: info.inject,
            cpus,
            console,
            printing: AtomicBool::new(false),
            started: AtomicBool::new(false),
            fencing: (0..cpus).map(|_| AtomicBool::new(false)).collect(),
            unready,
            left,
            measuring: AtomicUsize::new(0),
            taken_before: AtomicU64::new(u64::MAX),
        }
    }

    /// Whether every lane can be relied on.
    pub(super) fn all_are_ready(&self) -> bool {
        // Acquire, pairs with the release of the last `one_is_ready`.
        self.unready.load(Ordering::Acquire) == 0
    }

    /// Whether all work that has an end is done.
    pub(super) fn all_are_done(&self) -> bool {
        // Acquire, pairs with the release of the last `one_is_done`.
        self.left.load(Ordering::Acquire) == 0
    }

    /// A lane of processor `cpu` can be relied on.
    pub(super) fn one_is_ready(&self, cpu: usize) {
        if self.unready.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.wake_others(cpu);
        }
    }

    /// A lane of processor `cpu` is done.
    pub(super) fn one_is_done(&self, cpu: usize) {
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.wake_others(cpu);
        }
    }

    fn wake_others(&self, cpu: usize) {
        (0..self.cpus).filter(|other| *other != cpu).for_each(|other| self.wake(other));
    }

    /// Wakes a processor that sleeps, or is about to.
    pub(super) fn wake(&self, cpu: usize) {
        self.platform.interrupt(cpu, WAKE);
    }

    /// Begins to wait for `cpu` to take a fence; `false`: another processor waits for one.
    ///
    /// With one fence at a time, the next that is taken is the one that was sent.
    pub(super) fn begin_fence(&self, cpu: usize) -> bool {
        // Acquire, pairs with the release in `end_fence`: the count of fences is that after the last.
        !self.fencing[cpu].swap(true, Ordering::Acquire)
    }

    /// The fence was taken, or is not waited for any more.
    pub(super) fn end_fence(&self, cpu: usize) {
        self.fencing[cpu].store(false, Ordering::Release);
    }

    /// Whether a request that was just published is the first of all.
    pub(super) fn is_first(&self) -> bool {
        // Relaxed: it orders nothing. Read first, for it is asked for every request.
        !self.started.load(Ordering::Relaxed) && !self.started.swap(true, Ordering::Relaxed)
    }

    /// A processor enters a measured phase, or leaves it.
    ///
    /// Tells the VMM of the first and the last. Returns the interrupts since the first measured phase.
    pub(super) fn mark(&self, begins: bool) -> u64 {
        let taken: u64 = (0..self.cpus).map(|cpu| self.platform.interrupts(cpu)).sum();
        // Relaxed: the first one stores its count, whoever that is.
        let stored =
            self.taken_before.compare_exchange(u64::MAX, taken, Ordering::Relaxed, Ordering::Relaxed);
        let before = stored.map_or_else(|before| before, |_| taken);
        // Relaxed: the exits that tell of it order themselves at the VMM.
        let tells = if begins {
            (self.measuring.fetch_add(1, Ordering::Relaxed) == 0).then_some(event::MEASURE)
        } else {
            (self.measuring.fetch_sub(1, Ordering::Relaxed) == 1).then_some(event::MEASURED)
        };
        if let Some(code) = tells {
            milestone(self.platform, code);
        }
        taken.saturating_sub(before)
    }

    /// Tells the operator of a failure.
    pub(super) fn tell(&self, number: usize, lane: u32, failure: &Failure) {
        // Acquire and release: the console's memory is one processor's at a time.
        while self.printing.swap(true, Ordering::Acquire) {
            core::hint::spin_loop();
        }
        self.console.tell(number, lane, failure);
        self.printing.store(false, Ordering::Release);
    }

    /// Injects the failure that a test configured.
    pub(super) fn inject(&self, cpu: usize) {
        match self.inject {
            inject::CRASH => self.platform.crash(),
            inject::HANG => loop {
                self.platform.wait(cpu, self.platform.interrupts(cpu));
            },
            inject::PANIC => panic!("a panic, as asked for"),
            _ => {}
        }
    }
}
