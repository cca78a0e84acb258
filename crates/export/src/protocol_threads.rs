//! Threads that run the protocol of many exports.
//!
//! ```text
//!   waits for descriptors, a time or a wake-up --the poller--> ready --> a worker runs a step --> waits, or ended
//!                                                                ^            |
//!                                                                '-- woken meanwhile
//! ```
//! A step may block: on memory that is mapped, or on requests in flight that are waited for. If none
//! of the ready tasks is begun within [`PATIENCE`], there is one more worker, which ends when two have
//! nothing to do. So at rest there are a poller and a worker, and never many more workers than steps
//! that block.
use paravane_io::{caught, outlive_pipes};
use paravane_notify::Notifier;
use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::event::{Timespec, epoll};
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Token of the notifier that ends a poll.
const WAKE: u64 = u64::MAX;
/// Most descriptors of a task.
const MAX_FDS: u64 = 4;
/// Time after which another worker is started, if no ready task is begun.
const PATIENCE: Duration = Duration::from_millis(1);
/// Stack of the poller.
const POLLER_STACK: usize = 128 << 10;
/// Time until a task is run again whose descriptors cannot be waited for.
const RETRY: Duration = Duration::from_millis(200);

/// Descriptors of a task that are readable or broken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ready(u8);

impl Ready {
    /// Whether the descriptor with this number is one of them.
    pub(crate) fn has(self, number: u8) -> bool {
        self.0 & 1 << number != 0
    }
}

/// What a task does after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// It waits for its descriptors, for a wake-up, and for this time at most.
    Wait(Option<Duration>),
    /// It is dropped.
    End,
}

/// Runs in steps, each on one thread.
pub(crate) trait Task: Send {
    /// Runs until it has to wait.
    fn step(&mut self, ready: Ready) -> Next;

    /// Descriptors to wait for, with numbers from 0 to 3. The same until the next step.
    fn fds(&self) -> Vec<(u8, BorrowedFd<'_>)>;
}

/// Threads that run the protocol of exports.
///
/// Clones are the same threads. They end with the last clone, once all exports have ended.
#[derive(Clone, Debug)]
pub struct ProtocolThreads(Arc<Handle>);

#[derive(Debug)]
struct Handle(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    epoll: OwnedFd,
    wake: Notifier,
    state: Mutex<State>,
    /// Signalled once for each of [`State::called`].
    call: Condvar,
}

#[derive(Default)]
struct State {
    tasks: HashMap<u64, Slot>,
    next: u64,
    ready: VecDeque<u64>,
    timers: BTreeSet<(Instant, u64)>,
    /// Number of steps begun.
    begun: u64,
    /// Workers that rest and were not called.
    resting: usize,
    /// Workers that were called and rest still.
    called: usize,
    /// Whether no task follows.
    is_closed: bool,
}

struct Slot {
    /// `None`: a thread runs it.
    task: Option<Box<dyn Task>>,
    /// Whether it is to run once more: it is in the ready list, or a thread runs it.
    is_queued: bool,
    ready: Ready,
    due: Option<Instant>,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State").field("tasks", &self.tasks.len()).finish_non_exhaustive()
    }
}

/// Wakes a task.
#[derive(Debug)]
pub(crate) struct Waker {
    inner: Weak<Inner>,
    task: u64,
}

impl Waker {
    /// Has the task run a step soon.
    pub(crate) fn wake(&self) {
        if let Some(inner) = self.inner.upgrade() {
            let mut state = inner.state.lock();
            state.make_ready(self.task, Ready::default());
            inner.attend(&mut state);
        }
    }
}

impl ProtocolThreads {
    /// Starts the poller and the first worker.
    ///
    /// # Errors
    /// The host refuses a thread or descriptors.
    pub fn new() -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let wake = Notifier::new(false).map_err(io::Error::other)?;
        epoll::add(&epoll, wake.as_fd(), epoll::EventData::new_u64(WAKE), epoll::EventFlags::IN)?;
        let inner = Inner { epoll, wake, state: Mutex::default(), call: Condvar::new() };
        let handle = Handle(Arc::new(inner));
        let poller = Arc::clone(&handle.0);
        std::thread::Builder::new().name("protocol-poll".to_owned()).stack_size(POLLER_STACK).spawn(
            move || {
                outlive_pipes();
                poller.poll_all();
            },
        )?;
        handle.0.spawn()?;
        Ok(Self(Arc::new(handle)))
    }

    /// Adds a task, which runs its first step at once.
    pub(crate) fn add(&self, task: Box<dyn Task>) -> Waker {
        let inner = &self.0.0;
        let mut state = inner.state.lock();
        let id = state.next;
        state.next += 1;
        let slot = Slot { task: Some(task), is_queued: false, ready: Ready::default(), due: None };
        state.tasks.insert(id, slot);
        state.make_ready(id, Ready::default());
        inner.attend(&mut state);
        Waker { inner: Arc::downgrade(inner), task: id }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.is_closed = true;
        self.0.close(&mut state);
    }
}

impl State {
    /// Has a task run; one that runs already runs again.
    fn make_ready(&mut self, id: u64, ready: Ready) {
        let Some(slot) = self.tasks.get_mut(&id) else { return };
        slot.ready.0 |= ready.0;
        if !std::mem::replace(&mut slot.is_queued, true) && slot.task.is_some() {
            self.ready.push_back(id);
        }
    }

    fn make_due_ready(&mut self) {
        let now = Instant::now();
        while let Some(&(due, id)) = self.timers.first()
            && due <= now
        {
            self.timers.remove(&(due, id));
            if let Some(slot) = self.tasks.get_mut(&id) {
                slot.due = None;
            }
            self.make_ready(id, Ready::default());
        }
    }

    /// Time until the first task is due.
    fn timeout(&self) -> Option<Timespec> {
        let (due, _) = self.timers.first()?;
        let time = due.saturating_duration_since(Instant::now());
        Some(Timespec { tv_sec: time.as_secs().cast_signed(), tv_nsec: time.subsec_nanos().into() })
    }
}

impl Inner {
    fn spawn(self: &Arc<Self>) -> io::Result<()> {
        let inner = Arc::clone(self);
        std::thread::Builder::new().name("protocol".to_owned()).spawn(move || {
            outlive_pipes();
            inner.work();
        })?;
        Ok(())
    }

    /// Has a worker look at what is ready.
    fn attend(&self, state: &mut State) {
        if state.ready.is_empty() {
            return;
        }
        match state.resting {
            // A worker that ends its step goes on with this. If none does, the poller starts one.
            0 => self.wake.signal(),
            _ => self.call(state),
        }
    }

    fn call(&self, state: &mut State) {
        state.resting -= 1;
        state.called += 1;
        self.call.notify_one();
    }

    /// Ends the threads if nothing is left to do.
    fn close(&self, state: &mut State) {
        if state.is_closed && state.tasks.is_empty() {
            while state.resting > 0 {
                self.call(state);
            }
            self.wake.signal();
        }
    }

    /// A worker.
    fn work(self: &Arc<Self>) {
        let mut state = self.state.lock();
        loop {
            if let Some(id) = state.ready.pop_front() {
                state = self.step(state, id);
                continue;
            }
            if state.resting > 0 || state.is_closed && state.tasks.is_empty() {
                return;
            }
            state.resting += 1;
            while state.called == 0 {
                self.call.wait(&mut state);
            }
            state.called -= 1;
        }
    }

    /// The poller.
    fn poll_all(self: &Arc<Self>) {
        let mut state = self.state.lock();
        // Since when no step was begun although tasks are ready, and how many were until then.
        let mut late: Option<(Instant, u64)> = None;
        while !state.is_closed || !state.tasks.is_empty() {
            let is_late = !state.ready.is_empty() && state.resting == 0 && state.called == 0;
            let timeout = match is_late {
                true => Some(Timespec { tv_sec: 0, tv_nsec: PATIENCE.subsec_nanos().into() }),
                false => state.timeout(),
            };
            late = late.filter(|(_, begun)| is_late && *begun == state.begun);
            if late.is_some_and(|(since, _)| since.elapsed() >= PATIENCE) {
                late = None;
                drop(state);
                if let Err(error) = self.spawn() {
                    tracing::error!(
                        "cannot start a thread for the protocol: {error}; devices wait for one another"
                    );
                    std::thread::sleep(RETRY);
                }
                state = self.state.lock();
            }
            if is_late {
                late.get_or_insert_with(|| (Instant::now(), state.begun));
            }
            drop(state);
            state = self.poll(timeout);
        }
    }

    /// Waits until tasks are ready.
    fn poll(&self, timeout: Option<Timespec>) -> MutexGuard<'_, State> {
        let mut events = Vec::with_capacity(16);
        let waited = epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), timeout.as_ref());
        if let Err(error) = waited
            && error != rustix::io::Errno::INTR
        {
            tracing::error!("epoll_wait: {error}; retrying");
            std::thread::sleep(RETRY);
        }
        let mut state = self.state.lock();
        for event in &events {
            match event.data.u64() {
                WAKE => drop(self.wake.take()),
                token => state.make_ready(token / MAX_FDS, Ready(1 << (token % MAX_FDS))),
            }
        }
        state.make_due_ready();
        if state.resting > 0 && !state.ready.is_empty() {
            self.call(&mut state);
        }
        state
    }

    /// Runs a step of a task that is ready.
    fn step<'a>(self: &'a Arc<Self>, mut state: MutexGuard<'a, State>, id: u64) -> MutexGuard<'a, State> {
        let Some(slot) = state.tasks.get_mut(&id) else { return state };
        let Some(mut task) = slot.task.take() else { return state };
        let ready = std::mem::take(&mut slot.ready);
        slot.is_queued = false;
        if let Some(due) = slot.due.take() {
            state.timers.remove(&(due, id));
        }
        state.begun += 1;
        // For the next one, as this step may take any time.
        self.attend(&mut state);
        drop(state);
        for (_, fd) in task.fds() {
            // Before the first step there is nothing to remove.
            let _ = epoll::delete(&self.epoll, fd);
        }
        // Tasks catch their own panics, to report them.
        let Ok(Next::Wait(time)) = caught(|| task.step(ready)) else {
            drop(task);
            let mut state = self.state.lock();
            state.tasks.remove(&id);
            self.close(&mut state);
            return state;
        };
        let time = match self.listen(id, &*task) {
            true => time,
            false => Some(time.map_or(RETRY, |time| time.min(RETRY))),
        };
        let due = time.map(|time| Instant::now() + time);
        let mut state = self.state.lock();
        let is_first = due.is_some_and(|due| state.timers.first().is_none_or(|(first, _)| due < *first));
        let Some(slot) = state.tasks.get_mut(&id) else { return state };
        slot.task = Some(task);
        slot.due = due;
        if slot.is_queued {
            state.ready.push_back(id);
        }
        if let Some(due) = due {
            state.timers.insert((due, id));
            if is_first {
                self.wake.signal();
            }
        }
        state
    }

    /// Waits for the descriptors of a task, each until its next event.
    ///
    /// Returns whether the kernel takes all of them.
    fn listen(&self, id: u64, task: &dyn Task) -> bool {
        let mut all = true;
        for (number, fd) in task.fds() {
            let token = epoll::EventData::new_u64(id * MAX_FDS + u64::from(number));
            let flags = epoll::EventFlags::IN | epoll::EventFlags::ONESHOT;
            if let Err(error) = epoll::add(&self.epoll, fd, token, flags) {
                tracing::error!("cannot wait for a descriptor: {error}; retrying");
                all = false;
            }
        }
        all
    }
}
