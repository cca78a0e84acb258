//! I/O threads: each has queues, and serves them whenever one of their event file descriptors wakes it.
//!
//! ```text
//!  start:   QueueStart::build -> assign -> put_on a thread
//!  move:    take_off one thread -> put_on another
//!  stop:    take_off -> HostQueue::stop
//! ```
//! A queue that is being moved or stopped keeps its ioeventfd and all that is in flight: kicks and completions that come
//! in between wait in their descriptors, and a queue that is put on a thread is served once without being asked. So no work
//! is lost, and there is no other way for a queue to change hands.
//!
//! Whoever puts these together, a machine of ours or a server for other people's, says where kicks arrive ([`Kicks`]) and
//! is told what the queue's driver has to know ([`QueueEvents`]).
//!
//! A thread that panics ends, and with it the service of its queues: what is in flight is waited for, and who has asked for it
//! ([`IoThread::watched`]) is told.
//!
//! An I/O thread may block in a [`QueueEvents`] that signals another process. Every wait for the thread frees it then
//! ([`IoThread::freed_by`]).
mod counters;
mod event_loop;
mod host_queue;
mod inline;
mod kicks;
mod panic;
mod queue_events;
mod queue_start;
mod resting;
#[cfg(test)]
mod tests;

pub use counters::{IoThreadFigures, QueueWork};
pub use host_queue::{HostQueue, QueueKey};
pub use inline::Inline;
pub use kicks::{ForeignKicks, Kicks, is_eventfd};
pub use panic::caught;
pub use queue_events::QueueEvents;
pub use queue_start::{QueueStart, QueueStartError};
pub use resting::{RestingQueue, ResumeError};

use counters::Counters;
use event_loop::{EventLoop, Setting};
use nix::sys::signal::{SigSet, Signal};
use paravane_device::LogDevice;
use paravane_notify::Notifier;
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Stack of an I/O thread: no buffers live there.
const STACK: usize = 256 << 10;

/// How long a wait for a thread lasts before the thread is freed, and between one time and the next.
const PATIENCE: Duration = Duration::from_millis(10);

enum Message {
    PutOn(Box<HostQueue>, SyncSender<Result<(), NotPutOn>>),
    TakeOff(QueueKey, SyncSender<Option<Box<HostQueue>>>),
    LookAgain(usize),
    Run(Task),
    Quit,
}

/// What a thread is to do once.
type Task = Box<dyn FnOnce() + Send>;

/// Runs tasks on an I/O thread, in the order in which they come.
#[derive(Clone)]
pub struct Tasks {
    sender: Sender<Message>,
    control: Arc<Notifier>,
}

impl Tasks {
    /// Returns at once. A task for a thread that has ended is dropped.
    pub fn run(&self, task: impl FnOnce() + Send + 'static) {
        // An error means that the thread has ended.
        let _ = self.sender.send(Message::Run(Box::new(task)));
        self.control.signal();
    }
}

impl std::fmt::Debug for Tasks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tasks").finish_non_exhaustive()
    }
}

/// Frees a thread that is blocked.
struct Free(Box<dyn Fn() + Send + Sync>);

impl std::fmt::Debug for Free {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Free")
    }
}

/// A thread does not take a queue.
#[derive(Debug)]
pub struct NotPutOn {
    /// The queue, as it was; `None`: it ended with the thread.
    pub queue: Option<Box<HostQueue>>,
    /// Why.
    pub source: io::Error,
}

impl std::fmt::Display for NotPutOn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "cannot put the queue on its I/O thread: {}", self.source)
    }
}

impl std::error::Error for NotPutOn {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}

impl NotPutOn {
    fn ended(queue: Option<Box<HostQueue>>) -> Self {
        Self { queue, source: io::Error::other("the I/O thread has ended") }
    }
}

/// A queue that is being taken off its thread.
#[derive(Debug)]
pub struct TakingOff(Receiver<Option<Box<HostQueue>>>);

/// Locks `mutex`, also when a thread has panicked while it held it: nothing of ours leaves half a change behind.
fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The calling thread gets an error, and no signal, when it writes to a pipe that nobody reads any more. For threads that
/// write to descriptors of other processes: SIGPIPE ends a process that does not ignore it, as programs in C do not.
pub fn outlive_pipes() {
    // One that arises stays pending, and ends with the thread.
    let blocked = SigSet::from(Signal::SIGPIPE).thread_block();
    debug_assert!(blocked.is_ok(), "the set is a valid one");
}

/// Our end of one I/O thread.
#[derive(Debug)]
pub struct IoThread {
    sender: Mutex<Sender<Message>>,
    control: Arc<Notifier>,
    counters: Arc<Counters>,
    thread: Mutex<Option<JoinHandle<()>>>,
    free: Free,
}

impl IoThread {
    /// Starts a thread that has no queues yet. Its log lines name the device that the calling thread's do. It polls a queue
    /// for `longest_poll` at most before it waits for a kick.
    /// `name` is seen in lists of threads (15 bytes of it).
    ///
    /// # Errors
    /// The host refuses a thread or descriptors.
    pub fn spawn(name: String, longest_poll: Duration) -> io::Result<Self> {
        Self::watched(name, longest_poll, |_| ())
    }

    /// As [`IoThread::spawn`]. If the thread panics, `died` is told with what words, when none of its queues is touched any more
    /// and none can be put on it.
    ///
    /// # Errors
    /// The host refuses a thread or descriptors.
    pub fn watched(
        name: String,
        longest_poll: Duration,
        died: impl FnOnce(&str) + Send + 'static,
    ) -> io::Result<Self> {
        let (sender, receiver) = channel();
        let control = Arc::new(Notifier::new(false).map_err(io::Error::other)?);
        let counters = Arc::new(Counters::default());
        let mut event_loop = EventLoop::new(Setting {
            control: Arc::clone(&control),
            receiver,
            longest_poll,
            counters: Arc::clone(&counters),
        })?;
        let device = LogDevice::current();
        let thread = std::thread::Builder::new().name(name).stack_size(STACK).spawn(move || {
            let _named = LogDevice::enter(device);
            outlive_pipes();
            if let Err(words) = caught(|| event_loop.run()) {
                tracing::error!("an I/O thread panicked: {words}");
                event_loop.give_up();
                // Whoever waits for an answer is told that there is none.
                drop(event_loop);
                died(&words);
            }
        })?;
        let free = Free(Box::new(|| ()));
        Ok(Self { sender: Mutex::new(sender), control, counters, thread: Mutex::new(Some(thread)), free })
    }

    /// Whoever waits for the thread calls `free` again and again until the thread answers. It ends what the thread is blocked in
    /// ([`QueueEvents`]), and does nothing if the thread is not blocked.
    #[must_use]
    pub fn freed_by(mut self, free: impl Fn() + Send + Sync + 'static) -> Self {
        self.free = Free(Box::new(free));
        self
    }

    /// A way to run tasks on the thread.
    #[must_use]
    pub fn tasks(&self) -> Tasks {
        Tasks { sender: lock(&self.sender).clone(), control: Arc::clone(&self.control) }
    }

    /// Returns when the thread has run all tasks that it was given before, or has ended.
    pub fn finish_tasks(&self) {
        let (done, wait) = sync_channel(1);
        // Who asks waits for the answer.
        self.tasks().run(move || done.send(()).unwrap_or_default());
        self.answer(&wait);
    }

    /// The thread's answer; `None` if the thread has ended.
    fn answer<T>(&self, wait: &Receiver<T>) -> Option<T> {
        loop {
            match wait.recv_timeout(PATIENCE) {
                Ok(answer) => return Some(answer),
                Err(RecvTimeoutError::Timeout) => (self.free.0)(),
                Err(RecvTimeoutError::Disconnected) => return None,
            }
        }
    }

    fn send(&self, message: Message) -> Result<(), Message> {
        let sent = lock(&self.sender).send(message);
        self.control.signal();
        sent.map_err(|error| error.0)
    }

    /// Hands a queue over, to be served once now and whenever there is work. Returns when its kicks reach the thread.
    ///
    /// # Errors
    /// The kernel's wait set is full, or the thread is gone.
    pub fn put_on(&self, queue: Box<HostQueue>) -> Result<(), NotPutOn> {
        let (done, wait) = sync_channel(1);
        match self.send(Message::PutOn(queue, done)) {
            Ok(()) => self.answer(&wait).unwrap_or_else(|| Err(NotPutOn::ended(None))),
            Err(Message::PutOn(queue, _)) => Err(NotPutOn::ended(Some(queue))),
            Err(_) => Err(NotPutOn::ended(None)),
        }
    }

    /// Takes a queue back, with its ioeventfd and all that is in flight. When this returns the thread does not touch it
    /// any more. `None` if the thread has not got it: it has failed, or the thread has ended.
    pub fn take_off(&self, key: QueueKey) -> Option<Box<HostQueue>> {
        self.taken_off(self.begin_take_off(key))
    }

    /// As [`IoThread::take_off`], and returns at once. Of queues that are to leave together the thread serves none while another
    /// one is waited for.
    #[must_use]
    pub fn begin_take_off(&self, key: QueueKey) -> TakingOff {
        let (done, wait) = sync_channel(1);
        // An error means that the thread has ended, and with it all its queues: there is no answer.
        let _ = self.send(Message::TakeOff(key, done));
        TakingOff(wait)
    }

    /// Waits for a queue of this thread; see [`IoThread::take_off`].
    pub fn taken_off(&self, taking_off: TakingOff) -> Option<Box<HostQueue>> {
        self.answer(&taking_off.0)?
    }

    /// The queues of this device that wait for translations ([`paravane_device::MappedQueue::waits_for_translation`]), or keep memory that may be
    /// another by now ([`paravane_device::QueueHandler::keeps_memory`]), are served once more.
    pub fn look_again(&self, device: usize) {
        // An error means that the thread has ended, and with it all its queues.
        let _ = self.send(Message::LookAgain(device));
    }

    /// What it has counted so far.
    #[must_use]
    pub fn figures(&self) -> IoThreadFigures {
        self.counters.figures()
    }

    /// Ends the thread; queues that it still has are stopped.
    pub fn quit(&self) {
        // An error means that it has ended by itself.
        let _ = self.send(Message::Quit);
        let Some(thread) = lock(&self.thread).take() else { return };
        let mut rest = Duration::from_micros(50);
        while !thread.is_finished() {
            std::thread::sleep(rest);
            rest = (rest * 2).min(PATIENCE);
            if rest == PATIENCE {
                (self.free.0)();
            }
        }
        if thread.join().is_err() {
            tracing::error!("an I/O thread panicked");
        }
    }
}

impl Drop for IoThread {
    fn drop(&mut self) {
        self.quit();
    }
}
