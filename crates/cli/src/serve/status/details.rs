//! Latencies of one device by operation and stage, and its queues.
use super::latency::{DeviceValues, Values, short_duration};
use crate::serve::report::{Device, Settings};
use std::fmt::Write;

/// Lines of `--details`, for all requests since the device started.
pub(super) fn text(device: &Device) -> String {
    let values = DeviceValues::new(device);
    let mut out = String::new();
    let name: String = device.name.chars().flat_map(char::escape_default).collect();
    for (head, rows) in [("OPERATION", &values.operations), ("STAGE", &values.stages)] {
        if rows.is_empty() {
            continue;
        }
        // Writing to a String cannot fail.
        let _ = writeln!(
            out,
            "  {name}  {head:<12} {:>10} {:>6} {:>6} {:>6} {:>6}",
            "COUNT", "P50", "P99", "P99.9", "MAX"
        );
        for (row, values) in rows {
            let Some(percentiles) = values.percentiles() else { continue };
            let [p50, p99, p999, max] =
                [percentiles.p50_ns, percentiles.p99_ns, percentiles.p999_ns, values.max].map(short_duration);
            let count = percentiles.count;
            let indent = name.chars().count();
            let _ =
                writeln!(out, "  {:indent$}  {row:<12} {count:>10} {p50:>6} {p99:>6} {p999:>6} {max:>6}", "");
        }
    }
    let counts = |values: &Values| values.percentiles().map(|counts| (counts, values.max));
    for (what, values) in [("depth", &values.depth), ("batch", &values.batch)] {
        if let Some((counts, max)) = counts(values) {
            let _ =
                writeln!(out, "  {name}  {what}: P50 {}, P99 {}, max {max}", counts.p50_ns, counts.p99_ns);
        }
    }
    if !device.figures.is_empty() {
        let figures: Vec<_> = device.figures.iter().map(|(name, value)| format!("{name} {value}")).collect();
        let _ = writeln!(out, "  {name}  {}", figures.join(", "));
    }
    let settings = settings(&device.settings);
    if !settings.is_empty() {
        let _ = writeln!(out, "  {name}  settings: {}", settings.join(", "));
    }
    for queue in device.queues.iter().filter(|queue| queue.enabled) {
        let _ = writeln!(
            out,
            "  {name}  queue {}: {} done, {} in flight, {} kicks, {} interrupts",
            queue.index, queue.completed, queue.in_flight, queue.kicks, queue.interrupts
        );
    }
    out
}

/// Limits and the like that are in force, by their keys.
fn settings(settings: &Settings) -> Vec<String> {
    let Settings { bytes_per_second, burst_bytes, ops_per_second, burst_ops, slow_us, .. } = settings;
    let numbers = [
        ("bytes-per-second", *bytes_per_second, ""),
        ("burst-bytes", *burst_bytes, ""),
        ("ops-per-second", *ops_per_second, ""),
        ("burst-ops", *burst_ops, ""),
        ("slow", *slow_us, " us"),
    ];
    numbers.into_iter().filter_map(|(key, value, unit)| Some(format!("{key} {}{unit}", value?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::report::{Distribution, OperationLatency, Queue, StageLatency};

    #[test]
    fn operations_stages_depth_and_queues_are_lines() {
        let latency = |ns: u64| Distribution {
            count: 4,
            sum: 4 * ns,
            max: ns,
            buckets: vec![(ns, 4)],
            ..Distribution::default()
        };
        let queue = Queue {
            enabled: true,
            completed: 4,
            operations: vec![OperationLatency { operation: "write".into(), latency: latency(1_200_000) }],
            stages: vec![StageLatency { stage: "host".into(), latency: latency(1_100_000) }],
            depth: Some(latency(3)),
            ..Queue::default()
        };
        let settings = Settings { ops_per_second: Some(9), slow_us: Some(1000), ..Settings::default() };
        let device = Device { name: "vm0".into(), queues: vec![queue], settings, ..Device::default() };
        let text = text(&device);
        let lines: Vec<_> =
            text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        let expected = [
            "vm0 OPERATION COUNT P50 P99 P99.9 MAX",
            "write 4 1.2ms 1.2ms 1.2ms 1.2ms",
            "vm0 STAGE COUNT P50 P99 P99.9 MAX",
            "host 4 1.1ms 1.1ms 1.1ms 1.1ms",
            "vm0 depth: P50 3, P99 3, max 3",
            "vm0 settings: ops-per-second 9, slow 1000 us",
            "vm0 queue 0: 4 done, 0 in flight, 0 kicks, 0 interrupts",
        ];
        assert_eq!(lines, expected);
        assert_eq!(super::text(&Device::default()), "");
    }
}
