//! "Add a memory barrier to DMA functions" (QEMU, 2012): netperf over e1000.
//!
//! The card is emulated.
//!
//! The e1000 is bridged to gigabit Ethernet.
use super::series::PatchSeries;
use crate::Row;
use crate::spread::Spread;

/// The series. QEMU merged it.
pub(super) const SERIES: PatchSeries = PatchSeries {
    tag: "dma-barrier-2012",
    subject: "Add a memory barrier to DMA functions",
    author: "Benjamin Herrenschmidt",
    posted: "22 May 2012",
    archive: Some("Message-ID 1337661278.2779.166.camel@pasglop"),
};

const METHOD: &str = "published May 2012, netperf";

/// Case, subject, runs in 10^6 bit/s.
const FIGURES: [(&str, &str, &[f64]); 7] = [
    ("tcp_stream", "published/host", &[933.02, 908.64, 926.78, 919.73]),
    ("tcp_stream", "published/none", &[880.31, 876.73, 880.73, 878.63]),
    ("tcp_stream", "published/rw", &[869.39, 864.99, 886.13, 872.90]),
    ("tcp_stream", "published/rw+map", &[867.45, 868.51, 888.94, 888.19]),
    ("udp_stream", "published/none", &[272.92, 285.44, 268.22]),
    ("udp_stream", "published/rw", &[279.06, 265.75, 276.78]),
    ("udp_stream", "published/rw+map", &[288.83, 291.94, 272.23]),
];

/// The published figures as rows.
pub(crate) fn rows() -> Vec<Row> {
    let row = |&(case, subject, runs): &(&str, &str, &[f64])| {
        let spread = Spread::of(runs)?;
        Some(Row {
            bench: "barrier".to_owned(),
            case: format!("{}/{case}", SERIES.tag),
            subject: subject.to_owned(),
            metric: "rate".to_owned(),
            unit: "10^6bit/s".to_owned(),
            median: spread.median,
            min: spread.min,
            max: spread.max,
            rounds: runs.len() as u32,
            values: runs.to_vec(),
            method: METHOD.to_owned(),
            pinned_cpu: None,
            load: [None, None],
        })
    };
    FIGURES.iter().filter_map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_figure_is_a_row() {
        let rows = rows();
        assert_eq!(rows.len(), FIGURES.len());
    }
}
