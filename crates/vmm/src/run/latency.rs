//! Percentiles from a guest's histogram.
use paravane_spec::builtin::{HIST_BUCKETS, HIST_SUB_BITS};

/// The middle of a bucket in nanoseconds.
fn middle(bucket: usize) -> u64 {
    let sub = 1_u64 << HIST_SUB_BITS;
    let bucket = bucket as u64;
    if bucket < sub {
        return bucket;
    }
    // Bucket numbers above grow by `sub` an octave: octave e starts at (e - 4) * 32, see the
    // contract.
    let octave = bucket / sub + u64::from(HIST_SUB_BITS) - 1;
    let width = 1 << (octave - u64::from(HIST_SUB_BITS));
    (sub + bucket % sub) * width + width / 2
}

/// The given percentiles in microseconds; zeros if nothing was counted.
pub(crate) fn percentiles<const N: usize>(buckets: &[u32; HIST_BUCKETS], wanted: [f64; N]) -> [f64; N] {
    let total: u64 = buckets.iter().map(|&count| u64::from(count)).sum();
    wanted.map(|percent| {
        let rank = (total as f64 * percent / 100.0).ceil().max(1.0) as u64;
        let mut below = 0;
        let reaches = |count: &u32| {
            below += u64::from(*count);
            below >= rank
        };
        buckets.iter().position(reaches).map_or(0.0, |bucket| middle(bucket).max(1) as f64 / 1000.0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use paravane_guest::histogram;

    #[test]
    fn the_middle_of_a_bucket_lies_in_it() {
        for bucket in 0..HIST_BUCKETS {
            assert_eq!(histogram::bucket(middle(bucket)), bucket);
        }
    }

    #[test]
    fn percentiles_of_known_values() {
        let mut buckets = [0; HIST_BUCKETS];
        assert_eq!(percentiles(&buckets, [50.0]), [0.0]);
        for micros in 1..=1000_u64 {
            buckets[histogram::bucket(micros * 1000)] += 1;
        }
        let [p50, p99, all] = percentiles(&buckets, [50.0, 99.0, 100.0]);
        assert!((480.0..=520.0).contains(&p50), "{p50}");
        assert!((960.0..=1020.0).contains(&p99), "{p99}");
        assert!((980.0..=1030.0).contains(&all), "{all}");
    }

    #[test]
    fn full_counters_are_no_overflow() {
        let buckets = [u32::MAX; HIST_BUCKETS];
        assert!(percentiles(&buckets, [99.9])[0] > 0.0);
    }
}
