//! Moves of live queues: to the idlest thread, to a thread of the device's own, and back.
use crate::places::{Place, Shared};
use crate::{HostQueue, IoThread, NotPutOn, QueueKey};
use paravane_device::LogDevice;
use parking_lot::MutexGuard;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;
use thiserror::Error;

/// Why a queue does not move to another thread.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MoveError {
    /// No I/O thread has the queue.
    #[error("queue {queue} is not running")]
    NotLive {
        /// Queue index.
        queue: u16,
    },
    /// The pool has fewer threads.
    #[error("there is no I/O thread {thread}")]
    NoThread {
        /// Index asked for.
        thread: usize,
    },
    /// The queue is on its old thread.
    #[error("I/O thread {thread} does not take queue {queue}: {source}")]
    Refused {
        /// Queue index.
        queue: u16,
        /// Index asked for.
        thread: usize,
        /// The reason.
        source: io::Error,
    },
    /// Nobody serves the queue any more: the driver has to reset the device.
    #[error("no I/O thread takes queue {queue} any more: {source}")]
    Lost {
        /// Queue index.
        queue: u16,
        /// The reason.
        source: io::Error,
    },
}

impl Shared {
    /// Locks a queue to its thread, for a move. `None`: it moves already, or is being taken off.
    fn begin_move<'a>(&self, key: QueueKey, place: &'a Arc<Place>) -> Option<MutexGuard<'a, Arc<IoThread>>> {
        let thread = place.thread.try_lock()?;
        // Whoever takes it off removes its place first, and then waits for the lock.
        let is_here = self.places.lock().get(&key).is_some_and(|other| Arc::ptr_eq(other, place));
        is_here.then_some(thread)
    }

    /// Moves a live queue, unless it moves or is being taken off.
    ///
    /// # Errors
    /// See [`MoveError`].
    pub(crate) fn move_to(&self, key: QueueKey, to: usize) -> Result<(), MoveError> {
        let not_live = || MoveError::NotLive { queue: key.queue };
        let place = self.places.lock().get(&key).cloned().ok_or_else(not_live)?;
        let target = self.threads.get(to).cloned().ok_or(MoveError::NoThread { thread: to })?;
        let mut thread = self.begin_move(key, &place).ok_or_else(not_live)?;
        // `None`: it has failed.
        let queue = thread.take_off(key).ok_or_else(not_live)?;
        *place.moved.lock() = Some(Instant::now());
        put_on(queue, target, &mut thread).map_err(|stays| match stays {
            Stays::There(source) => MoveError::Refused { queue: key.queue, thread: to, source },
            Stays::Nowhere(source) => MoveError::Lost { queue: key.queue, source },
        })?;
        // Relaxed: a statistic.
        place.moves.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Moves the queues of a device to a thread of its own.
    ///
    /// Waits for those that block a thread.
    pub(crate) fn isolate(&self, device: usize) {
        self.move_all(device, |name| {
            if let Some(thread) = self.isolation.thread(device) {
                return Ok(thread);
            }
            let _named = LogDevice::enter(name);
            let thread = IoThread::spawn(format!("io-own{device}"), self.longest_poll())?;
            let thread = Arc::new(self.freed(thread));
            self.isolation.set_thread(device, &thread);
            tracing::info!(
                "the client's memory has blocked a shared I/O thread: its queues get a thread of their own"
            );
            Ok(thread)
        });
        self.isolation.moved(device);
    }

    /// Moves the queues of a device back to shared threads.
    pub(crate) fn rejoin(&self, device: usize) {
        // From now on, new queues go there.
        let own = self.isolation.end(device);
        let mut number = 0;
        self.move_all(device, |name| {
            let _named = LogDevice::enter(name);
            if number == 0 {
                tracing::info!("queues share I/O threads again");
            }
            number += 1;
            Ok(self.choose(QueueKey { device, queue: number - 1 }))
        });
        drop(own);
    }

    /// Moves all queues of a device that are not yet where `to` says. It gets the name of the device.
    fn move_all(&self, device: usize, mut to: impl FnMut(Option<Arc<str>>) -> io::Result<Arc<IoThread>>) {
        let places: Vec<_> = self.places().into_iter().filter(|(key, _)| key.device == device).collect();
        let own = self.isolation.thread(device);
        let mut leaving = Vec::new();
        for (key, place) in &places {
            let Some(thread) = self.begin_move(*key, place) else { continue };
            if !own.as_ref().is_some_and(|own| Arc::ptr_eq(own, &thread)) {
                leaving.push((thread.begin_take_off(*key), thread));
            }
        }
        for (taking_off, mut thread) in leaving {
            // `None`: it has failed.
            let Some(queue) = taking_off.wait() else { continue };
            let target = to(queue.name().cloned()).unwrap_or_else(|error| {
                tracing::warn!("a queue stays on its I/O thread: {error}");
                Arc::clone(&thread)
            });
            if let Err(Stays::There(error)) = put_on(queue, target, &mut thread) {
                tracing::warn!("a queue stays on its I/O thread: {error}");
            }
        }
    }
}

/// Where a queue is that its new thread does not take.
enum Stays {
    /// On the thread that it had.
    There(io::Error),
    /// It has failed.
    Nowhere(io::Error),
}

/// Puts a queue on `target`, or else back on its thread.
fn put_on(queue: Box<HostQueue>, target: Arc<IoThread>, thread: &mut Arc<IoThread>) -> Result<(), Stays> {
    let NotPutOn { queue, source } = match target.put_on(queue) {
        Ok(()) => {
            *thread = target;
            return Ok(());
        }
        Err(refused) => refused,
    };
    let Some(queue) = queue else { return Err(Stays::Nowhere(source)) };
    match thread.put_on(queue) {
        Ok(()) => Err(Stays::There(source)),
        Err(NotPutOn { queue, .. }) => {
            if let Some(queue) = queue {
                queue.fail(&io::Error::other("no I/O thread takes the queue").into());
            }
            Err(Stays::Nowhere(source))
        }
    }
}
