//! Log-linear histograms with one writer.
//!
//! ```text
//!   unit       8 units of one width each, then 8 buckets an octave          open end
//!   |--|--|--|--|--|--|--|--|----|----|----|----|----|----|----|----|--------| ... |---->
//!   0                       8u   9u                                 16u
//! ```
//! A bucket is at most 1/8 as wide as its values, so a quantile is at most 1/8 too high. A bucket
//! includes its upper bound.
use std::sync::atomic::{AtomicU64, Ordering};

/// Buckets an octave, as a power of two.
const SUB_BITS: u32 = 3;
const SUB: usize = 1 << SUB_BITS;
/// Octaves of latencies: from 64 ns to 2^36 ns (69 s).
const LATENCY_OCTAVES: usize = 30;
/// Octaves of counts: from 8 to 65536, more than the largest queue.
const COUNT_OCTAVES: usize = 13;

/// For latencies in nanoseconds, in units of 8 ns.
pub(super) type Latencies = Histogram<3, { SUB + LATENCY_OCTAVES * SUB + 1 }>;
/// For counts of 1 and more; exact up to 16.
pub(super) type Counts = Histogram<0, { SUB + COUNT_OCTAVES * SUB + 1 }>;

/// Distribution of numbers, written by one thread at a time and read by any.
///
/// `SHIFT` is the logarithm of the unit. The last of the `BUCKETS` is open.
#[derive(Debug)]
pub(super) struct Histogram<const SHIFT: u32, const BUCKETS: usize> {
    sum: AtomicU64,
    max: AtomicU64,
    buckets: [AtomicU64; BUCKETS],
}

impl<const SHIFT: u32, const BUCKETS: usize> Histogram<SHIFT, BUCKETS> {
    pub(super) fn new() -> Self {
        Self {
            sum: AtomicU64::new(0),
            max: AtomicU64::new(0),
            buckets: [const { AtomicU64::new(0) }; BUCKETS],
        }
    }

    /// Adds `value`, `times` times. One thread at a time may call it.
    #[inline]
    pub(super) fn add(&self, value: u64, times: u64) {
        if value == 0 {
            // Frequent, as steps share readings of the clock. Changes neither sum nor maximum.
            raise(&self.buckets[0], times);
            return;
        }
        self.add_to(index(value, SHIFT).min(BUCKETS - 1), value, times);
    }

    #[inline]
    fn add_to(&self, bucket: usize, value: u64, times: u64) {
        raise(&self.buckets[bucket], times);
        raise(&self.sum, value.wrapping_mul(times));
        // Relaxed: a statistic with one writer, as in `raise`.
        if value > self.max.load(Ordering::Relaxed) {
            self.max.store(value, Ordering::Relaxed);
        }
    }

    /// A copy. Values that are added meanwhile may be in a part of it.
    pub(super) fn snapshot(&self) -> Distribution {
        // Relaxed: statistics.
        let max = self.max.load(Ordering::Relaxed);
        let last = BUCKETS - 1;
        let bucket = |(index, count): (usize, &AtomicU64)| match count.load(Ordering::Relaxed) {
            0 => None,
            count => Some((if index == last { max } else { upper(index, SHIFT) }, count)),
        };
        let buckets: Vec<_> = self.buckets.iter().enumerate().filter_map(bucket).collect();
        let count = buckets.iter().fold(0_u64, |sum, (_, count)| sum.wrapping_add(*count));
        Distribution { count, sum: self.sum.load(Ordering::Relaxed), max, buckets }
    }
}

impl Counts {
    /// Adds `value` once. One thread at a time may call it.
    #[inline]
    pub(super) fn count(&self, value: u64) {
        // Small counts have a bucket each.
        match value.wrapping_sub(1) {
            bucket if bucket < 2 * SUB as u64 => self.add_to(bucket as usize, value, 1),
            _ => self.count_other(value),
        }
    }

    #[inline(never)]
    fn count_other(&self, value: u64) {
        self.add(value, 1);
    }
}

/// Adds to a counter with one writer at a time, without a read-modify-write.
#[inline]
fn raise(counter: &AtomicU64, more: u64) {
    // Relaxed: a statistic. Its writer changes by channels, which order the stores of one before
    // the loads of the next.
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
}

/// The bucket of a value, if there were buckets without end. It has no branches.
#[inline]
fn index(value: u64, shift: u32) -> usize {
    // One less, so that upper bounds are inclusive.
    let units = value.saturating_sub(1) >> shift;
    // The first two rows are linear: octave 0.
    let octave = (units | SUB as u64).ilog2() - SUB_BITS;
    // The leading bit of the quotient counts as one more row.
    ((octave as usize) << SUB_BITS) + (units >> octave) as usize
}

/// The largest value of a bucket.
fn upper(index: usize, shift: u32) -> u64 {
    let (row, sub) = (index >> SUB_BITS, (index & (SUB - 1)) as u64);
    match row {
        0 => (sub + 1) << shift,
        row => (SUB as u64 + sub + 1) << (row as u32 - 1 + shift),
    }
}

/// Copy of a distribution of latencies or counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Distribution {
    /// Number of values.
    pub count: u64,
    /// Sum of the values; wraps around.
    pub sum: u64,
    /// Largest value.
    pub max: u64,
    /// Buckets that are not empty: the largest value that belongs there, and the number of values.
    ///
    /// In ascending order. A bucket begins where the one before ends, empty ones included.
    pub buckets: Vec<(u64, u64)>,
}

impl Distribution {
    /// Value that the share `q` of the values does not exceed; 0 if there are none.
    ///
    /// At most 1/8 too high; up to 64 ns of latency, at most 8 ns too high. Counts up to 16 are
    /// exact.
    #[must_use]
    pub fn quantile(&self, q: f64) -> u64 {
        // Counts are far below 2^52.
        let rank = ((q * self.count as f64).ceil() as u64).clamp(1, self.count.max(1));
        let mut seen = 0;
        for (upper, count) in &self.buckets {
            seen += count;
            if seen >= rank {
                return (*upper).min(self.max);
            }
        }
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_value_belongs_to_the_bucket_that_ends_at_or_after_it() {
        for shift in [0, 3] {
            let mut before = 0;
            for bucket in 0..SUB + 40 * SUB {
                let upper = upper(bucket, shift);
                assert!(upper > before);
                assert_eq!(index(before + 1, shift), bucket, "the first of bucket {bucket}");
                assert_eq!(index(upper, shift), bucket, "the last of bucket {bucket}");
                before = upper;
            }
        }
        assert_eq!(index(0, 3), 0);
        assert_eq!(upper(SUB + LATENCY_OCTAVES * SUB - 1, 3), 1 << 36);
        assert_eq!(upper(SUB + COUNT_OCTAVES * SUB - 1, 0), 1 << 16);
    }

    #[test]
    fn small_counts_are_exact_and_large_values_end_in_the_open_bucket() {
        let counts = Counts::new();
        (1..=16).for_each(|count| counts.add(count, count - 1));
        (1..=16).for_each(|count| counts.count(count));
        let buckets: Vec<_> = (1..=16).map(|count| (count, count)).collect();
        assert_eq!(counts.snapshot().buckets, buckets);
        let latencies = Latencies::new();
        latencies.add(u64::MAX, 2);
        latencies.add(1 << 40, 1);
        let snapshot = latencies.snapshot();
        assert_eq!((snapshot.buckets.as_slice(), snapshot.count), ([(u64::MAX, 3)].as_slice(), 3));
        assert_eq!(Distribution::default().quantile(0.5), 0);
    }

    proptest! {
        #[test]
        fn a_quantile_is_at_most_an_eighth_too_high(
            mut values in prop::collection::vec((0..37_u32).prop_flat_map(|bits| 0..=1_u64 << bits), 1..300),
            q in 0.0..=1.0_f64,
        ) {
            let latencies = Latencies::new();
            values.iter().for_each(|value| latencies.add(*value, 1));
            values.sort_unstable();
            let snapshot = latencies.snapshot();
            prop_assert_eq!(snapshot.count, values.len() as u64);
            prop_assert_eq!(snapshot.sum, values.iter().sum::<u64>());
            prop_assert_eq!(Some(&snapshot.max), values.last());
            let rank = ((q * values.len() as f64).ceil() as usize).max(1);
            let (exact, told) = (values[rank - 1], snapshot.quantile(q));
            prop_assert!(told >= exact, "{told} for {exact}");
            prop_assert!(told - exact <= (exact / 8).max(8), "{told} for {exact}");
        }

        #[test]
        fn a_value_added_many_times_is_as_many_values(value in any::<u32>(), times in 1..50_u64) {
            let (once, each) = (Latencies::new(), Latencies::new());
            once.add(value.into(), times);
            (0..times).for_each(|_| each.add(value.into(), 1));
            prop_assert_eq!(once.snapshot(), each.snapshot());
        }

        #[test]
        fn a_count_is_a_value_added_once(values in prop::collection::vec(0..100_u64, 1..20)) {
            let (counted, added) = (Counts::new(), Counts::new());
            values.iter().for_each(|value| counted.count(*value));
            values.iter().for_each(|value| added.add(*value, 1));
            prop_assert_eq!(counted.snapshot(), added.snapshot());
        }
    }
}
