//! Chains that were in flight when a process died.
use super::region::corrupt;
use crate::QueueError;
use crate::batch::Batch;
use crate::state::StateError;
use alloc::collections::VecDeque;

/// Brings back the chains in flight when a process died, in that order.
///
/// As far as `batch` goes. `pop` returns whether a chain fitted in.
pub(super) fn pop_again<T>(
    again: &mut VecDeque<T>,
    batch: &mut Batch,
    mut pop: impl FnMut(&T, &mut Batch) -> Result<bool, QueueError>,
) -> Result<usize, QueueError> {
    batch.clear();
    while let Some(chain) = again.front().filter(|_| batch.count() < batch.slots()) {
        if !pop(chain, batch)? {
            break;
        }
        again.pop_front();
    }
    Ok(batch.count())
}

/// Sorts by counter, and returns the counter to go on with.
pub(super) fn in_order_of_taking<T>(again: &mut [(u64, T)]) -> Result<u64, StateError> {
    again.sort_unstable_by_key(|(counter, _)| *counter);
    if let Some(twice) = again.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        return corrupt("the counter of two chains", twice[0].0);
    }
    match again.last() {
        None => Ok(0),
        Some((u64::MAX, _)) => corrupt("a counter", u64::MAX),
        Some((newest, _)) => Ok(newest + 1),
    }
}
