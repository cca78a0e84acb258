//! The guest's reports on all queues of a device, as one.
use super::latency;
use super::report_area::ReportArea;
use paravane_spec::builtin::{DiskReport, HIST_BUCKETS};
use std::ops::Range;

/// The reports on the queues of a device, in their order; `None` where the memory holds none.
pub(super) struct QueueReports(Vec<Option<DiskReport>>);

impl QueueReports {
    /// Those with these numbers.
    pub(super) fn read(area: &ReportArea, numbers: &Range<usize>) -> Self {
        Self(numbers.clone().map(|number| area.queue(number)).collect())
    }

    /// All of them; `None` if one is missing.
    pub(super) fn all(&self) -> Option<Vec<&DiskReport>> {
        self.0.iter().map(Option::as_ref).collect()
    }

    fn sum(&self, figure: impl Fn(&DiskReport) -> u64) -> u64 {
        self.0.iter().flatten().fold(0, |sum, report| sum.saturating_add(figure(report)))
    }

    /// Bytes moved so far, over all phases.
    pub(super) fn bytes_done(&self) -> u64 {
        self.sum(|report| report.bytes_done)
    }

    /// Requests or frames in the measured phase.
    pub(super) fn ops(&self) -> u64 {
        self.sum(|report| report.ops)
    }

    /// Requests and bytes per second: the sum of the queues' rates.
    pub(super) fn rates(&self) -> [f64; 2] {
        let mut rates = [0.0; 2];
        for report in self.0.iter().flatten().filter(|report| report.elapsed_ns > 0) {
            let seconds = report.elapsed_ns as f64 * 1e-9;
            rates[0] += report.ops as f64 / seconds;
            rates[1] += report.bytes as f64 / seconds;
        }
        rates
    }

    /// Median, 99th and 99.9th percentile of all queues' latencies in microseconds.
    pub(super) fn latencies(&self) -> [f64; 3] {
        let mut sum = [0_u32; HIST_BUCKETS];
        for report in self.0.iter().flatten() {
            for (sum, count) in sum.iter_mut().zip(report.histogram) {
                *sum = sum.saturating_add(count);
            }
        }
        latency::percentiles(&sum, [50.0, 99.0, 99.9])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromZeros;

    fn report(ops: u64, elapsed_ns: u64) -> Option<DiskReport> {
        let mut report = DiskReport::new_zeroed();
        (report.ops, report.bytes, report.elapsed_ns) = (ops, ops.saturating_mul(2), elapsed_ns);
        (report.bytes_done, report.histogram[40]) = (ops, u32::MAX);
        Some(report)
    }

    #[test]
    fn figures_of_the_queues_add_up() {
        let reports = QueueReports(vec![report(100, 1_000_000_000), report(50, 500_000_000), report(7, 0)]);
        assert_eq!((reports.ops(), reports.bytes_done(), reports.rates()), (157, 157, [200.0, 400.0]));
        assert!(reports.latencies()[0] > 0.0);
        assert_eq!(reports.all().map(|all| all.len()), Some(3));
    }

    #[test]
    fn no_value_from_the_guest_overflows_and_one_may_be_missing() {
        let reports = QueueReports(vec![report(u64::MAX, 1), None, report(u64::MAX, u64::MAX)]);
        assert_eq!((reports.ops(), reports.bytes_done()), (u64::MAX, u64::MAX));
        assert!(reports.rates()[0].is_finite() && reports.all().is_none());
    }
}
