//! Moves queues from busy I/O threads to idle ones while the machine runs.
//!
//! `paravane_io` decides, as for a daemon's threads. Work is the number of chains that a queue took and
//! completed since the last step; the busiest thread counts as fully busy.
use paravane_attach::AttachedDevice;
use paravane_io::{Load, Move, MoveError, QueueKey, best_move};
use std::collections::HashMap;

/// Work of each queue at the last step.
#[derive(Debug, Default)]
pub(crate) struct Rebalancer(HashMap<QueueKey, u64>);

impl Rebalancer {
    /// Moves one queue, if the work done since the last step makes it worth it.
    ///
    /// The next step sees the effect of the move.
    pub(crate) fn step(&mut self, devices: &[AttachedDevice], threads: usize) {
        let mut loads = self.loads(devices);
        let work = |thread| loads.iter().filter(|load| load.thread == thread).map(|load| load.busy).sum();
        let most = (0..threads).map(work).max().unwrap_or(0).max(1);
        loads.iter_mut().for_each(|load| load.busy = load.busy * 100 / most);
        let Some(Move { key, to, .. }) = best_move(threads, &loads) else { return };
        let Some(device) = devices.get(key.device) else { return };
        match device.move_queue(key.queue, to) {
            Ok(()) => tracing::debug!(device = key.device, queue = key.queue, to, "queue moved"),
            // It was stopped meanwhile.
            Err(MoveError::NotLive { .. }) => {}
            Err(error) => tracing::warn!(device = key.device, queue = key.queue, "queue not moved: {error}"),
        }
    }

    /// Chains of each live queue since the last step.
    fn loads(&mut self, devices: &[AttachedDevice]) -> Vec<Load> {
        let mut loads = Vec::new();
        for device in devices {
            for queue in device.queues().iter().filter(|queue| queue.live) {
                let key = QueueKey { device: device.number(), queue: queue.queue };
                let before = self.0.insert(key, queue.work).unwrap_or(queue.work);
                let busy = queue.work.saturating_sub(before);
                loads.push(Load { key, thread: queue.thread, busy, stays: false });
            }
        }
        loads
    }
}
