//! Clusters that transfers in flight use, for whoever is to free clusters.
//!
//! ```text
//!   a queue:   tables shared -> find on the map -> enter -> (engine) -> outcome -> leave
//!   a worker:  tables alone  -> forget on the map -> split: free what nobody uses, keep the rest
//! ```
//! A transfer that an engine does while its queue goes on cannot keep the tables locked. So the queue
//! enters its clusters here. Whoever frees clusters has the tables alone and takes them off the map
//! first: no transfer finds them any more, and those that have are listed. What they use stays
//! allocated. The worker does not wait for them: the thread that would take their outcomes may itself
//! wait for the worker, at the end of another queue.
use paravane_store::lock;
use std::ops::Range;
use std::sync::{Arc, Mutex, Weak};

/// Locks, ignoring poison: each list is valid after any panic.
/// Ranges of the disk that the queues of an image use.
#[derive(Debug, Default)]
pub(super) struct InUse(Mutex<Vec<Weak<QueueRanges>>>);

/// Ranges of the disk that one queue uses, by head. A range that is empty is not in use.
///
/// As long as the greatest head so far needs.
#[derive(Debug, Default)]
pub(crate) struct QueueRanges(Mutex<Vec<Range<u64>>>);

/// A part of a range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) range: Range<u64>,
    /// A transfer in flight uses clusters of it.
    pub(super) is_used: bool,
}

impl InUse {
    /// The list of a new queue. It counts for as long as the queue has it.
    pub(super) fn queue(&self) -> Arc<QueueRanges> {
        let queue = Arc::new(QueueRanges::default());
        let mut queues = lock(&self.0);
        queues.retain(|queue| queue.strong_count() > 0);
        queues.push(Arc::downgrade(&queue));
        queue
    }

    /// Splits a range by what is in use, in whole clusters of `cluster` bytes.
    ///
    /// The tables are locked exclusively, and the range is not on the map.
    pub(super) fn split(&self, range: Range<u64>, cluster: u64) -> Vec<Part> {
        let mut used = Vec::new();
        for queue in lock(&self.0).iter().filter_map(Weak::upgrade) {
            let ranges = lock(&queue.0);
            used.extend(ranges.iter().filter(|used| !used.is_empty()).filter_map(|used| {
                let start = (used.start / cluster * cluster).max(range.start);
                let end = used.end.checked_next_multiple_of(cluster).unwrap_or(u64::MAX).min(range.end);
                (start < end).then_some(start..end)
            }));
        }
        used.sort_unstable_by_key(|used| used.start);
        let (mut parts, mut at) = (Vec::new(), range.start);
        let mut add = |range: Range<u64>, is_used| {
            if !range.is_empty() {
                parts.push(Part { range, is_used });
            }
        };
        for used in used {
            add(at..used.start.max(at), false);
            add(used.start.max(at)..used.end.max(at), true);
            at = at.max(used.end);
        }
        add(at..range.end, false);
        parts
    }
}

impl QueueRanges {
    /// The transfer with this head uses a range, which is on the map. The tables are locked, shared.
    pub(super) fn enter(&self, head: u16, range: Range<u64>) {
        let (mut ranges, head) = (lock(&self.0), usize::from(head));
        if ranges.len() <= head {
            ranges.resize(head + 1, 0..0);
        }
        ranges[head] = range;
    }

    /// The transfer with this head has ended.
    pub(crate) fn leave(&self, head: u16) {
        if let Some(range) = lock(&self.0).get_mut(usize::from(head)) {
            *range = 0..0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(in_use: &InUse, range: Range<u64>) -> Vec<(Range<u64>, bool)> {
        in_use.split(range, 10).into_iter().map(|part| (part.range, part.is_used)).collect()
    }

    #[test]
    fn clusters_in_use_are_told_apart() {
        let in_use = InUse::default();
        assert_eq!(parts(&in_use, 5..100), [(5..100, false)]);
        assert_eq!(parts(&in_use, 5..5), []);
        let (one, two) = (in_use.queue(), in_use.queue());
        one.enter(0, 31..32);
        two.enter(3, 48..52);
        two.enter(0, 51..53);
        let split = [(5..30, false), (30..40, true), (40..60, true), (60..100, false)];
        assert_eq!(parts(&in_use, 5..100), split);
        assert_eq!(parts(&in_use, 35..38), [(35..38, true)]);
        assert_eq!(parts(&in_use, 60..70), [(60..70, false)]);
        one.leave(0);
        drop(two);
        assert_eq!(parts(&in_use, 5..100), [(5..100, false)]);
        one.enter(1, u64::MAX - 1..u64::MAX);
        let last = u64::MAX / 10 * 10;
        assert_eq!(parts(&in_use, 0..u64::MAX), [(0..last, false), (last..u64::MAX, true)]);
    }

    #[test]
    fn ranges_within_others_count_once() {
        let in_use = InUse::default();
        let queue = in_use.queue();
        queue.enter(0, 0..90);
        queue.enter(1, 20..30);
        queue.enter(2, 80..110);
        let used: Vec<_> = parts(&in_use, 0..200);
        assert_eq!(used, [(0..90, true), (90..110, true), (110..200, false)]);
    }
}
