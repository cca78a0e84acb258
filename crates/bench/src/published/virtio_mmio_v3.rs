//! "virtio-mmio: add features for virtio-mmio specification version 3" (2019).
//!
//! Linux; netperf TCP_RR.
//!
//! Requests of 32 bytes, responses of 1024 bytes.
use super::series::PatchSeries;
use crate::Row;
use crate::spread::Spread;

/// The series. Linux did not merge it.
pub(super) const SERIES: PatchSeries = PatchSeries {
    tag: "virtio-mmio-v3-2019",
    subject: "virtio-mmio: add features for virtio-mmio specification version 3",
    author: "Liu Jiang and Zha Bin",
    posted: "25 December 2019",
    archive: Some("specification: https://lkml.org/lkml/2019/12/20/113"),
};

const METHOD: &str = "published December 2019, netperf, three runs of 30 s";

/// Subject; transactions/s of three runs.
const RUNS: [(&str, [f64; 3]); 3] = [
    ("published/mmio", [6939.0, 7029.0, 7095.0]),
    ("published/mmio-msi", [9500.0, 9749.0, 9318.0]),
    ("published/pci", [9536.0, 9734.0, 9894.0]),
];

/// The published figures as rows.
pub(crate) fn rows() -> Vec<Row> {
    let row = |(subject, runs): &(&str, [f64; 3])| {
        let spread = Spread::of(runs)?;
        Some(Row {
            bench: "transport".to_owned(),
            case: format!("{}/tcp_rr/32/1024", SERIES.tag),
            subject: (*subject).to_owned(),
            metric: "rate".to_owned(),
            unit: "transactions/s".to_owned(),
            median: spread.median,
            min: spread.min,
            max: spread.max,
            rounds: 3,
            values: runs.to_vec(),
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
    fn every_subject_has_its_row() {
        let rows = rows();
        let medians: Vec<(&str, f64)> = rows.iter().map(|row| (row.subject.as_str(), row.median)).collect();
        assert_eq!(
            medians,
            [("published/mmio", 7029.0), ("published/mmio-msi", 9500.0), ("published/pci", 9734.0)]
        );
        assert!(rows.iter().all(|row| row.min < row.max));
    }
}
