//! Counters of I/O threads and queues.
use paravane_device::Served;
use paravane_device::latency::QueueLatency;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Counters of one I/O thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IoThreadFigures {
    /// Turns of its queues: at most one a wake-up, and more while there is work.
    pub turns: u64,
    /// Time spent polling, in nanoseconds.
    pub polled_ns: u64,
    /// Polls of a queue that found work.
    pub fruitful_polls: u64,
    /// Polls of a queue that found none, so that the thread waited for a kick.
    pub fruitless_polls: u64,
}

/// Counters that one thread adds to. All are relaxed: they order nothing.
#[derive(Debug, Default)]
pub(super) struct Counters {
    turns: AtomicU64,
    polled_ns: AtomicU64,
    fruitful: AtomicU64,
    fruitless: AtomicU64,
    /// Times that the thread may have been blocked.
    uses: AtomicU64,
    /// Device whose memory is used now, plus 1; 0: none.
    serving: AtomicUsize,
    /// Whether the thread has something to do.
    awake: AtomicBool,
}

impl Counters {
    /// Counts a turn of a queue, or a task.
    pub(super) fn count_turn(&self) {
        raise(&self.turns, 1);
    }

    /// The thread begins to use memory of this device's client, and may be blocked.
    pub(super) fn begin_use(&self, device: usize) {
        raise(&self.uses, 1);
        self.serving.store(device + 1, Ordering::Relaxed);
    }

    /// The thread has done so.
    pub(super) fn end_use(&self) {
        self.serving.store(0, Ordering::Relaxed);
    }

    /// Number of uses begun, and the device of the one under way.
    pub(super) fn now(&self) -> (u64, Option<usize>) {
        (self.uses.load(Ordering::Relaxed), self.serving.load(Ordering::Relaxed).checked_sub(1))
    }

    /// Whether the thread has something to do.
    pub(super) fn is_awake(&self) -> bool {
        self.awake.load(Ordering::Relaxed)
    }

    /// The thread has woken, or is about to sleep.
    pub(super) fn set_awake(&self, awake: bool) {
        self.awake.store(awake, Ordering::Relaxed);
    }

    /// Counts time spent polling, polls that found work, and polls that were given up.
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

    /// The counters now.
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

/// Work done for one queue, on all threads that served it.
#[derive(Debug, Default)]
pub struct QueueWork {
    taken: AtomicU64,
    completed: AtomicU64,
    interrupts: AtomicU64,
    /// Chains taken and never completed: by a reset, or by an early stop.
    forgotten: AtomicU64,
    /// Time that turns took, in nanoseconds.
    busy_ns: AtomicU64,
    latency: OnceLock<Arc<QueueLatency>>,
    /// Whether latencies are not measured.
    unmeasured: AtomicBool,
}

impl QueueWork {
    /// Creates counters for a queue whose latencies are not measured.
    #[must_use]
    pub fn without_latencies() -> Self {
        Self { unmeasured: AtomicBool::new(true), ..Self::default() }
    }

    /// Latencies of the queue, unless they are off.
    #[must_use]
    pub fn latency(&self) -> Option<&Arc<QueueLatency>> {
        // Relaxed: the cell orders.
        (!self.unmeasured.load(Ordering::Relaxed)).then(|| self.latency.get_or_init(Arc::default))
    }

    /// Turns latencies on or off. A live queue learns of it by [`DeviceThreads::renew`].
    ///
    /// What was measured before stays for the next time that they are on.
    ///
    /// [`DeviceThreads::renew`]: crate::DeviceThreads::renew
    pub fn measure(&self, on: bool) {
        // Relaxed: as above.
        self.unmeasured.store(!on, Ordering::Relaxed);
    }

    /// Chains taken and neither completed nor forgotten.
    #[must_use]
    pub fn in_flight(&self) -> u64 {
        // Relaxed: a statistic. The three are not read at one instant, so for a busy queue the
        // result may be off by a batch.
        let done = self.completed().wrapping_add(self.forgotten.load(Ordering::Relaxed));
        self.taken().saturating_sub(done)
    }

    /// Records that nothing is in flight any more. Called as [`QueueWork::add`].
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

    /// Interrupts sent.
    #[must_use]
    pub fn interrupts(&self) -> u64 {
        self.interrupts.load(Ordering::Relaxed)
    }

    /// Time that the queue was served, in nanoseconds; 0 on threads that do not measure it.
    #[must_use]
    pub fn busy_ns(&self) -> u64 {
        self.busy_ns.load(Ordering::Relaxed)
    }

    /// Adds the time of a turn. Called as [`QueueWork::add`].
    pub(super) fn was_busy(&self, time: Duration) {
        let time = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let sum = self.busy_ns.load(Ordering::Relaxed).wrapping_add(time);
        self.busy_ns.store(sum, Ordering::Relaxed);
    }

    /// Adds what was served. Only the queue's one owner calls this.
    pub(super) fn add(&self, served: &Served) {
        raise(&self.taken, served.taken);
        raise(&self.completed, served.completed);
    }

    /// Counts an interrupt. Called as [`QueueWork::add`].
    pub(super) fn interrupted(&self) {
        raise(&self.interrupts, 1);
    }
}

/// Adds to a counter with one writer at a time, without a read-modify-write.
fn raise(counter: &AtomicU64, more: u32) {
    // Relaxed: the owner of the queue changes by channels, which order the stores of one before the
    // loads of the next.
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(more.into()), Ordering::Relaxed);
}
