//! The configuration of a queue: checked, then frozen.
use crate::split::{self, avail_bytes, used_bytes};
use crate::{Area, ConfigError, QueueAddresses};
use paravane_spec::feature;
use paravane_spec::packed::{EVENT_ALIGN, EVENT_SIZE};
use paravane_spec::queue::MAX_SIZE;
use paravane_spec::split::{AVAIL_ALIGN, DESC_ALIGN, USED_ALIGN};

/// One of the three areas of a queue, and the memory that it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AreaRequest {
    /// Its name in errors.
    pub part: &'static str,
    /// First byte, in the device's address space.
    pub addr: u64,
    /// Bytes.
    pub len: usize,
    /// Whether the device writes to it.
    pub writable: bool,
}

/// A checked and frozen configuration, the only way to a [`Queue`](super::Queue).
#[derive(Clone, Copy, Debug)]
pub struct QueueConfig {
    addresses: QueueAddresses,
    features: u64,
}

impl QueueConfig {
    /// Feature bits that queues implement.
    pub const FEATURES: u64 = Self::SPLIT_FEATURES | feature::RING_PACKED | feature::IN_ORDER;

    /// The subset that a device offers by default.
    pub const SPLIT_FEATURES: u64 = feature::INDIRECT_DESC | feature::EVENT_IDX;

    /// Checks what a driver asked for.
    ///
    /// `features` are the negotiated ones, device-specific bits are ignored.
    ///
    /// # Errors
    /// The size is not a power of two (with RING_PACKED: any number) from 1 to `max_size`, or an
    /// area is misaligned or wraps around.
    pub fn new(addresses: QueueAddresses, max_size: u16, features: u64) -> Result<Self, ConfigError> {
        let (size, max) = (addresses.size, max_size.min(MAX_SIZE));
        let config = Self { addresses, features };
        if config.packed() {
            // Section 2.8.10.1: any size.
            if size == 0 || size > max {
                return Err(ConfigError::PackedSize { size, max });
            }
        } else if !size.is_power_of_two() || size > max {
            return Err(ConfigError::Size { size, max });
        }
        for (AreaRequest { part, addr, len, .. }, align) in config.areas().into_iter().zip(config.aligns()) {
            if !addr.is_multiple_of(align) {
                return Err(ConfigError::Misaligned { part, addr, align });
            }
            if addr.checked_add(len as u64).is_none() {
                return Err(ConfigError::Wraps { part, addr });
            }
        }
        Ok(config)
    }

    /// Addresses and size that the driver has set.
    #[must_use]
    pub fn addresses(&self) -> QueueAddresses {
        self.addresses
    }

    /// Negotiated features.
    #[must_use]
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Number of descriptors.
    pub(crate) fn size(&self) -> u16 {
        self.addresses.size
    }

    pub(crate) fn has(&self, feature: u64) -> bool {
        self.features & feature != 0
    }

    pub(crate) fn packed(&self) -> bool {
        self.has(feature::RING_PACKED)
    }

    /// What the areas are aligned to.
    fn aligns(&self) -> [u64; 3] {
        let [driver, device] = if self.packed() { [EVENT_ALIGN; 2] } else { [AVAIL_ALIGN, USED_ALIGN] };
        [DESC_ALIGN, driver, device]
    }

    /// Memory for [`QueueConfig::activate`]: descriptor, driver and device area.
    #[must_use]
    pub fn areas(&self) -> [AreaRequest; 3] {
        let QueueAddresses { size, desc, driver, device } = self.addresses;
        let packed = self.packed();
        let lens = if packed { [EVENT_SIZE; 2] } else { [avail_bytes(size), used_bytes(size)] };
        [
            // A descriptor is 16 bytes in either layout. In a packed queue it is marked used where
            // it lies.
            AreaRequest {
                part: "descriptor area",
                addr: desc,
                len: split::desc_bytes(size),
                writable: packed,
            },
            AreaRequest { part: "driver area", addr: driver, len: lens[0], writable: false },
            AreaRequest { part: "device area", addr: device, len: lens[1], writable: true },
        ]
    }

    /// Whether `areas` are long and aligned as [`QueueConfig::areas`] asks.
    pub(super) fn check(&self, areas: &[Area; 3]) -> Result<(), ConfigError> {
        let [_, driver, device] = self.aligns();
        // Descriptors are fetched as words of 8 bytes.
        for ((AreaRequest { part, addr, len, .. }, area), align) in
            self.areas().into_iter().zip(areas).zip([8, driver, device])
        {
            if area.len() < len {
                return Err(ConfigError::Short { part, needed: len, given: area.len() });
            }
            if !area.is_aligned(align as usize) {
                return Err(ConfigError::Misaligned { part, addr, align });
            }
        }
        Ok(())
    }
}
