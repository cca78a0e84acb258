//! Notices a guest whose rings are in memory that its VMM does not share.
//!
//! A memfd that the VMM maps privately (QEMU: `share=off`) can be mapped here, and stays as it was:
//! kicks come, and the rings stay empty. A guest that works has something available when it kicks.
use crate::status::ExportStatus;
use std::time::{Duration, Instant};

/// Time from the start of the first queue to the look at all.
const DELAY: Duration = Duration::from_secs(3);
/// Kicks of a queue after which its driver has made something available.
///
/// QEMU kicks each queue of a disk once when it starts.
const KICKS: u64 = 2;

/// Progress of one session.
#[derive(Debug)]
pub(super) enum Unseen {
    /// No queue has started. Kicks and chains of each queue before this session.
    Waits(Vec<(u64, u64)>),
    /// Looks at this time.
    Due(Instant, Vec<(u64, u64)>),
    Done,
}

impl Unseen {
    pub(super) fn new(status: &ExportStatus) -> Self {
        Self::Waits(status.queues.iter().map(|queue| (queue.kicks, queue.taken)).collect())
    }

    /// Time until the look, if it is due later.
    pub(super) fn next(&self) -> Option<Duration> {
        match self {
            Self::Due(due, _) => Some(due.saturating_duration_since(Instant::now())),
            Self::Waits(_) | Self::Done => None,
        }
    }

    /// Looks if that is due. Returns what is wrong, once.
    ///
    /// `fills`: whether the driver kicks a queue only for what is served at once.
    pub(super) fn look(
        &mut self,
        status: impl FnOnce() -> ExportStatus,
        fills: impl Fn(u16) -> bool,
    ) -> Option<String> {
        match self {
            Self::Waits(before) => {
                if status().queues.iter().any(|queue| queue.live) {
                    *self = Self::Due(Instant::now() + DELAY, std::mem::take(before));
                }
                None
            }
            Self::Due(due, before) if *due <= Instant::now() => {
                let found = find(&status(), before, fills);
                *self = Self::Done;
                found
            }
            Self::Due(..) | Self::Done => None,
        }
    }
}

fn find(status: &ExportStatus, before: &[(u64, u64)], fills: impl Fn(u16) -> bool) -> Option<String> {
    let mut queues = (0..).zip(status.queues.iter().zip(before)).filter(|(index, _)| fills(*index));
    let (index, kicks) = queues.find_map(|(index, (queue, (kicks, taken)))| {
        let kicks = queue.kicks.saturating_sub(*kicks);
        (queue.live && queue.taken == *taken && kicks >= KICKS).then_some((index, kicks))
    })?;
    Some(format!(
        "queue {index}: {kicks} kicks, and its ring stays empty: the guest writes to memory that the client does not \
         share (QEMU: share=on for each memory backend, also for a memfd)"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::QueueStatus;

    fn status(queues: &[(bool, u64, u64)]) -> ExportStatus {
        let queue = |&(live, kicks, taken): &_| QueueStatus { live, kicks, taken, ..QueueStatus::default() };
        ExportStatus { queues: queues.iter().map(queue).collect(), ..ExportStatus::default() }
    }

    #[test]
    fn only_a_live_queue_that_is_kicked_and_stays_empty_is_named() {
        let before = [(5, 5), (5, 5)];
        let named = |queues: &[_]| find(&status(queues), &before, |_| true).is_some();
        assert!(named(&[(true, 5, 5), (true, 7, 5)]));
        for others in
            [[(true, 5, 5), (true, 6, 5)], [(true, 7, 6), (true, 9, 8)], [(true, 5, 5), (false, 9, 5)]]
        {
            assert!(!named(&others), "{others:?}");
        }
        assert!(find(&status(&[(true, 9, 5), (true, 5, 5)]), &before, |index| index > 0).is_none());
    }
}
