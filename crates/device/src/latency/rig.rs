//! For tests: latencies with a clock that stands still until it is moved.
use super::{LatencyRecorder, Operation, ProbedQueue, QueueLatency, Stage};
use crate::{MappedQueue, Served};
use quanta::{Clock, Mock};
use std::sync::Arc;

/// What is recorded, and the clock.
pub(crate) struct Watch {
    pub(crate) latency: Arc<QueueLatency>,
    pub(super) clock: Arc<Mock>,
}

impl Watch {
    pub(super) fn new() -> (Self, LatencyRecorder) {
        let (clock, mock) = Clock::mock();
        mock.increment(1_000_000_u64);
        let latency = Arc::new(QueueLatency::default());
        (
            Self { latency: latency.clone(), clock: mock },
            LatencyRecorder::with_clock(latency, ProbedQueue::default(), clock),
        )
    }

    /// Watches `queue` from now on.
    pub(crate) fn of(queue: &mut MappedQueue) -> Self {
        let (watch, recorder) = Self::new();
        *queue.latency() = recorder;
        watch
    }

    pub(crate) fn wait(&self, nanos: u64) {
        self.clock.increment(nanos);
    }

    /// Sum and count of each stage.
    pub(crate) fn stages(&self) -> Vec<(Stage, u64, u64)> {
        let stages = self.latency.snapshot().stages;
        stages.iter().map(|(stage, times)| (*stage, times.sum, times.count)).collect()
    }

    /// Sum and count of each operation.
    pub(crate) fn operations(&self) -> Vec<(&'static Operation, u64, u64)> {
        let operations = self.latency.snapshot().operations;
        operations.iter().map(|(operation, times)| (*operation, times.sum, times.count)).collect()
    }

    /// Number of requests recorded.
    pub(crate) fn count(&self) -> u64 {
        self.operations().iter().map(|(_, _, count)| count).sum()
    }
}

/// Ends a serve as the owner of the queue does.
pub(crate) fn served(queue: &mut MappedQueue, served: &Served) {
    queue.latency().finish();
    if served.taken + served.completed == 0 {
        queue.latency().idle();
    }
}
