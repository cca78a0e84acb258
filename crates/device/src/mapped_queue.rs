//! A virtqueue together with the guest memory that it lies in.
//!
//! The ring accesses its areas through raw host memory, and `dma` vouches for that memory. This
//! module sees both.
//!
//! ```text
//! QueueAddresses -> QueueConfig --areas--> AccessGuard::map --activate, keeping--> Queue
//!
//! MappedQueue --begin_batch--> QueueBatch { queue, memory, chains, latency }   for one batch
//!                              '-- drop: marks the device's areas in the dirty log
//!
//! MappedQueue --park--> ParkedQueue { position, areas } --resume(position)--> MappedQueue
//! ```
//! **The queue owns its mappings** ([`Queue::keeping`]), so a handler gets the ring's own
//! queue, and may move or swap queues without parting one from its memory.
//!
//! **Dirty log.** The ring writes to its areas past the access guard, so it writes only during a
//! batch. At the end of a batch the areas that the device writes to are marked as a whole: one page
//! or two, and nothing while no log is on.
//!
//! **IOMMU.** Where translations are fetched on demand ([`MappedQueue::with_invalidation_lock`]), a
//! chain is popped once all of it is translated. The first chain that is not stays in the ring, and
//! the queue waits. The [`InvalidationLock`] keeps translations in place during a batch. A request
//! that is served longer keeps its memory mapped, or checks again
//! ([`QueueGuard::translates_chain`]).
use crate::latency::{LatencyRecorder, ProbedQueue, QueueLatency};
use paravane_dma::{Access, AccessGuard, DmaError, GuestRange, Handle, HostSlice, InPlace, Mapping, Region};
use paravane_ring::device::{
    AreaRequest, Batch, Fetched, Queue, QueueConfig, State, StateError, TableMemory, TranslationCheck,
};
use paravane_ring::{Area, ConfigError, QueueAddresses, QueueError, Segment};
use std::cell::Cell;
use std::ops::Deref;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use thiserror::Error;

/// Chains that a batch has room for.
///
/// Enough to share the cost of a publication and a system call, few enough that the first
/// completion does not wait long for the last.
const BATCH: usize = 64;

/// A queue cannot be started or resumed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum StartError {
    /// The size or an address is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// An area is not in guest memory, not in one piece, or not writable.
    #[error("the {part} is not usable guest memory: {source}")]
    Memory {
        /// Name of the area.
        part: &'static str,
        /// Cause.
        source: DmaError,
    },
    /// The position to resume from is impossible.
    #[error("cannot resume the queue: {0}")]
    State(#[from] StateError),
}

/// Excludes the removal of translations from the batches of a device's queues.
///
/// Each batch holds it shared, and [`lock`](InvalidationLock::lock) holds it exclusively. Do not
/// wait for requests in flight while you hold it: they complete in batches.
#[derive(Clone, Debug, Default)]
pub struct InvalidationLock(Arc<RwLock<()>>);

impl InvalidationLock {
    /// Waits for batches in progress, and blocks new ones until the result is dropped.
    pub fn lock(&self) -> RwLockWriteGuard<'_, ()> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn share(&self) -> RwLockReadGuard<'_, ()> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reads indirect tables in place.
struct GuardTables<'a>(&'a AccessGuard<'a>, InPlace<'a>);

impl TableMemory for GuardTables<'_> {
    #[inline(always)]
    fn in_place(&mut self, addr: u64, len: u32) -> Option<Area> {
        let table = self.1.find(addr, len)?;
        // SAFETY: guest memory, to which nobody makes Rust references, and which stays mapped while
        // the guard lives. The queue uses it only until it returns to the guard's borrower.
        Some(unsafe { Area::new(table, len as usize) })
    }

    fn copy(&mut self, addr: u64, table: &mut [u8]) -> bool {
        self.0.read(addr, table, Access::READ).is_ok()
    }
}

/// Checks chains against the translations that an access guard sees.
struct GuardCheck<'a> {
    guard: &'a AccessGuard<'a>,
    missed: bool,
}

impl TranslationCheck for GuardCheck<'_> {
    fn fetch(&mut self, addr: u64, table: &mut [u8]) -> Fetched {
        if !self.guard.translates(addr, table.len(), Access::READ) {
            self.missed = true;
            return Fetched::Later;
        }
        if self.guard.read(addr, table, Access::READ).is_ok() { Fetched::Done } else { Fetched::Never }
    }

    fn translates(&mut self, readable: &[Segment], writable: &[Segment]) -> bool {
        let of = |segments: &[Segment], access| {
            // Checks all of them, so that all misses are reported at once.
            let missed = segments.iter().filter(|s| !self.guard.translates(s.addr, s.len as usize, access));
            missed.count() == 0
        };
        let translated = of(readable, Access::READ) & of(writable, Access::WRITE);
        self.missed |= !translated;
        translated
    }
}

/// A live queue with its handle to guest memory and storage for one batch.
#[derive(Debug)]
pub struct MappedQueue {
    config: QueueConfig,
    queue: Queue,
    /// Descriptor, driver and device area. The queue keeps them, too.
    areas: Arc<[Mapping; 3]>,
    /// Areas that the device writes to; the others are empty.
    written: [GuestRange; 3],
    memory: Handle,
    invalidation: Option<InvalidationLock>,
    chains: Batch,
    /// An available chain is not translated.
    waiting: bool,
    shares_thread: bool,
    latency: LatencyRecorder,
}

/// A queue at rest: nothing in flight, its areas mapped, its position known.
///
/// Another device side (a vhost back end) may serve the queue meanwhile, and reports the position
/// to resume from.
#[derive(Debug)]
pub struct ParkedQueue {
    config: QueueConfig,
    areas: Arc<[Mapping; 3]>,
    memory: Handle,
    invalidation: Option<InvalidationLock>,
    state: State,
}

/// A live queue during one batch.
///
/// The newest memory map applies until it is dropped.
#[derive(Debug)]
pub struct QueueBatch<'a> {
    /// The virtqueue.
    ///
    /// Pop by [`QueueBatch::pop`] or [`QueueGuard::pop`], which check translations.
    pub queue: &'a mut Queue,
    /// Access to guest memory.
    pub memory: QueueGuard<'a>,
    /// Storage for popped chains.
    pub chains: &'a mut Batch,
    /// Records the latencies of requests.
    pub latency: &'a mut LatencyRecorder,
}

impl QueueBatch<'_> {
    /// Pops available chains into [`QueueBatch::chains`], and returns their number.
    ///
    /// See [`QueueGuard::pop`].
    ///
    /// # Errors
    /// The queue has latched.
    #[inline]
    pub fn pop(&mut self) -> Result<usize, QueueError> {
        self.memory.pop(self.queue, self.chains)
    }
}

/// Access to guest memory during one batch of a queue.
///
/// Marks what the ring may have written when dropped.
#[derive(Debug)]
pub struct QueueGuard<'a> {
    // Dropped before the invalidation lock is released.
    guard: AccessGuard<'a>,
    written: [GuestRange; 3],
    waiting: &'a Cell<bool>,
    shared: Option<RwLockReadGuard<'a, ()>>,
}

impl<'a> Deref for QueueGuard<'a> {
    type Target = AccessGuard<'a>;

    fn deref(&self) -> &AccessGuard<'a> {
        &self.guard
    }
}

impl QueueGuard<'_> {
    /// Whether translations are fetched on demand, so that any address may lack one.
    #[must_use]
    #[inline]
    pub fn translates_on_demand(&self) -> bool {
        self.shared.is_some()
    }

    /// Pops available chains of `queue` into `chains`, and returns their number.
    ///
    /// See [`Queue::pop`].
    ///
    /// Where translations are fetched on demand, it stops before the first chain that lacks one
    /// ([`Queue::pop_translated`]). The queue then [waits](MappedQueue::waits_for_translation).
    ///
    /// # Errors
    /// The queue has latched.
    #[inline]
    pub fn pop(&self, queue: &mut Queue, chains: &mut Batch) -> Result<usize, QueueError> {
        if self.translates_on_demand() {
            return self.pop_translated(queue, chains);
        }
        queue.pop_in_place(chains, GuardTables(&self.guard, self.guard.in_place()))
    }

    #[cold]
    fn pop_translated(&self, queue: &mut Queue, chains: &mut Batch) -> Result<usize, QueueError> {
        let mut check = GuardCheck { guard: self, missed: false };
        let taken = queue.pop_translated(chains, &mut check);
        self.waiting.set(check.missed);
        taken
    }

    /// Whether a chain of an earlier batch is still translated.
    ///
    /// If not, the queue [waits](MappedQueue::waits_for_translation).
    #[must_use]
    pub fn translates_chain(&self, readable: &[Segment], writable: &[Segment]) -> bool {
        if !self.translates_on_demand() {
            return true;
        }
        let mut check = GuardCheck { guard: self, missed: false };
        let translated = check.translates(readable, writable);
        self.waiting.set(!translated);
        translated
    }
}

impl Drop for QueueGuard<'_> {
    fn drop(&mut self) {
        for range in self.written {
            self.guard.mark(range);
        }
    }
}

impl MappedQueue {
    /// Checks the driver's configuration, maps the areas, and activates the queue.
    ///
    /// # Errors
    /// The configuration is invalid, or an area is not in guest memory.
    pub fn start(
        addresses: QueueAddresses,
        max_size: u16,
        features: u64,
        memory: Handle,
    ) -> Result<Self, StartError> {
        Self::resume(addresses, max_size, features, memory, None, None)
    }

    /// As [`MappedQueue::start`], at the position `state` where another device side stopped.
    ///
    /// In-flight tracking in the region `tracking` needs a position. A new region is all zero; the
    /// queue then starts at `state`. In a used one, the chains that the previous process had in
    /// flight are popped first, and of `state` only the layout counts. Tracking ends when the queue
    /// is parked.
    ///
    /// # Errors
    /// As [`MappedQueue::start`]; or the position is impossible; or the region is too short, corrupt,
    /// contradicts the ring, or IN_ORDER was negotiated.
    pub fn resume(
        addresses: QueueAddresses,
        max_size: u16,
        features: u64,
        mut memory: Handle,
        state: Option<State>,
        tracking: Option<Mapping>,
    ) -> Result<Self, StartError> {
        let config = QueueConfig::new(addresses, max_size, features)?;
        let guard = memory.enter();
        let map = |request: AreaRequest| {
            // Relaxed: the ring orders its own accesses.
            let mut access = Access::READ | Access::RELAXED;
            access.set(Access::WRITE, request.writable);
            guard
                .map(request.addr, request.len, access)
                .map_err(|source| StartError::Memory { part: request.part, source })
        };
        let [desc, driver, device] = config.areas();
        let areas = Arc::new([map(desc)?, map(driver)?, map(device)?]);
        drop(guard);
        Self::activate(config, areas, memory, state, tracking)
    }

    fn activate(
        config: QueueConfig,
        areas: Arc<[Mapping; 3]>,
        memory: Handle,
        state: Option<State>,
        tracking: Option<Mapping>,
    ) -> Result<Self, StartError> {
        // SAFETY: a Mapping keeps its bytes mapped while it lives, and nobody makes Rust references
        // to guest memory. The queue owns them, areas and tracking region, from the next statement
        // on and drops them after itself; nothing takes an owner from a queue (`Queue::keeping`).
        // The mappings are those that `areas` of the same configuration asked for, in its order.
        let queue = unsafe {
            let area = |mapping: &Mapping| Area::new(mapping.host(), mapping.len());
            let [desc, driver, device] = areas.each_ref().map(area);
            match (state, &tracking) {
                (Some(state), Some(tracking)) => {
                    config.resume_tracked(desc, driver, device, state, area(tracking))?
                }
                (Some(state), None) => config.resume(desc, driver, device, state)?,
                (None, _) => config.activate(desc, driver, device)?,
            }
        };
        let queue = queue.keeping((Arc::clone(&areas), tracking));
        let mut written = areas.each_ref().map(Mapping::range);
        for (range, request) in written.iter_mut().zip(config.areas()) {
            if !request.writable {
                range.len = 0;
            }
        }
        let chains = Batch::new(BATCH.min(usize::from(queue.size())));
        Ok(Self {
            config,
            queue,
            areas,
            written,
            memory,
            invalidation: None,
            chains,
            waiting: false,
            shares_thread: false,
            latency: LatencyRecorder::default(),
        })
    }

    /// Records latencies into `latency` from now on [none are recorded]; `None`: records none.
    ///
    /// Only one live queue at a time may record into it. Probes name the queue by `device` and
    /// `queue`, its index. Requests that are in flight and were taken without are not recorded.
    pub fn record_into(&mut self, latency: Option<Arc<QueueLatency>>, device: &str, queue: u16) {
        self.latency = latency.map_or_else(LatencyRecorder::default, |latency| {
            LatencyRecorder::new(latency, ProbedQueue::new(device, queue))
        });
    }

    /// Says whether the thread serves other queues, too \[no\].
    pub fn share_thread(&mut self, shares: bool) {
        self.shares_thread = shares;
    }

    /// Whether the thread serves other queues: a handler that copies does so in small portions.
    #[must_use]
    pub fn shares_thread(&self) -> bool {
        self.shares_thread
    }

    /// The recorder of latencies.
    pub fn latency(&mut self) -> &mut LatencyRecorder {
        &mut self.latency
    }

    /// Marks translations as fetched on demand, and taken away under `lock`.
    ///
    /// Each batch holds `lock` shared. A chain that is not translated waits; without a lock it
    /// latches the queue.
    #[must_use]
    pub fn with_invalidation_lock(self, lock: InvalidationLock) -> Self {
        Self { invalidation: Some(lock), ..self }
    }

    /// Whether an available chain lacks a translation.
    ///
    /// Serve the queue again when translations have been added.
    #[must_use]
    pub fn waits_for_translation(&self) -> bool {
        self.waiting
    }

    /// Puts the queue to rest.
    ///
    /// # Errors
    /// Something is in flight, or the queue has latched.
    pub fn park(self) -> Result<ParkedQueue, StateError> {
        let state = self.queue.state()?;
        let Self { config, queue, areas, memory, invalidation, .. } = self;
        drop(queue);
        Ok(ParkedQueue { config, areas, memory, invalidation, state })
    }

    /// Ends the queue, and returns its position.
    ///
    /// Chains in flight stay in the tracking region, for [`MappedQueue::resume`].
    ///
    /// # Errors
    /// The queue has latched; or something is in flight, and the queue is not tracked.
    pub fn leave(self) -> Result<State, StateError> {
        self.queue.tracked_state()
    }

    /// Begins a batch: enters guest memory, at its newest map.
    pub fn begin_batch(&mut self) -> QueueBatch<'_> {
        let Self { queue, memory, written, invalidation, chains, waiting, latency, .. } = self;
        // The lock first: its exclusive holder waits for guards.
        let shared = invalidation.as_ref().map(InvalidationLock::share);
        let waiting = Cell::from_mut(waiting);
        let memory = QueueGuard { guard: memory.enter(), written: *written, waiting, shared };
        QueueBatch { memory, queue, chains, latency }
    }

    /// Regions of the newest memory map, and its generation.
    pub fn regions(&mut self) -> (u64, &[Arc<Region>]) {
        self.memory.regions()
    }

    /// Turns kicks off; see [`Queue::disable_kicks`].
    pub fn disable_kicks(&mut self) {
        self.begin_batch().queue.disable_kicks();
    }

    /// Turns kicks on; `true` if more is available. See [`Queue::arm_kicks`].
    ///
    /// Does nothing while the queue waits for a translation, since no kick brings that.
    ///
    /// # Errors
    /// The queue has latched.
    pub fn arm_kicks(&mut self) -> Result<bool, QueueError> {
        if self.waiting {
            return Ok(false);
        }
        self.begin_batch().queue.arm_kicks()
    }

    /// Whether something seems to be available; see [`Queue::has_available`].
    ///
    /// Only reads the ring, so needs no batch.
    #[must_use]
    pub fn has_available(&self) -> bool {
        !self.waiting && self.queue.has_available()
    }

    /// The virtqueue, for its size, error and number of chains in flight.
    #[must_use]
    pub fn queue(&self) -> &Queue {
        &self.queue
    }
}

impl ParkedQueue {
    /// What the driver has configured.
    #[must_use]
    pub fn config(&self) -> &QueueConfig {
        &self.config
    }

    /// Position where the queue was parked.
    #[must_use]
    pub fn state(&self) -> State {
        self.state
    }

    /// Descriptor, driver and device area in this process.
    ///
    /// They stay mapped while this value lives.
    #[must_use]
    pub fn areas(&self) -> [HostSlice; 3] {
        self.areas.each_ref().map(|area| HostSlice { ptr: area.host().as_ptr(), len: area.len() })
    }

    /// Resumes the queue at `state`, the position where the other device side stopped.
    ///
    /// # Errors
    /// The position is impossible, or contradicts the ring.
    pub fn resume(self, state: State) -> Result<MappedQueue, StartError> {
        let live = MappedQueue::activate(self.config, self.areas, self.memory, Some(state), None)?;
        Ok(MappedQueue { invalidation: self.invalidation, ..live })
    }
}
#[cfg(test)]
mod tests;
