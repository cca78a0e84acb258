//! One queue, as its device knows it.
use crate::lent_queue::LentQueue;
use crate::status::{KickPath, QueueStatus};
use paravane_io::{QueueWork, RestingQueue};
use paravane_notify::{HostNotifier, NotifierState};
use paravane_spec::queue::QueueAddresses;
use std::sync::Arc;

/// Who serves a queue.
#[derive(Default)]
pub(crate) enum Serving {
    /// Nobody: it was never started, or was stopped.
    #[default]
    Stopped,
    /// I/O thread of this index.
    ///
    /// The thread gives up a queue that fails, which is noticed when the queue is wanted back.
    Thread(usize),
    /// The exits of its kicks.
    Inline,
    /// A back end that it is lent to.
    Lent(Box<LentQueue>),
    /// Nobody, while the device is suspended.
    Resting(Box<RestingQueue>),
    /// Nobody any more, until the driver resets it.
    Lost,
}

/// What a queue was started with.
#[derive(Clone, Copy)]
pub(crate) struct Started {
    pub(crate) features: u64,
    pub(crate) addresses: QueueAddresses,
}

/// One queue.
#[derive(Default)]
pub(crate) struct Queue {
    pub(crate) serving: Serving,
    /// Index of the I/O thread that has the queue, or had it last.
    pub(crate) thread: usize,
    /// Changes of thread.
    pub(crate) moves: u64,
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
    pub(crate) fn is_live(&self) -> bool {
        !matches!(self.serving, Serving::Stopped)
    }

    /// Kicks arrive at `notifier` from now on.
    pub(crate) fn set_notifier(&mut self, notifier: Option<Arc<HostNotifier>>) {
        let earlier = std::mem::replace(&mut self.notifier, notifier);
        self.exit_kicks += earlier.map_or(0, |earlier| earlier.exit_kicks());
    }

    /// Takes the notifier back, and removes its ioeventfd.
    pub(crate) fn release_notifier(&self) {
        let Some(notifier) = &self.notifier else { return };
        while notifier.state() == NotifierState::OffLimits && notifier.release().is_ok() {}
        if notifier.state() == NotifierState::Assigned
            && let Err(error) = notifier.deassign()
        {
            tracing::error!("cannot remove an ioeventfd: {error}");
        }
    }

    /// For reports; `None`: it was never started.
    pub(crate) fn status(&self, queue: u16) -> Option<QueueStatus> {
        self.started?;
        Some(QueueStatus {
            queue,
            live: self.is_live(),
            thread: self.thread,
            moves: self.moves,
            kicks_by: self.kicks_by,
            exit_kicks: self.exit_kicks + self.notifier.as_ref().map_or(0, |notifier| notifier.exit_kicks()),
            work: self.work.total(),
        })
    }
}
