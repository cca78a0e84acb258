//! One queue, as its device knows it beside the set that serves it.
use crate::status::{KickPath, QueueStatus};
use paravane_io::{QueueSet, QueueWork};
use paravane_notify::HostNotifier;
use paravane_spec::queue::QueueAddresses;
use std::sync::Arc;

/// What a queue was started with.
#[derive(Clone, Copy)]
pub(crate) struct Started {
    pub(crate) features: u64,
    pub(crate) addresses: QueueAddresses,
}

/// One queue.
#[derive(Default)]
pub(crate) struct Queue {
    /// Work since the first start.
    pub(crate) work: Arc<QueueWork>,
    /// How kicks arrive, since the last start.
    pub(crate) kicks_by: KickPath,
    /// Where kicks arrive, since the last start.
    pub(crate) notifier: Option<Arc<HostNotifier>>,
    /// Kicks that came as exits to earlier notifiers.
    pub(crate) exit_kicks: u64,
    /// The last start.
    pub(crate) started: Option<Started>,
}

impl Queue {
    /// Kicks arrive at `notifier` from now on.
    pub(crate) fn set_notifier(&mut self, notifier: Arc<HostNotifier>) {
        let earlier = self.notifier.replace(notifier);
        self.exit_kicks += earlier.map_or(0, |earlier| earlier.exit_kicks());
    }

    /// For reports; `None`: it was never started.
    pub(crate) fn status(&self, queue: u16, set: &QueueSet) -> Option<QueueStatus> {
        self.started?;
        let place = set.place(queue);
        Some(QueueStatus {
            queue,
            live: set.is_live(queue),
            thread: place.thread,
            moves: place.moves,
            kicks_by: self.kicks_by,
            exit_kicks: self.exit_kicks + self.notifier.as_ref().map_or(0, |notifier| notifier.exit_kicks()),
            work: self.work.total(),
        })
    }
}
