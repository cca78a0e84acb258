//! Latencies of requests, measured by the thread that serves their queue.
//!
//! ```text
//!   the thread learns     (a rate limit       the handler      the host has        used buffers
//!   of work: announce     holds them: hold)   takes: take      done: complete      signalled: finish
//!        |------- ring ----------|-- throttled --|------ host ------|---- interrupt ----|
//!        |------------------------ whole latency of the operation ---------------------|
//! ```
//! [`QueueLatency`] has the histograms of one queue: one of the whole latency for each
//! [`Operation`], one for each [`Stage`], and those of queue depth and batch size. It spans
//! restarts of the queue; its one writer is the [`LatencyRecorder`] of the live queue.
//!
//! **The start is an estimate.** A device cannot see when the driver made a buffer available. The
//! wait in the ring counts from the moment at which the thread learned of work: it woke, or, while
//! it polls or serves, it last looked at the ring and did not take the buffer. So it may be too
//! long for a thread that is awake, by the time between two looks, and it lacks the time before a
//! sleeping thread runs.
//!
//! **Probes.** Tracers see each stage begin and end: [`PROBES`].
//!
//! The clock is the processor's cycle counter where that runs at a constant rate, else
//! CLOCK_MONOTONIC. It is read one to four times a batch, never for each request.
mod histogram;
mod operation;
mod probes;
mod recorder;
mod request;
#[cfg(test)]
pub(crate) mod rig;

pub use histogram::Distribution;
pub use operation::Operation;
pub use probes::{PROBE_ARGUMENTS, PROBES, Probe};
pub use recorder::{LatencyRecorder, Taken};
pub use request::{Request, RequestObserver, RequestRecord};

use histogram::{Counts, Latencies};
use std::ffi::CStr;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Measures the speed of this process's clock, which takes about 0.6 ms.
///
/// The first queue whose latencies are recorded does it otherwise. Call it before a client waits.
pub fn calibrate() {
    recorder::calibrate();
}

/// Stages of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// Waited in the ring for the thread; for a frame to the guest, the frame waited for a buffer.
    Ring,
    /// Held by a rate limit.
    Throttled,
    /// Host I/O: taken from the ring (or let go by the limit), until the host was done.
    Host,
    /// Done by the host, until the used buffer was published and signalled.
    Interrupt,
}

impl Stage {
    /// All stages, in the order of a request.
    pub const ALL: [Self; 4] = [Self::Ring, Self::Throttled, Self::Host, Self::Interrupt];

    /// Name in reports: "ring", "throttled", "host", "interrupt".
    #[must_use]
    pub fn name(self) -> &'static str {
        self.c_name().to_str().unwrap_or_default()
    }

    /// The name as probes report it.
    fn c_name(self) -> &'static CStr {
        match self {
            Self::Ring => c"ring",
            Self::Throttled => c"throttled",
            Self::Host => c"host",
            Self::Interrupt => c"interrupt",
        }
    }
}

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
struct StageLatencies {
    ring: Latencies,
    host: Latencies,
    interrupt: Latencies,
}

/// What looks at the ring found that took chains.
#[derive(Debug)]
struct Looks {
    depth: Counts,
    batch: Counts,
}

/// Observer of a queue's requests.
#[derive(Default)]
struct Observer {
    /// There is one.
    is_some: AtomicBool,
    observer: Mutex<Option<Arc<dyn RequestObserver>>>,
}

impl Observer {
    fn lock(&self) -> MutexGuard<'_, Option<Arc<dyn RequestObserver>>> {
        self.observer.lock().unwrap_or_else(PoisonError::into_inner)
    }
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
        let mut place = self.observer.lock();
        // Relaxed: the lock orders; a request that misses it goes unseen.
        self.observer.is_some.store(observer.is_some(), Ordering::Relaxed);
        *place = observer;
    }

    #[inline]
    fn is_observed(&self) -> bool {
        // Relaxed: as above.
        self.observer.is_some.load(Ordering::Relaxed)
    }

    /// A copy, so that it is not called under the lock: the I/O thread waits for no one who changes
    /// the observer.
    #[cold]
    fn observer(&self) -> Option<Arc<dyn RequestObserver>> {
        self.observer.lock().clone()
    }

    #[inline]
    fn operation(&self, operation: &'static Operation) -> &Latencies {
        &self.operations[operation.index()].get_or_init(|| (operation, Box::new(Latencies::new()))).1
    }

    /// Those of [`Stage::ALL`] but [`Stage::Throttled`].
    #[inline]
    fn stages(&self) -> &StageLatencies {
        self.stages.get_or_init(|| {
            let [ring, host, interrupt] = [(); 3].map(|()| Latencies::new());
            Box::new(StageLatencies { ring, host, interrupt })
        })
    }

    #[cold]
    fn throttled(&self) -> &Latencies {
        self.throttled.get_or_init(|| Box::new(Latencies::new()))
    }

    #[inline]
    fn looks(&self) -> &Looks {
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
