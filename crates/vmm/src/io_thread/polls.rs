//! What busy polling costs an I/O thread, and what it brings.
use crate::report::IoThreadResult;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Counters of one thread, which alone adds to them. All are relaxed: they order nothing.
#[derive(Debug, Default)]
pub(crate) struct PollCounters {
    polled_ns: AtomicU64,
    fruitful: AtomicU64,
    fruitless: AtomicU64,
}

impl PollCounters {
    /// So much time was polled; so many queues had work, and for so many it was given up.
    pub(super) fn add(&self, polled: Duration, fruitful: u64, fruitless: u64) {
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
        let [polled_ns, fruitful_polls, fruitless_polls] =
            [&self.polled_ns, &self.fruitful, &self.fruitless].map(|counter| counter.load(Ordering::Relaxed));
        IoThreadResult { polled_ns, fruitful_polls, fruitless_polls }
    }
}
