//! A queue that our threads do not serve, with all that takes it up again.
//!
//! ```text
//! HostQueue --park--> RestingQueue --resume--> HostQueue
//!                      |  ^
//!                      '--'  the handler may go to a back end, and comes back
//! ```
use crate::{Kicks, QueueEvents, QueueKey, QueueWork};
use paravane_device::{ParkedQueue, QueueHandler, StartError, State};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use thiserror::Error;

/// Why [`RestingQueue::resume`] made no queue.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ResumeError {
    /// The position is impossible for this ring.
    #[error(transparent)]
    Ring(#[from] StartError),
    /// The owner has not given the handler back.
    #[error("the queue has no handler: its owner keeps it")]
    NoHandler,
}

/// A parked queue: nothing in flight, kicks wait, memory stays mapped.
pub struct RestingQueue {
    pub(crate) key: QueueKey,
    pub(crate) parked: ParkedQueue,
    /// Where the queue goes on: where it was parked, or where a back end has stopped.
    pub(crate) position: State,
    pub(crate) handler: Option<Box<dyn QueueHandler>>,
    pub(crate) kicks: Kicks,
    pub(crate) events: Arc<dyn QueueEvents>,
    pub(crate) work: Arc<QueueWork>,
    pub(crate) cut: Option<Arc<AtomicBool>>,
}

impl RestingQueue {
    /// As [`RestingQueue::end`]. Returns the position, with nothing in flight.
    pub(crate) fn retire(self) -> (State, u16) {
        let position = self.position;
        self.end();
        (position, 0)
    }

    /// Ends the queue: kicks exit.
    pub(crate) fn end(self) {
        self.kicks.give_back();
        self.kicks.deassign();
    }
}

impl std::fmt::Debug for RestingQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RestingQueue")
            .field("key", &self.key)
            .field("parked", &self.parked)
            .field("kicks", &self.kicks)
            .finish_non_exhaustive()
    }
}
