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
mod threads;
mod whole_blocks;

pub(super) use mapped::Mapped;
pub(super) use paravane_store::file::{Uring, probe};
pub(super) use paravane_store::{Job, Outcome, Pieces, StoreQueue};
pub(super) use threads::{AtOnce, Pool};

use super::image::Image;
use crate::MappedQueue;
use beside::Beside;
use paravane_store::{Rest, Store, WakeSet};
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

/// What a disk asks of an engine beyond jobs.
pub(super) trait EngineQueue {
    /// Follows changes of the memory map; called before jobs are pushed.
    fn follow(&mut self, queue: &mut MappedQueue) {
        let _ = queue;
    }

    /// Whether it keeps guest memory beyond that of jobs.
    fn registers(&self) -> bool {
        false
    }

    /// Whether jobs are done in the queue's thread.
    fn copies(&self) -> bool {
        false
    }

    /// The mapped image, if the queue's thread copies to and from it, and it has the disk's layout.
    fn mapped(&self) -> Option<&Mapped> {
        None
    }
}

impl EngineQueue for Box<dyn StoreQueue> {}

impl EngineQueue for Uring {
    fn follow(&mut self, queue: &mut MappedQueue) {
        if self.registers() {
            let (generation, regions) = queue.regions();
            self.register_memory(generation, regions);
        }
    }

    fn registers(&self) -> bool {
        self.registers()
    }
}

/// Defines the enum of engines, which passes calls on: only a store costs a virtual call for each job.
macro_rules! engines {
    ($($(#[$attribute:meta])? $kind:ident($engine:ty),)*) => {
        /// The engine of one queue.
        #[derive(Debug)]
        pub(super) enum Engine {
            $($(#[$attribute])? $kind($engine),)*
        }

        impl StoreQueue for Engine {
            fn register(&mut self, wakes: Option<&WakeSet>) -> io::Result<()> {
                match self { $($(#[$attribute])? Self::$kind(engine) => engine.register(wakes),)* }
            }

            fn rest(&mut self, arm: bool) -> Rest {
                match self { $($(#[$attribute])? Self::$kind(engine) => engine.rest(arm),)* }
            }

            fn quiet(&mut self) {
                match self { $($(#[$attribute])? Self::$kind(engine) => engine.quiet(),)* }
            }

            unsafe fn push(&mut self, head: u16, job: Job) -> io::Result<()> {
                // SAFETY: the caller's promise is the one that is asked for.
                unsafe { match self { $($(#[$attribute])? Self::$kind(engine) => engine.push(head, job),)* } }
            }

            fn submit(&mut self) -> io::Result<()> {
                match self { $($(#[$attribute])? Self::$kind(engine) => engine.submit(),)* }
            }

            fn reap(&mut self, outcomes: &mut VecDeque<Outcome>) {
                match self { $($(#[$attribute])? Self::$kind(engine) => engine.reap(outcomes),)* }
            }

            fn wait(&mut self) -> io::Result<()> {
                match self { $($(#[$attribute])? Self::$kind(engine) => engine.wait(),)* }
            }

            fn cancel(&mut self) {
                match self { $($(#[$attribute])? Self::$kind(engine) => engine.cancel(),)* }
            }
        }

        impl EngineQueue for Engine {
            fn follow(&mut self, queue: &mut MappedQueue) {
                match self { $($(#[$attribute])? Self::$kind(engine) => engine.follow(queue),)* }
            }

            fn registers(&self) -> bool {
                match self { $($(#[$attribute])? Self::$kind(engine) => engine.registers(),)* }
            }

            fn copies(&self) -> bool {
                match self { $($(#[$attribute])? Self::$kind(engine) => engine.copies(),)* }
            }

            fn mapped(&self) -> Option<&Mapped> {
                match self { $($(#[$attribute])? Self::$kind(engine) => engine.mapped(),)* }
            }
        }
    };
}

engines! {
    Uring(Uring),
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
                Self::Uring(Uring::new(image.file()?, *registers, jobs, event.clone())?)
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
}
