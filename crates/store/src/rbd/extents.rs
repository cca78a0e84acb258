//! Which parts of an image hold data: what librbd reports as a difference to an empty image.
//!
//! Ranges are asked for by whole periods of objects: librbd of Ceph 16 reports wrong offsets for a
//! range that begins within an object.
use super::discard::Stripes;
use crate::StoreExtent;
use std::ops::Range;

/// Bytes that are asked for at once, before they are rounded to whole periods.
const AT_ONCE: u64 = 1 << 30;

/// The range to ask for, so that it covers the byte at `offset`. `None`: the image has no known period.
///
/// `end` is the end of what is wanted, `size` that of the image.
pub(super) fn window(offset: u64, end: u64, size: u64, stripes: Stripes) -> Option<Range<u64>> {
    let period = stripes.object.checked_mul(stripes.count).filter(|period| (1..=AT_ONCE).contains(period))?;
    let start = offset / period * period;
    let most = offset.checked_add(AT_ONCE)?.min(end);
    Some(start..most.checked_next_multiple_of(period)?.min(size))
}

/// The list of a range, from the parts of it that exist, as librbd has reported them.
pub(super) fn listed(wanted: Range<u64>, mut parts: Vec<Range<u64>>) -> Vec<StoreExtent> {
    parts.sort_unstable_by_key(|part| part.start);
    let mut found: Vec<StoreExtent> = Vec::new();
    let mut at = wanted.start;
    for part in parts {
        let (start, end) = (part.start.max(at), part.end.min(wanted.end));
        if start >= end {
            continue;
        }
        if start > at {
            found.push(StoreExtent::hole(at, start - at));
        }
        match found.last_mut() {
            Some(last) if !last.hole => last.len += end - start,
            _ => found.push(StoreExtent::data(start, end - start)),
        }
        at = end;
    }
    if at < wanted.end {
        found.push(StoreExtent::hole(at, wanted.end - at));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn whole_periods_are_asked_for() {
        let plain = Stripes { object: 4 * MIB, unit: 4 * MIB, count: 1 };
        assert_eq!(window(5 * MIB, 6 * MIB, 100 * MIB, plain), Some(4 * MIB..8 * MIB));
        assert_eq!(window(0, 100 * MIB, 99 * MIB, plain), Some(0..99 * MIB), "the image ends before");
        assert_eq!(window(MIB, 1 << 40, 1 << 40, plain), Some(0..AT_ONCE + 4 * MIB));
        let striped = Stripes { object: 4 * MIB, unit: 65536, count: 5 };
        assert_eq!(window(21 * MIB, 22 * MIB, 100 * MIB, striped), Some(20 * MIB..40 * MIB));
        for odd in [
            Stripes { object: 0, ..plain },
            Stripes { count: 0, ..plain },
            Stripes { count: u64::MAX, ..plain },
            Stripes { object: 2 * AT_ONCE, ..plain },
        ] {
            assert_eq!(window(0, MIB, MIB, odd), None);
        }
        assert_eq!(window(u64::MAX, u64::MAX, u64::MAX, plain), None);
    }

    #[test]
    fn what_is_not_reported_is_a_hole() {
        assert_eq!(listed(10..20, vec![]), [StoreExtent::hole(10, 10)]);
        assert_eq!(listed(10..20, vec![0..12, 12..30]), [StoreExtent::data(10, 10)]);
        // Out of order, twice, side by side, beyond the range.
        let parts = vec![16..18, 5..12, 11..12, 12..13, 19..40, 40..50];
        assert_eq!(
            listed(10..20, parts),
            [
                StoreExtent::data(10, 3),
                StoreExtent::hole(13, 3),
                StoreExtent::data(16, 2),
                StoreExtent::hole(18, 1),
                StoreExtent::data(19, 1),
            ]
        );
        #[expect(clippy::reversed_empty_ranges, reason = "what a library could report")]
        let odd = vec![15..12, 12..12];
        assert_eq!(listed(10..20, odd), [StoreExtent::hole(10, 10)]);
    }
}
