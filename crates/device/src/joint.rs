//! Where the ring is handed the memory that dma vouches for: the only place that sees both.
//!
//! ```text
//! QueueAddresses -> QueueConfig -> areas() -> Handle::map (three times) -> activate -> Ring
//! ```
use paravane_dma::{Access, DmaError, Handle, Mapping};
use paravane_ring::device::{AreaRequest, Batch, Queue, QueueConfig};
use paravane_ring::{Area, ConfigError, QueueAddresses, QueueError};
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
}

/// A ring together with the mappings that keep its memory there. The two cannot be parted: whoever moves the
/// ring moves its memory along.
#[derive(Debug)]
pub struct Ring {
    // Dropped before `_areas`: fields are dropped in the order in which they are declared.
    queue: Queue,
    _areas: [Mapping; 3],
}

impl Ring {
    /// See [`Queue::pop`].
    ///
    /// # Errors
    /// The queue has latched.
    pub fn pop(
        &mut self,
        batch: &mut Batch,
        fetch: impl FnMut(u64, &mut [u8]) -> bool,
    ) -> Result<usize, QueueError> {
        self.queue.pop(batch, fetch)
    }

    /// See [`Queue::complete`].
    ///
    /// # Errors
    /// The queue has latched.
    pub fn complete(&mut self, head: u16, written: u32) -> Result<(), QueueError> {
        self.queue.complete(head, written)
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

/// A live queue with its door to guest memory and its batch storage.
#[derive(Debug)]
pub struct LiveQueue {
    /// The ring.
    pub ring: Ring,
    /// The door to guest memory.
    pub memory: Handle,
    /// Storage for popped chains.
    pub batch: Batch,
}

impl LiveQueue {
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
        let config = QueueConfig::new(addresses, max_size, features)?;
        let map = |request: AreaRequest| {
            // The ring orders its own accesses; the mapping is only to be there.
            let mut access = Access::READ | Access::RELAXED;
            access.set(Access::WRITE, request.writable);
            memory
                .map(request.addr, request.len, access)
                .map_err(|source| StartError::Memory { part: request.part, source })
        };
        let [desc, driver, device] = config.areas();
        let areas = [map(desc)?, map(driver)?, map(device)?];
        // SAFETY: a Mapping keeps its bytes mapped while it lives, and no one makes Rust references to guest
        // memory. The mappings are stored in the Ring beside the queue that uses the areas and are dropped
        // after it; neither can be taken out of the Ring. They are what `areas` asked for, in its order.
        let queue = unsafe {
            let [desc, driver, device] =
                areas.each_ref().map(|mapping| Area::new(mapping.host(), mapping.len()));
            config.activate(desc, driver, device)?
        };
        let batch = Batch::new(BATCH.min(usize::from(queue.size())));
        Ok(Self { ring: Ring { queue, _areas: areas }, memory, batch })
    }
}
