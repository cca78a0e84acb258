//! Network card (section 5.1).
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Feature: the device takes frames whose checksum is yet to be computed.
pub const F_CSUM: u64 = 1 << 0;
/// Feature: the driver takes frames whose checksum is yet to be computed, or was checked already.
pub const F_GUEST_CSUM: u64 = 1 << 1;
/// Feature: the driver may change what is offloaded towards it ([`CLASS_GUEST_OFFLOADS`]).
pub const F_CTRL_GUEST_OFFLOADS: u64 = 1 << 2;
/// Feature: the largest packet is in `mtu`.
pub const F_MTU: u64 = 1 << 3;
/// Feature: the device's address is in `mac`.
pub const F_MAC: u64 = 1 << 5;
/// Feature: the driver takes TCP over IPv4 in pieces larger than the MTU.
pub const F_GUEST_TSO4: u64 = 1 << 7;
/// Feature: the driver takes TCP over IPv6 in pieces larger than the MTU.
pub const F_GUEST_TSO6: u64 = 1 << 8;
/// Feature: with [`F_GUEST_TSO4`] or [`F_GUEST_TSO6`], also with congestion notification.
pub const F_GUEST_ECN: u64 = 1 << 9;
/// Feature: the device segments TCP over IPv4.
pub const F_HOST_TSO4: u64 = 1 << 11;
/// Feature: the device segments TCP over IPv6.
pub const F_HOST_TSO6: u64 = 1 << 12;
/// Feature: with [`F_HOST_TSO4`] or [`F_HOST_TSO6`], also with congestion notification.
pub const F_HOST_ECN: u64 = 1 << 13;
/// Feature: the driver takes a frame in several buffers.
pub const F_MRG_RXBUF: u64 = 1 << 15;
/// Feature: `status` is valid.
pub const F_STATUS: u64 = 1 << 16;
/// Feature: there is a control queue.
pub const F_CTRL_VQ: u64 = 1 << 17;
/// Feature: the device asks by [`S_ANNOUNCE`] that the driver makes itself known to the network, and is told when that is
/// done ([`CLASS_ANNOUNCE`]).
pub const F_GUEST_ANNOUNCE: u64 = 1 << 21;
/// Feature: more than one pair of queues, `max_virtqueue_pairs` says how many at most.
pub const F_MQ: u64 = 1 << 22;
/// Feature: the driver takes UDP in pieces larger than the MTU, over IPv4.
pub const F_GUEST_USO4: u64 = 1 << 54;
/// Feature: the driver takes UDP in pieces larger than the MTU, over IPv6.
pub const F_GUEST_USO6: u64 = 1 << 55;
/// Feature: the device segments UDP.
pub const F_HOST_USO: u64 = 1 << 56;

/// Bit of [`Config::status`]: the link is up.
pub const S_LINK_UP: u16 = 1;

/// Bit of [`Config::status`]: the driver is to make itself known, since it may be at another place of the network now.
pub const S_ANNOUNCE: u16 = 2;

/// Bit of [`Header::flags`]: the checksum from `csum_start` on is to be put at `csum_offset` behind it.
pub const HDR_F_NEEDS_CSUM: u8 = 1;
/// Bit of [`Header::flags`]: the checksum has been found right (device to driver only).
pub const HDR_F_DATA_VALID: u8 = 2;

/// Value of [`Header::gso_type`]: one frame as it is.
pub const GSO_NONE: u8 = 0;
/// Value of [`Header::gso_type`]: TCP over IPv4, to be segmented.
pub const GSO_TCPV4: u8 = 1;
/// Value of [`Header::gso_type`]: TCP over IPv6, to be segmented.
pub const GSO_TCPV6: u8 = 4;
/// Value of [`Header::gso_type`]: UDP, to be segmented.
pub const GSO_UDP_L4: u8 = 5;
/// Bit of [`Header::gso_type`], beside TCP: congestion notification.
pub const GSO_ECN: u8 = 0x80;

/// Bytes of an Ethernet header: what a frame has at least.
pub const ETH_HEADER: usize = 14;
/// Most bytes of a frame: an IP packet of 65535 bytes and its Ethernet header with a VLAN tag.
pub const MAX_FRAME: usize = 65535 + ETH_HEADER + 4;
/// Least MTU that a device may offer (section 5.1.4.1).
pub const MIN_MTU: u16 = 68;

/// Most pairs of queues (section 5.1.5).
pub const MAX_PAIRS: u16 = 0x8000;

/// Queues of a pair (section 5.1.2). Pair `p` has the queues from `p` times this on; the control queue comes after the
/// last pair, which is the first one where [`F_MQ`] was not negotiated.
pub const PAIR: u16 = 2;
/// The receive queue in its pair.
pub const RECEIVE: u16 = 0;
/// The transmit queue in its pair.
pub const TRANSMIT: u16 = 1;

/// Class of control commands: which frames are received.
pub const CLASS_RX: u8 = 0;
/// Class of control commands: address filtering.
pub const CLASS_MAC: u8 = 1;
/// Class of control commands: the driver has made itself known.
pub const CLASS_ANNOUNCE: u8 = 3;
/// Class of control commands: pairs of queues.
pub const CLASS_MQ: u8 = 4;
/// Class of control commands: what is offloaded towards the driver.
pub const CLASS_GUEST_OFFLOADS: u8 = 5;
/// Command of [`CLASS_ANNOUNCE`]: [`S_ANNOUNCE`] was seen, and may go.
pub const ANNOUNCE_ACK: u8 = 0;
/// Command of [`CLASS_MQ`]: how many pairs are in use (a little-endian u16 follows).
pub const MQ_VQ_PAIRS_SET: u8 = 0;

/// Answer to a control command: done.
pub const CTRL_OK: u8 = 0;
/// Answer to a control command: not done.
pub const CTRL_ERR: u8 = 1;

/// What stands before every frame (little endian; section 5.1.6). With VERSION_1 it has all its fields, always.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Header {
    /// `HDR_F_` bits.
    pub flags: u8,
    /// One of the `GSO_` values.
    pub gso_type: u8,
    /// Bytes of all headers, where the frame is to be segmented: a hint.
    pub hdr_len: u16,
    /// Bytes of payload in each segment.
    pub gso_size: u16,
    /// Where the checksum begins, in bytes from the start of the frame.
    pub csum_start: u16,
    /// Where it goes, in bytes from there.
    pub csum_offset: u16,
    /// Device to driver, with [`F_MRG_RXBUF`]: the buffers that the frame lies in.
    pub num_buffers: u16,
}

/// What starts every control command; data and, writable, one byte for the answer follow (section 5.1.6.5).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Command {
    /// One of the `CLASS_` constants.
    pub class: u8,
    /// Command of that class.
    pub command: u8,
}

/// The configuration space (little endian; offsets follow from the layout). What follows `mtu` in the specification
/// belongs to features that are not named here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Config {
    /// The device's address.
    pub mac: [u8; 6],
    /// `S_` bits.
    pub status: u16,
    /// Most pairs of queues.
    pub max_virtqueue_pairs: u16,
    /// Largest packet in bytes, without the Ethernet header.
    pub mtu: u16,
}
