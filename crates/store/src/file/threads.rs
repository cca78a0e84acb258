//! A pool of threads that block in system calls, for hosts that refuse io_uring, and for what a format
//! has to do besides transfers.
//!
//! ```text
//!   push -> pushed --submit--> the pool's jobs -> worker -> the queue's outcomes -> reap
//!                                                            | first of a batch: eventfd
//! ```
//! One pool serves all queues of a disk. Its threads start with the first queue, not when the disk
//! is opened: the process may drop privileges in between, which threads inherit. This engine takes
//! locks: one for each batch on the queue's side, and one for each job on the worker's.
//!
//! A pool may do jobs **at once**, in the queue's thread and without a worker ([`Perform::at_once`]):
//! transfers of a qcow2 image in memory whose clusters are known. As with [`Immediate`](super::Immediate),
//! no disk has to be waited for.
use super::Perform;
use crate::lock::lock;
use crate::{Job, LogDevice, Outcome, Rest, StoreQueue, WakeSet, WakeSource, eventfd, signal};
use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Workers of a pool: system calls that a disk has in flight.
const WORKERS: usize = 8;

#[derive(Debug)]
struct PoolTask {
    head: u16,
    job: Job,
    queue: Arc<PoolQueue>,
}

#[derive(Debug, Default)]
struct Jobs {
    tasks: VecDeque<PoolTask>,
    stop: bool,
}

#[derive(Debug, Default)]
struct WorkQueue {
    jobs: Mutex<Jobs>,
    more: Condvar,
}

/// The threads.
///
/// They start with the first queue, and end with the disk and its last queue.
#[derive(Debug)]
pub struct Pool {
    work: Arc<dyn Perform>,
    work_queue: Arc<WorkQueue>,
    workers: Mutex<Vec<JoinHandle<()>>>,
}

impl Pool {
    /// Creates a pool without threads, which do jobs by `work`.
    #[must_use]
    pub fn new(work: Arc<dyn Perform>) -> Arc<Self> {
        Arc::new(Self { work, work_queue: Arc::default(), workers: Mutex::default() })
    }

    /// The engine of one queue, with room for `jobs` jobs.
    ///
    /// # Errors
    /// The host refuses a thread or a descriptor.
    pub fn queue(self: &Arc<Self>, jobs: u16) -> io::Result<Threads> {
        self.start()?;
        let outcomes = Mutex::new(Vec::with_capacity(jobs.into()));
        let shared = Arc::new(PoolQueue { outcomes, posted: Condvar::new(), event: eventfd()? });
        Ok(Threads {
            pool: self.clone(),
            shared,
            pushed: Vec::with_capacity(jobs.into()),
            handed_out: 0,
            signals: 0,
            done: VecDeque::with_capacity(jobs.into()),
            wakes: None,
        })
    }

    /// Starts missing threads.
    ///
    /// # Errors
    /// The host refuses a thread.
    fn start(&self) -> io::Result<()> {
        let stack = self.work.stack();
        let mut workers = lock(&self.workers);
        while workers.len() < WORKERS {
            let (work_queue, perform, device) =
                (self.work_queue.clone(), self.work.clone(), LogDevice::current());
            let thread = std::thread::Builder::new().name(format!("blk-io-{}", workers.len()));
            workers.push(thread.stack_size(stack).spawn(move || {
                let _named = LogDevice::enter(device);
                work(&work_queue, &*perform);
            })?);
        }
        Ok(())
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // Every queue holds the pool, and waits for its jobs before it is dropped: no job is left.
        lock(&self.work_queue.jobs).stop = true;
        self.work_queue.more.notify_all();
        for worker in lock(&self.workers).drain(..) {
            if worker.join().is_err() {
                tracing::error!("a block I/O thread has panicked");
            }
        }
    }
}

fn work(work_queue: &WorkQueue, work: &dyn Perform) {
    loop {
        let task = {
            let mut jobs = lock(&work_queue.jobs);
            loop {
                if let Some(task) = jobs.tasks.pop_front() {
                    break task;
                }
                if jobs.stop {
                    return;
                }
                jobs = work_queue.more.wait(jobs).unwrap_or_else(PoisonError::into_inner);
            }
        };
        // SAFETY: the pieces and their memory are valid until the outcome is reaped (StoreQueue::push),
        // and it has not even been posted.
        let result = unsafe { work.perform(task.job) };
        // SAFETY: the worker has done the job, and took it off the list.
        task.queue.post(unsafe { Outcome::new(task.head, result) });
    }
}

/// State that a queue shares with the workers.
#[derive(Debug)]
struct PoolQueue {
    outcomes: Mutex<Vec<Outcome>>,
    posted: Condvar,
    event: Arc<OwnedFd>,
}

impl PoolQueue {
    fn post(&self, outcome: Outcome) {
        let first = {
            let mut outcomes = lock(&self.outcomes);
            outcomes.push(outcome);
            outcomes.len() == 1
        };
        // The worker that found the list empty signals; later outcomes need no signal until the
        // queue has taken them all.
        if first {
            signal(&self.event);
            self.posted.notify_one();
        }
    }
}

/// The engine of one queue.
#[derive(Debug)]
pub struct Threads {
    pool: Arc<Pool>,
    shared: Arc<PoolQueue>,
    pushed: Vec<PoolTask>,
    /// Jobs that workers have, or whose outcomes have not been reaped.
    handed_out: usize,
    /// Signals of outcomes that have been reaped, less those that were cleared.
    ///
    /// A worker posts first, and signals then.
    signals: i64,
    /// Outcomes of jobs that were done at once.
    done: VecDeque<Outcome>,
    wakes: Option<WakeSource>,
}

impl Threads {
    /// Clears the event, before the owner sleeps.
    fn clear(&mut self) {
        if self.handed_out > 0 || self.signals > 0 {
            let mut count = [0; 8];
            // EAGAIN: it was not readable, which is fine. Cleared before the list is checked:
            // outcomes signalled before are in it, and a worker that finds it empty from here on
            // signals.
            if rustix::io::read(&self.shared.event, &mut count).is_ok() {
                self.signals -= i64::from_ne_bytes(count);
            }
        }
    }

    /// Takes a job over, or does it at once.
    pub(super) fn add(&mut self, head: u16, job: Job) {
        // SAFETY: as for a worker.
        match unsafe { self.pool.work.at_once(job) } {
            // SAFETY: the job has been done, and no worker gets it.
            Some(result) => self.done.push_back(unsafe { Outcome::new(head, result) }),
            None => self.pushed.push(PoolTask { head, job, queue: self.shared.clone() }),
        }
    }

    /// Gives the workers what was added.
    pub(super) fn hand_out(&mut self) {
        let count = self.pushed.len();
        if count == 0 {
            return;
        }
        self.handed_out += count;
        lock(&self.pool.work_queue.jobs).tasks.extend(self.pushed.drain(..));
        match count {
            1 => self.pool.work_queue.more.notify_one(),
            _ => self.pool.work_queue.more.notify_all(),
        }
    }
}

impl StoreQueue for Threads {
    fn register(&mut self, wakes: Option<&WakeSet>) -> io::Result<()> {
        WakeSource::register(&mut self.wakes, &self.shared.event, wakes)
    }

    fn rest(&mut self, arm: bool) -> Rest {
        if arm {
            self.clear();
        }
        match self.handed_out {
            _ if !self.done.is_empty() => Rest::Serve,
            0 => Rest::Poll { kicks: true },
            // Without a lock, only the event tells.
            _ if arm && !lock(&self.shared.outcomes).is_empty() => Rest::Serve,
            _ => Rest::Ask { kicks: true },
        }
    }

    unsafe fn push(&mut self, head: u16, job: Job) -> io::Result<()> {
        self.add(head, job);
        Ok(())
    }

    fn submit(&mut self) -> io::Result<()> {
        self.hand_out();
        Ok(())
    }

    fn cancel(&mut self) {
        // SAFETY: no worker has the task, and none will.
        let given_up = |task: PoolTask| unsafe { Outcome::new(task.head, -libc::ECANCELED) };
        self.handed_out += self.pushed.len();
        let mut outcomes: Vec<Outcome> = self.pushed.drain(..).map(given_up).collect();
        {
            let mut jobs = lock(&self.pool.work_queue.jobs);
            let (ours, others): (VecDeque<_>, VecDeque<_>) =
                jobs.tasks.drain(..).partition(|task| Arc::ptr_eq(&task.queue, &self.shared));
            jobs.tasks = others;
            outcomes.extend(ours.into_iter().map(given_up));
        }
        outcomes.into_iter().for_each(|outcome| self.shared.post(outcome));
    }

    fn reap(&mut self, outcomes: &mut VecDeque<Outcome>) {
        outcomes.append(&mut self.done);
        if self.handed_out > 0 {
            let mut posted = lock(&self.shared.outcomes);
            if !posted.is_empty() {
                self.signals += 1;
                self.handed_out -= posted.len();
            }
            outcomes.extend(posted.drain(..));
        }
    }

    fn wait(&mut self) -> io::Result<()> {
        self.hand_out();
        if !self.done.is_empty() {
            return Ok(());
        }
        let mut outcomes = lock(&self.shared.outcomes);
        while outcomes.is_empty() {
            outcomes = self.shared.posted.wait(outcomes).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(())
    }
}
