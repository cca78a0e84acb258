//! What a new specification changes of a network card.
use super::spec::{Net, Network};
use crate::kinds::changes::{Differences, Effect, differences};

/// Adds what `wanted` changes of `served`.
pub(super) fn changes(all: &mut Differences, served: &Net, wanted: &Net) {
    let network_key = match &wanted.network {
        Network::Tap(_) | Network::TapFds(_) => "tap",
        Network::Link(_) => "link",
        Network::Echo(_) => "echo",
        Network::Sink => "sink",
        Network::Source(_) => "source",
    };
    all.add(network_key, Effect::Session, served.network != wanted.network);
    differences!(
        all, Net, served, wanted,
        mac "mac" Restart,
        queues "queues" Restart,
        queue_size "queue-size" Restart,
        mtu "mtu" Restart,
        offloads "no-offloads" Restart;
        but network announce limit
    );
    all.limit(served.limit, wanted.limit);
}
