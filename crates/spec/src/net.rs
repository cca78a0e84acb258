//! Network device (section 5.1).
//!
//! Features are in section 5.1.3, the configuration space in 5.1.4, packets in 5.1.6, the control
//! queue in 5.1.6.5.
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Feature: the device accepts frames with a partial checksum.
pub const F_CSUM: u64 = 1 << 0;
/// Feature: the driver accepts frames with a partial or verified checksum.
pub const F_GUEST_CSUM: u64 = 1 << 1;
/// Feature: the driver can change its receive offloads ([`CLASS_GUEST_OFFLOADS`]).
pub const F_CTRL_GUEST_OFFLOADS: u64 = 1 << 2;
/// Feature: `mtu` is the largest packet.
pub const F_MTU: u64 = 1 << 3;
/// Feature: `mac` is the device's address.
pub const F_MAC: u64 = 1 << 5;
/// Feature: the driver accepts TCP over IPv4 in segments larger than the MTU.
pub const F_GUEST_TSO4: u64 = 1 << 7;
/// Feature: the driver accepts TCP over IPv6 in segments larger than the MTU.
pub const F_GUEST_TSO6: u64 = 1 << 8;
/// Feature: [`F_GUEST_TSO4`] and [`F_GUEST_TSO6`] with congestion notification.
pub const F_GUEST_ECN: u64 = 1 << 9;
/// Feature: the device segments TCP over IPv4.
pub const F_HOST_TSO4: u64 = 1 << 11;
/// Feature: the device segments TCP over IPv6.
pub const F_HOST_TSO6: u64 = 1 << 12;
/// Feature: [`F_HOST_TSO4`] and [`F_HOST_TSO6`] also with congestion notification.
pub const F_HOST_ECN: u64 = 1 << 13;
/// Feature: the driver accepts a frame in several buffers.
pub const F_MRG_RXBUF: u64 = 1 << 15;
/// Feature: `status` is valid.
pub const F_STATUS: u64 = 1 << 16;
/// Feature: there is a control queue.
pub const F_CTRL_VQ: u64 = 1 << 17;
/// Feature: the device can request that the driver announces itself.
///
/// It requests it by [`S_ANNOUNCE`], and receives [`CLASS_ANNOUNCE`] when that is done.
pub const F_GUEST_ANNOUNCE: u64 = 1 << 21;
/// Feature: more than one queue pair, up to `max_virtqueue_pairs`.
pub const F_MQ: u64 = 1 << 22;
/// Feature: the driver accepts UDP over IPv4 in segments larger than the MTU.
pub const F_GUEST_USO4: u64 = 1 << 54;
/// Feature: the driver accepts UDP over IPv6 in segments larger than the MTU.
pub const F_GUEST_USO6: u64 = 1 << 55;
/// Feature: the device segments UDP.
pub const F_HOST_USO: u64 = 1 << 56;

/// Bit of [`Config::status`]: the link is up.
pub const S_LINK_UP: u16 = 1;

/// Bit of [`Config::status`]: the driver must announce itself.
///
/// Its place in the network may have changed.
pub const S_ANNOUNCE: u16 = 2;

/// Bit of [`Header::flags`]: the checksum must be computed.
///
/// From `csum_start` on; store it `csum_offset` bytes further.
pub const HDR_F_NEEDS_CSUM: u8 = 1;
/// Bit of [`Header::flags`]: the checksum was verified (device to driver only).
pub const HDR_F_DATA_VALID: u8 = 2;

/// Value of [`Header::gso_type`]: one frame, not to be segmented.
pub const GSO_NONE: u8 = 0;
/// Value of [`Header::gso_type`]: TCP over IPv4, to be segmented.
pub const GSO_TCPV4: u8 = 1;
/// Value of [`Header::gso_type`]: TCP over IPv6, to be segmented.
pub const GSO_TCPV6: u8 = 4;
/// Value of [`Header::gso_type`]: UDP, to be segmented.
pub const GSO_UDP_L4: u8 = 5;
/// Bit of [`Header::gso_type`] beside TCP: congestion notification.
pub const GSO_ECN: u8 = 0x80;

/// Size in bytes of an Ethernet header, the shortest frame.
pub const ETH_HEADER: usize = 14;
/// Size in bytes of the longest frame.
///
/// An IP packet of 65535 bytes and its Ethernet header with a VLAN tag.
pub const MAX_FRAME: usize = 65535 + ETH_HEADER + 4;
/// Smallest MTU that a device may offer (section 5.1.4.1).
pub const MIN_MTU: u16 = 68;

/// Most queue pairs (section 5.1.5).
pub const MAX_PAIRS: u16 = 0x8000;

/// Number of queues in a pair (section 5.1.2).
///
/// Pair `p` starts at queue `p * PAIR`. The control queue follows the last pair, which is the first
/// if [`F_MQ`] was not negotiated.
pub const PAIR: u16 = 2;
/// Index of the receive queue in its pair.
pub const RECEIVE: u16 = 0;
/// Index of the transmit queue in its pair.
pub const TRANSMIT: u16 = 1;

/// Class of control commands: receive filtering.
pub const CLASS_RX: u8 = 0;
/// Class of control commands: address filtering.
pub const CLASS_MAC: u8 = 1;
/// Class of control commands: the driver has announced itself.
pub const CLASS_ANNOUNCE: u8 = 3;
/// Class of control commands: number of queue pairs.
pub const CLASS_MQ: u8 = 4;
/// Class of control commands: offloads of received frames.
pub const CLASS_GUEST_OFFLOADS: u8 = 5;
/// Command of [`CLASS_ANNOUNCE`]: acknowledges [`S_ANNOUNCE`].
pub const ANNOUNCE_ACK: u8 = 0;
/// Command of [`CLASS_MQ`]: sets the number of pairs in use.
///
/// A little-endian u16 follows.
pub const MQ_VQ_PAIRS_SET: u8 = 0;

/// Result of a control command: success.
pub const CTRL_OK: u8 = 0;
/// Result of a control command: failure.
pub const CTRL_ERR: u8 = 1;

/// Header of every frame (section 5.1.6; little endian).
///
/// With VERSION_1 it always has all fields.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Header {
    /// `HDR_F_` bits.
    pub flags: u8,
    /// One of the `GSO_` values.
    pub gso_type: u8,
    /// Length in bytes of all headers of a frame to be segmented; a hint.
    pub hdr_len: u16,
    /// Size in bytes of the payload of each segment.
    pub gso_size: u16,
    /// Start of the checksummed part, in bytes from the start of the frame.
    pub csum_start: u16,
    /// Position of the checksum, in bytes from there.
    pub csum_offset: u16,
    /// Device to driver, with [`F_MRG_RXBUF`]: number of buffers that hold the frame.
    pub num_buffers: u16,
}

/// Header of every control command (section 5.1.6.5).
///
/// Data and one writable byte for the result follow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Command {
    /// One of the `CLASS_` constants.
    pub class: u8,
    /// Command of that class.
    pub command: u8,
}

/// Configuration space (section 5.1.4) up to `mtu`, little endian.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Config {
    /// The device's address.
    pub mac: [u8; 6],
    /// `S_` bits.
    pub status: u16,
    /// Maximum number of queue pairs.
    pub max_virtqueue_pairs: u16,
    /// Largest packet in bytes, without the Ethernet header.
    pub mtu: u16,
}
