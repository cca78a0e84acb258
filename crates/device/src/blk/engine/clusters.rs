//! One queue of a qcow2 image: an engine for the image's file or store, and workers.
//!
//! ```text
//!   push --its clusters are known--> the engine below, at the offset in the file --> reap
//!    |                                  | nothing there: the end of the file         ^
//!    '----------- else -----------------'--> a worker of the pool -> the format -----'
//! ```
//! So most transfers of an image that is in use cost what they cost without a format, and as many are
//! in flight; allocations, zeroes, flushes, backing files and tables are the workers'. A worker enters
//! the clusters that it has come across into the map. A transfer that the map knows only in part is
//! done in parts.
use super::threads::{Pool, Threads};
use super::{Engine, EngineKind, Image, Job, Outcome};
use crate::MappedQueue;
use crate::blk::qcow2::QueueRanges;
use paravane_dma::HostSlice;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

/// See the module.
#[derive(Debug)]
pub(in crate::blk) struct Clusters {
    below: Box<Engine>,
    workers: Threads,
    image: Arc<Image>,
    /// What the transfers below use.
    ranges: Arc<QueueRanges>,
    /// Jobs whose transfers are below, by head; as long as the greatest head so far needs.
    placed: Vec<Placed>,
    /// Number of them.
    below_in_flight: usize,
    /// Empty between calls.
    outcomes: VecDeque<Outcome>,
}

/// A transfer below.
#[derive(Debug, Default)]
struct Placed {
    job: Option<Job>,
    /// Its pieces, if it is a part of the job.
    part: Vec<HostSlice>,
}

impl Clusters {
    /// An engine with room for `jobs` jobs; `below` is that of the image's file or store.
    pub(super) fn new(
        pool: &Arc<Pool>,
        below: &EngineKind,
        image: &Arc<Image>,
        jobs: u16,
        event: &Arc<OwnedFd>,
    ) -> io::Result<Self> {
        let below = Box::new(Engine::new(below, image, jobs, event)?);
        let qcow2 = image.qcow2.as_ref().ok_or_else(|| io::Error::other("the image has no clusters"))?;
        Ok(Self {
            below,
            workers: Threads::new(pool.clone(), jobs, event.clone())?,
            image: image.clone(),
            ranges: qcow2.ranges(),
            placed: Vec::new(),
            below_in_flight: 0,
            outcomes: VecDeque::with_capacity(jobs.into()),
        })
    }

    /// The engine of the image's file or store.
    pub(super) fn below(&self) -> &Engine {
        &self.below
    }

    pub(super) fn below_mut(&mut self) -> &mut Engine {
        &mut self.below
    }

    pub(super) fn follow(&mut self, queue: &mut MappedQueue) {
        self.below.follow(queue);
    }

    pub(super) fn own_fd(&self) -> Option<BorrowedFd<'_>> {
        self.below.own_fd()
    }

    pub(super) fn quiet(&mut self) {
        self.below.quiet();
    }

    pub(super) fn listen(&mut self) -> bool {
        // Both, so that both signal.
        let below = self.below.listen();
        let workers = match self.below.own_fd() {
            Some(_) => self.workers.listen(),
            // `below` has cleared the event.
            None => self.workers.has_outcomes(),
        };
        below || workers
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
        if self.placed.len() <= usize::from(head) {
            self.placed.resize_with(usize::from(head) + 1, Placed::default);
        }
        let placed = &mut self.placed[usize::from(head)];
        if let Some(qcow2) = &self.image.qcow2
            && let Some(transfer) = qcow2.place(job, (head, &self.ranges), &mut placed.part)
        {
            // SAFETY: the caller promises that the memory is valid until the job's outcome has been
            // reaped, which is that of this transfer, or comes after it. The list is the job's, or
            // `part`, which stays as it is while the head is in use.
            if let Err(error) = unsafe { self.below.push(head, transfer) } {
                self.ranges.leave(head);
                return Err(error);
            }
            placed.job = Some(job);
            self.below_in_flight += 1;
            return Ok(());
        }
        self.workers.push(head, job);
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
            let job = self.placed.get_mut(usize::from(head)).and_then(|placed| placed.job.take());
            self.below_in_flight -= 1;
            self.ranges.leave(head);
            match (outcome.result(), job) {
                // The file ends within a cluster, which reads as zeroes there.
                (0, Some(job)) => {
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

impl Drop for Clusters {
    fn drop(&mut self) {
        if self.below_in_flight > 0 {
            // Nobody knows when these transfers end: their clusters stay in use.
            std::mem::forget(self.ranges.clone());
        }
    }
}
