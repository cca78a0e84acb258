//! Axes: where a value lies, and which values get a mark.

/// A value range on a line.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Scale {
    low: f64,
    high: f64,
    pub(super) logarithmic: bool,
    start: f64,
    length: f64,
}

/// Values whose ratio exceeds this get a logarithmic scale.
const WIDEST: f64 = 25.0;

impl Scale {
    /// A scale for `values`, from `start` on, `length` long.
    ///
    /// A linear one includes zero.
    pub(super) fn of(values: impl Iterator<Item = f64> + Clone, start: f64, length: f64) -> Self {
        let values = values.filter(|value| value.is_finite());
        let high = values.clone().fold(f64::NEG_INFINITY, f64::max);
        let low = values.fold(f64::INFINITY, f64::min);
        if low > 0.0 && high / low > WIDEST {
            return Self::logarithmic(low, high, start, length);
        }
        let (low, high) = (low.min(0.0), high.max(0.0));
        let high = if high > low { high } else { low + 1.0 };
        let margin = 0.04 * (high - low);
        let low = if low < 0.0 { low - margin } else { 0.0 };
        Self { low, high: high + margin, logarithmic: false, start, length }
    }

    /// A logarithmic scale for values from `low` to `high`, both above zero.
    pub(super) fn logarithmic(low: f64, high: f64, start: f64, length: f64) -> Self {
        let (low, high) = (low / 1.15, high * 1.15);
        Self { low, high, logarithmic: true, start, length }
    }

    /// A linear scale from `low` to `high`.
    pub(super) fn linear(low: f64, high: f64, start: f64, length: f64) -> Self {
        Self { low, high, logarithmic: false, start, length }
    }

    /// Whether the scale reaches a value.
    pub(super) fn contains(&self, value: f64) -> bool {
        (self.low..=self.high).contains(&value)
    }

    /// The place of a value.
    pub(super) fn place(&self, value: f64) -> f64 {
        let share = if self.logarithmic {
            (value.max(self.low) / self.low).ln() / (self.high / self.low).ln()
        } else {
            (value - self.low) / (self.high - self.low)
        };
        self.start + self.length * share.clamp(0.0, 1.0)
    }

    /// At most `most` round values on the scale, but at least one.
    pub(super) fn ticks(&self, most: usize) -> Vec<f64> {
        let steps: &[&[f64]] = if self.logarithmic { &[&[1.0, 2.0, 5.0], &[1.0, 3.0], &[1.0]] } else { &[] };
        for mantissas in steps {
            let ticks = self.decades(mantissas, 1);
            if ticks.len() <= most {
                return ticks;
            }
        }
        if self.logarithmic {
            return (2..40)
                .map(|each| self.decades(&[1.0], each))
                .find(|ticks| ticks.len() <= most)
                .unwrap_or_default();
        }
        let rough = (self.high - self.low) / most.max(1) as f64;
        let power = 10_f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|digit| digit * power).into_iter().find(|step| *step >= rough);
        let step = step.unwrap_or(rough);
        let first = (self.low / step).ceil() as i64;
        let last = (self.high / step).floor() as i64;
        (first..=last).take(most + 2).map(|n| n as f64 * step).collect()
    }

    /// The values with these mantissas in every `each`-th decade.
    fn decades(&self, mantissas: &[f64], each: i32) -> Vec<f64> {
        let (first, last) = (self.low.log10().floor() as i32, self.high.log10().ceil() as i32);
        let decades = (first..=last).filter(|decade| decade.rem_euclid(each) == 0);
        decades
            .flat_map(|decade| mantissas.iter().map(move |mantissa| mantissa * 10_f64.powi(decade)))
            .filter(|value| self.contains(*value))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_linear_scale_begins_at_zero() {
        let scale = Scale::of([80.0, 100.0].into_iter(), 10.0, 200.0);
        assert!(!scale.logarithmic);
        assert_eq!(scale.place(0.0), 10.0);
        assert!(scale.place(100.0) > 200.0 && scale.place(100.0) < 210.0);
        assert_eq!(scale.ticks(5), [0.0, 50.0, 100.0]);
        assert_eq!(Scale::of([-10.0, 10.0].into_iter(), 0.0, 1.0).ticks(5), [-10.0, -5.0, 0.0, 5.0, 10.0]);
    }

    #[test]
    fn a_wide_range_is_logarithmic() {
        let scale = Scale::of([1.0, 1_000.0].into_iter(), 0.0, 100.0);
        assert!(scale.logarithmic);
        assert_eq!(scale.ticks(5), [1.0, 10.0, 100.0, 1_000.0]);
        let step = scale.place(100.0) - scale.place(10.0);
        assert!((scale.place(10.0) - scale.place(1.0) - step).abs() < 1e-9);
        assert!(Scale::of([1e-9, 1e9].into_iter(), 0.0, 1.0).ticks(5).len() <= 5);
    }

    #[test]
    fn odd_values_have_a_place() {
        for values in [&[][..], &[0.0], &[f64::NAN], &[5.0, 5.0], &[-1.0]] {
            let scale = Scale::of(values.iter().copied(), 0.0, 100.0);
            for value in [0.0, 5.0, -1.0] {
                assert!((0.0..=100.0).contains(&scale.place(value)), "{values:?}");
            }
            assert!(scale.ticks(5).len() <= 7, "{values:?}: {:?}", scale.ticks(5));
        }
    }
}
