//! The device's side of a queue, whatever its layout.
use crate::split::device::Ring;
use crate::split::{avail_bytes, desc_bytes, used_bytes};
use crate::{Area, ConfigError, QueueAddresses, QueueError};
use paravane_spec::feature;
use paravane_spec::queue::MAX_SIZE;
use paravane_spec::split::{AVAIL_ALIGN, DESC_ALIGN, USED_ALIGN};

pub use crate::batch::{Batch, Chain};

/// Most descriptors in one chain, indirect ones included. The specification's limit is the queue size;
/// Linux exceeds it with indirect tables, so this is a fixed bound instead. A chain outside indirect tables
/// is bounded by the queue size too.
pub const MAX_CHAIN: usize = 1024;

/// One of the three areas of a queue, with what its memory must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AreaRequest {
    /// What it is called in errors.
    pub part: &'static str,
    /// First byte, in the device's address space.
    pub addr: u64,
    /// Bytes.
    pub len: usize,
    /// Whether the device writes to it.
    pub writable: bool,
}

/// A queue's checked and frozen configuration; the only way to a [`Queue`].
#[derive(Clone, Copy, Debug)]
pub struct QueueConfig {
    addresses: QueueAddresses,
    features: u64,
}

impl QueueConfig {
    /// Feature bits that queues implement; a device offers these and its own.
    pub const FEATURES: u64 = feature::INDIRECT_DESC | feature::EVENT_IDX;

    /// Feature bits that change a queue's layout or rules and are not implemented.
    const REFUSED: u64 = feature::RING_PACKED | feature::IN_ORDER;

    /// Checks what a driver asked for. `features` are the negotiated ones, device-specific bits are ignored.
    ///
    /// # Errors
    /// The size is not a power of two from 1 to `max_size`, an area is misaligned or wraps around, or a
    /// negotiated ring feature is not implemented.
    pub fn new(addresses: QueueAddresses, max_size: u16, features: u64) -> Result<Self, ConfigError> {
        let (size, max) = (addresses.size, max_size.min(MAX_SIZE));
        if !size.is_power_of_two() || size > max {
            return Err(ConfigError::Size { size, max });
        }
        if features & Self::REFUSED != 0 {
            return Err(ConfigError::Features(features & Self::REFUSED));
        }
        let config = Self { addresses, features };
        for (AreaRequest { part, addr, len, .. }, align) in
            config.areas().into_iter().zip([DESC_ALIGN, AVAIL_ALIGN, USED_ALIGN])
        {
            if !addr.is_multiple_of(align) {
                return Err(ConfigError::Misaligned { part, addr, align });
            }
            if addr.checked_add(len as u64).is_none() {
                return Err(ConfigError::Wraps { part, addr });
            }
        }
        Ok(config)
    }

    /// The memory that [`QueueConfig::activate`] needs: descriptor, driver and device area.
    #[must_use]
    pub fn areas(&self) -> [AreaRequest; 3] {
        let QueueAddresses { size, desc, driver, device } = self.addresses;
        [
            AreaRequest { part: "descriptor area", addr: desc, len: desc_bytes(size), writable: false },
            AreaRequest { part: "driver area", addr: driver, len: avail_bytes(size), writable: false },
            AreaRequest { part: "device area", addr: device, len: used_bytes(size), writable: true },
        ]
    }

    /// Takes the queue into use. From here on nothing of the configuration can change.
    ///
    /// # Errors
    /// An area is shorter than [`QueueConfig::areas`] asked for, or misaligned in host memory.
    ///
    /// # Safety
    /// Each area must be the memory that [`QueueConfig::areas`] asked for and stay mapped until the queue
    /// has been dropped.
    pub unsafe fn activate(self, desc: Area, driver: Area, device: Area) -> Result<Queue, ConfigError> {
        // SAFETY: the caller's promise is the same.
        unsafe { self.activate_at(desc, driver, device, 0) }
    }

    /// As [`QueueConfig::activate`], with both rings at position `start`.
    ///
    /// # Safety
    /// As [`QueueConfig::activate`].
    pub(crate) unsafe fn activate_at(
        self,
        desc: Area,
        driver: Area,
        device: Area,
        start: u16,
    ) -> Result<Queue, ConfigError> {
        let areas = [desc, driver, device];
        // Descriptors are fetched as words of 8 bytes.
        for ((AreaRequest { part, addr, len, .. }, area), align) in
            self.areas().into_iter().zip(areas).zip([8, AVAIL_ALIGN, USED_ALIGN])
        {
            if area.len() < len {
                return Err(ConfigError::Short { part, needed: len, given: area.len() });
            }
            if !area.is_aligned(align as usize) {
                return Err(ConfigError::Misaligned { part, addr, align });
            }
        }
        let indirect = self.features & feature::INDIRECT_DESC != 0;
        let event_idx = self.features & feature::EVENT_IDX != 0;
        // SAFETY: the caller promises the mapping; `new` checked the size, and lengths and alignment are
        // checked above.
        Ok(Queue { ring: unsafe { Ring::new(areas, self.addresses.size, indirect, event_idx, start) } })
    }
}

/// A live queue, device side.
#[derive(Debug)]
pub struct Queue {
    ring: Ring,
}

impl Queue {
    /// Clears `batch`, then takes as many available chains as it has room for (or as there are) and
    /// returns their number. `fetch` copies an indirect table out of the device's address space: address
    /// and destination, `false` if that memory cannot be read. A chain whose segments do not fit in the
    /// rest of the batch is left for the next call; an empty batch has room for any chain.
    ///
    /// # Errors
    /// The first malformed chain or index latches the queue. Chains before it in the same call are lost
    /// with the queue.
    #[inline]
    pub fn pop(
        &mut self,
        batch: &mut Batch,
        fetch: impl FnMut(u64, &mut [u8]) -> bool,
    ) -> Result<usize, QueueError> {
        self.ring.pop(batch, fetch)
    }

    /// Stages the completion of a chain; the driver sees it after [`Queue::publish`]. `written` is the
    /// number of bytes that the device has written to the chain's writable part.
    ///
    /// # Errors
    /// `head` is not in flight, or the queue has latched.
    #[inline]
    pub fn complete(&mut self, head: u16, written: u32) -> Result<(), QueueError> {
        self.ring.complete(head, written)
    }

    /// Publishes all staged completions with one store and says whether the driver wants an interrupt.
    /// Without staged completions it does nothing and says no.
    ///
    /// # Errors
    /// The queue has latched.
    #[inline]
    pub fn publish(&mut self) -> Result<bool, QueueError> {
        self.ring.publish()
    }

    /// Asks the driver not to kick while the device is at work. A hint; kicks may still come.
    #[inline]
    pub fn disable_kicks(&mut self) {
        self.ring.disable_kicks();
    }

    /// Asks the driver to kick at the next available buffer, then looks once more.
    /// `true`: more is available, do not sleep (kicks stay armed). `false`: the next buffer brings a kick.
    ///
    /// # Errors
    /// The available index is impossible, or the queue has latched.
    #[inline]
    pub fn arm_kicks(&mut self) -> Result<bool, QueueError> {
        self.ring.arm_kicks()
    }

    /// Latches an error that the device found in a chain. Returns the error that the queue now has (the first).
    pub fn fail(&mut self, error: QueueError) -> QueueError {
        self.ring.latch(error)
    }

    /// The latched error.
    #[must_use]
    pub fn error(&self) -> Option<QueueError> {
        self.ring.error()
    }

    /// Number of descriptors.
    #[must_use]
    pub fn size(&self) -> u16 {
        self.ring.size()
    }

    /// Chains popped and not yet completed.
    #[must_use]
    pub fn in_flight(&self) -> u16 {
        self.ring.in_flight()
    }
}
