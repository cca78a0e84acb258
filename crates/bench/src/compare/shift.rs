//! By how much a figure moved: the Hodges-Lehmann estimate with its interval.
//!
//! The estimate is the median of the ratios of every value after to every value before; for pairs of
//! one run, of the means of any two ratios. It belongs to the rank test: the interval holds the
//! ratios that the test would not reject.
use super::rank;

/// The most rounds that are compared.
const MOST: usize = 300;

/// A relative change: 0.1 is 10 % more.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Shift {
    pub(super) estimate: f64,
    /// The interval of 95 %.
    pub(super) interval: [f64; 2],
    /// Two-sided p of "nothing changed".
    pub(super) p: f64,
    /// The smallest p that this number of rounds can show.
    pub(super) smallest: f64,
}

/// Compares two runs; `None` without values.
pub(super) fn of_runs(before: &[f64], after: &[f64]) -> Option<Shift> {
    let scale = Scale::of(before, after)?;
    let (before, after) = (scale.all(before), scale.all(after));
    let differences = after.iter().flat_map(|after| before.iter().map(move |before| after - before));
    let (n, m) = (before.len(), after.len());
    let (estimate, interval) = middle(differences.collect(), rank::place_in_runs(n, m))?;
    Some(Shift {
        estimate: scale.relative(estimate),
        interval: interval.map(|value| scale.relative(value)),
        p: rank::mann_whitney(&before, &after),
        smallest: rank::smallest_of_runs(n, m),
    })
}

/// Compares two subjects of one run, round by round; `None` without values.
pub(super) fn of_pairs(before: &[f64], after: &[f64]) -> Option<Shift> {
    let count = before.len().min(after.len());
    let scale = Scale::of(&before[..count], &after[..count])?;
    let (before, after) = (scale.all(&before[..count]), scale.all(&after[..count]));
    let differences: Vec<f64> = after.iter().zip(&before).map(|(after, before)| after - before).collect();
    let means = (0..differences.len()).flat_map(|i| {
        differences[i..].iter().map({
            let differences = &differences;
            move |other| f64::midpoint(differences[i], *other)
        })
    });
    let (estimate, interval) = middle(means.collect(), rank::place_in_pairs(differences.len()))?;
    Some(Shift {
        estimate: scale.relative(estimate),
        interval: interval.map(|value| scale.relative(value)),
        p: rank::signed_rank(&differences),
        smallest: rank::smallest_of_pairs(differences.len()),
    })
}

/// How values become differences.
enum Scale {
    /// All values are positive: by their logarithms.
    Logarithm,
    /// Relative to the larger of the two means.
    Linear(f64),
}

impl Scale {
    /// `None` if a value is missing or is no number.
    fn of(before: &[f64], after: &[f64]) -> Option<Self> {
        let all = || before.iter().chain(after);
        if before.is_empty() || after.is_empty() || !all().all(|value| value.is_finite()) {
            return None;
        }
        if all().all(|value| *value > 0.0) {
            return Some(Self::Logarithm);
        }
        let mean = |values: &[f64]| (values.iter().sum::<f64>() / values.len() as f64).abs();
        let unit = mean(before).max(mean(after));
        Some(Self::Linear(if unit > 0.0 { unit } else { 1.0 }))
    }

    fn all(&self, values: &[f64]) -> Vec<f64> {
        let one = |value: &f64| match self {
            Self::Logarithm => value.ln(),
            Self::Linear(unit) => value / unit,
        };
        values.iter().take(MOST).map(one).collect()
    }

    fn relative(&self, difference: f64) -> f64 {
        match self {
            Self::Logarithm => difference.exp_m1(),
            Self::Linear(_) => difference,
        }
    }
}

/// The median of differences, and those at `place` from either end.
fn middle(mut differences: Vec<f64>, place: usize) -> Option<(f64, [f64; 2])> {
    differences.sort_by(f64::total_cmp);
    let last = differences.len().checked_sub(1)?;
    let low = (place - 1).min(last / 2);
    let median = f64::midpoint(differences[last / 2], differences[last.div_ceil(2)]);
    Some((median, [differences[low], differences[last - low]]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shift_is_a_ratio() {
        let before = [100.0, 101.0, 99.0, 100.5, 99.5];
        let after = before.map(|value| value * 1.2);
        for shift in [of_runs(&before, &after).unwrap(), of_pairs(&before, &after).unwrap()] {
            assert!((shift.estimate - 0.2).abs() < 1e-9, "{shift:?}");
            assert!(shift.interval[0] <= shift.estimate && shift.estimate <= shift.interval[1]);
            assert_eq!(shift.p, shift.smallest);
        }
    }

    #[test]
    fn drift_that_both_subjects_share_cancels_in_pairs() {
        let before = [100.0, 120.0, 150.0, 200.0, 300.0, 500.0];
        let after = before.map(|value| value * 1.02);
        let (pairs, runs) = (of_pairs(&before, &after).unwrap(), of_runs(&before, &after).unwrap());
        assert!((pairs.estimate - 0.02).abs() < 1e-9 && pairs.p < 0.05, "{pairs:?}");
        assert!(runs.p > 0.5, "{runs:?}");
    }

    #[test]
    fn zeroes_and_negative_values_have_a_shift() {
        let shift = of_runs(&[0.0; 5], &[0.0; 5]).unwrap();
        assert_eq!((shift.estimate, shift.p), (0.0, 1.0));
        let shift = of_runs(&[-1.0, 0.0, 1.0], &[9.0, 10.0, 11.0]).unwrap();
        assert!((shift.estimate - 1.0).abs() < 1e-9, "{shift:?}");
        assert_eq!(of_runs(&[], &[1.0]), None);
        assert_eq!(of_runs(&[f64::NAN], &[1.0]), None);
    }

    #[test]
    fn a_long_list_is_cut() {
        let long = vec![1.0; 5_000];
        assert_eq!(of_runs(&long, &long).unwrap().estimate, 0.0);
    }
}
