//! Threads that take event loops over from threads that are blocked.
//!
//! ```text
//!   watcher: run(loop) --> waiting --> a spare thread runs it, until it ends or is lost --> spare again, or surplus: ends
//!            refill    --> one spare thread at least, while there are fewer than MOST
//! ```
//! A spare thread is there before it is needed: to start one takes memory maps, which the thread that is
//! blocked may hold.
use crate::event_loop::parts::{EventLoop, Setting};
use crate::outlive_pipes;
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

/// Stack of an I/O thread: no buffers live there.
pub(crate) const STACK: usize = 256 << 10;

/// Most threads beyond those of the event loops.
pub(crate) const MOST: usize = 64;

/// Spare threads that stay.
const REST: usize = 2;

/// An event loop and what others know of it.
pub(crate) type Work = (Arc<Setting>, Box<EventLoop>);

/// Work that is no event loop.
type Job = Box<dyn FnOnce() + Send>;

enum Task {
    Run(Work),
    Do(Job),
}

/// The threads of a pool that devices share.
#[derive(Default)]
pub(crate) struct Spares {
    state: Mutex<State>,
    change: Condvar,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Task>,
    /// Threads without work.
    idle: usize,
    /// Threads beyond those of the event loops.
    extra: usize,
    is_closed: bool,
    threads: Vec<JoinHandle<()>>,
}

impl Spares {
    /// Starts a thread that runs an event loop, and may lose it.
    ///
    /// # Errors
    /// The host refuses a thread.
    pub(crate) fn start(self: &Arc<Self>, name: String, work: Work) -> io::Result<()> {
        self.spawn(name, Some(Task::Run(work)))
    }

    fn spawn(self: &Arc<Self>, name: String, task: Option<Task>) -> io::Result<()> {
        let spares = Arc::clone(self);
        let thread = std::thread::Builder::new().name(name).stack_size(STACK).spawn(move || {
            outlive_pipes();
            let mut next = task.or_else(|| spares.next());
            while let Some(task) = next {
                match task {
                    Task::Run((setting, event_loop)) => setting.run(event_loop),
                    Task::Do(job) => job(),
                }
                next = spares.next();
            }
        })?;
        self.state.lock().threads.push(thread);
        Ok(())
    }

    /// Waits for work. `None`: the thread is not needed.
    fn next(&self) -> Option<Task> {
        let mut state = self.state.lock();
        if state.idle >= REST {
            state.extra = state.extra.saturating_sub(1);
            return None;
        }
        state.idle += 1;
        while state.waiting.is_empty() && !state.is_closed {
            self.change.wait(&mut state);
        }
        state.idle -= 1;
        state.waiting.pop_front()
    }

    /// Whether there is a thread for more work now.
    pub(crate) fn has_room(&self) -> bool {
        let state = self.state.lock();
        state.idle > state.waiting.len()
    }

    /// Has a spare thread run an event loop.
    pub(crate) fn run(&self, work: Work) {
        self.give(Task::Run(work));
    }

    /// Has a spare thread do something else, which may take long.
    pub(crate) fn have_done(&self, job: impl FnOnce() + Send + 'static) {
        self.give(Task::Do(Box::new(job)));
    }

    fn give(&self, task: Task) {
        self.state.lock().waiting.push_back(task);
        self.change.notify_one();
    }

    /// Starts a spare thread if there is none, and there are few. Returns whether there is one.
    pub(crate) fn refill(self: &Arc<Self>) -> bool {
        {
            let mut state = self.state.lock();
            state.threads.retain(|thread| !thread.is_finished());
            if state.idle > state.waiting.len() {
                return true;
            }
            if state.extra >= MOST || state.is_closed {
                return false;
            }
            state.extra += 1;
        }
        let spawned = self.spawn("io-spare".to_owned(), None);
        if let Err(error) = &spawned {
            self.state.lock().extra -= 1;
            tracing::warn!("cannot start a spare I/O thread: {error}");
        }
        spawned.is_ok()
    }

    /// Threads beyond those of the event loops.
    #[cfg(test)]
    pub(crate) fn extra(&self) -> usize {
        self.state.lock().extra
    }

    /// Ends the threads. Their event loops have ended.
    pub(crate) fn close(&self) {
        let threads = {
            let mut state = self.state.lock();
            state.is_closed = true;
            std::mem::take(&mut state.threads)
        };
        self.change.notify_all();
        for thread in threads {
            if thread.join().is_err() {
                tracing::error!("an I/O thread panicked");
            }
        }
    }
}
