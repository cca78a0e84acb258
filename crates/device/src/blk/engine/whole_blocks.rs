//! io_uring for a disk with smaller blocks than direct I/O on its file takes, and workers for the rest.
//!
//! ```text
//!   push --> io_uring --EINVAL--> a worker: whole blocks (blk/whole_blocks.rs) --> reap
//!                '------------------------ else ---------------------------------> reap
//! ```
//! To change a part of a block takes a read and a write, for which workers wait.
use super::threads::{Pool, Threads};
use super::{Engine, EngineKind, Image, Job, Outcome};
use crate::MappedQueue;
use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// See the module.
#[derive(Debug)]
pub(in crate::blk) struct WholeBlocks {
    below: Box<Engine>,
    workers: Threads,
    /// Transfers below, by head; as long as the greatest head so far needs.
    transfers: Vec<Option<Job>>,
    /// Jobs below.
    below_in_flight: usize,
    /// Empty between calls.
    outcomes: VecDeque<Outcome>,
}

impl WholeBlocks {
    /// An engine with room for `jobs` jobs; `below` is that of the image's file.
    pub(super) fn new(
        pool: &Arc<Pool>,
        below: &EngineKind,
        image: &Arc<Image>,
        jobs: u16,
        event: &Arc<OwnedFd>,
    ) -> io::Result<Self> {
        Ok(Self {
            below: Box::new(Engine::new(below, image, jobs, event)?),
            workers: Threads::new(pool.clone(), jobs, event.clone())?,
            transfers: Vec::new(),
            below_in_flight: 0,
            outcomes: VecDeque::with_capacity(jobs.into()),
        })
    }

    /// The engine of the image's file.
    pub(super) fn below(&self) -> &Engine {
        &self.below
    }

    pub(super) fn follow(&mut self, queue: &mut MappedQueue) {
        self.below.follow(queue);
    }

    pub(super) fn quiet(&mut self) {
        self.below.quiet();
    }

    pub(super) fn listen(&mut self) -> bool {
        // The engine below has cleared the event of both.
        let below = self.below.listen();
        below || self.workers.has_outcomes()
    }

    pub(super) fn has_news(&mut self) -> Option<bool> {
        match (self.below.has_news(), self.workers.has_news()) {
            (Some(true), _) | (_, Some(true)) => Some(true),
            (Some(false), Some(false)) => Some(false),
            _ => None,
        }
    }

    /// # Safety
    /// See [`Engine::push`].
    pub(super) unsafe fn push(&mut self, head: u16, job: Job) -> io::Result<()> {
        if self.transfers.len() <= usize::from(head) {
            self.transfers.resize(usize::from(head) + 1, None);
        }
        // SAFETY: the caller promises that the memory is valid until the outcome of the job has been
        // reaped, which is that of the engine below, or comes after it.
        unsafe { self.below.push(head, job) }?;
        let is_transfer = matches!(job, Job::Read { .. } | Job::Write { .. });
        self.transfers[usize::from(head)] = is_transfer.then_some(job);
        self.below_in_flight += 1;
        Ok(())
    }

    pub(super) fn submit(&mut self) -> io::Result<()> {
        self.workers.submit();
        self.below.submit()
    }

    pub(super) fn cancel(&mut self) {
        self.below.cancel();
        self.workers.cancel();
    }

    pub(super) fn reap(&mut self, outcomes: &mut VecDeque<Outcome>) {
        self.workers.reap(outcomes);
        if self.below_in_flight == 0 {
            return;
        }
        self.below.reap(&mut self.outcomes);
        let mut again = false;
        for outcome in self.outcomes.drain(..) {
            let head = outcome.head();
            self.below_in_flight -= 1;
            let transfer = self.transfers.get_mut(usize::from(head)).and_then(Option::take);
            match (outcome.result(), transfer) {
                (result, Some(job)) if result == -libc::EINVAL => {
                    self.workers.push(head, job);
                    again = true;
                }
                _ => outcomes.push_back(outcome),
            }
        }
        if again {
            self.workers.submit();
        }
    }

    pub(super) fn wait(&mut self) -> io::Result<()> {
        self.workers.submit();
        if self.below_in_flight == 0 {
            self.workers.wait();
            return Ok(());
        }
        // What workers have done meanwhile is reaped afterwards: nothing below waits for them.
        self.below.wait()
    }
}
