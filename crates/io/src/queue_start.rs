//! The one way to a live queue, for every host that serves queues.
//!
//! ```text
//! driver's addresses, features, guest memory --> QueueStart --build(device, kicks, events)--> HostQueue
//!                                                  |                                             |
//!                         a position to go on from, in-flight memory,             nobody's, until it is put on
//!                         an invalidation lock, counters: where wanted            a thread
//! ```
use crate::{HostQueue, Kicks, QueueEvents, QueueKey, QueueWork};
use paravane_device::{Device, InvalidationLock, MappedQueue, StartError, State};
use paravane_dma::{Handle, Mapping};
use paravane_spec::queue::QueueAddresses;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use thiserror::Error;

/// Why [`QueueStart::build`] made no queue.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum QueueStartError {
    /// The device has fewer queues.
    #[error("the device has no queue {queue}")]
    NoQueue {
        /// Index asked for.
        queue: u16,
    },
    /// The driver's configuration is invalid, or its rings are outside memory.
    #[error(transparent)]
    Ring(#[from] StartError),
    /// The device lacks something of the host.
    #[error("the device cannot serve the queue: {0}")]
    Handler(io::Error),
}

/// Starts one queue of a device.
#[derive(Debug)]
#[must_use]
pub struct QueueStart {
    key: QueueKey,
    addresses: QueueAddresses,
    features: u64,
    memory: Handle,
    position: Option<State>,
    tracking: Option<Mapping>,
    lock: Option<InvalidationLock>,
    work: Arc<QueueWork>,
    cut: Option<Arc<AtomicBool>>,
}

impl QueueStart {
    /// Takes what the driver has configured: addresses and negotiated features.
    ///
    /// `memory` is guest memory as the device addresses it. The queue begins at position 0.
    pub fn new(key: QueueKey, addresses: QueueAddresses, features: u64, memory: Handle) -> Self {
        Self {
            key,
            addresses,
            features,
            memory,
            position: None,
            tracking: None,
            lock: None,
            work: Arc::default(),
            cut: None,
        }
    }

    /// Begins at `position`, where another device side has stopped.
    pub fn at(self, position: State) -> Self {
        Self { position: Some(position), ..self }
    }

    /// Records requests in flight in `tracking`, and serves recorded ones first.
    ///
    /// `position` counts only if nothing is recorded yet; see [`MappedQueue::resume`].
    pub fn tracked(self, position: State, tracking: Mapping) -> Self {
        Self { position: Some(position), tracking: Some(tracking), ..self }
    }

    /// Leaves chains that are not translated in the ring.
    ///
    /// See [`MappedQueue::with_invalidation_lock`].
    pub fn behind(self, lock: InvalidationLock) -> Self {
        Self { lock: Some(lock), ..self }
    }

    /// Adds to these counters [new ones].
    pub fn counted_by(self, work: Arc<QueueWork>) -> Self {
        Self { work, ..self }
    }

    /// Ends requests early once `cut` is set.
    ///
    /// See [`paravane_device::QueueHandler::drain_until`].
    pub fn cut_by(self, cut: Arc<AtomicBool>) -> Self {
        Self { cut: Some(cut), ..self }
    }

    /// Maps the rings, has `device` make the handler, and puts both together.
    ///
    /// Kicks arrive at `kicks`; `events` is told of used buffers and errors. Nothing is served
    /// before the queue is on a thread.
    ///
    /// # Errors
    /// See [`QueueStartError`]. The device was asked for a handler only if the rings are valid.
    pub fn build(
        self,
        device: &mut dyn Device,
        kicks: Kicks,
        events: Arc<dyn QueueEvents>,
    ) -> Result<Box<HostQueue>, QueueStartError> {
        let Self { key, addresses, features, memory, position, tracking, lock, work, cut } = self;
        let QueueKey { queue, .. } = key;
        let max = device.queue_sizes().get(usize::from(queue)).copied();
        let max = max.ok_or(QueueStartError::NoQueue { queue })?;
        let live = MappedQueue::resume(addresses, max, features, memory, position, tracking)?;
        let live = match lock {
            Some(lock) => live.with_invalidation_lock(lock),
            None => live,
        };
        let handler = device.start_queue(queue, features).map_err(QueueStartError::Handler)?;
        let mut queue = Box::new(HostQueue::new(key, live, handler, kicks, events, work));
        queue.cut_by(cut);
        Ok(queue)
    }
}
