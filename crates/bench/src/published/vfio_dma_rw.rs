//! "drm/i915/gvt: subsitute kvm_read/write_guest with vfio_dma_rw" (Linux, 2020).
//!
//! Cycles for each access.
//!
//! GVT-g in the kernel, with glmark2 in one guest or two.
use super::series::PatchSeries;
use crate::Row;

/// The series, spelled as posted. Linux 5.7 merged it.
pub(super) const SERIES: PatchSeries = PatchSeries {
    tag: "vfio-dma-rw-2020",
    subject: "[PATCH v2 2/2] drm/i915/gvt: subsitute kvm_read/write_guest with vfio_dma_rw",
    author: "Yan Zhao",
    posted: "21 January 2020",
    archive: Some("rwsem variant: https://lkml.org/lkml/2020/1/16/1869"),
};

const METHOD: &str = "published January 2020, average of 40 million";

/// Subject; cycles of a read, of a write, of the mix.
type Published = (&'static str, f64, f64, f64);

const ONE_GUEST: [Published; 3] = [
    ("published/kvm_read_write_page", 694.0, 1506.0, 993.0),
    ("published/vfio_dma_rw(mutex)", 1340.0, 2248.0, 1673.0),
    ("published/vfio_dma_rw(rwsem)", 1323.0, 2198.0, 1645.0),
];
const TWO_GUESTS: [Published; 3] = [
    ("published/kvm_read_write_page", 1035.0, 1832.0, 1325.0),
    ("published/vfio_dma_rw(mutex)", 2104.0, 2886.0, 2390.0),
    ("published/vfio_dma_rw(rwsem)", 1965.0, 2778.0, 2260.0),
];

/// The published figures as rows. The message states no spread.
pub(crate) fn rows() -> Vec<Row> {
    let row = |guests: u32, work: &str, subject: &str, cycles: f64| Row {
        bench: "dma".to_owned(),
        case: format!("{}/guests{guests}/{work}", SERIES.tag),
        subject: subject.to_owned(),
        metric: "cycles".to_owned(),
        unit: "cycles/access".to_owned(),
        median: cycles,
        min: cycles,
        max: cycles,
        rounds: 1,
        values: vec![cycles],
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
    fn every_figure_is_a_row() {
        let rows = rows();
        assert_eq!(rows.len(), 18);
        // The mix is between its parts, by the share of reads.
        for of_case in rows.chunks(9) {
            for i in 0..3 {
                let [read, write, mix] = [0, 3, 6].map(|at| of_case[at + i].median);
                assert!((0.63 * read + 0.37 * write - mix).abs() < 0.03 * mix, "{read} {write} {mix}");
            }
        }
    }
}
