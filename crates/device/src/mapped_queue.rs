//! Where the ring is handed the memory that dma vouches for: the only place that sees both.
//!
//! ```text
//! QueueAddresses -> QueueConfig -> areas() -> AccessGuard::map (three times) -> activate -> Ring
//!
//! MappedQueue --open--> QueueBatch { ring, memory, batch }    for one batch
//!                       '-- drop: what the device may have written of the ring is in the dirty log, guard shut
//!
//!      pop: chains that the guard reaches; the first that it does not reach stays in the ring, and the queue waits
//!
//! MappedQueue --park--> ParkedQueue { position, areas } --resume(position)--> MappedQueue      somebody else serves it
//! ```
//! A ring writes to its areas by itself, past the guard. So whoever wants to write to it must open the queue, and
//! when the guard is shut the areas that the device writes to are marked: once a batch, a page or two, and nothing while
//! no log is on. A large used ring is marked whole, since the ring does not say where it wrote.
//!
//! Where an IOMMU's translations come when they are asked for ([`MappedQueue::behind`]), a chain is taken when all of it is
//! translated, and not before. So nothing of it is missed while it is served in the same batch, if nobody takes
//! translations away meanwhile: the [`InvalidationLock`] sees to that. What is served longer holds its memory, or asks again
//! ([`Ring::translates`]).
use paravane_dma::{Access, AccessGuard, DmaError, GuestRange, Handle, HostSlice, Mapping, Region};
use paravane_ring::device::{
    AreaRequest, Batch, Fetched, Queue, QueueConfig, State, StateError, TranslationCheck,
};
use paravane_ring::{Area, ConfigError, QueueAddresses, QueueError, Segment};
use std::ops::Deref;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use thiserror::Error;

/// Most chains that one [`Ring::pop`] takes: enough to pay for a publish and a system call, few enough that
/// the first completion of a batch does not wait long for its last.
const BATCH: usize = 64;

/// Why a queue could not be started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum StartError {
    /// {0}
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// the {part}: {source}
    #[error("the {part}: {source}")]
    Memory {
        /// Which area.
        part: &'static str,
        /// What is wrong with its memory.
        source: DmaError,
    },
    /// the position to go on from: {0}
    #[error("the position to go on from: {0}")]
    State(#[from] StateError),
}

/// Through it a device's queues go for each batch, and nobody goes through while it is shut: to take translations away.
/// Who waits for requests in flight must open it first, for they end in batches.
#[derive(Clone, Debug, Default)]
pub struct InvalidationLock(Arc<RwLock<()>>);

impl InvalidationLock {
    /// Waits for the batches that are under way, and shuts the gate until the result is dropped.
    pub fn shut(&self) -> RwLockWriteGuard<'_, ()> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn pass(&self) -> RwLockReadGuard<'_, ()> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a guard reaches of a chain.
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
            // All of them, so that what is missed is told at once.
            let missed = segments.iter().filter(|s| !self.guard.translates(s.addr, s.len as usize, access));
            missed.count() == 0
        };
        let reached = of(readable, Access::READ) & of(writable, Access::WRITE);
        self.missed |= !reached;
        reached
    }
}

/// A ring together with the mappings that keep its memory there. The two cannot be parted: whoever moves the
/// ring moves its memory along.
#[derive(Debug)]
pub struct Ring {
    // Dropped before `areas`: fields are dropped in the order in which they are declared.
    queue: Queue,
    areas: [Mapping; 3],
    /// Where it is written down what is in flight, if it is. Dropped after `queue`, too.
    tracking: Option<Mapping>,
    /// Which of the areas the device writes to.
    writable: [bool; 3],
    /// A chain is not translated.
    waits: bool,
}

impl Ring {
    /// Whether a successor is told what is in flight; see [`MappedQueue::resume_tracked`].
    pub(crate) fn is_tracked(&self) -> bool {
        self.tracking.is_some()
    }

    /// See [`Queue::pop`]; with a gate [`Queue::pop_translated`], and the queue waits if a chain was left.
    ///
    /// # Errors
    /// The queue has latched.
    #[inline]
    pub fn pop(&mut self, batch: &mut Batch, memory: &QueueGuard<'_>) -> Result<usize, QueueError> {
        if memory.is_gated() {
            return self.pop_gated(batch, memory);
        }
        self.queue.pop(batch, |addr, table| memory.read(addr, table, Access::READ).is_ok())
    }

    #[cold]
    fn pop_gated(&mut self, batch: &mut Batch, memory: &QueueGuard<'_>) -> Result<usize, QueueError> {
        let mut check = GuardCheck { guard: memory, missed: false };
        let taken = self.queue.pop_translated(batch, &mut check);
        self.waits = check.missed;
        taken
    }

    /// Whether a chain that was taken in an earlier batch can be served now. If not, the queue waits.
    #[must_use]
    pub fn translates(
        &mut self,
        memory: &QueueGuard<'_>,
        readable: &[Segment],
        writable: &[Segment],
    ) -> bool {
        if !memory.is_gated() {
            return true;
        }
        let mut check = GuardCheck { guard: memory, missed: false };
        self.waits = !check.translates(readable, writable);
        !self.waits
    }

    /// See [`Queue::complete`].
    ///
    /// # Errors
    /// The queue has latched.
    pub fn complete(&mut self, head: u16, written: u32) -> Result<(), QueueError> {
        self.queue.complete(head, written)
    }

    /// See [`Queue::complete_all`].
    ///
    /// # Errors
    /// The queue has latched.
    pub fn complete_all(&mut self, chains: impl IntoIterator<Item = (u16, u32)>) -> Result<(), QueueError> {
        self.queue.complete_all(chains)
    }

    /// See [`Queue::expect_completions`].
    pub fn expect_completions(&self, chains: usize) {
        self.queue.expect_completions(chains);
    }

    /// See [`Queue::publish`].
    ///
    /// # Errors
    /// The queue has latched.
    pub fn publish(&mut self) -> Result<bool, QueueError> {
        self.queue.publish()
    }

    /// See [`Queue::disable_kicks`].
    pub fn disable_kicks(&mut self) {
        self.queue.disable_kicks();
    }

    /// See [`Queue::arm_kicks`].
    ///
    /// # Errors
    /// The queue has latched.
    pub fn arm_kicks(&mut self) -> Result<bool, QueueError> {
        self.queue.arm_kicks()
    }

    /// See [`Queue::fail`].
    pub fn fail(&mut self, error: QueueError) -> QueueError {
        self.queue.fail(error)
    }

    /// What the device writes to; empty where it only reads.
    fn written(&self) -> [GuestRange; 3] {
        let mut ranges = self.areas.each_ref().map(Mapping::range);
        for (range, writable) in ranges.iter_mut().zip(self.writable) {
            if !writable {
                range.len = 0;
            }
        }
        ranges
    }

    /// The latched error.
    #[must_use]
    pub fn error(&self) -> Option<QueueError> {
        self.queue.error()
    }

    /// Number of descriptors.
    #[must_use]
    pub fn size(&self) -> u16 {
        self.queue.size()
    }

    /// Chains popped and not yet completed.
    #[must_use]
    pub fn in_flight(&self) -> u16 {
        self.queue.in_flight()
    }
}

/// A live queue with its handle on guest memory and its batch storage.
#[derive(Debug)]
pub struct MappedQueue {
    config: QueueConfig,
    ring: Ring,
    memory: Handle,
    gate: Option<InvalidationLock>,
    batch: Batch,
}

/// A queue that rests, with nothing in flight: its memory, kept mapped, and its position. Somebody else (a vhost back
/// end) may serve it meanwhile, and says where it has come to.
#[derive(Debug)]
pub struct ParkedQueue {
    config: QueueConfig,
    areas: [Mapping; 3],
    memory: Handle,
    gate: Option<InvalidationLock>,
    state: State,
}

/// A live queue during one batch.
#[derive(Debug)]
pub struct QueueBatch<'a> {
    /// The ring.
    pub ring: &'a mut Ring,
    /// Guest memory.
    pub memory: QueueGuard<'a>,
    /// Storage for popped chains.
    pub batch: &'a mut Batch,
}

/// The guard to guest memory during one batch of a queue; marks what the ring may have written when it is shut.
#[derive(Debug)]
pub struct QueueGuard<'a> {
    // Shut before the gate is left.
    guard: AccessGuard<'a>,
    written: [GuestRange; 3],
    passed: Option<RwLockReadGuard<'a, ()>>,
}

impl<'a> Deref for QueueGuard<'a> {
    type Target = AccessGuard<'a>;

    fn deref(&self) -> &AccessGuard<'a> {
        &self.guard
    }
}

impl QueueGuard<'_> {
    /// Whether translations come and go, so that it is to be asked what there is of them.
    #[must_use]
    #[inline]
    pub fn is_gated(&self) -> bool {
        self.passed.is_some()
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
    /// Checks what the driver asked for, maps the three areas, and takes the queue into use.
    ///
    /// # Errors
    /// The configuration is invalid or its memory is not there.
    pub fn start(
        addresses: QueueAddresses,
        max_size: u16,
        features: u64,
        memory: Handle,
    ) -> Result<Self, StartError> {
        Self::begin(addresses, max_size, features, memory, None, None)
    }

    /// As [`MappedQueue::start`], from where another device side has left it.
    ///
    /// # Errors
    /// As [`MappedQueue::start`]; or the position is impossible.
    pub fn resume(
        addresses: QueueAddresses,
        max_size: u16,
        features: u64,
        memory: Handle,
        state: State,
    ) -> Result<Self, StartError> {
        Self::begin(addresses, max_size, features, memory, Some(state), None)
    }

    /// As [`MappedQueue::resume`], with what is in flight written down in `tracking` (all zero, if nobody has used it yet),
    /// whoever's memory that is. What another process had in flight there when it died is served first; `state` counts only
    /// in a new region. A queue that is parked and resumed is tracked no more.
    ///
    /// # Errors
    /// As [`MappedQueue::resume`]; or the region is too short, corrupt, contradicts the ring, or IN_ORDER was negotiated.
    pub fn resume_tracked(
        addresses: QueueAddresses,
        max_size: u16,
        features: u64,
        memory: Handle,
        state: State,
        tracking: Mapping,
    ) -> Result<Self, StartError> {
        Self::begin(addresses, max_size, features, memory, Some(state), Some(tracking))
    }

    fn begin(
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
            // The ring orders its own accesses; the mapping is only to be there.
            let mut access = Access::READ | Access::RELAXED;
            access.set(Access::WRITE, request.writable);
            guard
                .map(request.addr, request.len, access)
                .map_err(|source| StartError::Memory { part: request.part, source })
        };
        let [desc, driver, device] = config.areas();
        let areas = [map(desc)?, map(driver)?, map(device)?];
        drop(guard);
        Self::activate(config, areas, memory, state, tracking)
    }

    fn activate(
        config: QueueConfig,
        areas: [Mapping; 3],
        memory: Handle,
        state: Option<State>,
        tracking: Option<Mapping>,
    ) -> Result<Self, StartError> {
        // SAFETY: a Mapping keeps its bytes mapped while it lives, and no one makes Rust references to guest
        // memory. The mappings are stored in the Ring beside the queue that uses the areas and are dropped
        // after it; neither can be taken out of the Ring but with the queue dropped (`park`). They are what `areas`
        // of the same configuration asked for, in its order. The same goes for the tracking region.
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
        let writable = config.areas().map(|request| request.writable);
        let batch = Batch::new(BATCH.min(usize::from(queue.size())));
        let ring = Ring { queue, areas, tracking, writable, waits: false };
        Ok(Self { config, ring, memory, gate: None, batch })
    }

    /// Translations come and go: from here on each batch goes through `gate`, which whoever takes them away shuts meanwhile,
    /// and a chain that is not translated waits, instead of breaking the queue.
    #[must_use]
    pub fn behind(self, gate: InvalidationLock) -> Self {
        Self { gate: Some(gate), ..self }
    }

    /// A chain is available that is not translated: the queue is to be served again when translations have come.
    #[must_use]
    pub fn waits(&self) -> bool {
        self.ring.waits
    }

    /// Puts the queue to rest.
    ///
    /// # Errors
    /// Something is in flight, or the queue has latched.
    pub fn park(self) -> Result<ParkedQueue, StateError> {
        let state = self.ring.queue.state()?;
        let Self { config, ring: Ring { queue, areas, .. }, memory, gate, .. } = self;
        drop(queue);
        Ok(ParkedQueue { config, areas, memory, gate, state })
    }

    /// Opens the guard for one batch: the newest map is seen from here on.
    pub fn begin_batch(&mut self) -> QueueBatch<'_> {
        let Self { ring, memory, gate, batch, .. } = self;
        // The gate first: who has shut it waits for guards.
        let passed = gate.as_ref().map(InvalidationLock::pass);
        let memory = QueueGuard { guard: memory.enter(), written: ring.written(), passed };
        QueueBatch { memory, ring, batch }
    }

    /// The regions of the newest map, and its number.
    pub fn regions(&mut self) -> (u64, &[Arc<Region>]) {
        self.memory.regions()
    }

    /// Asks the driver for no kicks; see [`Queue::disable_kicks`].
    pub fn disable_kicks(&mut self) {
        self.begin_batch().ring.disable_kicks();
    }

    /// Asks the driver for kicks again; `true` if something has come meanwhile. See [`Queue::arm_kicks`]. A queue that waits
    /// asks for none: no kick helps it.
    ///
    /// # Errors
    /// The queue has latched.
    pub fn arm_kicks(&mut self) -> Result<bool, QueueError> {
        if self.ring.waits {
            return Ok(false);
        }
        self.begin_batch().ring.arm_kicks()
    }

    /// Whether there seems to be something available; see [`Queue::has_available`]. Opens no guard: it only reads the ring.
    #[must_use]
    pub fn has_available(&self) -> bool {
        !self.ring.waits && self.ring.queue.has_available()
    }

    /// The ring, to look at.
    #[must_use]
    pub fn ring(&self) -> &Ring {
        &self.ring
    }
}

impl ParkedQueue {
    /// Where it was left.
    #[must_use]
    pub fn state(&self) -> State {
        self.state
    }

    /// The descriptor, driver and device area in this process. They stay mapped as long as this value lives.
    #[must_use]
    pub fn areas(&self) -> [HostSlice; 3] {
        self.areas.each_ref().map(|area| HostSlice { ptr: area.host().as_ptr(), len: area.len() })
    }

    /// Takes it up at `state`, as whoever had it meanwhile has left it.
    ///
    /// # Errors
    /// The position is impossible, or contradicts the ring.
    pub fn resume(self, state: State) -> Result<MappedQueue, StartError> {
        let live = MappedQueue::activate(self.config, self.areas, self.memory, Some(state), None)?;
        Ok(MappedQueue { gate: self.gate, ..live })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use paravane_dma::{Backing, Memory, Region, RegionConfig};
    use paravane_spec::feature;

    const BASE: u64 = 0x10_0000;
    const SIZE: u64 = 0x1_0000;
    const READ_ONLY: u64 = BASE + SIZE;

    /// One region to write to and, right behind it, one to read only.
    fn memory() -> Memory {
        let region = |gpa, writable| {
            Region::new(RegionConfig { gpa, size: SIZE, backing: Backing::Pages, writable }).unwrap()
        };
        Memory::new(vec![region(BASE, true), region(READ_ONLY, false)]).unwrap()
    }

    fn good() -> QueueAddresses {
        QueueAddresses { size: 16, desc: BASE, driver: BASE + 0x1000, device: BASE + 0x2000 }
    }

    fn start(addresses: QueueAddresses) -> Result<MappedQueue, StartError> {
        MappedQueue::start(addresses, 64, feature::VERSION_1, memory().handle())
    }

    #[test]
    fn a_good_queue_starts_and_outlives_the_machines_memory() {
        let mut queue = start(good()).unwrap();
        // `memory()` has been dropped; the rings are still there.
        let QueueBatch { ring, batch, memory } = queue.begin_batch();
        assert_eq!(ring.size(), 16);
        assert_eq!(ring.pop(batch, &memory), Ok(0));
        assert_eq!(ring.publish(), Ok(false));
        assert_eq!(ring.arm_kicks(), Ok(false));
        assert_eq!(ring.in_flight(), 0);
        drop(memory);
        assert_eq!(queue.ring().error(), None);
    }

    #[test]
    fn a_queue_rests_and_goes_on_where_it_is_told() {
        let memory = memory();
        let started = MappedQueue::start(good(), 64, feature::VERSION_1, memory.handle()).unwrap();
        let parked = started.park().unwrap();
        assert_eq!(parked.state(), State::Split { avail: 0 });
        // The whole of the used ring and the event index behind it.
        assert_eq!(parked.areas().map(|area| area.len), [256, 38, 134]);
        // As if another had served four buffers.
        let mut handle = memory.handle();
        for at in [BASE + 0x1002, BASE + 0x2002] {
            handle.enter().write_obj(at, &4_u16, Access::WRITE).unwrap();
        }
        let resumed = parked.resume(State::Split { avail: 4 }).unwrap();
        assert_eq!(resumed.park().unwrap().state(), State::Split { avail: 4 });
        // A position that the ring does not show is not believed.
        let resumed =
            MappedQueue::resume(good(), 64, feature::VERSION_1, memory.handle(), State::Split { avail: 9 });
        assert!(matches!(resumed, Err(StartError::State(_))), "{resumed:?}");
    }

    #[test]
    fn a_ring_outside_memory_does_not_start() {
        for (part, addresses) in [
            ("desc", QueueAddresses { desc: 0, ..good() }),
            ("driver", QueueAddresses { driver: BASE - 0x1000, ..good() }),
            ("device", QueueAddresses { device: READ_ONLY + SIZE, ..good() }),
            ("desc", QueueAddresses { desc: READ_ONLY + SIZE - 16, ..good() }),
        ] {
            let error = start(addresses).unwrap_err();
            assert!(matches!(error, StartError::Memory { .. }), "{part}: {error}");
        }
    }

    #[test]
    fn only_the_device_area_must_be_writable() {
        let read_only = QueueAddresses { desc: READ_ONLY, driver: READ_ONLY + 0x1000, ..good() };
        assert!(start(read_only).is_ok());
        let error = start(QueueAddresses { device: READ_ONLY, ..good() }).unwrap_err();
        assert!(matches!(error, StartError::Memory { source: DmaError::Denied { .. }, .. }), "{error}");
    }

    #[test]
    fn a_ring_across_two_regions_does_not_start() {
        let error = start(QueueAddresses { desc: READ_ONLY - 64, ..good() }).unwrap_err();
        assert!(
            matches!(error, StartError::Memory { source: DmaError::NotContiguous { .. }, .. }),
            "{error}"
        );
    }

    #[test]
    fn a_bad_configuration_does_not_start() {
        for addresses in [
            QueueAddresses { size: 0, ..good() },
            QueueAddresses { size: 12, ..good() },
            QueueAddresses { size: 128, ..good() },
            QueueAddresses { desc: BASE + 8, ..good() },
            QueueAddresses { device: BASE + 0x2001, ..good() },
            QueueAddresses { driver: u64::MAX - 1, ..good() },
        ] {
            let error = start(addresses).unwrap_err();
            assert!(matches!(error, StartError::Config(_)), "{error}");
        }
    }
}
