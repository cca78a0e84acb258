//! An engine for most jobs of a queue, and workers for the rest.
//!
//! ```text
//!   push --the rule places it--> the engine below --> reap
//!    |                             | the rule sends it to a worker
//!    '--------- else --------------'---------------> a worker of the pool --> reap
//! ```
use super::threads::{Pool, Threads};
use super::{Engine, EngineKind, EngineQueue, Image, Job, Outcome, StoreQueue};
use crate::{MappedQueue, Rest, WakeSet};
use std::collections::VecDeque;
use std::fmt::Debug;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Which jobs are the engine's, and which the workers'.
///
/// # Safety
/// What [`Rule::place`] returns has only memory of the job. The list of its pieces is the job's, or
/// stays in place until [`Rule::done`].
pub(in crate::blk) unsafe trait Rule {
    /// What the engine below does for a job. `None`: a worker does the job.
    fn place(&mut self, head: u16, job: Job) -> Option<Job>;

    /// The engine below has done with what was placed. Returns the job if a worker must do it.
    fn done(&mut self, head: u16, result: i32) -> Option<Job>;

    /// The engine below has refused what was placed.
    fn refused(&mut self, head: u16);
}

/// See the module.
#[derive(Debug)]
pub(in crate::blk) struct Beside<R> {
    below: Box<Engine>,
    workers: Threads,
    rule: R,
    /// Number of jobs below.
    below_in_flight: usize,
    /// Empty between calls.
    outcomes: VecDeque<Outcome>,
}

impl<R: Rule> Beside<R> {
    /// An engine with room for `jobs` jobs; `below` is that of the image's file or store.
    pub(super) fn new(
        rule: R,
        (pool, below): (&Arc<Pool>, &EngineKind),
        image: &Arc<Image>,
        jobs: u16,
        event: &Arc<OwnedFd>,
    ) -> io::Result<Self> {
        Ok(Self {
            below: Box::new(Engine::new(below, image, jobs, event)?),
            workers: Threads::new(pool.clone(), jobs, event.clone())?,
            rule,
            below_in_flight: 0,
            outcomes: VecDeque::with_capacity(jobs.into()),
        })
    }
}

impl<R> EngineQueue for Beside<R> {
    fn follow(&mut self, queue: &mut MappedQueue) {
        self.below.follow(queue);
    }

    fn registers(&self) -> bool {
        self.below.registers()
    }
}

impl<R: Rule + Debug + Send> StoreQueue for Beside<R> {
    fn register(&mut self, wakes: Option<&WakeSet>) -> io::Result<()> {
        self.below.register(wakes)
    }

    fn quiet(&mut self) {
        self.below.quiet();
    }

    fn rest(&mut self, arm: bool) -> Rest {
        // Both, so that both signal.
        let below = self.below.rest(arm);
        below.max(match *self.below {
            // It has cleared the event.
            Engine::Uring(_) => self.workers.rest_cleared(arm),
            _ => self.workers.rest(arm),
        })
    }

    unsafe fn push(&mut self, head: u16, job: Job) -> io::Result<()> {
        let Some(placed) = self.rule.place(head, job) else {
            self.workers.add(head, job);
            return Ok(());
        };
        // SAFETY: the caller promises that the memory is valid until the job's outcome has been
        // reaped, which is that of this one, or comes after it. The rule promises the same for the
        // list of pieces.
        if let Err(error) = unsafe { self.below.push(head, placed) } {
            self.rule.refused(head);
            return Err(error);
        }
        self.below_in_flight += 1;
        Ok(())
    }

    fn submit(&mut self) -> io::Result<()> {
        self.workers.hand_out();
        self.below.submit()
    }

    fn cancel(&mut self) {
        self.below.cancel();
        self.workers.cancel();
    }

    fn reap(&mut self, outcomes: &mut VecDeque<Outcome>) {
        self.workers.reap(outcomes);
        if self.below_in_flight == 0 {
            return;
        }
        self.below.reap(&mut self.outcomes);
        let mut again = false;
        for outcome in self.outcomes.drain(..) {
            let head = outcome.head();
            self.below_in_flight -= 1;
            match self.rule.done(head, outcome.result()) {
                Some(job) => {
                    self.workers.add(head, job);
                    again = true;
                }
                None => outcomes.push_back(outcome),
            }
        }
        if again {
            self.workers.hand_out();
        }
    }

    fn wait(&mut self) -> io::Result<()> {
        self.workers.hand_out();
        if self.below_in_flight == 0 {
            return self.workers.wait();
        }
        // What workers have done meanwhile is reaped afterwards: nothing below waits for them.
        self.below.wait()
    }
}
