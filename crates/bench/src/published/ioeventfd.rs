//! "virtio: Use ioeventfd for virtqueue notify" (QEMU, 2010): FFSB and netperf.
use super::series::PatchSeries;
use crate::Row;

/// The series. QEMU merged a rewrite.
pub(super) const SERIES: PatchSeries = PatchSeries {
    tag: "ioeventfd-2010",
    subject: "virtio: Use ioeventfd for virtqueue notify",
    author: "Stefan Hajnoczi",
    posted: "30 September 2010",
    archive: Some("Message-ID 1285855312-11739-1-git-send-email-stefanha@linux.vnet.ibm.com"),
};

const METHOD: &str = "published September 2010";

/// FFSB test, threads, MB/s unmodified and patched.
const BLOCKS: [(&str, u32, [f64; 2]); 12] = [
    ("create", 1, [21.7, 21.8]),
    ("create", 8, [101.0, 118.0]),
    ("create", 16, [119.0, 157.0]),
    ("seq-read", 1, [21.9, 23.2]),
    ("seq-read", 8, [114.0, 139.0]),
    ("seq-read", 16, [143.0, 178.0]),
    ("random-read", 1, [3.3, 3.6]),
    ("random-read", 8, [23.0, 25.4]),
    ("random-read", 16, [43.3, 47.8]),
    ("random-write", 1, [22.2, 23.0]),
    ("random-write", 8, [93.1, 111.6]),
    ("random-write", 16, [110.5, 132.0]),
];

/// Direction, message bytes, Mbit/s unmodified, with ioeventfd, with vhost-net.
const STREAMS: [(&str, u32, [f64; 3]); 8] = [
    ("guest-to-host", 65_536, [6430.0, 7590.0, 12755.0]),
    ("guest-to-host", 16_384, [3084.0, 5764.0, 8499.0]),
    ("guest-to-host", 4096, [1578.0, 3659.0, 4723.0]),
    ("guest-to-host", 1024, [981.0, 2060.0, 1827.0]),
    ("host-to-guest", 65_536, [5790.0, 5853.0, 11156.0]),
    ("host-to-guest", 16_384, [5575.0, 5691.0, 10787.0]),
    ("host-to-guest", 4096, [5556.0, 4277.0, 10452.0]),
    ("host-to-guest", 1024, [3671.0, 5277.0, 4437.0]),
];

/// Bytes each way, transactions/s unmodified, with ioeventfd, with vhost-net.
const EXCHANGES: [(u32, [f64; 3]); 4] = [
    (1, [3459.0, 3425.0, 9903.0]),
    (4096, [1931.0, 1899.0, 7185.0]),
    (16_384, [2102.0, 1923.0, 6108.0]),
    (65_536, [1610.0, 1744.0, 3161.0]),
];

/// The columns of the published tables.
const SUBJECTS: [&str; 3] = ["published/unmodified", "published/ioeventfd", "published/vhost-net"];

/// The published figures as rows.
pub(crate) fn rows() -> Vec<Row> {
    let tag = SERIES.tag;
    let mut rows = Vec::new();
    let mut add = |case: String, unit: &str, values: &[f64]| {
        for (subject, &value) in SUBJECTS.iter().zip(values) {
            rows.push(Row {
                bench: "notify".to_owned(),
                case: case.clone(),
                subject: (*subject).to_owned(),
                metric: "rate".to_owned(),
                unit: unit.to_owned(),
                median: value,
                min: value,
                max: value,
                rounds: 1,
                values: vec![value],
                method: METHOD.to_owned(),
                pinned_cpu: None,
                load: [None, None],
            });
        }
    };
    for (test, threads, values) in BLOCKS {
        add(format!("{tag}/blk/{test}/inflight{threads}"), "MB/s", &values);
    }
    for (direction, bytes, values) in STREAMS {
        // The tables say Mbit/s.
        add(format!("{tag}/stream/{direction}/{bytes}"), "MB/s", &values.map(|value| value / 8.0));
    }
    for (bytes, values) in EXCHANGES {
        add(format!("{tag}/rr/{bytes}"), "transactions/s", &values);
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_columns_are_there() {
        let rows = rows();
        assert_eq!(rows.len(), 12 * 2 + 8 * 3 + 4 * 3);
        let vhost =
            rows.iter().find(|row| row.case.ends_with("host/65536") && row.subject.ends_with("vhost-net"));
        assert_eq!(vhost.unwrap().median, 12755.0 / 8.0);
    }
}
