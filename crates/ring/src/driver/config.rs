//! How a driver's queue is laid out.
use crate::ConfigError;
use crate::split;
use paravane_spec::feature;
use paravane_spec::packed::EVENT_SIZE;
use paravane_spec::queue::MAX_SIZE;

/// Size and features of a queue, and the memory that it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriverConfig {
    pub(crate) size: u16,
    pub(crate) indirect: u16,
    pub(crate) event_idx: bool,
    pub(crate) in_order: bool,
    pub(super) packed: bool,
    pub(super) order_platform: bool,
}

impl DriverConfig {
    /// Feature bits that a queue implements; it ignores all others.
    pub const FEATURES: u64 = feature::INDIRECT_DESC
        | feature::EVENT_IDX
        | feature::RING_PACKED
        | feature::IN_ORDER
        | feature::ORDER_PLATFORM;

    /// A queue of `size` descriptors.
    ///
    /// With INDIRECT_DESC among the negotiated `features` and `indirect` > 1, chains of 2 to
    /// `indirect` segments go into a table (one table a chain is set aside). No chain may be longer
    /// than the queue (section 2.7.5.3.1), so an `indirect` above `size` counts as `size`.
    ///
    /// # Errors
    /// The size is not a power of two from 1 to 32768. (The specification allows others for packed
    /// queues; a driver may always choose less than the device's limit.)
    pub fn new(size: u16, indirect: u16, features: u64) -> Result<Self, ConfigError> {
        if !size.is_power_of_two() {
            return Err(ConfigError::Size { size, max: MAX_SIZE });
        }
        let has = |bit| features & bit != 0;
        let indirect = if has(feature::INDIRECT_DESC) { indirect.min(size) } else { 0 };
        Ok(Self {
            size,
            indirect: if indirect > 1 { indirect } else { 0 },
            event_idx: has(feature::EVENT_IDX),
            in_order: has(feature::IN_ORDER),
            packed: has(feature::RING_PACKED),
            order_platform: has(feature::ORDER_PLATFORM),
        })
    }

    /// Bytes of the driver area and of the device area.
    pub(super) fn area_bytes(&self) -> [usize; 2] {
        if self.packed {
            [EVENT_SIZE; 2]
        } else {
            [split::avail_bytes(self.size), split::used_bytes(self.size)]
        }
    }
}
