//! Threads that run the protocol of many exports.
//!
//! ```text
//!   waits for descriptors, a time or a wake-up --one of them--> ready --> a thread runs a step --> waits, or ended
//!                                                                 ^             |
//!                                                                 '-- woken meanwhile
//!   threads:  one polls --something is ready--> it runs the step, and the next thread polls
//!                ^--- nothing ready, nobody polls ---'   '--- one polls and one rests already: it ends
//! ```
//! A step may block: on memory that is mapped, or on requests in flight that are waited for. So
//! another thread polls meanwhile, and there are at most as many threads as steps that run, and two
//! more. Without steps there are two.
use paravane_io::{caught, outlive_pipes};
use paravane_notify::Notifier;
use rustix::event::{Timespec, epoll};
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Token of the notifier that ends a poll.
const WAKE: u64 = u64::MAX;
/// Most descriptors of a task.
const MAX_FDS: u64 = 4;
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
    /// Whether a thread polls.
    is_polled: bool,
    /// Threads that rest and were not called.
    resting: usize,
    /// Threads that were called and rest still.
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
            let mut state = inner.lock();
            state.make_ready(self.task, Ready::default());
            inner.attend(&mut state);
        }
    }
}

impl ProtocolThreads {
    /// Starts the first thread.
    ///
    /// # Errors
    /// The host refuses a thread or descriptors.
    pub fn new() -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let wake = Notifier::new(false).map_err(io::Error::other)?;
        epoll::add(&epoll, wake.as_fd(), epoll::EventData::new_u64(WAKE), epoll::EventFlags::IN)?;
        let inner = Inner { epoll, wake, state: Mutex::default(), call: Condvar::new() };
        let handle = Handle(Arc::new(inner));
        handle.0.spawn()?;
        Ok(Self(Arc::new(handle)))
    }

    /// Adds a task, which runs its first step at once.
    pub(crate) fn add(&self, task: Box<dyn Task>) -> Waker {
        let inner = &self.0.0;
        let mut state = inner.lock();
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
        let mut state = self.0.lock();
        state.is_closed = true;
        // One that rests or polls sees it, and tells the others.
        match state.resting {
            0 => self.0.wake.signal(),
            _ => self.0.call(&mut state),
        }
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
    fn lock(&self) -> MutexGuard<'_, State> {
        // No change under the lock is left half done.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn spawn(self: &Arc<Self>) -> io::Result<()> {
        let inner = Arc::clone(self);
        std::thread::Builder::new().name("vhost".to_owned()).spawn(move || {
            outlive_pipes();
            inner.run();
        })?;
        Ok(())
    }

    /// Has a resting thread, or the one that polls, look at what is ready.
    fn attend(&self, state: &mut State) {
        if state.ready.is_empty() {
            return;
        }
        if state.resting > 0 {
            self.call(state);
        } else if state.is_polled {
            self.wake.signal();
        }
        // Else every thread runs a step. The next to end one goes on with this.
    }

    fn call(&self, state: &mut State) {
        state.resting -= 1;
        state.called += 1;
        self.call.notify_one();
    }

    fn run(self: &Arc<Self>) {
        let mut state = self.lock();
        loop {
            if let Some(id) = state.ready.pop_front() {
                state = self.step(state, id);
                continue;
            }
            if state.is_closed && state.tasks.is_empty() {
                // The others, one after the other.
                if state.resting > 0 {
                    self.call(&mut state);
                }
                self.wake.signal();
                return;
            }
            if state.is_polled {
                if state.resting > 0 {
                    return;
                }
                state.resting += 1;
                while state.called == 0 {
                    state = self.call.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                state.called -= 1;
                continue;
            }
            state = self.poll(state);
        }
    }

    /// Waits until a task is ready.
    fn poll<'a>(&'a self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        state.is_polled = true;
        let timeout = state.timeout();
        drop(state);
        let mut events = Vec::with_capacity(16);
        let waited = epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), timeout.as_ref());
        if let Err(error) = waited
            && error != rustix::io::Errno::INTR
        {
            tracing::error!("epoll_wait: {error}; retrying");
            std::thread::sleep(RETRY);
        }
        let mut state = self.lock();
        state.is_polled = false;
        for event in &events {
            match event.data.u64() {
                WAKE => drop(self.wake.take()),
                token => state.make_ready(token / MAX_FDS, Ready(1 << (token % MAX_FDS))),
            }
        }
        state.make_due_ready();
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
        // Somebody else polls, or runs what is ready, however long this step takes.
        let must_spawn = state.resting == 0 && !state.is_polled;
        if state.resting > 0 {
            self.call(&mut state);
        }
        drop(state);
        if must_spawn && let Err(error) = self.spawn() {
            tracing::error!("cannot start a thread for the protocol: {error}; devices wait for one another");
        }
        for (_, fd) in task.fds() {
            // Before the first step there is nothing to remove.
            let _ = epoll::delete(&self.epoll, fd);
        }
        // Tasks catch their own panics, to report them.
        let Ok(Next::Wait(time)) = caught(|| task.step(ready)) else {
            drop(task);
            let mut state = self.lock();
            state.tasks.remove(&id);
            return state;
        };
        let time = match self.listen(id, &*task) {
            true => time,
            false => Some(time.map_or(RETRY, |time| time.min(RETRY))),
        };
        let due = time.map(|time| Instant::now() + time);
        let mut state = self.lock();
        let is_first = due.is_some_and(|due| state.timers.first().is_none_or(|(first, _)| due < *first));
        let Some(slot) = state.tasks.get_mut(&id) else { return state };
        slot.task = Some(task);
        slot.due = due;
        if slot.is_queued {
            state.ready.push_back(id);
        }
        if let Some(due) = due {
            state.timers.insert((due, id));
            if is_first && state.is_polled {
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
