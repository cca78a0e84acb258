//! Our end of one I/O thread.
use crate::activity::Activity;
use crate::counters::IoThreadFigures;
use crate::event_loop::parts::{EventLoop, Message, NotPutOn, Setting};
use crate::host_queue::HostQueue;
use crate::outlive_pipes;
use crate::queue_key::QueueKey;
use crate::spares::{STACK, Spares};
use paravane_device::LogDevice;
use parking_lot::Mutex;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// Interval at which a wait for a thread calls [`IoThread::freed_by`]'s function.
const PATIENCE: Duration = Duration::from_millis(10);

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

/// A queue that is on its way off its thread.
#[derive(Debug)]
pub struct TakingOff {
    thread: Arc<IoThread>,
    wait: Receiver<Option<Box<HostQueue>>>,
}

impl TakingOff {
    /// Waits for the queue; see [`IoThread::take_off`].
    #[must_use]
    pub fn wait(self) -> Option<Box<HostQueue>> {
        self.thread.answer(&self.wait)?
    }
}

/// Our end of one I/O thread.
#[derive(Debug)]
pub struct IoThread {
    pub(crate) setting: Arc<Setting>,
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
    pub(crate) fn start(
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
    /// It must end what the thread may be blocked in ([`QueueEvents`](crate::QueueEvents)), and do nothing if the
    /// thread is not blocked.
    #[must_use]
    pub fn freed_by(mut self, free: impl Fn() + Send + Sync + 'static) -> Self {
        self.free = Free(Box::new(free));
        self
    }

    /// Returns a handle that runs tasks of this device on the thread.
    pub(crate) fn tasks_of(&self, device: usize) -> Tasks {
        Tasks { setting: Arc::clone(&self.setting), device }
    }

    /// Waits until the thread has run all earlier tasks of this device, or has ended.
    pub(crate) fn finish_tasks_of(&self, device: usize) {
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
        self.answer(&self.ask_for(key))?
    }

    fn ask_for(&self, key: QueueKey) -> Receiver<Option<Box<HostQueue>>> {
        let (done, wait) = sync_channel(1);
        // An error means that the thread has ended, and with it all its queues: there is no answer.
        let _ = self.setting.send(Message::TakeOff(key, done));
        wait
    }

    /// Begins [`IoThread::take_off`] and returns at once.
    ///
    /// Queues whose removal was begun together are not served while one of them is waited for.
    #[must_use]
    pub fn begin_take_off(self: &Arc<Self>, key: QueueKey) -> TakingOff {
        TakingOff { thread: Arc::clone(self), wait: self.ask_for(key) }
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
    pub(crate) fn renew(&self, device: usize) {
        // An error means that the thread has ended, and with it all its queues.
        let _ = self.setting.send(Message::Renew(device));
    }

    /// Whether the thread runs.
    pub(crate) fn is_alive(&self) -> bool {
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
        if let Some(thread) = self.thread.lock().take()
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
