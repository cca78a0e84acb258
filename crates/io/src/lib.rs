//! I/O threads: each serves queues when one of their descriptors wakes it.
//!
//! ```text
//!  start:   QueueStart::build -> assign -> put_on a thread
//!  move:    take_off one thread -> put_on another
//!  stop:    take_off -> HostQueue::stop
//! ```
//! A queue that is moved or stopped keeps its ioeventfd and all that is in flight: kicks and
//! completions that come in between wait in their descriptors, and a queue that is put on a thread
//! is served once without a kick. So no work is lost, and a queue changes hands in no other way.
//!
//! The host (a VMM, a vhost-user back end) says where kicks arrive ([`Kicks`]) and receives what
//! the queue's driver has to know ([`QueueEvents`]).
//!
//! If the code that serves a queue panics, that queue ends ([`QueueEvents::panicked`]), after a wait
//! for what is in flight. The thread serves its other queues on.
//!
//! An I/O thread may block in a [`QueueEvents`] that signals another process. Every wait for the
//! thread then unblocks it ([`IoThread::freed_by`]); in a pool that devices share, somebody watches.
//!
//! Devices use threads through an [`IoPool`]: one that they share, or one that each has of its own.
mod activity;
mod balance;
mod counters;
mod event_loop;
mod host_queue;
mod inline;
mod kicks;
mod panic;
mod places;
mod pool;
mod queue_events;
mod queue_key;
mod queue_start;
mod resting;
#[cfg(test)]
mod tests;
mod watch;

pub use counters::{IoThreadFigures, QueueWork};
pub use host_queue::HostQueue;
pub use inline::Inline;
pub use kicks::{ForeignKicks, Kicks, is_eventfd};
pub use panic::caught;
pub use pool::{DeviceThreads, IoPool, Leaving};
pub use queue_events::QueueEvents;
pub use queue_key::QueueKey;
pub use queue_start::{QueueStart, QueueStartError};
pub use resting::{RestingQueue, ResumeError};

use activity::Activity;
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
use thiserror::Error;

/// Stack of an I/O thread: no buffers live there.
const STACK: usize = 256 << 10;

/// Interval at which a wait for a thread calls [`IoThread::freed_by`]'s function.
const PATIENCE: Duration = Duration::from_millis(10);

enum Message {
    PutOn(Box<HostQueue>, SyncSender<Result<(), NotPutOn>>),
    TakeOff(QueueKey, SyncSender<Option<Box<HostQueue>>>),
    LookAgain(usize),
    Renew(usize),
    Run(usize, Task),
    Quit,
}

/// Work for a thread, done once.
type Task = Box<dyn FnOnce() + Send>;

/// Runs tasks on an I/O thread, in the order of their arrival.
#[derive(Clone)]
pub struct Tasks {
    sender: Sender<Message>,
    control: Arc<Notifier>,
    device: usize,
}

impl Tasks {
    /// Queues a task and returns at once.
    ///
    /// A task for a thread that has ended is dropped.
    pub fn run(&self, task: impl FnOnce() + Send + 'static) {
        // An error means that the thread has ended.
        let _ = self.sender.send(Message::Run(self.device, Box::new(task)));
        self.control.signal();
    }
}

impl std::fmt::Debug for Tasks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tasks").finish_non_exhaustive()
    }
}

/// Unblocks a thread.
struct Free(Box<dyn Fn() + Send + Sync>);

impl std::fmt::Debug for Free {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Free")
    }
}

/// Error of [`IoThread::put_on`]: the thread does not take the queue.
#[derive(Debug, Error)]
#[error("cannot put the queue on its I/O thread: {source}")]
pub struct NotPutOn {
    /// The queue, unchanged; `None`: it ended with the thread.
    pub queue: Option<Box<HostQueue>>,
    /// The reason.
    pub source: io::Error,
}

impl NotPutOn {
    fn ended(queue: Option<Box<HostQueue>>) -> Self {
        Self { queue, source: io::Error::other("the I/O thread has ended") }
    }
}

/// A queue that is on its way off its thread.
#[derive(Debug)]
pub struct TakingOff(Receiver<Option<Box<HostQueue>>>);

/// Locks `mutex`, also after a panic in another thread.
///
/// No change of ours is left half done.
fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Blocks SIGPIPE in this thread: a write to a pipe without reader is an error.
///
/// For threads that write to descriptors of other processes. SIGPIPE ends a process that does not
/// ignore it, a C program for instance.
pub fn outlive_pipes() {
    // A signal that arises stays pending, and ends with the thread.
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
    id: i32,
    free: Free,
}

impl IoThread {
    /// Starts a thread without queues.
    ///
    /// It polls a queue for at most `longest_poll` before it waits for a kick; zero turns polling
    /// off. The kernel keeps the first 15 bytes of `name`. Log lines of the thread name the same
    /// device as those of the calling thread.
    ///
    /// # Errors
    /// The host refuses a thread or descriptors.
    pub fn spawn(name: String, longest_poll: Duration) -> io::Result<Self> {
        Self::start(name, longest_poll, None)
    }

    /// As [`IoThread::spawn`]; `activity` is told when the thread wakes.
    fn start(name: String, longest_poll: Duration, activity: Option<Arc<Activity>>) -> io::Result<Self> {
        let (sender, receiver) = channel();
        let control = Arc::new(Notifier::new(false).map_err(io::Error::other)?);
        let counters = Arc::new(Counters::default());
        let mut event_loop = EventLoop::new(Setting {
            control: Arc::clone(&control),
            receiver,
            longest_poll,
            counters: Arc::clone(&counters),
            activity,
        })?;
        let device = LogDevice::current();
        let (started, id) = sync_channel(1);
        let thread = std::thread::Builder::new().name(name).stack_size(STACK).spawn(move || {
            // The receiver waits for it.
            started.send(rustix::thread::gettid().as_raw_nonzero().get()).unwrap_or_default();
            let _named = LogDevice::enter(device);
            outlive_pipes();
            while let Err(words) = caught(|| event_loop.run()) {
                tracing::error!("an I/O thread panicked: {words}");
                if !event_loop.recover(&words) {
                    // Wakes those who wait for an answer, when it is dropped.
                    event_loop.give_up(&words);
                    break;
                }
            }
        })?;
        let id = id.recv().map_err(io::Error::other)?;
        let free = Free(Box::new(|| ()));
        Ok(Self { sender: Mutex::new(sender), control, counters, thread: Mutex::new(Some(thread)), id, free })
    }

    /// Returns the kernel's number of the thread.
    ///
    /// It names the thread below /proc/self/task. Another thread may get it after this one has
    /// ended.
    #[must_use]
    pub fn id(&self) -> i32 {
        self.id
    }

    /// Calls `free` every 10 ms while a caller waits for the thread.
    ///
    /// It must end what the thread may be blocked in ([`QueueEvents`]), and do nothing if the
    /// thread is not blocked.
    #[must_use]
    pub fn freed_by(mut self, free: impl Fn() + Send + Sync + 'static) -> Self {
        self.free = Free(Box::new(free));
        self
    }

    /// Returns a handle that runs tasks on the thread.
    #[must_use]
    pub fn tasks(&self) -> Tasks {
        self.tasks_of(0)
    }

    /// As [`IoThread::tasks`], for tasks of this device.
    fn tasks_of(&self, device: usize) -> Tasks {
        Tasks { sender: lock(&self.sender).clone(), control: Arc::clone(&self.control), device }
    }

    /// Waits until the thread has run all earlier tasks, or has ended.
    pub fn finish_tasks(&self) {
        let (done, wait) = sync_channel(1);
        // The receiver waits for the answer.
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

    /// Hands over a queue. The thread serves it once now, and whenever there is work.
    ///
    /// When this returns, kicks reach the thread.
    ///
    /// # Errors
    /// The kernel's wait set is full, or the thread has ended.
    pub fn put_on(&self, queue: Box<HostQueue>) -> Result<(), NotPutOn> {
        let (done, wait) = sync_channel(1);
        match self.send(Message::PutOn(queue, done)) {
            Ok(()) => self.answer(&wait).unwrap_or_else(|| Err(NotPutOn::ended(None))),
            Err(Message::PutOn(queue, _)) => Err(NotPutOn::ended(Some(queue))),
            Err(_) => Err(NotPutOn::ended(None)),
        }
    }

    /// Takes a queue back, with its ioeventfd and all that is in flight.
    ///
    /// When this returns the thread does not touch the queue any more. `None`: the thread has no
    /// such queue. It may have failed, or the thread may have ended.
    pub fn take_off(&self, key: QueueKey) -> Option<Box<HostQueue>> {
        self.taken_off(self.begin_take_off(key))
    }

    /// Begins [`IoThread::take_off`] and returns at once.
    ///
    /// Queues whose removal was begun together are not served while one of them is waited for.
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

    /// Serves the queues of `device` that depend on the memory map once more.
    ///
    /// These wait for translations ([`paravane_device::MappedQueue::waits_for_translation`]) or
    /// keep memory across batches ([`paravane_device::QueueHandler::keeps_memory`]).
    pub fn look_again(&self, device: usize) {
        // An error means that the thread has ended, and with it all its queues.
        let _ = self.send(Message::LookAgain(device));
    }

    /// Has the queues of `device` apply settings that have changed.
    fn renew(&self, device: usize) {
        // An error means that the thread has ended, and with it all its queues.
        let _ = self.send(Message::Renew(device));
    }

    /// Whether the thread runs.
    fn is_alive(&self) -> bool {
        lock(&self.thread).as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Counters of the thread.
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
