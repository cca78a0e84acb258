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
//! It may also block in a page fault on memory of another process, which nothing ends. In a pool that
//! devices share, another thread then goes on with the queues of the other devices, and the device gets a
//! thread of its own for a while.
//!
//! Devices use threads through an [`IoPool`]: one that they share, or one that each has of its own.
//!
//! # Files
//!
//! * `IoThread`, an event loop with adaptive polling; `QueueStart`, the one builder of a live
//!   queue; `HostQueue`, everything that serving a queue takes, which changes hands as one value;
//!   `RestingQueue`, a queue that another owner serves; `Kicks`, where kicks arrive (our notifier,
//!   or another process's eventfd or pipe); `QueueEvents`, the receiver of used buffer
//!   notifications and errors; `Inline`, queues served in the exits of their kicks; `pool`
//!   (`IoPool`), threads for one device or for many, `places`, the thread that has each queue,
//!   `balance`, which queue to move (pure), `watch`, which moves it and frees blocked threads,
//!   `activity`, which wakes the watcher; `event_loop/lend`, what a thread does while another one
//!   may take its loop, `spares`, the threads that do, `isolation`, devices that get a thread of
//!   their own for it, `moves`, how queues get there; `panic`, a panic as a value.
mod activity;
mod balance;
mod counters;
mod event_loop;
mod host_queue;
mod inline;
mod isolation;
mod kicks;
mod moves;
mod panic;
mod places;
mod pool;
mod queue_events;
mod queue_key;
mod queue_start;
mod resting;
mod spares;
#[cfg(test)]
mod tests;
mod watch;

pub use balance::{Load, Move, best_move};
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
use event_loop::{EventLoop, Returned, Setting};
use nix::sys::signal::{SigSet, Signal};
use paravane_device::LogDevice;
use spares::{STACK, Spares};
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use thiserror::Error;

/// Interval at which a wait for a thread calls [`IoThread::freed_by`]'s function.
const PATIENCE: Duration = Duration::from_millis(10);

enum Message {
    PutOn(Box<HostQueue>, SyncSender<Result<(), NotPutOn>>),
    TakeOff(QueueKey, SyncSender<Option<Box<HostQueue>>>),
    LookAgain(usize),
    Renew(usize),
    Run(usize, Task),
    Back(Returned),
    Quit,
}

/// Work for a thread, done once.
type Task = Box<dyn FnOnce() + Send>;

/// Runs tasks on an I/O thread, in the order of their arrival.
///
/// In a pool that devices share, a task that blocks delays those of its device.
#[derive(Clone)]
pub struct Tasks {
    setting: Arc<Setting>,
    device: usize,
}

impl Tasks {
    /// Queues a task and returns at once.
    ///
    /// A task for a thread that has ended is dropped.
    pub fn run(&self, task: impl FnOnce() + Send + 'static) {
        // An error means that the thread has ended.
        let _ = self.setting.send(Message::Run(self.device, Box::new(task)));
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
    setting: Arc<Setting>,
    /// `None`: the thread is one of a pool's.
    thread: Mutex<Option<JoinHandle<()>>>,
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
        let (event_loop, setting) = EventLoop::new(longest_poll, None)?;
        let setting = Arc::new(setting);
        let device = LogDevice::current();
        let of_thread = Arc::clone(&setting);
        let thread = std::thread::Builder::new().name(name).stack_size(STACK).spawn(move || {
            let _named = LogDevice::enter(device);
            outlive_pipes();
            of_thread.run(event_loop);
        })?;
        setting.wait_for_start();
        Ok(Self { setting, thread: Mutex::new(Some(thread)), free: Free(Box::new(|| ())) })
    }

    /// As [`IoThread::spawn`], in a pool whose threads can take over from this one.
    ///
    /// `activity` is told when the thread wakes.
    fn start(
        name: String,
        longest_poll: Duration,
        activity: &Arc<Activity>,
        spares: &Arc<Spares>,
    ) -> io::Result<Self> {
        let (event_loop, setting) = EventLoop::new(longest_poll, Some(Arc::clone(activity)))?;
        let setting = Arc::new(setting);
        spares.start(name, (Arc::clone(&setting), event_loop))?;
        setting.wait_for_start();
        Ok(Self { setting, thread: Mutex::default(), free: Free(Box::new(|| ())) })
    }

    /// Returns the kernel's number of the thread.
    ///
    /// It names the thread below /proc/self/task. Another thread may get it after this one has
    /// ended. In a pool that devices share, it changes when a thread takes over from one that is
    /// blocked.
    #[must_use]
    pub fn id(&self) -> i32 {
        self.setting.thread()
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
        Tasks { setting: Arc::clone(&self.setting), device }
    }

    /// Waits until the thread has run all earlier tasks, or has ended.
    pub fn finish_tasks(&self) {
        self.finish_tasks_of(0);
    }

    /// As [`IoThread::finish_tasks`], for tasks of this device.
    fn finish_tasks_of(&self, device: usize) {
        let (done, wait) = sync_channel(1);
        // The receiver waits for the answer.
        self.tasks_of(device).run(move || done.send(()).unwrap_or_default());
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

    /// Hands over a queue. The thread serves it once now, and whenever there is work.
    ///
    /// When this returns, kicks reach the thread.
    ///
    /// # Errors
    /// The kernel's wait set is full, or the thread has ended.
    pub fn put_on(&self, queue: Box<HostQueue>) -> Result<(), NotPutOn> {
        let (done, wait) = sync_channel(1);
        match self.setting.send(Message::PutOn(queue, done)) {
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
        let _ = self.setting.send(Message::TakeOff(key, done));
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
        let _ = self.setting.send(Message::LookAgain(device));
    }

    /// Has the queues of `device` apply settings that have changed.
    fn renew(&self, device: usize) {
        // An error means that the thread has ended, and with it all its queues.
        let _ = self.setting.send(Message::Renew(device));
    }

    /// Whether the thread runs.
    fn is_alive(&self) -> bool {
        !self.setting.has_ended()
    }

    /// Counters of the thread.
    #[must_use]
    pub fn figures(&self) -> IoThreadFigures {
        self.setting.counters.figures()
    }

    /// Ends the thread; queues that it still has are stopped.
    pub fn quit(&self) {
        // An error means that it has ended by itself.
        let _ = self.setting.send(Message::Quit);
        let mut rest = Duration::from_micros(50);
        while !self.setting.has_ended() {
            std::thread::sleep(rest);
            rest = (rest * 2).min(PATIENCE);
            if rest == PATIENCE {
                (self.free.0)();
            }
        }
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
