//! What the wrap counter seed published of itself.
use super::NAME;
use crate::Row;

/// Buffers in a run of its test.
const BUFFERS: f64 = 1_048_576.0;
/// Subject; instructions and their spread in percent; seconds and their spread; where it is from.
type Published = (&'static str, f64, f64, f64, f64, &'static str);

const SERIES: &str = "published 8 February 2022, perf stat --repeat 25 of virtio_test";
const RFC: &str = "published 1 February 2022 in the RFC, perf stat of virtio_test";

/// The spread of the RFC's figures was not published with them.
const FIGURES: [Published; 4] = [
    ("seed/unpatched", 45_583_397_473.0, 0.09, 6.0908, 0.0107, SERIES),
    ("seed/counter-off", 48_973_010_013.0, 0.18, 6.1382, 0.0172, SERIES),
    ("seed/wrap-counter", 48_147_192_304.0, 0.14, 6.1525, 0.0155, SERIES),
    ("seed/unconditional", 68.18e9, 0.0, 8.01, 0.0, RFC),
];

/// Its figures a buffer, as rows. Smallest and largest are the mean less and plus the published deviation.
pub(super) fn rows() -> Vec<Row> {
    let row = |subject: &str, metric: &str, unit: &str, mean: f64, deviation: f64, method: &str| Row {
        bench: NAME.to_owned(),
        case: "reference/virtio_test/batch1".to_owned(),
        subject: subject.to_owned(),
        metric: metric.to_owned(),
        unit: unit.to_owned(),
        median: mean / BUFFERS,
        min: (mean - deviation) / BUFFERS,
        max: (mean + deviation) / BUFFERS,
        rounds: if method == SERIES { 25 } else { 1 },
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
    fn figures_are_a_buffer() {
        let rows = rows();
        let median = |metric: &str| rows.iter().find(|row| row.metric == metric).unwrap().median;
        assert_eq!(median("instructions").round(), 43_472.0);
        assert_eq!(median("time").round(), 5_809.0);
        assert!(
            rows.iter().all(|row| row.method.starts_with("published") && row.subject.starts_with("seed/"))
        );
    }
}
