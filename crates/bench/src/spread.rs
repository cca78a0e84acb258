//! Median, smallest and largest value.

/// Median, smallest and largest of a list of values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
}

impl Spread {
    /// The spread of `values`; `None` if empty.
    ///
    /// The median of an even number of values is the mean of the middle two.
    pub(crate) fn of(values: &[f64]) -> Option<Self> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (&min, &max) = (sorted.first()?, sorted.last()?);
        let middle = sorted.len() / 2;
        let median = if sorted.len() % 2 == 1 {
            sorted[middle]
        } else {
            f64::midpoint(sorted[middle - 1], sorted[middle])
        };
        Some(Self { median, min, max })
    }
}

/// A percentile of `values` by nearest rank; `None` if empty.
#[cfg(feature = "peers")]
pub(crate) fn percentile(values: &[f64], percent: usize) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get((sorted.len() * percent).div_ceil(100).saturating_sub(1)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn odd_number_of_rounds() {
        let spread = Spread::of(&[5.0, 1.0, 9.0, 2.0, 3.0]);
        assert_eq!(spread, Some(Spread { median: 3.0, min: 1.0, max: 9.0 }));
    }

    #[test]
    fn even_number_of_rounds() {
        let spread = Spread::of(&[4.0, -1.0, 2.0, 100.0]);
        assert_eq!(spread, Some(Spread { median: 3.0, min: -1.0, max: 100.0 }));
    }

    #[test]
    fn one_round_and_none() {
        assert_eq!(Spread::of(&[7.5]), Some(Spread { median: 7.5, min: 7.5, max: 7.5 }));
        assert_eq!(Spread::of(&[]), None);
    }

    #[cfg(feature = "peers")]
    #[test]
    fn percentiles_are_values_of_the_list() {
        let values: Vec<f64> = (1..=200).rev().map(f64::from).collect();
        assert_eq!((percentile(&values, 99), percentile(&values, 50)), (Some(198.0), Some(100.0)));
        assert_eq!((percentile(&[3.0], 99), percentile(&[], 99)), (Some(3.0), None));
    }
}
