//! Buckets of latencies in a [`paravane_spec::builtin::DiskReport`]'s histogram.
use paravane_spec::builtin::{HIST_BUCKETS, HIST_SUB_BITS};

/// Values from here on share the last bucket.
const END: u64 = 1 << 40;

/// The bucket of a latency in nanoseconds.
#[must_use]
pub fn bucket(nanoseconds: u64) -> usize {
    let sub = 1u64 << HIST_SUB_BITS;
    if nanoseconds < sub {
        return nanoseconds as usize;
    }
    if nanoseconds >= END {
        return HIST_BUCKETS - 1;
    }
    let octave = nanoseconds.ilog2();
    // The leading bit and the HIST_SUB_BITS bits below it; the leading one is taken off again.
    let inside = (nanoseconds >> (octave - HIST_SUB_BITS)) - sub;
    ((u64::from(octave - HIST_SUB_BITS) + 1) * sub + inside) as usize
}

/// The lowest latency, in nanoseconds, that falls into a bucket.
#[must_use]
pub fn lowest(bucket: usize) -> u64 {
    let sub = 1u64 << HIST_SUB_BITS;
    let bucket = bucket.min(HIST_BUCKETS - 1) as u64;
    if bucket < sub {
        return bucket;
    }
    let octave = bucket / sub - 1;
    (sub + bucket % sub) << octave
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_follow_the_contract() {
        for value in [32u64, 33, 63, 64, 65, 1000, 123_456, 7_654_321, (1 << 40) - 1] {
            let e = value.ilog2();
            let expected = u64::from(e - 4) * 32 + (value >> (e - 5)) - 32;
            assert_eq!(bucket(value) as u64, expected, "{value}");
        }
        for value in 0..32 {
            assert_eq!(bucket(value), value as usize);
        }
    }

    #[test]
    fn every_bucket_begins_where_the_one_below_ends() {
        for number in 0..HIST_BUCKETS {
            assert_eq!(bucket(lowest(number)), number);
            if number > 0 {
                assert_eq!(bucket(lowest(number) - 1), number - 1);
            }
        }
    }

    #[test]
    fn very_long_latencies_share_the_last_bucket() {
        for value in [(1 << 40) - 1, 1 << 40, u64::MAX] {
            assert_eq!(bucket(value), HIST_BUCKETS - 1);
        }
    }
}
