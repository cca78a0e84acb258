//! The slow-request log: a line for each request of a disk that takes too long.
//!
//! A request is seen when it ends. One that the host never finishes is in flight in the report, and
//! not in the log. The lines of a device have a limit of `--log-rate` lines a second, apart from its
//! other lines; `left_out` counts suppressed ones.
use crate::log::SLOW_REQUESTS;
use paravane_device::latency::{RequestRecord, Stage};
use std::time::Duration;

/// Logs the requests of one device that take this time or longer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SlowLog {
    device: Box<str>,
    /// In nanoseconds.
    threshold: u64,
}

impl SlowLog {
    pub(super) fn new(device: &str, threshold: Duration) -> Self {
        Self { device: device.into(), threshold: u64::try_from(threshold.as_nanos()).unwrap_or(u64::MAX) }
    }

    /// Logs the request if it was slow. Called by the I/O thread.
    pub(super) fn check(&self, queue: u16, record: &RequestRecord) {
        let total = record.total();
        if total < self.threshold {
            return;
        }
        let RequestRecord { operation, request, stages: [ring, throttled, host, interrupt] } = *record;
        tracing::warn!(
            target: SLOW_REQUESTS,
            device = &*self.device,
            queue,
            operation = operation.name(),
            sector = request.sector,
            bytes = request.bytes,
            status = request.status,
            stage = longest(record).name(),
            total_us = total / 1000,
            ring_us = ring / 1000,
            throttled_us = throttled / 1000,
            host_us = host / 1000,
            interrupt_us = interrupt / 1000,
            "slow request"
        );
    }
}

/// The stage that took most of the time.
fn longest(record: &RequestRecord) -> Stage {
    let times = Stage::ALL.into_iter().zip(record.stages);
    times.max_by_key(|(_, time)| *time).map_or(Stage::Host, |(stage, _)| stage)
}

#[cfg(test)]
mod tests {
    use super::*;
    use paravane_device::blk::operation::FLUSH;
    use paravane_device::latency::Request;

    #[test]
    fn the_longest_stage_is_named_and_sums_do_not_wrap() {
        let request = Request { head: 0, sector: None, bytes: 0, status: 0 };
        let mut record = RequestRecord { operation: FLUSH, request, stages: [1, 9, 3, 2] };
        assert_eq!((longest(&record), record.total()), (Stage::Throttled, 15));
        record.stages[2] = u64::MAX;
        assert_eq!((longest(&record), record.total()), (Stage::Host, u64::MAX));
    }
}
