//! "Introduce optional VirtIO ring wrap counters" (Linux, 2022).
//!
//! `perf stat` of `virtio_test`.
use super::series::PatchSeries;
use crate::Row;

/// The series. Linux did not merge it.
pub(super) const SERIES: PatchSeries = PatchSeries {
    tag: "wrap-counters-2022",
    subject: "[PATCH 0/4] Introduce optional VirtIO ring wrap counters",
    author: "Cristian Marussi",
    posted: "8 February 2022",
    archive: None,
};

/// Buffers in a run of `virtio_test`.
const BUFFERS: f64 = 1_048_576.0;
/// Subject; instructions, deviation in percent; seconds, deviation; method.
type Published = (&'static str, f64, f64, f64, f64, &'static str);

const METHOD: &str = "published 8 February 2022, perf stat --repeat 25 of virtio_test";
const RFC_METHOD: &str = "published 1 February 2022 in the RFC, perf stat of virtio_test";

/// The RFC states no deviation.
const FIGURES: [Published; 4] = [
    ("published/unpatched", 45_583_397_473.0, 0.09, 6.0908, 0.0107, METHOD),
    ("published/counter-off", 48_973_010_013.0, 0.18, 6.1382, 0.0172, METHOD),
    ("published/wrap-counter", 48_147_192_304.0, 0.14, 6.1525, 0.0155, METHOD),
    ("published/unconditional", 68.18e9, 0.0, 8.01, 0.0, RFC_METHOD),
];

/// Published figures per buffer as rows: mean, minus and plus the deviation.
pub(crate) fn rows() -> Vec<Row> {
    let row = |subject: &str, metric: &str, unit: &str, mean: f64, deviation: f64, method: &str| Row {
        bench: "poll".to_owned(),
        case: format!("{}/virtio_test/batch1", SERIES.tag),
        subject: subject.to_owned(),
        metric: metric.to_owned(),
        unit: unit.to_owned(),
        median: mean / BUFFERS,
        min: (mean - deviation) / BUFFERS,
        max: (mean + deviation) / BUFFERS,
        rounds: if method == METHOD { 25 } else { 1 },
        // The messages state means and deviations only.
        values: Vec::new(),
        method: method.to_owned(),
        pinned_cpu: None,
        load: [None, None],
    };
    let instructions = FIGURES.iter().map(|&(subject, count, percent, _, _, method)| {
        row(subject, "instructions", "instr/buffer", count, count * percent / 100.0, method)
    });
    let times = FIGURES.iter().map(|&(subject, _, _, seconds, deviation, method)| {
        row(subject, "time", "ns/buffer", seconds * 1e9, deviation * 1e9, method)
    });
    instructions.chain(times).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_per_buffer() {
        let rows = rows();
        let median = |metric: &str| rows.iter().find(|row| row.metric == metric).unwrap().median;
        assert_eq!(median("instructions").round(), 43_472.0);
        assert_eq!(median("time").round(), 5_809.0);
    }
}
