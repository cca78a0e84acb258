//! Classic histogram buckets of latencies.
use crate::serve::report::Distribution;

/// Upper bounds: nanoseconds, and seconds as label `le`.
///
/// OpenMetrics asks for this notation of numbers, and newer versions of Prometheus make others so.
pub(crate) type Bounds = &'static [(u64, &'static str)];

const US: u64 = 1_000;
const MS: u64 = 1_000 * US;
const S: u64 = 1_000 * MS;

/// Bounds for operations: steps of 1, 2, 5.
pub(crate) const FINE: Bounds = &[
    (10 * US, "1e-05"),
    (20 * US, "2e-05"),
    (50 * US, "5e-05"),
    (100 * US, "0.0001"),
    (200 * US, "0.0002"),
    (500 * US, "0.0005"),
    (MS, "0.001"),
    (2 * MS, "0.002"),
    (5 * MS, "0.005"),
    (10 * MS, "0.01"),
    (20 * MS, "0.02"),
    (50 * MS, "0.05"),
    (100 * MS, "0.1"),
    (200 * MS, "0.2"),
    (500 * MS, "0.5"),
    (S, "1.0"),
    (2 * S, "2.0"),
    (5 * S, "5.0"),
    (10 * S, "10.0"),
];

/// Bounds for stages, which tell where time goes rather than how much: steps of 10.
pub(crate) const COARSE: Bounds = &[
    (10 * US, "1e-05"),
    (100 * US, "0.0001"),
    (MS, "0.001"),
    (10 * MS, "0.01"),
    (100 * MS, "0.1"),
    (S, "1.0"),
    (10 * S, "10.0"),
];

/// Number of values up to each bound.
///
/// A bucket of the distribution that a bound divides counts as above the bound: latencies may seem
/// longer by the width of such a bucket, and never shorter.
pub(super) fn cumulative<'a>(
    distributions: impl Iterator<Item = &'a Distribution>,
    bounds: Bounds,
) -> impl Iterator<Item = (&'static str, u64)> {
    let mut counts = vec![0; bounds.len()];
    for &(upper, count) in distributions.flat_map(|distribution| &distribution.buckets) {
        if let Some(counted) = counts.get_mut(bounds.partition_point(|&(bound, _)| bound < upper)) {
            *counted += count;
        }
    }
    let sums = counts.into_iter().scan(0, |sum, count| {
        *sum += count;
        Some(*sum)
    });
    bounds.iter().map(|&(_, text)| text).zip(sums)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_rise_and_their_labels_are_their_seconds() {
        for bounds in [FINE, COARSE] {
            assert!(bounds.is_sorted_by(|one, next| one.0 < next.0));
            for &(bound, text) in bounds {
                let seconds: f64 = text.parse().unwrap();
                assert_eq!((seconds * 1e9).round() as u64, bound, "{text}");
            }
        }
        assert!(COARSE.iter().all(|bound| FINE.contains(bound)));
    }

    #[test]
    fn values_of_several_queues_are_counted_up_to_each_bound() {
        let one =
            Distribution { buckets: vec![(9_000, 1), (10_000, 2), (11_000, 4)], ..Distribution::default() };
        let other = Distribution { buckets: vec![(1_000_000, 8), (20 * S, 16)], ..Distribution::default() };
        let counts: Vec<_> = cumulative([&one, &other].into_iter(), COARSE).map(|(_, count)| count).collect();
        assert_eq!(counts, [3, 7, 15, 15, 15, 15, 15], "the last 16 are in the bucket +Inf");
    }
}
