//! vhost-user: how a VMM hands the queues of a device to another process, over a Unix socket (the vhost-user
//! specification). Numbers on the socket are in the byte order of the host.
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Virtio feature bit (unused by devices): the peer knows protocol features.
pub const F_PROTOCOL_FEATURES: u64 = 1 << 30;
/// Virtio feature bit (unused by devices): writes to guest memory are logged.
pub const F_LOG_ALL: u64 = 1 << 26;

/// Before each message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Header {
    /// What is asked: see [`request`] and [`back_end_request`].
    pub request: u32,
    /// See [`flags`].
    pub flags: u32,
    /// Bytes that follow.
    pub size: u32,
}

/// Flags of a message.
pub mod flags {
    /// Bits that hold the version.
    pub const VERSION_MASK: u32 = 3;
    /// The only version.
    pub const VERSION: u32 = 1;
    /// It is a reply.
    pub const REPLY: u32 = 1 << 2;
    /// The sender waits for a reply that says whether it was done.
    pub const NEED_REPLY: u32 = 1 << 3;
}

/// Protocol features, as masks.
pub mod protocol_feature {
    /// The number of queues can be asked for.
    pub const MQ: u64 = 1 << 0;
    /// The log of written pages is shared by descriptor.
    pub const LOG_SHMFD: u64 = 1 << 1;
    /// The device side can tell the network that a machine has moved.
    pub const RARP: u64 = 1 << 2;
    /// Any request may ask to be answered.
    pub const REPLY_ACK: u64 = 1 << 3;
    /// The device side has a socket for requests of its own.
    pub const BACKEND_REQ: u64 = 1 << 5;
    /// The configuration space is the device side's.
    pub const CONFIG: u64 = 1 << 9;
    /// What is in flight is tracked in memory that both have.
    pub const INFLIGHT_SHMFD: u64 = 1 << 12;
    /// There is a request that resets the device.
    pub const RESET_DEVICE: u64 = 1 << 13;
    /// Memory regions are added and removed one by one.
    pub const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
    /// The device status is told.
    pub const STATUS: u64 = 1 << 16;
    /// The device side's own state is carried to another host.
    pub const DEVICE_STATE: u64 = 1 << 19;
}

/// Requests to the device side.
pub mod request {
    /// Which virtio features are there?
    pub const GET_FEATURES: u32 = 1;
    /// These were accepted.
    pub const SET_FEATURES: u32 = 2;
    /// A session begins.
    pub const SET_OWNER: u32 = 3;
    /// Disable all queues (deprecated).
    pub const RESET_OWNER: u32 = 4;
    /// All of guest memory.
    pub const SET_MEM_TABLE: u32 = 5;
    /// Where to log written pages.
    pub const SET_LOG_BASE: u32 = 6;
    /// What to signal when the log has changed.
    pub const SET_LOG_FD: u32 = 7;
    /// A queue's size.
    pub const SET_VRING_NUM: u32 = 8;
    /// A queue's addresses.
    pub const SET_VRING_ADDR: u32 = 9;
    /// A queue's position.
    pub const SET_VRING_BASE: u32 = 10;
    /// Stop a queue; where has it come to?
    pub const GET_VRING_BASE: u32 = 11;
    /// What a queue's driver kicks.
    pub const SET_VRING_KICK: u32 = 12;
    /// What interrupts a queue's driver.
    pub const SET_VRING_CALL: u32 = 13;
    /// What to signal when a queue fails.
    pub const SET_VRING_ERR: u32 = 14;
    /// Which protocol features are there?
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    /// These were accepted.
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    /// How many queues (of a network card: pairs) are there?
    pub const GET_QUEUE_NUM: u32 = 17;
    /// Whether a queue is to be served.
    pub const SET_VRING_ENABLE: u32 = 18;
    /// Tell the network where the address of this card is now (the machine has moved, and its driver cannot do so).
    pub const SEND_RARP: u32 = 19;
    /// The socket for the device side's own requests.
    pub const SET_BACKEND_REQ_FD: u32 = 21;
    /// A translation comes or goes.
    pub const IOTLB_MSG: u32 = 22;
    /// Bytes of the configuration space.
    pub const GET_CONFIG: u32 = 24;
    /// Write them.
    pub const SET_CONFIG: u32 = 25;
    /// Make memory in which to track what is in flight.
    pub const GET_INFLIGHT_FD: u32 = 31;
    /// Track it there.
    pub const SET_INFLIGHT_FD: u32 = 32;
    /// Reset the device.
    pub const RESET_DEVICE: u32 = 34;
    /// How many memory regions can there be?
    pub const GET_MAX_MEM_SLOTS: u32 = 36;
    /// One more memory region.
    pub const ADD_MEM_REG: u32 = 37;
    /// One memory region less.
    pub const REM_MEM_REG: u32 = 38;
    /// The driver writes the device status.
    pub const SET_STATUS: u32 = 39;
    /// The driver reads it.
    pub const GET_STATUS: u32 = 40;
    /// Carry the device side's state through a pipe.
    pub const SET_DEVICE_STATE_FD: u32 = 42;
    /// Was it carried well?
    pub const CHECK_DEVICE_STATE: u32 = 43;
}

/// Requests of the device side.
pub mod back_end_request {
    /// A translation is missing, or does not allow the access.
    pub const IOTLB_MSG: u32 = 1;
    /// The configuration space has changed.
    pub const CONFIG_CHANGE_MSG: u32 = 2;
}

/// Most memory regions in [`request::SET_MEM_TABLE`].
pub const MAX_TABLE_REGIONS: usize = 8;

/// Bits of the queue's index in [`request::SET_VRING_KICK`] and its like.
pub const VRING_INDEX_MASK: u64 = 0xff;
/// There: no descriptor comes with it.
pub const VRING_NO_FD: u64 = 1 << 8;

/// In [`VringAddr::flags`]: writes to the used ring are logged.
pub const VRING_F_LOG: u32 = 1 << 0;

/// Bytes of memory that one bit of the log stands for.
pub const LOG_PAGE: u64 = 4096;

/// A queue and a number: its size, its position, or whether it is enabled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct VringState {
    /// Which queue.
    pub index: u32,
    /// The number.
    pub num: u32,
}

/// The addresses of a queue's areas, in the VMM's address space, or the device's if an IOMMU translates that.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct VringAddr {
    /// Which queue.
    pub index: u32,
    /// [`VRING_F_LOG`].
    pub flags: u32,
    /// Descriptor area.
    pub desc: u64,
    /// Device area.
    pub device: u64,
    /// Driver area.
    pub driver: u64,
    /// Guest-physical address by which the device area is logged.
    pub log: u64,
}

/// A piece of guest memory, and where it is in a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct MemoryRegion {
    /// Guest-physical address of the first byte.
    pub gpa: u64,
    /// Bytes.
    pub size: u64,
    /// Address of the first byte in the VMM.
    pub user: u64,
    /// Offset of the first byte in the file.
    pub offset: u64,
}

/// Before the regions of [`request::SET_MEM_TABLE`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct MemoryTable {
    /// How many.
    pub regions: u32,
    /// No meaning.
    pub padding: u32,
}

/// [`request::ADD_MEM_REG`] and [`request::REM_MEM_REG`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SingleRegion {
    /// No meaning.
    pub padding: u64,
    /// The region.
    pub region: MemoryRegion,
}

/// Where the log is in its file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct LogArea {
    /// Bytes.
    pub size: u64,
    /// Of the first byte.
    pub offset: u64,
}

/// Before bytes of the configuration space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ConfigAccess {
    /// Of the first byte.
    pub offset: u32,
    /// Bytes.
    pub size: u32,
    /// [`CONFIG_MIGRATION`] or 0.
    pub flags: u32,
}

/// In [`ConfigAccess::flags`]: it is not the driver that writes, but a migration.
pub const CONFIG_MIGRATION: u32 = 1;

/// Largest configuration space that clients ask for, in bytes.
pub const MAX_CONFIG: u32 = 256;

/// Memory to track what is in flight in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Inflight {
    /// Bytes.
    pub size: u64,
    /// Of the first byte, in its file.
    pub offset: u64,
    /// Number of queues.
    pub queues: u16,
    /// Their size.
    pub queue_size: u16,
    /// Fills the structure, as C does; some send it and some do not.
    pub padding: u32,
}

/// Bytes of [`Inflight`] without its padding.
pub const INFLIGHT_SIZE: usize = 20;

/// A translation, or the lack of one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Iotlb {
    /// Device address of the first byte.
    pub iova: u64,
    /// Bytes.
    pub size: u64,
    /// Address of the first byte in the VMM.
    pub user: u64,
    /// [`iotlb`]'s `READ` and `WRITE`.
    pub perm: u8,
    /// [`iotlb`]'s `MISS` and others.
    pub kind: u8,
    /// Fills the structure.
    pub padding: [u8; 6],
}

/// Fields of [`Iotlb`].
pub mod iotlb {
    /// The device may read.
    pub const READ: u8 = 1;
    /// The device may write.
    pub const WRITE: u8 = 2;
    /// A translation is missing.
    pub const MISS: u8 = 1;
    /// A translation comes.
    pub const UPDATE: u8 = 2;
    /// A translation goes.
    pub const INVALIDATE: u8 = 3;
    /// An access was refused.
    pub const ACCESS_FAIL: u8 = 4;
}

/// How the device side's state is carried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct StateTransfer {
    /// 0: out of the device side; 1: into it.
    pub direction: u32,
    /// 0: while it is stopped.
    pub phase: u32,
}
