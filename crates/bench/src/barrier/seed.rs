//! What the DMA-barrier seed published of itself: netperf with an emulated e1000, on a bridge to gigabit Ethernet.
use super::NAME;
use crate::Row;
use crate::spread::Spread;

const METHOD: &str = "published May 2012, netperf";

/// Case, subject, the runs in 10^6 bits a second.
const FIGURES: [(&str, &str, &[f64]); 7] = [
    ("tcp_stream", "seed/host", &[933.02, 908.64, 926.78, 919.73]),
    ("tcp_stream", "seed/none", &[880.31, 876.73, 880.73, 878.63]),
    ("tcp_stream", "seed/rw", &[869.39, 864.99, 886.13, 872.90]),
    ("tcp_stream", "seed/rw+map", &[867.45, 868.51, 888.94, 888.19]),
    ("udp_stream", "seed/none", &[272.92, 285.44, 268.22]),
    ("udp_stream", "seed/rw", &[279.06, 265.75, 276.78]),
    ("udp_stream", "seed/rw+map", &[288.83, 291.94, 272.23]),
];

/// Its figures as rows.
pub(super) fn rows() -> Vec<Row> {
    let row = |&(case, subject, runs): &(&str, &str, &[f64])| {
        let spread = Spread::of(runs)?;
        Some(Row {
            bench: NAME.to_owned(),
            case: format!("reference/{case}"),
            subject: subject.to_owned(),
            metric: "rate".to_owned(),
            unit: "10^6bit/s".to_owned(),
            median: spread.median,
            min: spread.min,
            max: spread.max,
            rounds: runs.len() as u32,
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
    fn every_figure_is_a_row_and_labelled() {
        let rows = rows();
        assert_eq!(rows.len(), FIGURES.len());
        assert!(
            rows.iter().all(|row| row.method.starts_with("published") && row.subject.starts_with("seed/"))
        );
    }
}
