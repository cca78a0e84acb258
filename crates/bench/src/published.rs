//! Published figures of patch series, printed beside measured ones.
//!
//! Some benchmarks answer questions that a patch series raised. The series' figures come from other
//! machines and mostly from whole programs, so they are never compared with measured ones. Their
//! case begins with the tag of the series, their subject with `published/`, their method with
//! "published".
pub(crate) mod dma_barrier;
pub(crate) mod ioeventfd;
pub(crate) mod vfio_dma_rw;
pub(crate) mod virtio_mmio_v3;
pub(crate) mod wrap_counters;

use series::PatchSeries;

mod series;

/// All series whose figures are printed.
const ALL: [&PatchSeries; 5] = [
    &ioeventfd::SERIES,
    &dma_barrier::SERIES,
    &virtio_mmio_v3::SERIES,
    &vfio_dma_rw::SERIES,
    &wrap_counters::SERIES,
];

/// The citation of the series that published the figures of `case`.
pub(crate) fn citation(case: &str) -> Option<String> {
    let tag = case.split('/').next()?;
    ALL.iter().find(|series| series.tag == tag).map(|series| series.citation())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_names_its_series() {
        let rows = [
            dma_barrier::rows(),
            ioeventfd::rows(),
            vfio_dma_rw::rows(),
            virtio_mmio_v3::rows(),
            wrap_counters::rows(),
        ];
        for row in rows.iter().flatten() {
            assert!(row.method.starts_with("published "), "{row:?}");
            assert!(row.subject.starts_with("published/"), "{row:?}");
            assert!(citation(&row.case).is_some(), "{row:?}");
        }
        assert_eq!(citation("split/device/1desc/batch32"), None);
    }

    #[test]
    fn a_citation_has_subject_author_and_year() {
        let text = citation("virtio-mmio-v3-2019/tcp_rr/32/1024").unwrap();
        for part in ["virtio-mmio-v3-2019: \"virtio-mmio: add features", "Jiang", "2019", "https://"] {
            assert!(text.contains(part), "{text}");
        }
    }
}
