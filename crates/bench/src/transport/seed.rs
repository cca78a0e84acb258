//! What the virtio-mmio seed published of itself: transactions a second of netperf TCP_RR, 32 bytes there and 1024 back.
use super::NAME;
use crate::Row;
use crate::spread::Spread;

const METHOD: &str = "published December 2019, netperf, three runs of 30 s";

/// Subject; its three runs.
const RUNS: [(&str, [f64; 3]); 3] = [
    ("seed/mmio", [6939.0, 7029.0, 7095.0]),
    ("seed/mmio-msi", [9500.0, 9749.0, 9318.0]),
    ("seed/pci", [9536.0, 9734.0, 9894.0]),
];

/// Its figures as rows.
pub(super) fn rows() -> Vec<Row> {
    let row = |(subject, runs): &(&str, [f64; 3])| {
        let spread = Spread::of(runs)?;
        Some(Row {
            bench: NAME.to_owned(),
            case: "reference/tcp_rr/32/1024".to_owned(),
            subject: (*subject).to_owned(),
            metric: "rate".to_owned(),
            unit: "transactions/s".to_owned(),
            median: spread.median,
            min: spread.min,
            max: spread.max,
            rounds: 3,
            method: METHOD.to_owned(),
            pinned_cpu: None,
            load: [None, None],
        })
    };
    RUNS.iter().filter_map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_subject_has_its_row_and_is_labelled() {
        let rows = rows();
        let medians: Vec<(&str, f64)> = rows.iter().map(|row| (row.subject.as_str(), row.median)).collect();
        assert_eq!(medians, [("seed/mmio", 7029.0), ("seed/mmio-msi", 9500.0), ("seed/pci", 9734.0)]);
        assert!(rows.iter().all(|row| row.method.starts_with("published") && row.min < row.max));
    }
}
