//! An event loop and what others know of it: the types that its files share.
use crate::activity::Activity;
use crate::counters::Counters;
use crate::host_queue::HostQueue;
use crate::queue_key::QueueKey;
use paravane_notify::{BatchDelay, Baton, Notifier, PollWindow};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32};
use std::sync::mpsc::{Receiver, Sender, SyncSender};
use std::time::{Duration, Instant};
use thiserror::Error;

/// What an event loop is asked to do.
pub(crate) enum Message {
    PutOn(Box<HostQueue>, SyncSender<Result<(), NotPutOn>>),
    TakeOff(QueueKey, SyncSender<Option<Box<HostQueue>>>),
    LookAgain(usize),
    Renew(usize),
    Run(usize, Task),
    Back(Returned),
    Quit,
}

/// Work for a thread, done once.
pub(crate) type Task = Box<dyn FnOnce() + Send>;

/// Error of [`IoThread::put_on`](crate::IoThread::put_on): the thread does not take the queue.
#[derive(Debug, Error)]
#[error("cannot put the queue on its I/O thread: {source}")]
pub struct NotPutOn {
    /// The queue, unchanged; `None`: it ended with the thread.
    pub queue: Option<Box<HostQueue>>,
    /// The reason.
    pub source: io::Error,
}

impl NotPutOn {
    pub(crate) fn ended(queue: Option<Box<HostQueue>>) -> Self {
        Self { queue, source: io::Error::other("the I/O thread has ended") }
    }
}

pub(crate) struct EventLoop {
    pub(super) epoll: Arc<OwnedFd>,
    pub(super) receiver: Receiver<Message>,
    pub(super) entries: Vec<Option<Entry>>,
    /// Number of queues.
    pub(super) count: usize,
    /// What the thread does that offers the loop.
    pub(super) lent: Option<Lent>,
    /// Devices that block threads which have lost the loop; once for each.
    pub(super) blocked: Vec<usize>,
    /// Tasks that wait for an earlier one of their device.
    pub(super) tasks: Vec<(usize, Task)>,
    /// It ends when its queues have.
    pub(super) quits: bool,
    /// Device that log lines name; of a thread that devices share.
    pub(super) named: Option<Arc<str>>,
    /// Indices of entries to serve without waiting for an event, each once.
    ///
    /// Has room for all.
    pub(super) ready: VecDeque<usize>,
    /// Indices of entries that are polled, each once. Has room for all.
    pub(super) polled: Vec<usize>,
    /// Last look at the polled queues.
    pub(super) looked: Option<Instant>,
}

/// A queue while this loop has it.
pub(super) struct Entry {
    /// `None`: a thread is serving it.
    pub(super) queue: Option<Box<HostQueue>>,
    pub(super) key: QueueKey,
    /// Device that log lines name.
    pub(super) name: Option<Arc<str>>,
    /// Who waits for a queue that is away.
    pub(super) wanted: Option<SyncSender<Option<Box<HostQueue>>>>,
    /// Settings have changed that it has not applied.
    pub(super) renews: bool,
    pub(super) state: State,
    pub(super) window: PollWindow,
    pub(super) delay: BatchDelay,
    /// Chains taken since its work last ran dry.
    pub(super) taken: u32,
    /// When its work ran dry; `None`: never, or polling is off.
    pub(super) dry: Option<Instant>,
    /// Time from then to the event that woke it.
    pub(super) gap: Option<Duration>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// An event wakes it.
    Asleep,
    /// In the ready list.
    Ready,
    /// In the list of those that are polled, from then on, until then at the latest.
    Polled { from: Instant, until: Instant },
    /// A thread has it that has lost the loop.
    Away,
    /// Not served before a queue or task of its device is back.
    Held,
}

/// What the threads of an event loop share, with those who have work for it.
pub(crate) struct Setting {
    /// Sends messages to the loop.
    pub(crate) sender: Mutex<Sender<Message>>,
    /// Signalled after each message.
    pub(crate) control: Notifier,
    /// Longest poll of a queue before the thread waits for its kick; 0: no polling.
    pub(super) longest_poll: Duration,
    /// Counters.
    pub(crate) counters: Counters,
    /// Told when the thread wakes; `None`: nobody watches it.
    ///
    /// A watched thread measures how long it serves each queue, and can lose the loop.
    pub(super) activity: Option<Arc<Activity>>,
    pub(super) epoll: Arc<OwnedFd>,
    /// Where the thread that has the loop offers it.
    pub(super) baton: Mutex<Arc<Baton<EventLoop>>>,
    /// Devices that block threads which have lost the loop; once for each.
    pub(super) blocked: Mutex<Vec<usize>>,
    /// Kernel's number of the thread that has the loop.
    pub(super) thread: AtomicI32,
    pub(super) ended: AtomicBool,
}

/// A thread's time with an event loop.
pub(super) struct Tenure<'a> {
    pub(super) setting: &'a Setting,
    /// Where this thread offers the loop; `None`: nobody would take it.
    pub(super) baton: Option<Arc<Baton<EventLoop>>>,
}

/// What a thread does while it offers the loop.
pub(super) struct Lent {
    /// Index of the queue; `None`: a task.
    pub(super) number: Option<usize>,
    pub(super) device: usize,
}

/// What a thread sends back that has lost the loop.
pub(crate) struct Returned {
    pub(super) lent: Lent,
    /// `None`: a task, or the queue has ended.
    pub(super) queue: Option<Box<HostQueue>>,
}
