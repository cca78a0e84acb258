//! Features offered to a client, and those that it accepted.
use super::error::SessionError;
use paravane_export::protocol::Offer;
use paravane_ring::device::QueueConfig;
use paravane_spec::vhost_user::{F_LOG_ALL, F_PROTOCOL_FEATURES, protocol_feature};
use paravane_spec::{device_id, feature};

/// Features that depend on the transport; the device alone cannot offer them.
const TRANSPORT_FEATURES: u64 = feature::ACCESS_PLATFORM
    | feature::ORDER_PLATFORM
    | feature::NOTIFICATION_DATA
    | feature::NOTIF_CONFIG_DATA
    | feature::ADMIN_VQ
    | feature::SUSPEND
    | feature::RING_RESET;

/// Features that are accepted, but not offered: a client may repeat what an earlier server offered.
///
/// RING_RESET: its other half, the reset of a queue, has no message. QEMU shows the feature to the
/// guest and forwards no reset: the driver then frees a ring that is still served.
const TOLERATED: u64 = feature::RING_RESET;

/// Protocol features of every device.
///
/// CONFIG is offered for network devices too. crosvm's front end reads the MAC address by
/// GET_CONFIG only, as do generic front ends (QEMU's vhost-user-test-device, Cloud Hypervisor's);
/// without CONFIG they see address 0. QEMU's virtio-net has its own configuration space and
/// logs a warning that it ignores ours. Cloud Hypervisor's and DPDK's network devices do not read
/// it.
const PROTOCOL_FEATURES: u64 = protocol_feature::MQ
    | protocol_feature::LOG_SHMFD
    | protocol_feature::REPLY_ACK
    | protocol_feature::BACKEND_REQ
    | protocol_feature::CONFIG
    | protocol_feature::INFLIGHT_SHMFD
    | protocol_feature::RESET_DEVICE
    | protocol_feature::CONFIGURE_MEM_SLOTS
    | protocol_feature::STATUS
    | protocol_feature::DEVICE_STATE
    | protocol_feature::GPA_ADDRESSES;

/// Protocol features to stop with requests in flight: each needs the other.
const LEAVING: u64 = protocol_feature::GET_VRING_BASE_INFLIGHT | protocol_feature::INFLIGHT_SHMFD;

/// Protocol features without which ACCESS_PLATFORM is not offered.
const TRANSLATION_NEEDS: u64 = protocol_feature::BACKEND_REQ | protocol_feature::REPLY_ACK;

/// Devices that offer ACCESS_PLATFORM.
///
/// The VMM decides whether a device is behind an IOMMU. For disks and network devices QEMU shows
/// the feature to the driver only with `iommu_platform=on`. For other devices QEMU 9 and later
/// (vhost-user-base) show every offered feature: the driver then maps its buffers in an IOMMU that
/// QEMU does not apply, and the device hangs. Earlier versions show and accept what the user asks
/// for, offered or not, so every device accepts the feature.
const OFFERS_TRANSLATION: [u32; 2] = [device_id::BLK, device_id::NET];

/// Offered and accepted features, of virtio and of the protocol.
#[derive(Clone, Copy, Debug)]
pub(super) struct Features {
    offered: u64,
    pub(super) accepted: u64,
    pub(super) offered_protocol: u64,
    pub(super) accepted_protocol: u64,
    offers_translation: bool,
}

impl Features {
    /// Features of a device of type `id` that itself offers `device`.
    pub(super) fn new(id: u32, device: u64, offer: Offer) -> Self {
        let mut offered = device & !TRANSPORT_FEATURES | F_PROTOCOL_FEATURES | F_LOG_ALL;
        for (wanted, feature) in [(offer.packed, feature::RING_PACKED), (offer.in_order, feature::IN_ORDER)] {
            offered &= !feature;
            if wanted {
                offered |= QueueConfig::FEATURES & feature;
            }
        }
        let offered_protocol = PROTOCOL_FEATURES
            | match id {
                device_id::NET => protocol_feature::RARP,
                // Other devices have no request that lasts.
                device_id::BLK => protocol_feature::GET_VRING_BASE_INFLIGHT,
                _ => 0,
            };
        let offers_translation = OFFERS_TRANSLATION.contains(&id);
        Self { offered, accepted: 0, offered_protocol, accepted_protocol: 0, offers_translation }
    }

    /// Virtio features offered now.
    ///
    /// ACCESS_PLATFORM is one once the client accepted what it needs.
    pub(super) fn offered(self) -> u64 {
        self.offered | if self.offers_translation { self.translation() } else { 0 }
    }

    /// ACCESS_PLATFORM if the client handles misses and invalidations, else 0.
    fn translation(self) -> u64 {
        if self.accepted_protocol & TRANSLATION_NEEDS == TRANSLATION_NEEDS {
            feature::ACCESS_PLATFORM
        } else {
            0
        }
    }

    /// Features that the driver accepted, without those of the protocol.
    pub(super) fn of_driver(self) -> u64 {
        self.accepted & !(F_PROTOCOL_FEATURES | F_LOG_ALL)
    }

    pub(super) fn accept(&mut self, features: u64) -> Result<(), SessionError> {
        match features & !(self.offered() | self.translation() | TOLERATED) {
            0 => self.accepted = features,
            unknown => return Err(SessionError::NotOffered(unknown)),
        }
        Ok(())
    }

    pub(super) fn accept_protocol(&mut self, features: u64) -> Result<(), SessionError> {
        match features & !self.offered_protocol {
            0 => self.accepted_protocol = features,
            unknown => return Err(SessionError::NotOffered(unknown)),
        }
        if features & LEAVING == protocol_feature::GET_VRING_BASE_INFLIGHT {
            return Err(SessionError::NotOffered(protocol_feature::GET_VRING_BASE_INFLIGHT));
        }
        // The client accepted ACCESS_PLATFORM before; now it drops what that needs.
        if self.has(feature::ACCESS_PLATFORM) && self.translation() == 0 {
            return Err(SessionError::NotOffered(feature::ACCESS_PLATFORM));
        }
        Ok(())
    }

    pub(super) fn has(self, feature: u64) -> bool {
        self.accepted & feature != 0
    }

    pub(super) fn has_protocol(self, feature: u64) -> bool {
        self.accepted_protocol & feature != 0
    }

    pub(super) fn need_protocol(self, feature: u64, request: &'static str) -> Result<(), SessionError> {
        if self.has_protocol(feature) { Ok(()) } else { Err(SessionError::NotAccepted { request }) }
    }
}
