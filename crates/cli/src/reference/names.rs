//! Names and meanings of feature bits and messages.
use paravane_spec::feature;
use paravane_spec::vhost_user::{self, back_end_request, protocol_feature as p, request as r};

/// A bit: name, mask, meaning.
pub(crate) type Bit = (&'static str, u64, &'static str);

/// Features of all devices.
pub(super) const RING: &[Bit] = &[
    ("VIRTIO_F_INDIRECT_DESC", feature::INDIRECT_DESC, "Descriptor chains in indirect tables."),
    ("VIRTIO_F_EVENT_IDX", feature::EVENT_IDX, "Notifications suppressed by ring position."),
    (
        "VIRTIO_F_VERSION_1",
        feature::VERSION_1,
        "Virtio 1.x; drivers without it are legacy drivers, which are served on little-endian hosts.",
    ),
    ("VIRTIO_F_ACCESS_PLATFORM", feature::ACCESS_PLATFORM, "Addresses are IOVAs, translated by an IOMMU."),
    ("VIRTIO_F_RING_PACKED", feature::RING_PACKED, "Packed virtqueues."),
    ("VIRTIO_F_IN_ORDER", feature::IN_ORDER, "Buffers used in the order in which they were made available."),
    ("VIRTIO_F_ORDER_PLATFORM", feature::ORDER_PLATFORM, "Memory ordering of the platform."),
    ("VIRTIO_F_NOTIFICATION_DATA", feature::NOTIFICATION_DATA, "Kicks carry the ring position."),
    ("VIRTIO_F_NOTIF_CONFIG_DATA", feature::NOTIF_CONFIG_DATA, "Kicks carry a value of the device."),
    ("VIRTIO_F_RING_RESET", feature::RING_RESET, "Reset of a single queue; no message carries it."),
    (
        "VHOST_USER_F_PROTOCOL_FEATURES",
        vhost_user::F_PROTOCOL_FEATURES,
        "Protocol features can be negotiated.",
    ),
    ("VHOST_F_LOG_ALL", vhost_user::F_LOG_ALL, "Dirty log, for live migration."),
];

/// Protocol features of vhost-user.
pub(super) const PROTOCOL: &[Bit] = &[
    ("MQ", p::MQ, "The VMM asks for the number of queues."),
    ("LOG_SHMFD", p::LOG_SHMFD, "The dirty log is shared memory."),
    ("RARP", p::RARP, "The daemon announces a migrated card by RARP."),
    ("REPLY_ACK", p::REPLY_ACK, "Messages are acknowledged on request."),
    ("BACKEND_REQ", p::BACKEND_REQ, "The daemon sends messages on a second socket."),
    ("CONFIG", p::CONFIG, "The daemon has the configuration space."),
    (
        "INFLIGHT_SHMFD",
        p::INFLIGHT_SHMFD,
        "In-flight tracking in shared memory survives a restart of the daemon.",
    ),
    ("RESET_DEVICE", p::RESET_DEVICE, "Reset of the device."),
    ("CONFIGURE_MEM_SLOTS", p::CONFIGURE_MEM_SLOTS, "Memory regions are added and removed one by one."),
    ("STATUS", p::STATUS, "The device status is forwarded."),
    ("DEVICE_STATE", p::DEVICE_STATE, "The state of the device migrates with the VMM."),
    (
        "GET_VRING_BASE_INFLIGHT",
        p::GET_VRING_BASE_INFLIGHT,
        "A stopped queue leaves its requests in flight to the in-flight region (needs INFLIGHT_SHMFD).",
    ),
    ("GPA_ADDRESSES", p::GPA_ADDRESSES, "Ring and user addresses are guest-physical."),
];

/// A message: name, number, meaning.
pub(super) type Message = (&'static str, u32, &'static str);

/// Messages of the VMM.
pub(super) const MESSAGES: &[Message] = &[
    ("GET_FEATURES", r::GET_FEATURES, "Read the offered virtio features."),
    ("SET_FEATURES", r::SET_FEATURES, "Accept virtio features."),
    ("SET_OWNER", r::SET_OWNER, "Begin a session."),
    ("RESET_OWNER", r::RESET_OWNER, "Disable all queues (deprecated)."),
    ("SET_MEM_TABLE", r::SET_MEM_TABLE, "Replace the guest memory."),
    ("SET_LOG_BASE", r::SET_LOG_BASE, "Set the memory of the dirty log."),
    ("SET_LOG_FD", r::SET_LOG_FD, "Set the notifier of the dirty log."),
    ("SET_VRING_NUM", r::SET_VRING_NUM, "Set the size of a queue."),
    ("SET_VRING_ADDR", r::SET_VRING_ADDR, "Set the addresses of a queue."),
    ("SET_VRING_BASE", r::SET_VRING_BASE, "Set the position of a queue."),
    ("GET_VRING_BASE", r::GET_VRING_BASE, "Stop a queue and read its position."),
    ("SET_VRING_KICK", r::SET_VRING_KICK, "Set the kick descriptor of a queue."),
    ("SET_VRING_CALL", r::SET_VRING_CALL, "Set the interrupt descriptor of a queue."),
    ("SET_VRING_ERR", r::SET_VRING_ERR, "Set the error descriptor of a queue."),
    ("GET_PROTOCOL_FEATURES", r::GET_PROTOCOL_FEATURES, "Read the offered protocol features."),
    ("SET_PROTOCOL_FEATURES", r::SET_PROTOCOL_FEATURES, "Accept protocol features."),
    ("GET_QUEUE_NUM", r::GET_QUEUE_NUM, "Read the number of queues (network: pairs)."),
    ("SET_VRING_ENABLE", r::SET_VRING_ENABLE, "Enable or disable a queue."),
    ("SEND_RARP", r::SEND_RARP, "Announce a migrated card (needs RARP)."),
    (
        "SET_BACKEND_REQ_FD",
        r::SET_BACKEND_REQ_FD,
        "Set the socket for messages of the daemon (needs BACKEND_REQ).",
    ),
    ("IOTLB_MSG", r::IOTLB_MSG, "Add or remove an IOMMU translation."),
    ("GET_CONFIG", r::GET_CONFIG, "Read the configuration space (needs CONFIG)."),
    ("SET_CONFIG", r::SET_CONFIG, "Write the configuration space (needs CONFIG)."),
    ("GET_INFLIGHT_FD", r::GET_INFLIGHT_FD, "Create a region for in-flight tracking (needs INFLIGHT_SHMFD)."),
    ("SET_INFLIGHT_FD", r::SET_INFLIGHT_FD, "Set the region for in-flight tracking (needs INFLIGHT_SHMFD)."),
    ("RESET_DEVICE", r::RESET_DEVICE, "Reset the device (needs RESET_DEVICE)."),
    ("GET_MAX_MEM_SLOTS", r::GET_MAX_MEM_SLOTS, "Read the maximum number of memory regions."),
    ("ADD_MEM_REG", r::ADD_MEM_REG, "Add a memory region (needs CONFIGURE_MEM_SLOTS)."),
    ("REM_MEM_REG", r::REM_MEM_REG, "Remove a memory region (needs CONFIGURE_MEM_SLOTS)."),
    ("SET_STATUS", r::SET_STATUS, "Write the device status (needs STATUS)."),
    ("GET_STATUS", r::GET_STATUS, "Read the device status (needs STATUS)."),
    ("SET_DEVICE_STATE_FD", r::SET_DEVICE_STATE_FD, "Transfer the state of the device (needs DEVICE_STATE)."),
    ("CHECK_DEVICE_STATE", r::CHECK_DEVICE_STATE, "Check the transfer of the state (needs DEVICE_STATE)."),
];

/// Messages of the daemon.
pub(super) const BACK_END_MESSAGES: &[Message] = &[
    ("IOTLB_MSG", back_end_request::IOTLB_MSG, "Report a missing IOMMU translation."),
    ("CONFIG_CHANGE_MSG", back_end_request::CONFIG_CHANGE_MSG, "Report a change of the configuration space."),
];
