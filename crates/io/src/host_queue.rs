//! The host's side of one live queue, with everything that serving it needs.
//!
//! ```text
//!   QueueStart --assign--> no thread --put_on--> an I/O thread
//!                           |  ^   <-take_off--
//!                           |  '--- park: another owner (a vhost back end), until RestingQueue::resume
//!                           stop: ioeventfd off, kicks taken and served once more (unless the device is being reset),
//!                             what is in flight drained, handler and mappings dropped
//! ```
//! The holder of the value is the queue's one owner. While the queue is on no thread, kicks wait
//! where they arrive, and completions in the handler's descriptor. The next thread looks at the
//! ring once without a kick ([`IoThread::put_on`]).
//!
//! [`IoThread::put_on`]: super::IoThread::put_on
use crate::resting::{RestingQueue, ResumeError};
use crate::{Kicks, QueueEvents, QueueKey, QueueWork};
use paravane_device::{
    LogDevice, MappedQueue, QueueHandler, Rest, ServeError, Served, State, StateError, WakeSet,
};
use paravane_notify::NotifyError;
use rustix::event::epoll;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Calls of `serve` in one turn of a queue.
const BUDGET: usize = 16;
/// Requests in flight with which the driver likely waits for the first answer.
///
/// Beyond that, asking all the time for news gains nothing, and costs a server that sends long answers
/// a tenth of its rate: it is woken for each part that has been received.
const FEW: u16 = 4;

/// Settings of a device's queues, which may change while they are live.
#[derive(Debug)]
pub(crate) struct QueueSettings {
    /// In nanoseconds.
    longest_poll: AtomicU64,
}

impl QueueSettings {
    pub(crate) fn new(longest_poll: Duration) -> Arc<Self> {
        let settings = Self { longest_poll: AtomicU64::new(0) };
        settings.poll_for(longest_poll);
        Arc::new(settings)
    }

    /// Longest time that a thread polls a queue before it waits for a kick.
    pub(crate) fn longest_poll(&self) -> Duration {
        // Relaxed: it orders nothing.
        Duration::from_nanos(self.longest_poll.load(Ordering::Relaxed))
    }

    pub(crate) fn poll_for(&self, longest: Duration) {
        let nanos = u64::try_from(longest.as_nanos()).unwrap_or(u64::MAX);
        // Relaxed: as above.
        self.longest_poll.store(nanos, Ordering::Relaxed);
    }
}

/// How a queue's turn ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// The budget is used up: there may be more to do.
    More { taken: u32 },
    /// Nothing is left, or the queue is left alone for a while.
    ///
    /// `worked`: there was something.
    Dry { taken: u32, worked: bool },
}

/// A live queue, its handler, and its ways to the driver.
pub struct HostQueue {
    key: QueueKey,
    live: MappedQueue,
    handler: Box<dyn QueueHandler>,
    kicks: Kicks,
    /// Where interrupts and failures are reported.
    events: Arc<dyn QueueEvents>,
    /// Signals in the notifier that are ours and no kicks.
    own_signals: u64,
    /// Counters, kept across moves.
    work: Arc<QueueWork>,
    /// Set to end requests early.
    cut: Option<Arc<AtomicBool>>,
    /// Of its device; `None`: as its thread says.
    settings: Option<Arc<QueueSettings>>,
    /// Device that log lines name.
    name: Option<Arc<str>>,
}

impl HostQueue {
    /// Puts the parts together. `work` is added to, with its latencies.
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
        // A host notifier is signalled when it is made and when it is given back.
        let own_signals = kicks.are_ours().into();
        let name = LogDevice::current();
        let mut queue =
            Self { key, live, handler, kicks, events, own_signals, work, cut: None, settings: None, name };
        queue.follow_latency();
        queue
    }

    /// Device number and queue index.
    #[must_use]
    pub fn key(&self) -> QueueKey {
        self.key
    }

    /// Asks for an ioeventfd, if kicks come from a guest of this process.
    ///
    /// # Errors
    /// The host refuses, and kicks exit.
    pub fn assign(&mut self) -> Result<(), NotifyError> {
        // It signals also when it is refused.
        self.own_signals += 1;
        self.kicks.assign()
    }

    /// Takes kicks from `kicks` from now on.
    ///
    /// Kicks that arrived at the old place and were not seen are made up for: the next thread looks
    /// at the ring once.
    pub fn kick_by(&mut self, kicks: Kicks) {
        self.kicks = kicks;
    }

    /// Adds the queue's descriptors to `poll`, with the tokens `kicks` and `news`.
    ///
    /// Events may have been missed before: the queue is to be served once now.
    pub(super) fn listen(&mut self, poll: &Arc<OwnedFd>, kicks: u64, news: u64) -> std::io::Result<()> {
        epoll::add(poll, self.kicks.fd(), epoll::EventData::new_u64(kicks), self.kicks.events())?;
        self.handler.register(Some(&WakeSet::new(poll, news))).inspect_err(|_| self.ignore(poll))
    }

    /// Undoes [`HostQueue::listen`]. Later events wait in their descriptors.
    pub(super) fn ignore(&mut self, poll: &OwnedFd) {
        if let Err(error) = epoll::delete(poll, self.kicks.fd()) {
            tracing::error!("cannot remove a descriptor from epoll: {error}");
        }
        // Cannot fail.
        let _ = self.handler.register(None);
    }

    /// Takes the signals that have arrived, and reports those that are kicks.
    pub(super) fn take_kicks(&mut self) {
        let signals = self.kicks.take();
        let own = signals.min(self.own_signals);
        self.own_signals -= own;
        self.events.kicked(self.key.queue, signals - own);
        if signals > own {
            self.live.latency().kicked();
        }
    }

    /// Notes that the thread learns of work now.
    ///
    /// See [`LatencyRecorder::announce`](paravane_device::latency::LatencyRecorder::announce).
    pub(super) fn announce(&mut self) {
        self.live.latency().announce();
    }

    /// Notes that polling has found work, after a look some time `ago` that found none.
    pub(super) fn announce_since(&mut self, ago: Duration) {
        self.live.latency().announce_since(ago);
    }

    /// Serves until nothing is left or the budget is used up.
    ///
    /// With `arm`, asks for wake-ups when nothing is left, and looks once more; without, the caller
    /// polls [`HostQueue::has_work`]. Ends early when a batch had fewer than `enough` chains, so
    /// that more gather.
    /// A turn that lasts until `until` ends after the batch under way.
    pub(super) fn serve(
        &mut self,
        arm: bool,
        enough: u32,
        until: Option<Instant>,
    ) -> Result<Turn, ServeError> {
        let mut sum = Served::default();
        self.live.share_thread(until.is_some());
        let turn = self.serve_counted(arm, enough, until, &mut sum);
        self.work.add(&sum);
        let Served { taken, completed, .. } = sum;
        if turn? {
            return Ok(Turn::More { taken });
        }
        self.live.latency().idle();
        Ok(Turn::Dry { taken, worked: taken + completed > 0 })
    }

    /// Serves as [`HostQueue::serve`] does. `true`: there may be more.
    fn serve_counted(
        &mut self,
        arm: bool,
        enough: u32,
        until: Option<Instant>,
        sum: &mut Served,
    ) -> Result<bool, ServeError> {
        let Self { key, live, handler, events, work, .. } = self;
        live.latency().begin_turn();
        live.disable_kicks();
        for _ in 0..BUDGET {
            let served = handler.serve(live)?;
            if served.interrupt {
                work.interrupted();
                events.used_buffer(key.queue);
                live.latency().signalled();
            }
            live.latency().finish();
            sum.taken += served.taken;
            sum.completed += served.completed;
            if served.taken < enough && served.taken > 0 && served.completed == served.taken {
                return Ok(false);
            }
            if served.taken + served.completed == 0 && !(arm && wake_ups(live, &mut **handler)?) {
                return Ok(false);
            }
            if until.is_some_and(|until| Instant::now() >= until) {
                break;
            }
        }
        Ok(true)
    }

    /// Asks for a wake-up by the next work. `true`: there is work already.
    pub(super) fn arm(&mut self) -> Result<bool, ServeError> {
        let more = wake_ups(&mut self.live, &mut *self.handler)?;
        if more {
            self.announce();
        }
        Ok(more)
    }

    /// Whether polling can find work, after a [`HostQueue::serve`] that ran dry.
    pub(super) fn can_poll(&mut self) -> bool {
        match self.handler.rest(false) {
            Rest::Serve | Rest::Poll { .. } => true,
            Rest::Ask { kicks } => kicks,
            Rest::Sleep { .. } => false,
        }
    }

    /// Whether there seems to be work, after a [`HostQueue::serve`] that ran dry.
    ///
    /// Makes no system call, and asks for no wake-up. `None`: only its descriptor tells, and the
    /// driver likely waits for that.
    pub(super) fn has_work(&mut self) -> Option<bool> {
        match self.handler.rest(false) {
            Rest::Serve => Some(true),
            rest if rest.kicks() && self.live.has_available() => Some(true),
            Rest::Poll { .. } => Some(false),
            Rest::Ask { .. } | Rest::Sleep { .. } => (self.live.queue().in_flight() > FEW).then_some(false),
        }
    }

    /// See [`QueueHandler::preferred_batch`].
    pub(super) fn preferred_batch(&self) -> u32 {
        self.handler.preferred_batch(self.live.queue().size())
    }

    /// Whether a change of memory or translations can give the queue work.
    ///
    /// A chain waits for it, or the handler keeps memory.
    pub(super) fn minds_memory(&self) -> bool {
        self.live.waits_for_translation() || self.handler.keeps_memory()
    }

    /// Has its threads serve it by these settings.
    pub(crate) fn set_up(&mut self, settings: Arc<QueueSettings>) {
        self.settings = Some(settings);
    }

    /// See [`QueueSettings::longest_poll`].
    pub(super) fn longest_poll(&self) -> Option<Duration> {
        self.settings.as_ref().map(|settings| settings.longest_poll())
    }

    /// Applies settings that have changed. Nothing listens to its handler.
    ///
    /// # Errors
    /// See [`QueueHandler::renew`].
    pub(super) fn renew(&mut self) -> io::Result<()> {
        self.follow_latency();
        self.handler.renew()
    }

    /// Records latencies if they are wanted now.
    fn follow_latency(&mut self) {
        let latency = self.work.latency();
        if latency.is_some() != self.live.latency().is_on() {
            let device = self.name.clone().unwrap_or_else(|| self.key.device.to_string().into());
            self.live.record_into(latency.cloned(), &device, self.key.queue);
        }
    }

    /// Applies settings that have changed while `poll` has its descriptors; see [`HostQueue::listen`].
    ///
    /// Serve the queue once afterwards.
    ///
    /// # Errors
    /// The queue cannot go on.
    pub(super) fn renew_within(&mut self, poll: &Arc<OwnedFd>, news: u64) -> io::Result<()> {
        self.handler.register(None)?;
        let renewed = self.renew();
        // Whoever ends it expects it there.
        self.handler.register(Some(&WakeSet::new(poll, news)))?;
        renewed
    }

    /// Device that log lines name.
    pub(super) fn name(&self) -> Option<&Arc<str>> {
        self.name.as_ref()
    }

    /// Counts the time of a turn.
    pub(super) fn was_busy(&self, time: Duration) {
        self.work.was_busy(time);
    }

    /// Its counters.
    pub(super) fn work(&self) -> &Arc<QueueWork> {
        &self.work
    }

    /// Where it reports.
    pub(super) fn events(&self) -> Arc<dyn QueueEvents> {
        Arc::clone(&self.events)
    }

    /// Reports to `events` from now on.
    pub fn tell(&mut self, events: Arc<dyn QueueEvents>) {
        self.events = events;
    }

    /// Once `cut` is set, draining ends requests early.
    ///
    /// See [`QueueHandler::drain_until`].
    pub(crate) fn cut_by(&mut self, cut: Option<Arc<AtomicBool>>) {
        self.cut = cut;
    }

    /// Whether [`HostQueue::park`] would lose nothing.
    #[must_use]
    pub fn at_rest(&self) -> bool {
        self.handler.at_rest()
    }

    fn drain(&mut self, complete: bool) {
        self.live.latency().begin_turn();
        let served = match &self.cut {
            Some(cut) => self.handler.drain_until(&mut self.live, complete, cut),
            None => self.handler.drain(&mut self.live, complete),
        };
        self.work.add(&served);
        self.work.settle();
        if served.interrupt {
            self.work.interrupted();
            self.events.used_buffer(self.key.queue);
            self.live.latency().signalled();
        }
        self.live.latency().finish();
    }

    /// Stops serving, with all requests in flight completed.
    ///
    /// An ioeventfd stays, and kicks wait. The handler keeps its state, and goes on when the queue
    /// is resumed.
    ///
    /// # Errors
    /// The queue has latched, or its handler keeps something in flight.
    pub fn park(mut self) -> Result<Box<RestingQueue>, StateError> {
        self.drain(true);
        let Self { key, live, handler, kicks, events, work, cut, .. } = self;
        let parked = live.park().inspect_err(|_| kicks.deassign())?;
        let (position, handler) = (parked.state(), Some(handler));
        Ok(Box::new(RestingQueue { key, parked, position, handler, kicks, events, work, cut }))
    }

    /// Ends the queue, and leaves requests in flight to its tracking region.
    ///
    /// Requests that the host has not begun are cancelled; the others are waited for. Without
    /// tracking, all are completed, as by [`HostQueue::park`]. Returns the position and the number
    /// of chains left in flight.
    ///
    /// # Errors
    /// The queue has latched, or its handler keeps something in flight.
    pub fn leave(mut self) -> Result<(State, u16), StateError> {
        if self.live.queue().is_tracked() {
            self.cut = Some(Arc::new(AtomicBool::new(true)));
        }
        self.drain(true);
        self.kicks.deassign();
        let left = self.live.queue().in_flight();
        Ok((self.live.leave()?, left))
    }

    /// Ends a queue that has failed, and reports it.
    pub(super) fn fail(self, error: &ServeError) {
        let (queue, events) = (self.key.queue, Arc::clone(&self.events));
        self.abandon();
        events.failed(queue, error);
    }

    /// Ends a queue that cannot go on: waits for what is in flight, and forgets it.
    pub fn abandon(mut self) {
        self.forget();
    }

    /// See [`HostQueue::abandon`].
    pub(super) fn forget(&mut self) {
        self.kicks.deassign();
        self.handler.drain(&mut self.live, false);
        self.work.settle();
    }

    /// Ends the queue.
    ///
    /// What was in flight is completed if `complete` is set, else forgotten.
    ///
    /// When this returns nothing is in flight, and memory is not touched any more.
    pub fn stop(mut self, complete: bool) {
        self.kicks.deassign();
        // A kick may have come before the ioeventfd went, or a thread may have left work behind.
        if self.kicks.are_ours() {
            self.take_kicks();
        }
        if complete && let Err(error) = self.serve(true, 0, None) {
            tracing::debug!("the last serve of a queue that is being stopped: {error}");
        }
        self.drain(complete);
    }
}

impl RestingQueue {
    /// Takes the queue up at its position.
    ///
    /// A queue with in-flight tracking is tracked no more.
    ///
    /// Kicks that came meanwhile are made up for by the first look at the ring, as for every queue
    /// that is put on a thread.
    ///
    /// # Errors
    /// See [`ResumeError`].
    pub fn resume(self) -> Result<Box<HostQueue>, ResumeError> {
        let Self { key, parked, position, handler, kicks, events, work, cut } = self;
        kicks.give_back();
        let live =
            handler.ok_or(ResumeError::NoHandler).and_then(|handler| Ok((parked.resume(position)?, handler)));
        let (live, handler) = live.inspect_err(|_| kicks.deassign())?;
        let mut queue = Box::new(HostQueue::new(key, live, handler, kicks, events, work));
        queue.cut_by(cut);
        Ok(queue)
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
    match handler.rest(true) {
        Rest::Serve => Ok(true),
        rest => Ok(rest.kicks() && live.arm_kicks()?),
    }
}
