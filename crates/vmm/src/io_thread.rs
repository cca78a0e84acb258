//! I/O threads: each has queues, and serves them whenever one of their event file descriptors wakes it.
//!
//! ```text
//!  start:   HostQueue::new -> assign -> put_on a thread
//!  move:    take_off one thread -> put_on another
//!  stop:    take_off -> HostQueue::stop
//! ```
//! A queue that is being moved or stopped keeps its ioeventfd and all that is in flight: kicks and completions that come
//! in between wait in their descriptors, and `put_on` signals the queue once. So no work is lost, and there is no
//! other way for a queue to change hands.
mod balance;
mod counters;
mod crew;
mod event_loop;
mod host_queue;
mod inline;
#[cfg(test)]
mod tests;

pub(crate) use balance::{Load, advise};
pub(crate) use crew::{Crew, Elsewhere};
pub(crate) use host_queue::{HostQueue, QueueKey};
pub(crate) use inline::Inline;

use crate::guard::lock;
use crate::report::IoThreadResult;
use crate::tally::Tally;
use counters::Counters;
use event_loop::{EventLoop, Setting};
use paravane_notify::Notifier;
use std::io;
use std::sync::mpsc::{Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// Stack of an I/O thread: no buffers live there.
const STACK: usize = 256 << 10;

enum Message {
    PutOn(Box<HostQueue>, SyncSender<Result<(), NotPutOn>>),
    TakeOff(QueueKey, SyncSender<Option<Box<HostQueue>>>),
    Quit,
}

/// A thread does not take a queue.
pub(crate) struct NotPutOn {
    /// The queue, as it was; `None`: it ended with the thread.
    pub(crate) queue: Option<Box<HostQueue>>,
    /// Why.
    pub(crate) source: io::Error,
}

impl NotPutOn {
    fn ended(queue: Option<Box<HostQueue>>) -> Self {
        Self { queue, source: io::Error::other("the I/O thread has ended") }
    }
}

/// Our end of one I/O thread.
pub(crate) struct IoThread {
    sender: Mutex<Sender<Message>>,
    control: Arc<Notifier>,
    counters: Arc<Counters>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl IoThread {
    /// Starts a thread that has no queues yet. It polls a queue for `longest_poll` at most before it waits for a kick.
    pub(crate) fn spawn(number: usize, longest_poll: Duration, tally: Arc<Tally>) -> io::Result<Self> {
        let (sender, receiver) = channel();
        let control = Arc::new(Notifier::new(false).map_err(io::Error::other)?);
        let counters = Arc::new(Counters::default());
        let mut event_loop = EventLoop::new(Setting {
            control: Arc::clone(&control),
            receiver,
            longest_poll,
            counters: Arc::clone(&counters),
            tally,
        })?;
        let thread = std::thread::Builder::new()
            .name(format!("io{number}"))
            .stack_size(STACK)
            .spawn(move || event_loop.run())?;
        Ok(Self { sender: Mutex::new(sender), control, counters, thread: Mutex::new(Some(thread)) })
    }

    fn send(&self, message: Message) -> Result<(), Message> {
        let sent = lock(&self.sender).send(message);
        self.control.signal();
        sent.map_err(|error| error.0)
    }

    /// Hands a queue over, and signals it once. Returns when its kicks reach the thread.
    ///
    /// # Errors
    /// The kernel's wait set is full, or the thread is gone.
    pub(crate) fn put_on(&self, queue: Box<HostQueue>) -> Result<(), NotPutOn> {
        let (done, wait) = sync_channel(1);
        match self.send(Message::PutOn(queue, done)) {
            Ok(()) => wait.recv().unwrap_or_else(|_| Err(NotPutOn::ended(None))),
            Err(Message::PutOn(queue, _)) => Err(NotPutOn::ended(Some(queue))),
            Err(_) => Err(NotPutOn::ended(None)),
        }
    }

    /// Takes a queue back, with its ioeventfd and all that is in flight. When this returns the thread does not touch it
    /// any more. `None` if the thread has not got it: it has failed, or the thread has ended.
    pub(crate) fn take_off(&self, key: QueueKey) -> Option<Box<HostQueue>> {
        let (done, wait) = sync_channel(1);
        // An error means that the thread has ended, and with it all its queues.
        self.send(Message::TakeOff(key, done)).ok()?;
        wait.recv().ok()?
    }

    /// What it has counted so far.
    pub(crate) fn figures(&self) -> IoThreadResult {
        self.counters.figures()
    }

    /// Ends the thread; queues that it still has are stopped.
    pub(crate) fn quit(&self) {
        // An error means that it has ended by itself.
        let _ = self.send(Message::Quit);
        if let Some(thread) = lock(&self.thread).take()
            && thread.join().is_err()
        {
            tracing::error!("an I/O thread panicked");
        }
    }
}

impl Drop for IoThread {
    fn drop(&mut self) {
        self.quit();
    }
}
