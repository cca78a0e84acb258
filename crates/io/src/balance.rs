//! Which queue to move to another thread.
//!
//! A queue moves from the busiest thread to the idlest one if that makes the busiest one less busy
//! by enough. A thread with one busy queue keeps it: a move would change nothing.
use crate::QueueKey;

/// Busy share of a thread below which nothing is moved from it, in percent.
const BUSY: u64 = 40;
/// Least gain of a move, in percent.
const GAIN: u64 = 10;

/// A queue, its thread, and how busy it kept that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// The queue.
    pub key: QueueKey,
    /// Index of its thread.
    pub thread: usize,
    /// Percent of the time.
    pub busy: u64,
    /// It was moved a short time ago, and stays.
    pub stays: bool,
}

/// A move of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// The queue.
    pub key: QueueKey,
    /// Index of its thread.
    pub from: usize,
    /// Index of the thread to move it to.
    pub to: usize,
}

/// The best move between `threads` threads, if one is worth it.
#[must_use]
pub fn best_move(threads: usize, loads: &[Load]) -> Option<Move> {
    let mut busy = vec![0; threads];
    for load in loads {
        *busy.get_mut(load.thread)? += load.busy;
    }
    let from = (0..threads).max_by_key(|&thread| busy[thread])?;
    let to = (0..threads).min_by_key(|&thread| busy[thread])?;
    let gap = busy[from] - busy[to];
    if busy[from] < BUSY {
        return None;
    }
    // After the move the busier of the two has `max(busy[from] - load, busy[to] + load)`.
    let gain = |load: &Load| load.busy.min(gap.saturating_sub(load.busy));
    let movable = loads.iter().filter(|load| load.thread == from && !load.stays);
    let best = movable.max_by_key(|load| gain(load))?;
    (gain(best) >= GAIN).then_some(Move { key: best.key, from, to })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loads(loads: &[(usize, u64)]) -> Vec<Load> {
        let load = |(device, &(thread, busy))| Load {
            key: QueueKey { device, queue: 0 },
            thread,
            busy,
            stays: false,
        };
        loads.iter().enumerate().map(load).collect()
    }

    fn moved(threads: usize, of: &[(usize, u64)]) -> Option<(usize, usize, usize)> {
        best_move(threads, &loads(of)).map(|Move { key, from, to }| (key.device, from, to))
    }

    #[test]
    fn the_busiest_thread_gives_what_evens_the_loads() {
        assert_eq!(moved(2, &[(0, 50), (0, 50)]), Some((1, 0, 1)));
        assert_eq!(moved(3, &[(0, 10), (1, 30), (1, 60), (2, 20)]), Some((1, 1, 0)));
        assert_eq!(moved(2, &[(0, 70), (0, 20), (1, 10)]), Some((1, 0, 1)));
    }

    #[test]
    fn nothing_moves_without_gain() {
        // One queue alone; idle threads; the same elsewhere; too little; even.
        for of in [
            &[(0, 100)][..],
            &[(0, 15), (0, 15)],
            &[(0, 95), (0, 1)],
            &[(0, 30), (0, 30), (1, 55)],
            &[(0, 50), (1, 50)],
        ] {
            assert_eq!(moved(2, of), None, "{of:?}");
        }
        assert_eq!((moved(1, &[(0, 50), (0, 50)]), moved(2, &[])), (None, None));
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
            while let Some((queue, _, to)) = moved(threads, &all) {
                all[queue].0 = to;
                moves += 1;
                assert!(moves < 100, "{threads} threads, {all:?}");
            }
        }
    }

    #[test]
    fn what_was_moved_stays_for_a_while() {
        let mut of = loads(&[(0, 50), (0, 40)]);
        (of[0].stays, of[1].stays) = (true, true);
        assert_eq!(best_move(2, &of), None);
        of[1].stays = false;
        assert_eq!(best_move(2, &of).map(|found| found.key.device), Some(1));
    }
}
