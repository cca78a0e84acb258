//! What is offered to a client, and what it has accepted.
use super::SessionError;
use paravane_ring::device::QueueConfig;
use paravane_spec::vhost_user::{F_LOG_ALL, F_PROTOCOL_FEATURES, protocol_feature};
use paravane_spec::{device_id, feature};

/// Features that a transport must implement, so that a device's word is not enough.
const OF_TRANSPORT: u64 = feature::ACCESS_PLATFORM
    | feature::ORDER_PLATFORM
    | feature::NOTIFICATION_DATA
    | feature::NOTIF_CONFIG_DATA
    | feature::ADMIN_VQ
    | feature::SUSPEND;

/// Protocol features that are implemented for every device.
///
/// CONFIG is offered for network cards, too, although QEMU's virtio-net makes a configuration space of its own and says in a
/// warning that it has no use for it, and Cloud Hypervisor's and DPDK's cards do not ask. crosvm's one front end for all devices reads
/// a card's address by GET_CONFIG, and has no other; so do generic ones (QEMU's vhost-user-test-device, Cloud Hypervisor's). A
/// card without it would have the address 0 there; with it QEMU has a line more in its log.
const PROTOCOL: u64 = protocol_feature::MQ
    | protocol_feature::LOG_SHMFD
    | protocol_feature::REPLY_ACK
    | protocol_feature::BACKEND_REQ
    | protocol_feature::CONFIG
    | protocol_feature::INFLIGHT_SHMFD
    | protocol_feature::RESET_DEVICE
    | protocol_feature::CONFIGURE_MEM_SLOTS
    | protocol_feature::STATUS
    | protocol_feature::DEVICE_STATE;

/// What a client must have accepted of them that is offered ACCESS_PLATFORM.
const TRANSLATED: u64 = protocol_feature::BACKEND_REQ | protocol_feature::REPLY_ACK;

/// Devices that offer ACCESS_PLATFORM.
///
/// Whether a device is behind an IOMMU is the VMM's decision. For disks and network cards QEMU shows the feature to the driver only
/// with `iommu_platform=on`. For other devices QEMU 9 and later (vhost-user-base) shows whatever is offered: the driver then maps
/// its buffers in an IOMMU that QEMU does not apply, and the device hangs. Earlier versions show and accept what the user asks for,
/// offered or not, so the feature is accepted of every device.
const OFFERS_TRANSLATION: [u32; 2] = [device_id::BLK, device_id::NET];

/// What is offered beside what the device itself does.
#[derive(Clone, Copy, Debug)]
pub struct Offer {
    /// Packed queues.
    pub packed: bool,
    /// Buffers are used in the order in which they were made available.
    pub in_order: bool,
}

/// Both kinds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Features {
    offered: u64,
    accepted: u64,
    offered_protocol: u64,
    accepted_protocol: u64,
    offers_translation: bool,
}

impl Features {
    /// A device of the type `id` that offers `device`.
    pub(super) fn new(id: u32, device: u64, offer: Offer) -> Self {
        let mut offered = device & !OF_TRANSPORT | F_PROTOCOL_FEATURES | F_LOG_ALL;
        for (wanted, feature) in [(offer.packed, feature::RING_PACKED), (offer.in_order, feature::IN_ORDER)] {
            offered &= !feature;
            if wanted {
                offered |= QueueConfig::FEATURES & feature;
            }
        }
        let offered_protocol = PROTOCOL | if id == device_id::NET { protocol_feature::RARP } else { 0 };
        let offers_translation = OFFERS_TRANSLATION.contains(&id);
        Self { offered, accepted: 0, offered_protocol, accepted_protocol: 0, offers_translation }
    }

    /// What the client is offered, and ACCESS_PLATFORM once it has accepted what that needs.
    pub(super) fn offered(self) -> u64 {
        self.offered | if self.offers_translation { self.translation() } else { 0 }
    }

    /// ACCESS_PLATFORM for a client that can be told of missing translations and waits for invalidations; else 0.
    fn translation(self) -> u64 {
        if self.accepted_protocol & TRANSLATED == TRANSLATED { feature::ACCESS_PLATFORM } else { 0 }
    }

    pub(super) fn offered_protocol(self) -> u64 {
        self.offered_protocol
    }

    /// All that the client has accepted.
    pub(super) fn accepted(self) -> u64 {
        self.accepted
    }

    /// What the driver has accepted, without what is the transport's own.
    pub(super) fn of_driver(self) -> u64 {
        self.accepted & !(F_PROTOCOL_FEATURES | F_LOG_ALL)
    }

    pub(super) fn accept(&mut self, features: u64) -> Result<(), SessionError> {
        match features & !(self.offered() | self.translation()) {
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
        // It has accepted before what it could not accept now.
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
