//! What an I/O thread counts: turns, and what busy polling costs and brings.
use crate::report::IoThreadResult;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Counters of one thread, which alone adds to them. All are relaxed: they order nothing.
#[derive(Debug, Default)]
pub(crate) struct Counters {
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

    /// For the report.
    pub(super) fn figures(&self) -> IoThreadResult {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        IoThreadResult {
            turns: read(&self.turns),
            polled_ns: read(&self.polled_ns),
            fruitful_polls: read(&self.fruitful),
            fruitless_polls: read(&self.fruitless),
        }
    }
}
