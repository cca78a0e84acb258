//! The host's side of one live queue: all that serving it takes, wherever that is done.
//!
//! ```text
//!   new --assign--> nobody's --put_on--> an I/O thread's
//!                    |  ^   <-take_off--
//!                    |  '--- park: another owner's (a vhost back end's), until it is resumed as a new one
//!                    stop: ioeventfd off, kicks taken and served once more (unless the device is being reset),
//!                    what is in flight drained, handler and mappings dropped
//! ```
//! Whoever has the value is the queue's one owner. While it is nobody's, kicks wait where they arrive and completions in
//! its handler's descriptor; who gets it looks at the ring once, without being asked ([`IoThread::put_on`]).
//!
//! [`IoThread::put_on`]: super::IoThread::put_on
use crate::resting::RestingQueue;
use crate::{Kicks, QueueEvents, QueueWork};
use paravane_device::{MappedQueue, QueueHandler, ServeError, Served, StateError};
use paravane_notify::NotifyError;
use rustix::event::epoll;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Serves of one queue in a row, before the others get their turn.
const BUDGET: usize = 16;
/// How a handler's own descriptor is waited for: each time that it becomes readable, not for as long as it is. A network
/// card that has no buffers must be able to sleep while frames wait.
const NEWS: epoll::EventFlags = epoll::EventFlags::IN.union(epoll::EventFlags::ET);

/// How a queue's turn ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// There is more to do, and others have their turn first.
    More { taken: u32 },
    /// There was nothing left, or it is left alone for a while; whether there had been anything.
    Dry { taken: u32, worked: bool },
}

/// Names a queue among all that a program serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueKey {
    /// Device number.
    pub device: usize,
    /// Queue index.
    pub queue: u16,
}

/// A live queue and what serves it.
pub struct HostQueue {
    key: QueueKey,
    live: MappedQueue,
    handler: Box<dyn QueueHandler>,
    kicks: Kicks,
    /// The device, which interrupts its driver and is told when the queue fails.
    events: Arc<dyn QueueEvents>,
    /// Signals in the notifier that are our own, not kicks.
    own_signals: u64,
    /// What all that served this queue have done.
    work: Arc<QueueWork>,
    /// Ends what is in flight early.
    cut: Option<Arc<AtomicBool>>,
}

impl HostQueue {
    /// Puts the parts together. `work` is added to.
    ///
    /// Called by [`QueueStart`](crate::QueueStart) and [`RestingQueue`] only.
    pub(crate) fn new(
        key: QueueKey,
        live: MappedQueue,
        handler: Box<dyn QueueHandler>,
        kicks: Kicks,
        events: Arc<dyn QueueEvents>,
        work: Arc<QueueWork>,
    ) -> Self {
        // A notifier of ours is born signalled, and signalled when it is given back.
        let own_signals = kicks.are_ours().into();
        Self { key, live, handler, kicks, events, own_signals, work, cut: None }
    }

    /// Whose it is.
    #[must_use]
    pub fn key(&self) -> QueueKey {
        self.key
    }

    /// Asks for an ioeventfd, where kicks come from a guest of ours.
    ///
    /// # Errors
    /// The host refuses, and kicks exit.
    pub fn assign(&mut self) -> Result<(), NotifyError> {
        // It signals whatever comes of it.
        self.own_signals += 1;
        self.kicks.assign()
    }

    /// Kicks arrive there from now on. What came by the old way and was not seen yet is made up for by the look that
    /// whoever gets the queue next takes.
    pub fn kick_by(&mut self, kicks: Kicks) {
        self.kicks = kicks;
    }

    /// Events of this queue wake whoever waits on `poll`: `kicks` and `news` say which. What is there already may have
    /// woken nobody: the queue is to be served once now.
    pub(super) fn listen(&mut self, poll: &OwnedFd, kicks: u64, news: u64) -> std::io::Result<()> {
        epoll::add(poll, self.kicks.fd(), epoll::EventData::new_u64(kicks), self.kicks.events())?;
        if let Some(fd) = self.handler.completion_fd()
            && let Err(error) = epoll::add(poll, fd, epoll::EventData::new_u64(news), NEWS)
        {
            epoll::delete(poll, self.kicks.fd())?;
            return Err(error.into());
        }
        Ok(())
    }

    /// The opposite of [`HostQueue::listen`]. What comes from now on stays where it arrives.
    pub(super) fn ignore(&self, poll: &OwnedFd) {
        for fd in [Some(self.kicks.fd()), self.handler.completion_fd()].into_iter().flatten() {
            if let Err(error) = epoll::delete(poll, fd) {
                tracing::error!("cannot take an event handler off: {error}");
            }
        }
    }

    /// Takes the signals that have come, and counts those that are kicks.
    pub(super) fn take_kicks(&mut self) {
        let signals = self.kicks.take();
        let own = signals.min(self.own_signals);
        self.own_signals -= own;
        self.events.kicked(self.key.queue, signals - own);
    }

    /// A kick came by an exit, to be served in it.
    pub(super) fn kicked_inline(&self) {
        self.events.kicked(self.key.queue, 1);
    }

    /// Serves until nothing is left or the budget is used up. With `arm`, when nothing is left, the next work wakes whoever
    /// listens, and it is looked once more; without, whoever has the queue goes on looking by [`HostQueue::has_work`]. Once `enough`
    /// chains at a time have not been there any more, what comes next is left alone for a while.
    pub(super) fn serve(&mut self, arm: bool, enough: u32) -> Result<Turn, ServeError> {
        let mut sum = Served::default();
        let turn = self.serve_counted(arm, enough, &mut sum);
        self.work.add(&sum);
        let Served { taken, completed, .. } = sum;
        Ok(if turn? { Turn::More { taken } } else { Turn::Dry { taken, worked: taken + completed > 0 } })
    }

    /// As [`HostQueue::serve`]; whether there is more.
    fn serve_counted(&mut self, arm: bool, enough: u32, sum: &mut Served) -> Result<bool, ServeError> {
        let Self { key, live, handler, events, work, .. } = self;
        live.disable_kicks();
        for _ in 0..BUDGET {
            let served = handler.serve(live)?;
            if served.interrupt {
                work.interrupted();
                events.used_buffer(key.queue);
            }
            sum.taken += served.taken;
            sum.completed += served.completed;
            if served.taken < enough && served.taken > 0 && served.completed == served.taken {
                return Ok(false);
            }
            if served.taken + served.completed == 0 && !(arm && wake_ups(live, &mut **handler)?) {
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

    /// Chains that it is good to take at once; see [`QueueHandler::preferred_batch`].
    pub(super) fn preferred_batch(&self) -> u32 {
        self.handler.preferred_batch(self.live.queue().size())
    }

    /// Whether it is to be served when there is other memory, or translations: it has work that waits for them, or keeps memory.
    pub(super) fn minds_memory(&self) -> bool {
        self.live.waits_for_translation() || self.handler.keeps_memory()
    }

    /// `events` is told what the queue's driver has to know, from now on.
    pub fn tell(&mut self, events: Arc<dyn QueueEvents>) {
        self.events = events;
    }

    /// Once `cut` is set, draining ends requests early; see [`QueueHandler::drain_until`].
    pub(crate) fn cut_by(&mut self, cut: Option<Arc<AtomicBool>>) {
        self.cut = cut;
    }

    /// Whether [`HostQueue::park`] would lose nothing.
    #[must_use]
    pub fn at_rest(&self) -> bool {
        self.handler.at_rest()
    }

    fn drain(&mut self, complete: bool) {
        let served = match &self.cut {
            Some(cut) => self.handler.drain_until(&mut self.live, complete, cut),
            None => self.handler.drain(&mut self.live, complete),
        };
        self.work.add(&served);
        self.work.settle();
        if served.interrupt {
            self.work.interrupted();
            self.events.used_buffer(self.key.queue);
        }
    }

    /// Ends our serving and nothing else: what is in flight is completed, an ioeventfd stays, and kicks wait. The
    /// handler keeps what it has of the host, and can go on with a queue that is resumed.
    ///
    /// # Errors
    /// The queue has latched, or its handler keeps something in flight.
    pub fn park(mut self) -> Result<RestingQueue, StateError> {
        self.drain(true);
        let Self { key, live, handler, kicks, events, work, cut, .. } = self;
        Ok(RestingQueue { key, parked: live.park()?, handler: Some(handler), kicks, events, work, cut })
    }

    /// It has failed, and is out of order until its driver resets it.
    pub(super) fn fail(self, error: &ServeError) {
        let (queue, events) = (self.key.queue, Arc::clone(&self.events));
        self.abandon();
        events.failed(queue, error);
    }

    /// It cannot go on: what is in flight is waited for and forgotten.
    pub fn abandon(mut self) {
        self.forget();
    }

    /// See [`HostQueue::abandon`].
    pub(super) fn forget(&mut self) {
        self.kicks.deassign();
        self.handler.drain(&mut self.live, false);
        self.work.settle();
    }

    /// Ends it. When this returns, nothing of it is in flight and its memory is not touched any more. What was in flight
    /// is completed if `complete` is set, else forgotten.
    pub fn stop(mut self, complete: bool) {
        self.kicks.deassign();
        // A kick may have come before the ioeventfd went, or a thread may have left work behind.
        if self.kicks.are_ours() {
            self.take_kicks();
        }
        if complete && let Err(error) = self.serve(true, 0) {
            tracing::debug!("the last serve of a queue that is being stopped: {error}");
        }
        self.drain(complete);
    }
}

impl std::fmt::Debug for HostQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostQueue")
            .field("key", &self.key)
            .field("live", &self.live)
            .field("kicks", &self.kicks)
            .field("work", &self.work)
            .finish_non_exhaustive()
    }
}

/// See [`HostQueue::arm`].
fn wake_ups(live: &mut MappedQueue, handler: &mut dyn QueueHandler) -> Result<bool, ServeError> {
    Ok(handler.listen() || (handler.wants_kicks() && live.arm_kicks()?))
}
