//! Percentiles of latencies between two reports.
use crate::serve::metrics::families::by_label;
use crate::serve::report::{Device, Distribution};
use serde::Serialize;
use std::collections::BTreeMap;

/// Values of some distributions, by bucket.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Values {
    /// Number of values by the largest value of their bucket.
    buckets: BTreeMap<u64, u64>,
    sum: u64,
    /// The largest value.
    pub(crate) max: u64,
}

impl Values {
    pub(crate) fn of<'a>(distributions: impl Iterator<Item = &'a Distribution>) -> Self {
        let mut all = Self::default();
        distributions.for_each(|one| all.add(one.buckets.iter().copied(), one.sum, one.max));
        all
    }

    fn add(&mut self, buckets: impl Iterator<Item = (u64, u64)>, sum: u64, max: u64) {
        self.sum = self.sum.wrapping_add(sum);
        self.max = self.max.max(max);
        for (upper, count) in buckets {
            let there = self.buckets.entry(upper).or_default();
            *there = there.saturating_add(count);
        }
    }

    /// The values since an earlier report.
    pub(crate) fn since(mut self, earlier: &Self) -> Self {
        for (upper, before) in &earlier.buckets {
            if let Some(count) = self.buckets.get_mut(upper) {
                *count = count.saturating_sub(*before);
            }
        }
        self.buckets.retain(|_, count| *count > 0);
        // The counters of a device that was restarted begin at 0.
        self.sum = self.sum.saturating_sub(earlier.sum);
        self
    }

    pub(crate) fn count(&self) -> u64 {
        self.buckets.values().fold(0, |sum, count| sum.saturating_add(*count))
    }

    /// `None`: there are no values.
    pub(crate) fn mean(&self) -> Option<f64> {
        let count = self.count();
        (count > 0).then(|| self.sum as f64 / count as f64)
    }

    /// Value that the share `q` of the values does not exceed; `None`: there are none.
    fn quantile(&self, q: f64) -> Option<u64> {
        let rank = (q * self.count() as f64).ceil().max(1.0) as u64;
        let mut seen: u64 = 0;
        let bucket = self.buckets.iter().find(|&(_, count)| {
            seen = seen.saturating_add(*count);
            seen >= rank
        });
        bucket.map(|(upper, _)| if self.max > 0 { (*upper).min(self.max) } else { *upper })
    }

    /// `None`: there are no values.
    pub(crate) fn percentiles(&self) -> Option<Percentiles> {
        Some(Percentiles {
            count: self.count(),
            p50_ns: self.quantile(0.5)?,
            p99_ns: self.quantile(0.99)?,
            p999_ns: self.quantile(0.999)?,
        })
    }
}

/// Percentiles of latencies, at most 1/8 too high.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Percentiles {
    /// Number of requests.
    pub(crate) count: u64,
    pub(crate) p50_ns: u64,
    pub(crate) p99_ns: u64,
    /// 99.9 %.
    pub(crate) p999_ns: u64,
}

/// Values of a device, over all queues.
#[derive(Clone, Debug, Default)]
pub(crate) struct DeviceValues {
    pub(crate) operations: Vec<(String, Values)>,
    pub(crate) stages: Vec<(String, Values)>,
    /// Requests in flight.
    pub(crate) depth: Values,
    /// Requests taken together.
    pub(crate) batch: Values,
}

impl DeviceValues {
    /// Since the start of the device.
    pub(crate) fn new(device: &Device) -> Self {
        let queues = || device.queues.iter();
        let operations = queues().flat_map(|queue| &queue.operations);
        let stages = queues().flat_map(|queue| &queue.stages);
        Self {
            operations: by_name(operations.map(|one| (one.operation.as_str(), &one.latency))),
            stages: by_name(stages.map(|one| (one.stage.as_str(), &one.latency))),
            depth: Values::of(queues().filter_map(|queue| queue.depth.as_ref())),
            batch: Values::of(queues().filter_map(|queue| queue.batch.as_ref())),
        }
    }

    /// Since an earlier report.
    pub(crate) fn between(earlier: &Device, device: &Device) -> Self {
        let (earlier, now) = (Self::new(earlier), Self::new(device));
        let since = |now: Vec<(String, Values)>, earlier: &[(String, Values)]| {
            let one = |(name, values): (String, Values)| {
                let before = earlier.iter().find(|(known, _)| *known == name);
                let values = before.map_or(values.clone(), |(_, before)| values.since(before));
                (name, values)
            };
            now.into_iter().map(one).collect()
        };
        Self {
            operations: since(now.operations, &earlier.operations),
            stages: since(now.stages, &earlier.stages),
            depth: now.depth.since(&earlier.depth),
            batch: now.batch.since(&earlier.batch),
        }
    }

    /// All operations together.
    pub(crate) fn percentiles(&self) -> Option<Percentiles> {
        let mut all = Values::default();
        for (_, Values { buckets, sum, max }) in &self.operations {
            all.add(buckets.iter().map(|(upper, count)| (*upper, *count)), *sum, *max);
        }
        all.percentiles()
    }

    /// Stage in which requests spent most of their time, and its share.
    pub(crate) fn longest_stage(&self) -> Option<(&str, f64)> {
        let sum: f64 = self.stages.iter().map(|(_, values)| values.sum as f64).sum();
        let (name, longest) = self.stages.iter().max_by_key(|(_, values)| values.sum)?;
        (sum > 0.0).then(|| (name.as_str(), longest.sum as f64 / sum))
    }
}

fn by_name<'a>(all: impl Iterator<Item = (&'a str, &'a Distribution)>) -> Vec<(String, Values)> {
    by_label(all).into_iter().map(|(name, all)| (name.to_owned(), Values::of(all.into_iter()))).collect()
}

/// A duration in at most 5 characters: "850ns", "23µs", "1.2ms", "120s".
pub(crate) fn short_duration(ns: u64) -> String {
    for (unit, next, name) in [(1, 1_000, "ns"), (1_000, 1_000_000, "µs"), (1_000_000, 1_000_000_000, "ms")]
    {
        if ns < next {
            let value = ns as f64 / unit as f64;
            // 9.96 would become 10.0.
            return if value < 9.95 && unit > 1 {
                format!("{value:.1}{name}")
            } else {
                format!("{:.0}{name}", value.min(999.0))
            };
        }
    }
    let seconds = ns as f64 * 1e-9;
    if seconds < 9.95 { format!("{seconds:.1}s") } else { format!("{:.0}s", seconds.min(9999.0)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::report::{OperationLatency, Queue, StageLatency};

    fn distribution(buckets: &[(u64, u64)]) -> Distribution {
        Distribution {
            count: buckets.iter().map(|(_, count)| count).sum(),
            sum: buckets.iter().map(|(upper, count)| upper * count).sum(),
            max: buckets.last().map_or(0, |(upper, _)| *upper),
            buckets: buckets.to_vec(),
            ..Distribution::default()
        }
    }

    #[test]
    fn percentiles_are_those_of_the_time_between_two_reports() {
        let before = Values::of([&distribution(&[(10, 1_000_000)])].into_iter());
        let one = distribution(&[(10, 1_000_000), (20, 90)]);
        let other = distribution(&[(20, 8), (500, 2)]);
        let now = Values::of([&one, &other].into_iter());
        assert_eq!(now.percentiles().unwrap().p999_ns, 10);
        let between = now.since(&before);
        let percentiles = Percentiles { count: 100, p50_ns: 20, p99_ns: 500, p999_ns: 500 };
        assert_eq!(between.percentiles(), Some(percentiles));
        assert_eq!(between.sum, 98 * 20 + 1000);
        assert_eq!(Values::default().percentiles(), None);
        // A device that was restarted.
        assert_eq!(Values::default().since(&between), Values::default());
    }

    #[test]
    fn the_longest_stage_of_all_queues_is_named() {
        let stage =
            |stage: &str, ns: u64| StageLatency { stage: stage.into(), latency: distribution(&[(ns, 1)]) };
        let read = OperationLatency { operation: "read".into(), latency: distribution(&[(1000, 4)]) };
        let queue = Queue {
            stages: vec![stage("ring", 300), stage("host", 100)],
            operations: vec![read],
            ..Queue::default()
        };
        let other = Queue { stages: vec![stage("host", 600)], ..Queue::default() };
        let device = Device { queues: vec![queue.clone(), other], ..Device::default() };
        let values = DeviceValues::new(&device);
        assert_eq!(values.longest_stage(), Some(("host", 0.7)));
        assert_eq!(values.percentiles().unwrap().count, 4);
        let earlier = Device { queues: vec![queue], ..Device::default() };
        let since = DeviceValues::between(&earlier, &device);
        assert_eq!(since.longest_stage(), Some(("host", 1.0)));
        assert_eq!(since.percentiles(), None);
        assert_eq!(DeviceValues::default().longest_stage(), None);
    }

    #[test]
    fn durations_take_five_characters() {
        for (ns, text) in [
            (0, "0ns"),
            (999, "999ns"),
            (1_000, "1.0µs"),
            (9_940, "9.9µs"),
            (9_960, "10µs"),
            (999_999, "999µs"),
            (1_250_000, "1.2ms"),
            (345_000_000, "345ms"),
            (3_400_000_000, "3.4s"),
            (120_000_000_000, "120s"),
            (u64::MAX, "9999s"),
        ] {
            assert_eq!(short_duration(ns), text);
            assert!(text.chars().count() <= 5);
        }
    }
}
