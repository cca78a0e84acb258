//! Feature bits to offer: the device's, those of its rings, and those of its place.
//!
//! The table is in the crate's front page.
use paravane_ring::device::QueueConfig;
use paravane_spec::feature;

/// Bits 24 to 49 (section 6).
const NOT_THE_DEVICE: u64 = (1 << 50) - (1 << 24);

/// Ring features to offer [split rings, indirect descriptors, event index].
///
/// A driver may refuse each of them, and gets a split ring if it refuses packed ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingFeatures(u64);

impl Default for RingFeatures {
    fn default() -> Self {
        Self(QueueConfig::SPLIT_FEATURES)
    }
}

impl RingFeatures {
    /// Offers packed rings as well (`VIRTIO_F_RING_PACKED`).
    #[must_use]
    pub fn packed(self) -> Self {
        Self(self.0 | feature::RING_PACKED)
    }

    /// Offers to use buffers in order (`VIRTIO_F_IN_ORDER`).
    #[must_use]
    pub fn in_order(self) -> Self {
        Self(self.0 | feature::IN_ORDER)
    }

    /// Offers no indirect descriptors.
    #[must_use]
    pub fn without_indirect(self) -> Self {
        Self(self.0 & !feature::INDIRECT_DESC)
    }

    /// Offers no event index.
    #[must_use]
    pub fn without_event_index(self) -> Self {
        Self(self.0 & !feature::EVENT_IDX)
    }

    /// The feature bits.
    #[must_use]
    pub fn bits(self) -> u64 {
        self.0
    }
}

/// All bits that a device with these `own` ones offers, but for the transport's.
pub(crate) fn offered(own: u64, rings: RingFeatures, behind_domain: bool, suspendable: bool) -> u64 {
    let platform = if behind_domain { feature::ACCESS_PLATFORM } else { 0 };
    let suspend = if suspendable { feature::SUSPEND } else { 0 };
    own & !NOT_THE_DEVICE | rings.0 | feature::VERSION_1 | feature::RING_RESET | platform | suspend
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_builder_decides_on_rings_and_the_device_on_the_rest() {
        let own =
            1 | 1 << 23 | 1 << 50 | feature::RING_PACKED | feature::NOTIFICATION_DATA | feature::SUSPEND;
        let plain = offered(own, RingFeatures::default(), false, false);
        let always = feature::VERSION_1 | feature::RING_RESET;
        assert_eq!(plain, 1 | 1 << 23 | 1 << 50 | always | QueueConfig::SPLIT_FEATURES);
        let rings = RingFeatures::default().packed().in_order().without_indirect().without_event_index();
        let special = offered(1, rings, true, true);
        let expected = feature::RING_PACKED | feature::IN_ORDER | feature::ACCESS_PLATFORM | feature::SUSPEND;
        assert_eq!(special, 1 | always | expected);
    }
}
