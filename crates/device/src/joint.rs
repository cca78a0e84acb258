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

    /// See [`Queue::complete_all`].
    ///
    /// # Errors
    /// The queue has latched.
    pub fn complete_all(&mut self, chains: impl IntoIterator<Item = (u16, u32)>) -> Result<(), QueueError> {
        self.queue.complete_all(chains)
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

    fn start(addresses: QueueAddresses) -> Result<LiveQueue, StartError> {
        LiveQueue::start(addresses, 64, feature::VERSION_1, memory().handle())
    }

    #[test]
    fn a_good_queue_starts_and_outlives_the_machines_memory() {
        let mut queue = start(good()).unwrap();
        // `memory()` has been dropped; the rings are still there.
        assert_eq!(queue.ring.size(), 16);
        assert_eq!(queue.ring.pop(&mut queue.batch, |_, _| false), Ok(0));
        assert_eq!(queue.ring.publish(), Ok(false));
        assert_eq!(queue.ring.arm_kicks(), Ok(false));
        assert_eq!(queue.ring.in_flight(), 0);
        assert_eq!(queue.ring.error(), None);
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
