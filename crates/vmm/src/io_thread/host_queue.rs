//! The host's side of one live queue: all that serving it takes, wherever that is done.
//!
//! ```text
//!   new --assign--> nobody's --put_on--> an I/O thread's
//!                    |  ^   <-take_off--
//!                    |  '--- park: another owner's (a vhost back end's), until it is resumed as a new one
//!                    stop: ioeventfd off, notifier tested and served once more (unless the device is being reset),
//!                    what is in flight drained, handler and mappings dropped
//! ```
//! Whoever has the value is the queue's one owner. While it is nobody's, kicks wait in its notifier and completions in
//! its handler's descriptor; who gets it looks at the ring once, for [`IoThread::put_on`] signals.
//!
//! [`IoThread::put_on`]: super::IoThread::put_on
use crate::guard::lock;
use crate::tally::Tally;
use paravane_device::{LiveQueue, ParkedQueue, QueueHandler, ServeError, StateError};
use paravane_notify::{HostNotifier, Interrupts, NotifierState, NotifyError};
use paravane_transport::Transport;
use rustix::event::epoll;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Serves of one queue in a row, before the others get their turn.
const BUDGET: usize = 16;
/// How a handler's own descriptor is waited for: each time that it becomes readable, not for as long as it is. A network
/// card that has no buffers must be able to sleep while frames wait.
const NEWS: epoll::EventFlags = epoll::EventFlags::IN.union(epoll::EventFlags::ET);

/// How a queue's turn ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// There is more to do, and others have their turn first.
    More,
    /// There was nothing left; whether there had been anything.
    Dry { worked: bool },
}

/// Names a queue in a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QueueKey {
    /// Device number.
    pub(crate) device: usize,
    /// Queue index.
    pub(crate) queue: u16,
}

/// A live queue and what serves it.
pub(crate) struct HostQueue {
    /// Whose it is.
    pub(crate) key: QueueKey,
    live: LiveQueue,
    handler: Box<dyn QueueHandler>,
    notifier: Arc<HostNotifier>,
    /// The device's interrupts, which know how the driver wants this queue's.
    interrupts: Arc<Interrupts>,
    /// The transport, which is told when the queue fails.
    transport: Arc<Mutex<Box<dyn Transport>>>,
    /// Signals in the notifier that are our own, not kicks.
    own_signals: u64,
    /// Chains taken and chains completed, by all that served this queue.
    work: Arc<AtomicU64>,
}

impl HostQueue {
    /// With the ring and its memory, the device's part, and where kicks arrive, none of which has been used yet.
    pub(crate) fn new(
        key: QueueKey,
        live: LiveQueue,
        handler: Box<dyn QueueHandler>,
        notifier: Arc<HostNotifier>,
        interrupts: Arc<Interrupts>,
        transport: Arc<Mutex<Box<dyn Transport>>>,
        work: Arc<AtomicU64>,
    ) -> Self {
        // It is born signalled.
        Self { key, live, handler, notifier, interrupts, transport, own_signals: 1, work }
    }

    /// Asks for an ioeventfd.
    ///
    /// # Errors
    /// The host refuses, and kicks exit.
    pub(crate) fn assign(&mut self) -> Result<(), NotifyError> {
        // It signals whatever comes of it.
        self.own_signals += 1;
        self.notifier.assign()
    }

    /// Events of this queue wake whoever waits on `poll`: `kicks` and `news` say which. Signals once.
    pub(super) fn listen(&mut self, poll: &OwnedFd, kicks: u64, news: u64) -> std::io::Result<()> {
        let notifier = self.notifier.notifier();
        epoll::add(poll, notifier, epoll::EventData::new_u64(kicks), epoll::EventFlags::IN)?;
        if let Some(fd) = self.handler.completion_fd()
            && let Err(error) = epoll::add(poll, fd, epoll::EventData::new_u64(news), NEWS)
        {
            epoll::delete(poll, notifier)?;
            return Err(error.into());
        }
        self.own_signals += 1;
        notifier.signal();
        Ok(())
    }

    /// The opposite of [`HostQueue::listen`]. What comes from now on stays where it arrives.
    pub(super) fn ignore(&self, poll: &OwnedFd) {
        let fds = [Some(self.notifier.notifier().as_fd()), self.handler.completion_fd()];
        for fd in fds.into_iter().flatten() {
            if let Err(error) = epoll::delete(poll, fd) {
                tracing::error!("cannot take an event handler off: {error}");
            }
        }
    }

    /// Takes the signals that have come, and counts those that are kicks; whether there were any.
    pub(super) fn take_kicks(&mut self, tally: &Tally) -> bool {
        let signals = self.notifier.notifier().take();
        let own = signals.min(self.own_signals);
        self.own_signals -= own;
        tally.kicked(signals - own);
        signals > 0
    }

    /// Serves until nothing is left or the budget is used up. With `arm`, when nothing is left, the next work wakes whoever
    /// listens, and it is looked once more; without, whoever has the queue goes on looking by [`HostQueue::has_work`].
    pub(super) fn serve(&mut self, arm: bool) -> Result<Turn, ServeError> {
        let mut work = 0;
        let turn = self.serve_counted(arm, &mut work);
        // Relaxed: a statistic, and written once a turn.
        self.work.fetch_add(work, Ordering::Relaxed);
        Ok(if turn? { Turn::More } else { Turn::Dry { worked: work > 0 } })
    }

    /// As [`HostQueue::serve`]; whether there is more.
    fn serve_counted(&mut self, arm: bool, work: &mut u64) -> Result<bool, ServeError> {
        let Self { key, live, handler, interrupts, .. } = self;
        live.disable_kicks();
        for _ in 0..BUDGET {
            let served = handler.serve(live)?;
            if served.interrupt {
                interrupts.used_buffer(key.queue);
            }
            let now = u64::from(served.taken) + u64::from(served.completed);
            *work += now;
            if now == 0 && !(arm && wake_ups(live, &mut **handler)?) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Asks for wake-ups by the next work. `true`: there is some already.
    pub(super) fn arm(&mut self) -> Result<bool, ServeError> {
        wake_ups(&mut self.live, &mut *self.handler)
    }

    /// Whether work can be found by looking, after a [`HostQueue::serve`] that ran dry.
    pub(super) fn can_poll(&mut self) -> bool {
        self.handler.wants_kicks() || self.handler.has_news().is_some()
    }

    /// Whether there seems to be work, after a [`HostQueue::serve`] that ran dry. No system call, and nothing is asked for.
    pub(super) fn has_work(&mut self) -> bool {
        (self.handler.wants_kicks() && self.live.has_available()) || self.handler.has_news() == Some(true)
    }

    /// Kicks exit again, if they did not.
    fn deassign(&self) {
        if self.notifier.state() == NotifierState::Assigned
            && let Err(error) = self.notifier.deassign()
        {
            tracing::error!("cannot remove an ioeventfd: {error}");
        }
    }

    /// Whether [`HostQueue::park`] would lose nothing.
    pub(crate) fn at_rest(&self) -> bool {
        self.handler.at_rest()
    }

    /// Ends our serving and nothing else: what is in flight is completed, the ioeventfd stays, and kicks wait. The
    /// handler keeps what it has of the host, and can go on with a queue that is resumed.
    ///
    /// # Errors
    /// The queue has latched, or its handler keeps something in flight.
    pub(crate) fn park(mut self) -> Result<(ParkedQueue, Box<dyn QueueHandler>), StateError> {
        if self.handler.drain(&mut self.live, true).interrupt {
            self.interrupts.used_buffer(self.key.queue);
        }
        Ok((self.live.park()?, self.handler))
    }

    /// It has failed, and is out of order until its driver resets it.
    pub(super) fn fail(self, error: &ServeError, tally: &Tally) {
        let (key, transport) = (self.key, Arc::clone(&self.transport));
        tracing::warn!(device = key.device, queue = key.queue, "queue stopped: {error}");
        tally.fault(key.device, error.to_string());
        self.abandon();
        lock(&transport).needs_reset();
    }

    /// It cannot go on: what is in flight is waited for and forgotten.
    pub(crate) fn abandon(mut self) {
        self.deassign();
        self.handler.drain(&mut self.live, false);
    }

    /// Ends it. When this returns, nothing of it is in flight and its memory is not touched any more. What was in flight
    /// is completed if `complete` is set, else forgotten.
    pub(crate) fn stop(mut self, complete: bool, tally: &Tally) {
        self.deassign();
        // A kick may have come before the ioeventfd went, or a thread may have left work behind.
        self.take_kicks(tally);
        if complete && let Err(error) = self.serve(true) {
            tracing::debug!("the last serve of a queue that is being stopped: {error}");
        }
        if self.handler.drain(&mut self.live, complete).interrupt {
            self.interrupts.used_buffer(self.key.queue);
        }
    }
}

/// See [`HostQueue::arm`].
fn wake_ups(live: &mut LiveQueue, handler: &mut dyn QueueHandler) -> Result<bool, ServeError> {
    Ok(handler.listen() || (handler.wants_kicks() && live.arm_kicks()?))
}
