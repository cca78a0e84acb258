//! The queues of one device, from start to stop: the only life cycle of a queue.
//!
//! ```text
//!   Stopped --start--> Live ----lend----> Lent
//!      ^                |  ^               |
//!      |        suspend |  | resume        | suspend, take_back
//!      |                v  |               v
//!      |              Resting <------------'
//!      |  Lost: no thread takes the queue, or its back end does not report its position
//!      '---stop, retire: from anywhere
//! ```
//! A live queue is on the thread that the pool chooses, and moves between threads. A thread gives up
//! a queue that fails, which is noticed when the queue is wanted back.
//!
//! While a queue rests or is lent its ioeventfd stays registered, and kicks wait in the notifier. The
//! driver notices nothing.
use crate::lent_queue::LentQueue;
use crate::{
    DeviceThreads, HostQueue, LendError, MoveError, NotPutOn, QueueBackend, QueueEvents, RestingQueue,
    TakingOff,
};
use paravane_device::{State, StateError};
use paravane_dma::Lent;
use std::sync::Arc;

/// Stage of a queue.
#[derive(Default)]
enum Stage {
    #[default]
    Stopped,
    /// A thread serves it.
    Live,
    /// Paused: nothing in flight, no server.
    Resting(Box<RestingQueue>),
    /// A back end serves it.
    Lent(Box<LentQueue>),
    /// It has failed: no server until it is stopped.
    Lost,
}

/// A queue on its way out of the set.
struct Leaving {
    queue: u16,
    stage: Stage,
    /// Its thread gives it up.
    taking_off: Option<TakingOff>,
}

impl Leaving {
    /// Waits for the queue.
    fn wait(self) -> Ended {
        let Self { queue, stage, taking_off } = self;
        match stage {
            Stage::Resting(resting) => Ended::Resting(resting),
            Stage::Lent(lent) => lent.end().map_or_else(
                |reason| {
                    tracing::debug!(queue, "a back end has stopped: {reason}");
                    Ended::Lost
                },
                Ended::Resting,
            ),
            _ => taking_off.and_then(TakingOff::wait).map_or(Ended::Lost, Ended::Taken),
        }
    }
}

/// Queues that [`QueueSet::begin_stop`] has begun to stop.
#[must_use = "until `finish` returns, the queues use memory"]
pub struct StoppingQueues(Vec<Leaving>);

impl StoppingQueues {
    /// Whether there is nothing to wait for.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Waits for the queues and stops them, as [`QueueSet::stop`] does.
    pub fn finish(self, complete: bool) {
        for leaving in self.0 {
            match leaving.wait() {
                Ended::Taken(host_queue) => host_queue.stop(complete),
                Ended::Resting(resting) => resting.end(),
                Ended::Lost => {}
            }
        }
    }
}

/// A queue that is not live any more.
enum Ended {
    Taken(Box<HostQueue>),
    Resting(Box<RestingQueue>),
    Lost,
}

#[derive(Default)]
struct Slot {
    stage: Stage,
    place: QueuePlace,
}

/// Place of a queue among the threads of its pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueuePlace {
    /// Index of the thread that has the queue, or had it last.
    pub thread: usize,
    /// Changes of thread.
    pub moves: u64,
}

/// A queue that [`QueueSet::retire`] has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retired {
    /// Queue index.
    pub queue: u16,
    /// Where the next server goes on; `None`: the queue has failed.
    pub position: Option<State>,
    /// Requests that the queue's tracking region has for the next server.
    pub in_flight: u16,
}

/// The queues of one device, on the threads of a pool.
pub struct QueueSet {
    threads: Arc<DeviceThreads>,
    slots: Box<[Slot]>,
}

impl QueueSet {
    /// Makes a set of `count` queues, all stopped.
    #[must_use]
    pub fn new(threads: Arc<DeviceThreads>, count: usize) -> Self {
        Self { threads, slots: std::iter::repeat_with(Slot::default).take(count).collect() }
    }

    /// The threads, as the device uses them.
    #[must_use]
    pub fn threads(&self) -> &Arc<DeviceThreads> {
        &self.threads
    }

    /// All queues.
    pub fn all(&self) -> std::ops::Range<u16> {
        0..u16::try_from(self.slots.len()).unwrap_or(u16::MAX)
    }

    /// Whether a queue was started and not stopped since.
    #[must_use]
    pub fn is_live(&self, queue: u16) -> bool {
        self.slots.get(usize::from(queue)).is_some_and(|slot| !matches!(slot.stage, Stage::Stopped))
    }

    /// Index of the first live queue.
    #[must_use]
    pub fn first_live(&self) -> Option<u16> {
        self.all().find(|&queue| self.is_live(queue))
    }

    /// The thread of a queue.
    #[must_use]
    pub fn place(&self, queue: u16) -> QueuePlace {
        let Some(slot) = self.slots.get(usize::from(queue)) else { return QueuePlace::default() };
        let now = self.threads.place(queue).unwrap_or_default();
        QueuePlace { thread: now.thread.unwrap_or(slot.place.thread), moves: slot.place.moves + now.moves }
    }

    /// Puts a queue on the thread that the pool chooses.
    ///
    /// # Errors
    /// No thread takes it.
    pub fn start(&mut self, host_queue: Box<HostQueue>) -> Result<(), NotPutOn> {
        let queue = host_queue.key().queue;
        self.threads.put_on(host_queue)?;
        self.set_stage(queue, Stage::Live);
        Ok(())
    }

    /// Adds a queue at rest. [`QueueSet::resume`] or [`QueueSet::lend`] starts it.
    ///
    /// # Errors
    /// The queue has latched.
    pub fn start_at_rest(&mut self, host_queue: Box<HostQueue>) -> Result<(), StateError> {
        let queue = host_queue.key().queue;
        let resting = host_queue.park()?;
        self.rest(queue, resting);
        Ok(())
    }

    /// Changes a queue that a thread serves, between two turns.
    ///
    /// Returns whether a thread has it.
    ///
    /// # Errors
    /// No thread takes it back.
    pub fn change(&mut self, queue: u16, change: impl FnOnce(&mut HostQueue)) -> Result<bool, NotPutOn> {
        let Some(mut host_queue) = self.take_off(queue) else { return Ok(false) };
        change(&mut host_queue);
        self.start(host_queue)?;
        Ok(true)
    }

    /// Takes a queue off its thread. `None`: no thread serves it, or it has failed.
    fn take_off(&mut self, queue: u16) -> Option<Box<HostQueue>> {
        let place = self.place(queue);
        let slot = self.slots.get_mut(usize::from(queue)).filter(|slot| matches!(slot.stage, Stage::Live))?;
        *slot = Slot { stage: Stage::Lost, place };
        self.threads.take_off(self.threads.key(queue))
    }

    /// Takes live queues out of the set. All begin to leave their threads.
    fn begin_end(&mut self, queues: impl IntoIterator<Item = u16>) -> Vec<Leaving> {
        let mut leaving = Vec::new();
        for queue in queues.into_iter().filter(|&queue| self.is_live(queue)).collect::<Vec<_>>() {
            let place = self.place(queue);
            let before =
                std::mem::replace(&mut self.slots[usize::from(queue)], Slot { place, ..Slot::default() });
            let is_served = matches!(before.stage, Stage::Live);
            let taking_off = is_served.then(|| self.threads.begin_take_off(self.threads.key(queue)));
            leaving.push(Leaving { queue, stage: before.stage, taking_off: taking_off.flatten() });
        }
        leaving
    }

    /// Stops queues. What is in flight is completed with `complete`, else forgotten.
    ///
    /// When this returns nothing is in flight, and memory is not touched any more.
    pub fn stop(&mut self, queues: impl IntoIterator<Item = u16>, complete: bool) {
        self.begin_stop(queues).finish(complete);
    }

    /// Begins [`QueueSet::stop`] and returns at once, unless a queue moves now.
    ///
    /// From now on the set has the queues as stopped. Do not start one of them before
    /// [`StoppingQueues::finish`] has returned.
    pub fn begin_stop(&mut self, queues: impl IntoIterator<Item = u16>) -> StoppingQueues {
        StoppingQueues(self.begin_end(queues))
    }

    /// Ends queues, and says where the next server goes on.
    ///
    /// What is in flight is completed. With `leave` it is left to the queue's tracking region, if there
    /// is one; see [`HostQueue::leave`].
    ///
    /// From now on the queues report to `events`.
    pub fn retire(
        &mut self,
        queues: impl IntoIterator<Item = u16>,
        leave: bool,
        events: impl Fn(u16) -> Arc<dyn QueueEvents>,
    ) -> Vec<Retired> {
        let ended = self.begin_end(queues).into_iter().map(|leaving| {
            let queue = leaving.queue;
            let ended = match leaving.wait() {
                Ended::Taken(mut host_queue) => {
                    host_queue.tell(events(queue));
                    if leave { host_queue.leave() } else { host_queue.park().map(|resting| resting.retire()) }
                }
                Ended::Resting(resting) => Ok(resting.retire()),
                Ended::Lost => return Retired { queue, position: None, in_flight: 0 },
            };
            if let Err(error) = &ended {
                tracing::warn!(queue, "cannot save the queue's position: {error}");
            }
            let (position, in_flight) = ended.map_or((None, 0), |(position, left)| (Some(position), left));
            Retired { queue, position, in_flight }
        });
        ended.collect()
    }

    /// Pauses a queue until [`QueueSet::resume`]. Requests in flight are completed.
    ///
    /// Does nothing if the queue is not served.
    ///
    /// # Errors
    /// The queue is lost.
    pub fn suspend(&mut self, queue: u16) -> Result<(), String> {
        let resting = match self.take_lent(queue) {
            Some(lent) => lent.end()?,
            // Its thread has given up a queue that has failed, and said so.
            None => match self.take_off(queue) {
                Some(taken) => taken.park().map_err(|error| error.to_string())?,
                None => return Ok(()),
            },
        };
        self.rest(queue, resting);
        Ok(())
    }

    /// Puts a queue that rests back on a thread.
    ///
    /// Does nothing if the queue does not rest.
    ///
    /// # Errors
    /// The queue is lost.
    pub fn resume(&mut self, queue: u16) -> Result<(), String> {
        let Some(resting) = self.take_resting(queue) else { return Ok(()) };
        let resumed = resting.resume().map_err(|error| error.to_string())?;
        self.start(resumed).map_err(|NotPutOn { queue, source }| {
            // Its ioeventfd goes with it.
            queue.into_iter().for_each(|queue| queue.abandon());
            source.to_string()
        })
    }

    /// Whether a queue rests.
    #[must_use]
    pub fn is_resting(&self, queue: u16) -> bool {
        self.slots.get(usize::from(queue)).is_some_and(|slot| matches!(slot.stage, Stage::Resting(_)))
    }

    /// Lends a queue that a thread serves, or that rests, to `backend`, with nothing in flight.
    ///
    /// # Errors
    /// See [`LendError`]. Unless the queue is lost, a thread serves it.
    pub fn lend(
        &mut self,
        queue: u16,
        backend: Box<dyn QueueBackend>,
        memory: Lent,
    ) -> Result<(), LendError> {
        let lost = |reason: String| LendError::Lost { queue, reason };
        if !self.is_resting(queue) {
            let taken = self.take_off(queue).ok_or(LendError::NotOurs { queue })?;
            if !taken.at_rest() {
                self.start(taken).map_err(|refused| lost(refused.source.to_string()))?;
                return Err(LendError::Busy { queue });
            }
            let resting = taken.park().map_err(|error| lost(error.to_string()))?;
            self.rest(queue, resting);
        }
        let Some(resting) = self.take_resting(queue) else { return Err(LendError::NotOurs { queue }) };
        match LentQueue::start(resting, backend, memory) {
            Ok(lent) => {
                self.set_stage(queue, Stage::Lent(Box::new(lent)));
                Ok(())
            }
            Err((resting, source)) => {
                self.rest(queue, resting);
                self.resume(queue).map_err(lost)?;
                Err(LendError::Refused { source })
            }
        }
    }

    /// Takes a queue back from its back end. A thread serves it again, where the back end has stopped.
    ///
    /// # Errors
    /// See [`LendError`].
    pub fn take_back(&mut self, queue: u16) -> Result<(), LendError> {
        let lent = self.take_lent(queue).ok_or(LendError::NotLent { queue })?;
        let resting = lent.end();
        let resumed = resting.and_then(|resting| {
            self.rest(queue, resting);
            self.resume(queue)
        });
        resumed.map_err(|reason| LendError::Lost { queue, reason })
    }

    /// Passes a kick that came as an exit to the queue's back end. `false`: signal the notifier instead.
    pub fn kick(&mut self, queue: u16) -> bool {
        match self.slots.get_mut(usize::from(queue)) {
            Some(Slot { stage: Stage::Lent(lent), .. }) => lent.kick(),
            _ => false,
        }
    }

    /// Moves a queue to thread `thread` of the pool, with all that is in flight.
    ///
    /// # Errors
    /// See [`MoveError`].
    pub fn move_to(&self, queue: u16, thread: usize) -> Result<(), MoveError> {
        self.threads.move_to(queue, thread)
    }

    fn set_stage(&mut self, queue: u16, stage: Stage) {
        if let Some(slot) = self.slots.get_mut(usize::from(queue)) {
            slot.stage = stage;
        }
    }

    fn rest(&mut self, queue: u16, resting: Box<RestingQueue>) {
        self.set_stage(queue, Stage::Resting(resting));
    }

    /// Takes a queue that rests.
    fn take_resting(&mut self, queue: u16) -> Option<Box<RestingQueue>> {
        self.take(queue, |stage| match stage {
            Stage::Resting(resting) => Ok(resting),
            other => Err(other),
        })
    }

    fn take_lent(&mut self, queue: u16) -> Option<Box<LentQueue>> {
        self.take(queue, |stage| match stage {
            Stage::Lent(lent) => Ok(lent),
            other => Err(other),
        })
    }

    /// Takes a queue if it is `wanted`. It is lost until it has another stage.
    fn take<T>(&mut self, queue: u16, wanted: fn(Stage) -> Result<T, Stage>) -> Option<T> {
        let slot = self.slots.get_mut(usize::from(queue))?;
        let taken = wanted(std::mem::replace(&mut slot.stage, Stage::Lost));
        taken.map_err(|other| slot.stage = other).ok()
    }
}

impl std::fmt::Debug for QueueSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let live: Vec<_> = self.all().filter(|&queue| self.is_live(queue)).collect();
        f.debug_struct("QueueSet").field("live", &live).finish_non_exhaustive()
    }
}
