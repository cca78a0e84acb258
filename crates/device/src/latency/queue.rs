//! Latencies of one queue.
use super::histogram::{Counts, Distribution, Latencies};
use super::operation::Operation;
use super::request::RequestObserver;
use super::stage::Stage;
use paravane_store::lock;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// Latencies of one queue, across its restarts.
///
/// Shared by its one writer and any number of observers. Histograms are allocated when they are
/// first used: an idle queue costs less than 1 KiB, each latency histogram 2 KiB.
#[derive(Debug, Default)]
pub struct QueueLatency {
    operations: [OnceLock<(&'static Operation, Box<Latencies>)>; Operation::MOST],
    stages: OnceLock<Box<StageLatencies>>,
    throttled: OnceLock<Box<Latencies>>,
    looks: OnceLock<Box<Looks>>,
    observer: Observer,
}

/// Latencies of the stages that each request has. They are together: one look finds them.
#[derive(Debug)]
pub(super) struct StageLatencies {
    pub(super) ring: Latencies,
    pub(super) host: Latencies,
    pub(super) interrupt: Latencies,
}

/// What looks at the ring found that took chains.
#[derive(Debug)]
pub(super) struct Looks {
    pub(super) depth: Counts,
    pub(super) batch: Counts,
}

/// Observer of a queue's requests.
#[derive(Default)]
struct Observer {
    /// There is one.
    is_some: AtomicBool,
    observer: Mutex<Option<Arc<dyn RequestObserver>>>,
}

impl fmt::Debug for Observer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Observer").field("is_some", &self.is_some).finish_non_exhaustive()
    }
}

impl QueueLatency {
    /// Tells `observer` of each request from now on; `None`: nobody.
    ///
    /// Only disks tell. Requests that complete while the observer changes may go unseen. While
    /// there is none, a request costs one relaxed load.
    pub fn observe(&self, observer: Option<Arc<dyn RequestObserver>>) {
        let mut place = lock(&self.observer.observer);
        // Relaxed: the lock orders; a request that misses it goes unseen.
        self.observer.is_some.store(observer.is_some(), Ordering::Relaxed);
        *place = observer;
    }

    #[inline]
    pub(super) fn is_observed(&self) -> bool {
        // Relaxed: as above.
        self.observer.is_some.load(Ordering::Relaxed)
    }

    /// A copy, so that it is not called under the lock: the I/O thread waits for no one who changes
    /// the observer.
    #[cold]
    pub(super) fn observer(&self) -> Option<Arc<dyn RequestObserver>> {
        lock(&self.observer.observer).clone()
    }

    #[inline]
    pub(super) fn operation(&self, operation: &'static Operation) -> &Latencies {
        &self.operations[operation.index()].get_or_init(|| (operation, Box::new(Latencies::new()))).1
    }

    /// Those of [`Stage::ALL`] but [`Stage::Throttled`].
    #[inline]
    pub(super) fn stages(&self) -> &StageLatencies {
        self.stages.get_or_init(|| {
            let [ring, host, interrupt] = [(); 3].map(|()| Latencies::new());
            Box::new(StageLatencies { ring, host, interrupt })
        })
    }

    #[cold]
    pub(super) fn throttled(&self) -> &Latencies {
        self.throttled.get_or_init(|| Box::new(Latencies::new()))
    }

    #[inline]
    pub(super) fn looks(&self) -> &Looks {
        self.looks.get_or_init(|| Box::new(Looks { depth: Counts::new(), batch: Counts::new() }))
    }

    /// Copies what was recorded so far.
    #[must_use]
    pub fn snapshot(&self) -> LatencySnapshot {
        let used = |stage: Stage| {
            let stages = self.stages.get();
            match stage {
                Stage::Ring => stages.map(|stages| &stages.ring),
                Stage::Throttled => self.throttled.get().map(Box::as_ref),
                Stage::Host => stages.map(|stages| &stages.host),
                Stage::Interrupt => stages.map(|stages| &stages.interrupt),
            }
        };
        LatencySnapshot {
            operations: self
                .operations
                .iter()
                .filter_map(OnceLock::get)
                .map(|(operation, histogram)| (*operation, histogram.snapshot()))
                .collect(),
            stages: Stage::ALL
                .into_iter()
                .filter_map(|stage| Some((stage, used(stage)?.snapshot())))
                .collect(),
            depth: self.looks.get().map(|looks| looks.depth.snapshot()),
            batch: self.looks.get().map(|looks| looks.batch.snapshot()),
        }
    }
}

/// Copy of the latencies of one queue.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LatencySnapshot {
    /// Whole latency of the operations that occurred, in nanoseconds.
    pub operations: Vec<(&'static Operation, Distribution)>,
    /// Stages that occurred, in nanoseconds, of all operations together.
    pub stages: Vec<(Stage, Distribution)>,
    /// Requests in flight, counted each time that some were taken.
    pub depth: Option<Distribution>,
    /// Requests taken together.
    pub batch: Option<Distribution>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blk::operation::OPERATIONS;

    #[test]
    fn an_idle_queue_costs_less_than_a_page_quarter() {
        assert!(size_of::<QueueLatency>() < 1024, "{}", size_of::<QueueLatency>());
        assert_eq!(QueueLatency::default().snapshot(), LatencySnapshot::default());
    }

    #[test]
    fn a_queue_that_uses_everything_has_at_most_32_kib() {
        let latency = QueueLatency::default();
        for operation in &OPERATIONS {
            latency.operation(operation);
        }
        latency.stages();
        latency.throttled();
        latency.looks();
        // A field that is added is to be counted here.
        let QueueLatency { operations, stages, throttled, looks, observer: _ } = &latency;
        let sizes = [
            operations.iter().map(|entry| size_of_val(&*entry.get().unwrap().1)).sum(),
            size_of_val(&**stages.get().unwrap()),
            size_of_val(&**throttled.get().unwrap()),
            size_of_val(&**looks.get().unwrap()),
            size_of_val(&latency),
        ];
        assert!(sizes.iter().sum::<usize>() <= 32 << 10, "{sizes:?}");
    }

    #[test]
    fn names_and_places_follow_the_enumeration() {
        assert!(Stage::ALL.iter().enumerate().all(|(at, stage)| *stage as usize == at));
        let mut names: Vec<_> = Stage::ALL.map(Stage::name).into();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Stage::ALL.len());
    }
}
