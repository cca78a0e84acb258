//! What an I/O thread counts: turns, what busy polling costs and brings, and what was done for each queue.
use paravane_device::Served;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// What one I/O thread did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IoThreadFigures {
    /// Turns that its queues had: at most one a wake-up, and as many more as there was work for.
    pub turns: u64,
    /// Nanoseconds of polling.
    pub polled_ns: u64,
    /// Polls of a queue that found work.
    pub fruitful_polls: u64,
    /// Polls of a queue that ended without any, so that the thread waited for a kick.
    pub fruitless_polls: u64,
}

/// Counters of one thread, which alone adds to them. All are relaxed: they order nothing.
#[derive(Debug, Default)]
pub(super) struct Counters {
    turns: AtomicU64,
    polled_ns: AtomicU64,
    fruitful: AtomicU64,
    fruitless: AtomicU64,
}

impl Counters {
    /// A queue had its turn.
    pub(super) fn turn(&self) {
        self.turns.fetch_add(1, Ordering::Relaxed);
    }

    /// So much time was polled; so many queues had work, and for so many it was given up.
    pub(super) fn poll(&self, polled: Duration, fruitful: u64, fruitless: u64) {
        let polled_ns = u64::try_from(polled.as_nanos()).unwrap_or(u64::MAX);
        for (counter, more) in
            [(&self.polled_ns, polled_ns), (&self.fruitful, fruitful), (&self.fruitless, fruitless)]
        {
            if more > 0 {
                counter.fetch_add(more, Ordering::Relaxed);
            }
        }
    }

    /// A look at them.
    pub(super) fn figures(&self) -> IoThreadFigures {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        IoThreadFigures {
            turns: read(&self.turns),
            polled_ns: read(&self.polled_ns),
            fruitful_polls: read(&self.fruitful),
            fruitless_polls: read(&self.fruitless),
        }
    }
}

/// What was done for one queue, by all that served it.
#[derive(Debug, Default)]
pub struct QueueWork {
    taken: AtomicU64,
    completed: AtomicU64,
    interrupts: AtomicU64,
    /// Chains taken that will not be completed: forgotten in a reset, or in flight when the queue was cut short.
    forgotten: AtomicU64,
}

impl QueueWork {
    /// Chains taken and neither completed nor forgotten.
    #[must_use]
    pub fn in_flight(&self) -> u64 {
        // Relaxed: a statistic. The three are not read at one time, so a look at a busy queue may be off by a batch.
        let done = self.completed().wrapping_add(self.forgotten.load(Ordering::Relaxed));
        self.taken().saturating_sub(done)
    }

    /// Nothing is in flight any more. As [`QueueWork::add`].
    pub(super) fn settle(&self) {
        let forgotten = self.taken().saturating_sub(self.completed());
        self.forgotten.store(forgotten, Ordering::Relaxed);
    }

    /// Chains taken and chains completed.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.taken().wrapping_add(self.completed())
    }

    /// Chains taken from the queue.
    #[must_use]
    pub fn taken(&self) -> u64 {
        // Relaxed: a statistic, as all here.
        self.taken.load(Ordering::Relaxed)
    }

    /// Chains completed and published.
    #[must_use]
    pub fn completed(&self) -> u64 {
        self.completed.load(Ordering::Relaxed)
    }

    /// Interrupts that the driver wanted and was sent.
    #[must_use]
    pub fn interrupts(&self) -> u64 {
        self.interrupts.load(Ordering::Relaxed)
    }

    /// Whoever serves the queue, and nobody else at that time, has done this.
    pub(super) fn add(&self, served: &Served) {
        raise(&self.taken, served.taken);
        raise(&self.completed, served.completed);
    }

    /// As [`QueueWork::add`].
    pub(super) fn interrupted(&self) {
        raise(&self.interrupts, 1);
    }
}

/// Adds to a counter that has one writer at a time: no read-modify-write is needed.
fn raise(counter: &AtomicU64, more: u32) {
    // Relaxed: the owner of the queue changes by channels, which order the stores of one before the loads of the next.
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(more.into()), Ordering::Relaxed);
}
