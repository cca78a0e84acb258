//! What guests are told of network cards.
use crate::mac;
use crate::serve::told::{QUEUES, Told, USED};
use paravane_spec::net;
use paravane_vhost::KnownToDriver;
use zerocopy::FromBytes;

pub(super) const MAC: &str = "MAC address";
pub(super) const MTU: &str = "MTU";
pub(super) const OFFLOADS: &str = "offloads";

/// What a driver has read.
pub(super) fn recorded(KnownToDriver { config, features }: &KnownToDriver, told: &mut Told) {
    let Ok((config, _)) = net::Config::read_from_prefix(config) else { return };
    told.put(MAC, mac::text(&config.mac));
    told.put(QUEUES, u16::from_le(config.max_virtqueue_pairs));
    if features & net::F_MTU != 0 {
        told.put(MTU, u16::from_le(config.mtu));
    }
}

/// What a driver uses of what may be offered or not.
pub(super) fn accepted(features: u64, told: &mut Told) {
    const OFFLOAD: u64 = net::F_CSUM
        | net::F_GUEST_CSUM
        | net::F_GUEST_TSO4
        | net::F_GUEST_TSO6
        | net::F_HOST_TSO4
        | net::F_HOST_TSO6;
    if features & OFFLOAD != 0 {
        told.put(OFFLOADS, USED);
    }
}
