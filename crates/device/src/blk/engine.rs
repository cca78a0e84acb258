//! Engines for host I/O.
//!
//! An engine takes jobs and returns results; it knows nothing of requests. Those here are for files;
//! another store brings its own ([`Engine::Store`]). A qcow2 image has one of either below
//! ([`Engine::Clusters`]).
//!
//! ```text
//!   push(head, job)*  ->  submit  ->  ... kernel ...  ->  reap: (head, result)*
//!   quiet() at the start of a serve, rest(true) before the owner sleeps: no signals in between
//! ```
mod beside;
mod clusters;
#[cfg(test)]
pub(super) mod held;
mod immediate;
mod mapped;
mod registered;
mod threads;
mod uring;
mod whole_blocks;

pub(super) use mapped::Mapped;
pub(super) use paravane_store::{Job, Outcome, Pieces};
pub(super) use threads::{AtOnce, Pool};
pub(super) use uring::probe;

use super::image::Image;
use crate::MappedQueue;
use beside::Beside;
use paravane_store::{Rest, Store, StoreQueue, WakeSet};
use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// The engine of a disk, chosen when it is opened.
#[derive(Clone, Debug)]
pub(super) enum EngineKind {
    /// A ring for each queue, with the image, and with guest memory if `registers`.
    ///
    /// The rings hold the image's lock, too: requests outlive a killed process, and nothing else
    /// may write to the image before they are done.
    Uring { registers: bool },
    /// The queue's own thread; the image may be mapped.
    Immediate { mapped: Option<Arc<Mapped>> },
    /// One pool for all queues, and the reason if io_uring was the first choice.
    Threads { pool: Arc<Pool>, why: Option<String> },
    /// The queues of a store other than a file.
    Store(Arc<dyn Store>),
    /// Of a qcow2 image: the engine of its file or store, and one pool for all queues.
    Clusters { below: Box<Self>, pool: Arc<Pool> },
    /// Of a disk with smaller blocks than its file takes: the engine of the file, and one pool for all
    /// queues.
    WholeBlocks { below: Box<Self>, pool: Arc<Pool> },
}

impl EngineKind {
    /// Whether transfers are io_uring's.
    pub(super) fn is_ring(&self) -> bool {
        match self {
            Self::Uring { .. } => true,
            Self::Clusters { below, .. } | Self::WholeBlocks { below, .. } => below.is_ring(),
            Self::Immediate { .. } | Self::Threads { .. } | Self::Store(_) => false,
        }
    }
}

/// The engine of one queue.
#[derive(Debug)]
pub(super) enum Engine {
    Uring(uring::Uring),
    Immediate(immediate::Immediate),
    Threads(threads::Threads),
    Store(Box<dyn StoreQueue>),
    Clusters(Beside<clusters::Clusters>),
    WholeBlocks(Beside<whole_blocks::WholeBlocks>),
    #[cfg(test)]
    Held(held::Held),
}

impl Engine {
    /// Creates an engine with room for `jobs` jobs in flight.
    ///
    /// An engine for files signals `event` when there is something to reap, after `rest(true)`.
    pub(super) fn new(
        kind: &EngineKind,
        image: &Arc<Image>,
        jobs: u16,
        event: &Arc<OwnedFd>,
    ) -> io::Result<Self> {
        Ok(match kind {
            EngineKind::Uring { registers } => {
                Self::Uring(uring::Uring::new(image.file()?, *registers, jobs, event.clone())?)
            }
            EngineKind::Immediate { mapped } => {
                Self::Immediate(immediate::Immediate::new(image.clone(), mapped.clone()))
            }
            EngineKind::Threads { pool, .. } => {
                Self::Threads(threads::Threads::new(pool.clone(), jobs, event.clone())?)
            }
            EngineKind::Store(store) => Self::Store(store.queue(jobs)?),
            EngineKind::Clusters { below, pool } => {
                let rule = clusters::Clusters::new(image)?;
                Self::Clusters(Beside::new(rule, (pool, below), image, jobs, event)?)
            }
            EngineKind::WholeBlocks { below, pool } => {
                let rule = whole_blocks::WholeBlocks::default();
                Self::WholeBlocks(Beside::new(rule, (pool, below), image, jobs, event)?)
            }
        })
    }

    /// Whether it keeps guest memory beyond that of jobs.
    pub(super) fn registers(&self) -> bool {
        match self {
            Self::Uring(uring) => uring.registers(),
            Self::Clusters(clusters) => clusters.below().registers(),
            Self::WholeBlocks(blocks) => blocks.below().registers(),
            _ => false,
        }
    }

    /// Whether jobs are done in the queue's thread.
    pub(super) fn copies(&self) -> bool {
        match self {
            Self::Immediate(_) => true,
            Self::Threads(threads) => threads.copies(),
            Self::Uring(_) | Self::Store(_) | Self::Clusters(_) | Self::WholeBlocks(_) => false,
            #[cfg(test)]
            Self::Held(_) => false,
        }
    }

    /// The mapped image, if the queue's thread copies to and from it, and it has the disk's layout.
    pub(super) fn mapped(&self) -> Option<&Mapped> {
        match self {
            Self::Immediate(immediate) => immediate.mapped(),
            _ => None,
        }
    }

    /// Follows changes of the memory map; called before jobs are pushed.
    pub(super) fn follow(&mut self, queue: &mut MappedQueue) {
        match self {
            Self::Uring(uring) => uring.follow(queue),
            Self::Clusters(clusters) => clusters.follow(queue),
            Self::WholeBlocks(blocks) => blocks.follow(queue),
            _ => {}
        }
    }

    /// Adds the descriptors that completions signal, apart from the event of [`Engine::new`].
    ///
    /// # Errors
    /// See [`StoreQueue::register`].
    pub(super) fn register(&mut self, wakes: Option<&WakeSet>) -> io::Result<()> {
        match self {
            Self::Uring(_) | Self::Immediate(_) | Self::Threads(_) | Self::WholeBlocks(_) => Ok(()),
            Self::Store(queue) => queue.register(wakes),
            Self::Clusters(clusters) => clusters.below_mut().register(wakes),
            #[cfg(test)]
            Self::Held(held) => held.register(wakes),
        }
    }

    /// Turns signals of completions off, until `rest(true)`.
    pub(super) fn quiet(&mut self) {
        match self {
            Self::Uring(uring) => uring.quiet(),
            Self::Clusters(clusters) => clusters.quiet(),
            Self::WholeBlocks(blocks) => blocks.quiet(),
            Self::Immediate(_) | Self::Threads(_) | Self::Store(_) => {}
            #[cfg(test)]
            Self::Held(_) => {}
        }
    }

    /// See [`StoreQueue::rest`].
    pub(super) fn rest(&mut self, arm: bool) -> Rest {
        match self {
            Self::Uring(uring) => uring.rest(arm),
            Self::Immediate(immediate) => Rest::serve_if(immediate.has_work()),
            Self::Threads(threads) => threads.rest(arm),
            Self::Store(queue) => queue.rest(arm),
            Self::Clusters(clusters) => clusters.rest(arm),
            Self::WholeBlocks(blocks) => blocks.rest(arm),
            #[cfg(test)]
            Self::Held(held) => held.rest(arm),
        }
    }

    /// Queues a job. The kernel has it after [`Engine::submit`] at the latest.
    ///
    /// # Errors
    /// The host refuses work; the job was not queued.
    ///
    /// # Safety
    /// The pieces of the job, the array that lists them, and the memory that they name must stay
    /// valid and in place until the job's outcome has been reaped. `head` has no other job in
    /// flight.
    pub(super) unsafe fn push(&mut self, head: u16, job: Job) -> io::Result<()> {
        match self {
            // SAFETY: the caller's promise is the one that is asked for.
            Self::Uring(uring) => unsafe { uring.push(head, job) },
            Self::Immediate(immediate) => {
                immediate.push(head, job);
                Ok(())
            }
            Self::Threads(threads) => {
                threads.push(head, job);
                Ok(())
            }
            // SAFETY: as above.
            Self::Store(queue) => unsafe { queue.push(head, job) },
            // SAFETY: as above.
            Self::Clusters(clusters) => unsafe { clusters.push(head, job) },
            // SAFETY: as above.
            Self::WholeBlocks(blocks) => unsafe { blocks.push(head, job) },
            #[cfg(test)]
            Self::Held(held) => {
                held.push(head, job);
                Ok(())
            }
        }
    }

    /// Submits all queued jobs.
    ///
    /// # Errors
    /// The host refuses work.
    pub(super) fn submit(&mut self) -> io::Result<()> {
        match self {
            Self::Uring(uring) => uring.submit(),
            Self::Immediate(immediate) => {
                immediate.submit();
                Ok(())
            }
            Self::Threads(threads) => {
                threads.submit();
                Ok(())
            }
            Self::Store(queue) => queue.submit(),
            Self::Clusters(clusters) => clusters.submit(),
            Self::WholeBlocks(blocks) => blocks.submit(),
            #[cfg(test)]
            Self::Held(held) => {
                held.submit();
                Ok(())
            }
        }
    }

    /// Gives up jobs that the host has not begun.
    ///
    /// Each still has an outcome: ECANCELED or EINTR if it was given up, which `wait` waits for as
    /// for all others. A write that was interrupted may have written a part.
    pub(super) fn cancel(&mut self) {
        match self {
            Self::Uring(uring) => uring.cancel(),
            Self::Immediate(immediate) => immediate.cancel(),
            Self::Threads(threads) => threads.cancel(),
            Self::Store(queue) => queue.cancel(),
            Self::Clusters(clusters) => clusters.cancel(),
            Self::WholeBlocks(blocks) => blocks.cancel(),
            #[cfg(test)]
            Self::Held(held) => held.cancel(),
        }
    }

    /// Appends the outcomes of finished jobs.
    pub(super) fn reap(&mut self, outcomes: &mut VecDeque<Outcome>) {
        match self {
            Self::Uring(uring) => uring.reap(outcomes),
            Self::Immediate(immediate) => immediate.reap(outcomes),
            Self::Threads(threads) => threads.reap(outcomes),
            Self::Store(queue) => queue.reap(outcomes),
            Self::Clusters(clusters) => clusters.reap(outcomes),
            Self::WholeBlocks(blocks) => blocks.reap(outcomes),
            #[cfg(test)]
            Self::Held(held) => held.reap(outcomes),
        }
    }

    /// Submits, and waits until there is something to reap. A job must be in flight.
    ///
    /// # Errors
    /// The host refuses to wait; jobs stay in flight.
    pub(super) fn wait(&mut self) -> io::Result<()> {
        match self {
            Self::Uring(uring) => uring.wait(),
            Self::Immediate(immediate) => {
                immediate.submit();
                Ok(())
            }
            Self::Threads(threads) => {
                threads.wait();
                Ok(())
            }
            Self::Store(queue) => queue.wait(),
            Self::Clusters(clusters) => clusters.wait(),
            Self::WholeBlocks(blocks) => blocks.wait(),
            #[cfg(test)]
            Self::Held(held) => {
                held.wait();
                Ok(())
            }
        }
    }
}
