//! What a new specification changes of a network card.
use super::spec::{Net, Network};
use crate::kinds::changes::{Differences, Effect};

/// Adds what `wanted` changes of `served`.
pub(super) fn changes(all: &mut Differences, served: &Net, wanted: &Net) {
    use Effect::{Restart, Session};
    let Net { network, mac, queues, queue_size, mtu, offloads, announce: _, limit } = served;
    let network_key = match &wanted.network {
        Network::Tap(_) | Network::TapFds(_) => "tap",
        Network::Link(_) => "link",
        Network::Echo(_) => "echo",
        Network::Sink => "sink",
        Network::Source(_) => "source",
    };
    all.add(network_key, Session, *network != wanted.network);
    all.add("mac", Restart, *mac != wanted.mac);
    all.add("queues", Restart, *queues != wanted.queues);
    all.add("queue-size", Restart, *queue_size != wanted.queue_size);
    all.add("mtu", Restart, *mtu != wanted.mtu);
    all.add("no-offloads", Restart, *offloads != wanted.offloads);
    all.limit(*limit, wanted.limit);
}
