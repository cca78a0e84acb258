//! The policy of balancing queues over I/O threads. It moves nothing.
//!
//! Work is the number of chains taken and completed in the last period. The queue to move is the
//! one that best evens out the busiest and the idlest thread, if that is worth a move. One a period
//! moves, so that the next decision sees its effect.
use paravane_io::QueueKey;

/// Share of its work that a move must take off the busiest thread (1/8).
///
/// With less, noise would undo the move.
const WORTH: u64 = 8;

/// Work of one queue, and its thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Load {
    pub(crate) key: QueueKey,
    /// Index of its thread.
    pub(crate) thread: usize,
    /// Chains taken and chains completed.
    pub(crate) work: u64,
}

/// The queue to move, and the thread to move it to; `None`: nothing is to move.
pub(crate) fn advise(threads: usize, loads: &[Load]) -> Option<(QueueKey, usize)> {
    let sum = |thread| loads.iter().filter(|load| load.thread == thread).map(|load| load.work).sum::<u64>();
    let sums: Vec<u64> = (0..threads).map(sum).collect();
    let busiest = (0..threads).max_by_key(|&thread| sums[thread])?;
    let idlest = (0..threads).min_by_key(|&thread| sums[thread])?;
    let (most, least) = (sums[busiest], sums[idlest]);
    // What the busier of the two would have after the move.
    let after = |load: &Load| (most - load.work).max(least + load.work);
    let candidates = loads.iter().filter(|load| load.thread == busiest && load.work > 0);
    let best = candidates.min_by_key(|load| after(load))?;
    (after(best) < most - most / WORTH).then_some((best.key, idlest))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Loads of queues 0, 1, 2 ... of one device, on these threads.
    fn loads(of: &[(usize, u64)]) -> Vec<Load> {
        let load = |(queue, &(thread, work))| Load { key: QueueKey { device: 0, queue }, thread, work };
        (0..).zip(of).map(load).collect()
    }

    fn advice(threads: usize, of: &[(usize, u64)]) -> Option<(u16, usize)> {
        advise(threads, &loads(of)).map(|(key, thread)| (key.queue, thread))
    }

    #[test]
    fn the_queue_that_evens_most_goes_to_the_idlest() {
        assert_eq!(advice(2, &[(0, 50), (0, 30), (0, 20)]), Some((0, 1)));
        assert_eq!(advice(2, &[(0, 90), (0, 30), (1, 10)]), Some((1, 1)));
        assert_eq!(advice(3, &[(2, 40), (2, 40), (0, 10), (1, 5)]), Some((0, 1)));
    }

    #[test]
    fn what_would_not_help_or_hardly_is_left_alone() {
        assert_eq!(advice(2, &[]), None);
        assert_eq!(advice(0, &[]), None);
        assert_eq!(advice(2, &[(0, 0), (0, 0)]), None);
        assert_eq!(advice(1, &[(0, 50), (0, 50)]), None);
        assert_eq!(advice(2, &[(0, 100)]), None, "it would only be elsewhere");
        assert_eq!(advice(2, &[(0, 50), (0, 50), (1, 95)]), None);
        assert_eq!(advice(2, &[(0, 100), (0, 10), (1, 90)]), None, "a tenth is noise");
    }

    #[test]
    fn it_comes_to_rest() {
        let mut state = 7_u64;
        for _ in 0..2000 {
            let mut next = |most: u64| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 33) % most
            };
            let (threads, queues) = (1 + next(4) as usize, 1 + next(12));
            let mut all: Vec<_> = (0..queues).map(|_| (next(threads as u64) as usize, next(1000))).collect();
            let mut moves = 0;
            while let Some((queue, to)) = advice(threads, &all) {
                all[usize::from(queue)].0 = to;
                moves += 1;
                assert!(moves < 100, "{threads} threads, {all:?}");
            }
        }
    }
}
