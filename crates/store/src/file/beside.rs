//! An engine for most jobs of a queue, and workers for the rest.
//!
//! ```text
//!   push --the rule places it--> the engine below --> reap
//!    |                             | the rule sends it to a worker
//!    '--------- else --------------'---------------> a worker of the pool --> reap
//! ```
use super::Threads;
use crate::{Job, Outcome, Rest, StoreQueue, WakeSet};
use paravane_dma::Region;
use std::collections::VecDeque;
use std::fmt::Debug;
use std::io;
use std::sync::Arc;

/// Which jobs are the engine's, and which the workers'.
///
/// # Safety
/// What [`Rule::place`] returns has only memory of the job. The list of its pieces is the job's, or
/// stays in place until [`Rule::done`].
pub unsafe trait Rule: Debug + Send {
    /// What the engine below does for a job. `None`: a worker does the job.
    fn place(&mut self, head: u16, job: Job) -> Option<Job>;

    /// The engine below has done what was placed for a job, or has refused it \[`None`\].
    ///
    /// Returns whether a worker must do the job.
    fn done(&mut self, head: u16, job: Job, result: Option<i32>) -> bool;
}

/// See the module.
#[derive(Debug)]
pub struct Beside<R> {
    below: Box<dyn StoreQueue>,
    workers: Threads,
    rule: R,
    /// Jobs below, by head; as long as the greatest head so far needs.
    placed: Vec<Option<Job>>,
    /// Number of them.
    below_in_flight: usize,
    /// Empty between calls.
    outcomes: VecDeque<Outcome>,
}

impl<R: Rule> Beside<R> {
    /// An engine for the jobs that `rule` places in `below`, and for others, which `workers` do.
    pub fn new(rule: R, below: Box<dyn StoreQueue>, workers: Threads) -> Self {
        Self { below, workers, rule, placed: Vec::new(), below_in_flight: 0, outcomes: VecDeque::new() }
    }
}

impl<R: Rule> StoreQueue for Beside<R> {
    fn register(&mut self, wakes: Option<&WakeSet>) -> io::Result<()> {
        self.workers.register(wakes)?;
        self.below.register(wakes)
    }

    fn registers(&self) -> bool {
        self.below.registers()
    }

    fn register_memory(&mut self, generation: u64, regions: &[Arc<Region>]) {
        self.below.register_memory(generation, regions);
    }

    fn quiet(&mut self) {
        self.below.quiet();
    }

    fn rest(&mut self, arm: bool) -> Rest {
        // Both, so that both signal.
        let below = self.below.rest(arm);
        below.max(self.workers.rest(arm))
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
            self.rule.done(head, job, None);
            return Err(error);
        }
        if self.placed.len() <= usize::from(head) {
            self.placed.resize(usize::from(head) + 1, None);
        }
        self.placed[usize::from(head)] = Some(job);
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
            let job = self.placed.get_mut(usize::from(head)).and_then(Option::take);
            match job.filter(|job| self.rule.done(head, *job, Some(outcome.result()))) {
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
