//! What the vfio_dma_rw seed published of itself: cycles an access, of GVT-g with glmark2 in its guests.
use super::NAME;
use crate::Row;

const METHOD: &str = "published January 2020, average of 40 million";

/// Subject; reads, writes, all of them.
type Published = (&'static str, f64, f64, f64);

const ONE_GUEST: [Published; 3] = [
    ("seed/kvm_read_write_page", 694.0, 1506.0, 993.0),
    ("seed/vfio_dma_rw(mutex)", 1340.0, 2248.0, 1673.0),
    ("seed/vfio_dma_rw(rwsem)", 1323.0, 2198.0, 1645.0),
];
const TWO_GUESTS: [Published; 3] = [
    ("seed/kvm_read_write_page", 1035.0, 1832.0, 1325.0),
    ("seed/vfio_dma_rw(mutex)", 2104.0, 2886.0, 2390.0),
    ("seed/vfio_dma_rw(rwsem)", 1965.0, 2778.0, 2260.0),
];

/// Its figures as rows. No spread was published with them.
pub(super) fn rows() -> Vec<Row> {
    let row = |guests: u32, work: &str, subject: &str, cycles: f64| Row {
        bench: NAME.to_owned(),
        case: format!("reference/guests{guests}/{work}"),
        subject: subject.to_owned(),
        metric: "cycles".to_owned(),
        unit: "cycles/access".to_owned(),
        median: cycles,
        min: cycles,
        max: cycles,
        rounds: 1,
        method: METHOD.to_owned(),
        pinned_cpu: None,
        load: [None, None],
    };
    let of = |guests, figures: [Published; 3]| {
        let column = |work, cycles: fn(Published) -> f64| {
            figures.map(|figure| row(guests, work, figure.0, cycles(figure)))
        };
        [
            column("read", |figure| figure.1),
            column("write", |figure| figure.2),
            column("mix", |figure| figure.3),
        ]
        .into_iter()
        .flatten()
    };
    of(1, ONE_GUEST).chain(of(2, TWO_GUESTS)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_figure_is_a_row_and_labelled() {
        let rows = rows();
        assert_eq!(rows.len(), 18);
        assert!(
            rows.iter().all(|row| row.method.starts_with("published") && row.subject.starts_with("seed/"))
        );
        // The mix is between its parts, by the share of reads.
        for of_case in rows.chunks(9) {
            for i in 0..3 {
                let [read, write, mix] = [0, 3, 6].map(|at| of_case[at + i].median);
                assert!((0.63 * read + 0.37 * write - mix).abs() < 0.03 * mix, "{read} {write} {mix}");
            }
        }
    }
}
