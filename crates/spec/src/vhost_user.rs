//! vhost-user protocol: a VMM hands a device's queues to another process.
//!
//! Messages go over a Unix socket.
//!
//! Source: vhost-user specification (QEMU, `docs/interop/vhost-user.rst`); each group names its
//! chapter. The *front end* is the VMM, the *back end* serves the device. Numbers on the socket
//! have the byte order of the host.
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Virtio feature bit: the peer supports protocol features.
///
/// Unused by devices. See "Feature negotiation".
pub const F_PROTOCOL_FEATURES: u64 = 1 << 30;
/// Virtio feature bit: log writes to guest memory.
///
/// Unused by devices. See "Migration".
pub const F_LOG_ALL: u64 = 1 << 26;

/// Header of every message ("Message specification").
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Header {
    /// Code from [`request`] or [`back_end_request`].
    pub request: u32,
    /// Bits from [`flags`].
    pub flags: u32,
    /// Size of the payload in bytes.
    pub size: u32,
}

/// Flags of a message ("Message specification").
pub mod flags {
    /// Bits that hold the version.
    pub const VERSION_MASK: u32 = 3;
    /// The only version.
    pub const VERSION: u32 = 1;
    /// The message is a reply.
    pub const REPLY: u32 = 1 << 2;
    /// The sender waits for a reply that reports success or failure.
    pub const NEED_REPLY: u32 = 1 << 3;
}

/// Protocol features, as masks ("Protocol features").
pub mod protocol_feature {
    /// The front end can query the number of queues.
    pub const MQ: u64 = 1 << 0;
    /// The dirty log is shared by descriptor.
    pub const LOG_SHMFD: u64 = 1 << 1;
    /// The back end can announce a migrated guest to the network.
    pub const RARP: u64 = 1 << 2;
    /// Any request may ask for an acknowledgement.
    pub const REPLY_ACK: u64 = 1 << 3;
    /// The back end has a socket for requests to the front end.
    pub const BACKEND_REQ: u64 = 1 << 5;
    /// The back end provides the configuration space.
    pub const CONFIG: u64 = 1 << 9;
    /// In-flight tracking in shared memory.
    pub const INFLIGHT_SHMFD: u64 = 1 << 12;
    /// The front end can reset the device.
    pub const RESET_DEVICE: u64 = 1 << 13;
    /// Memory regions are added and removed one by one.
    pub const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
    /// The front end forwards the device status.
    pub const STATUS: u64 = 1 << 16;
    /// The back end's own state can be migrated.
    pub const DEVICE_STATE: u64 = 1 << 19;
    /// A stopped queue may leave requests in flight, recorded in the in-flight region.
    pub const GET_VRING_BASE_INFLIGHT: u64 = 1 << 20;
    /// Ring and user addresses are guest-physical.
    pub const GPA_ADDRESSES: u64 = 1 << 21;
}

/// Requests of the front end ("Front-end message types").
pub mod request {
    /// Query the offered virtio features.
    pub const GET_FEATURES: u32 = 1;
    /// Set the accepted virtio features.
    pub const SET_FEATURES: u32 = 2;
    /// Begin a session.
    pub const SET_OWNER: u32 = 3;
    /// Disable all queues (deprecated).
    pub const RESET_OWNER: u32 = 4;
    /// Set all memory regions.
    pub const SET_MEM_TABLE: u32 = 5;
    /// Set the dirty log.
    pub const SET_LOG_BASE: u32 = 6;
    /// Set the descriptor that signals changes of the log.
    pub const SET_LOG_FD: u32 = 7;
    /// Set a queue's size.
    pub const SET_VRING_NUM: u32 = 8;
    /// Set a queue's addresses.
    pub const SET_VRING_ADDR: u32 = 9;
    /// Set a queue's position.
    pub const SET_VRING_BASE: u32 = 10;
    /// Stop a queue, and query its position.
    pub const GET_VRING_BASE: u32 = 11;
    /// Set the descriptor of a queue's kicks.
    pub const SET_VRING_KICK: u32 = 12;
    /// Set the descriptor of a queue's interrupts.
    pub const SET_VRING_CALL: u32 = 13;
    /// Set the descriptor that signals a queue's errors.
    pub const SET_VRING_ERR: u32 = 14;
    /// Query the offered protocol features.
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    /// Set the accepted protocol features.
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    /// Query the number of queues (network devices: queue pairs).
    pub const GET_QUEUE_NUM: u32 = 17;
    /// Enable or disable a queue.
    pub const SET_VRING_ENABLE: u32 = 18;
    /// Announce the MAC address to the network.
    ///
    /// After a migration whose driver cannot do so.
    pub const SEND_RARP: u32 = 19;
    /// Set the socket for the back end's requests.
    pub const SET_BACKEND_REQ_FD: u32 = 21;
    /// Add or remove a translation.
    pub const IOTLB_MSG: u32 = 22;
    /// Read the configuration space.
    pub const GET_CONFIG: u32 = 24;
    /// Write the configuration space.
    pub const SET_CONFIG: u32 = 25;
    /// Announce a migration with postcopy.
    pub const POSTCOPY_ADVISE: u32 = 28;
    /// Begin postcopy.
    pub const POSTCOPY_LISTEN: u32 = 29;
    /// End postcopy.
    pub const POSTCOPY_END: u32 = 30;
    /// Make an in-flight region.
    pub const GET_INFLIGHT_FD: u32 = 31;
    /// Set the in-flight region.
    pub const SET_INFLIGHT_FD: u32 = 32;
    /// Reset the device.
    pub const RESET_DEVICE: u32 = 34;
    /// Query the maximum number of memory regions.
    pub const GET_MAX_MEM_SLOTS: u32 = 36;
    /// Add a memory region.
    pub const ADD_MEM_REG: u32 = 37;
    /// Remove a memory region.
    pub const REM_MEM_REG: u32 = 38;
    /// Write the device status.
    pub const SET_STATUS: u32 = 39;
    /// Read the device status.
    pub const GET_STATUS: u32 = 40;
    /// Begin to save or load the back end's state through a pipe.
    pub const SET_DEVICE_STATE_FD: u32 = 42;
    /// Query whether the transfer of the state succeeded.
    pub const CHECK_DEVICE_STATE: u32 = 43;
}

/// Requests of the back end ("Back-end message types").
pub mod back_end_request {
    /// Report that a translation is missing, or forbids the access.
    pub const IOTLB_MSG: u32 = 1;
    /// Report that the configuration space changed.
    pub const CONFIG_CHANGE_MSG: u32 = 2;
}

/// Most memory regions in [`request::SET_MEM_TABLE`].
pub const MAX_TABLE_REGIONS: usize = 8;

/// Bits of the queue index in requests with a descriptor.
///
/// These are [`request::SET_VRING_KICK`], `SET_VRING_CALL` and `SET_VRING_ERR`.
pub const VRING_INDEX_MASK: u64 = 0xff;
/// Bit beside the queue index: no descriptor comes with the message.
pub const VRING_NO_FD: u64 = 1 << 8;

/// Bit of [`VringAddr::flags`]: log writes to the used ring.
pub const VRING_F_LOG: u32 = 1 << 0;

/// Size in bytes of the memory that one bit of the dirty log covers.
pub const LOG_PAGE: u64 = 4096;

/// Vring state description: a queue and its size, position or enable bit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct VringState {
    /// Index of the queue.
    pub index: u32,
    /// Value.
    pub num: u32,
}

/// Vring address description: addresses of a queue.
///
/// User addresses of the front end; guest-physical with GPA_ADDRESSES, IOVAs with ACCESS_PLATFORM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct VringAddr {
    /// Index of the queue.
    pub index: u32,
    /// [`VRING_F_LOG`].
    pub flags: u32,
    /// Address of the descriptor area.
    pub desc: u64,
    /// Address of the device area.
    pub device: u64,
    /// Address of the driver area.
    pub driver: u64,
    /// Guest-physical address for the log of the device area.
    pub log: u64,
}

/// Memory region description: a piece of guest memory, and its place in a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct MemoryRegion {
    /// Guest-physical address of the first byte.
    pub gpa: u64,
    /// Size in bytes.
    pub size: u64,
    /// Address of the first byte in the front end; `gpa` with GPA_ADDRESSES.
    pub user: u64,
    /// Offset of the first byte in the file.
    pub offset: u64,
}

/// Header of [`request::SET_MEM_TABLE`], followed by the regions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct MemoryTable {
    /// Number of regions.
    pub regions: u32,
    /// Unused.
    pub padding: u32,
}

/// Payload of [`request::ADD_MEM_REG`] and [`request::REM_MEM_REG`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SingleRegion {
    /// Unused.
    pub padding: u64,
    /// Region to add or remove.
    pub region: MemoryRegion,
}

/// Log description: the dirty log in its file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct LogArea {
    /// Size in bytes.
    pub size: u64,
    /// Offset in the file in bytes.
    pub offset: u64,
}

/// Virtio device config space description, followed by the bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ConfigAccess {
    /// Offset of the first byte.
    pub offset: u32,
    /// Number of bytes.
    pub size: u32,
    /// [`CONFIG_MIGRATION`] or 0.
    pub flags: u32,
}

/// Bit of [`ConfigAccess::flags`]: a migration writes, not the driver.
pub const CONFIG_MIGRATION: u32 = 1;

/// Largest configuration space that front ends read, in bytes.
pub const MAX_CONFIG: u32 = 256;

/// Inflight description: the in-flight region in its file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Inflight {
    /// Size in bytes.
    pub size: u64,
    /// Offset in the file in bytes.
    pub offset: u64,
    /// Number of queues.
    pub queues: u16,
    /// Size of the queues.
    pub queue_size: u16,
    /// Padding of the C structure; only some front ends send it.
    pub padding: u32,
}

/// Size in bytes of [`Inflight`] without its padding.
pub const INFLIGHT_SIZE: usize = 20;

/// IOTLB message: a translation, or a missing one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Iotlb {
    /// First IOVA.
    pub iova: u64,
    /// Size in bytes.
    pub size: u64,
    /// User address of the first byte; guest-physical with GPA_ADDRESSES.
    pub user: u64,
    /// Permissions: `READ` and `WRITE` of [`iotlb`].
    pub perm: u8,
    /// Type: `MISS`, `UPDATE`, `INVALIDATE` or `ACCESS_FAIL` of [`iotlb`].
    pub kind: u8,
    /// Padding.
    pub padding: [u8; 6],
}

/// Values in an [`Iotlb`].
pub mod iotlb {
    /// The device may read.
    pub const READ: u8 = 1;
    /// The device may write.
    pub const WRITE: u8 = 2;
    /// A translation is missing.
    pub const MISS: u8 = 1;
    /// A translation is added.
    pub const UPDATE: u8 = 2;
    /// A translation is removed.
    pub const INVALIDATE: u8 = 3;
    /// An access was denied.
    pub const ACCESS_FAIL: u8 = 4;
}

/// Device state transfer parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct StateTransfer {
    /// 0: save, out of the back end; 1: load, into it.
    pub direction: u32,
    /// 0: while the queues are stopped.
    pub phase: u32,
}
