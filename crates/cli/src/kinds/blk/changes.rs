//! What a new specification changes of a disk.
use super::spec::Blk;
use crate::kinds::changes::{Differences, Effect, differences};
use crate::kinds::kind::Spec;

/// Adds what `wanted` changes of `served`.
pub(super) fn changes(all: &mut Differences, served: &Blk, wanted: &Blk) {
    differences!(
        all, Blk, served, wanted,
        image "image" Session,
        format "format" Session,
        backing "backing" Session,
        force_layers "force-layers" Restart,
        read_only "read-only" Restart,
        lock "no-lock" Restart,
        direct "direct" Restart,
        block_size "block-size" Restart,
        registered_buffers "registered-buffers" Restart,
        store_timeout "store-timeout" Restart,
        queues "queues" Restart,
        queue_size "queue-size" Restart,
        engine "engine" Restart,
        on_full "on-full" InPlace,
        slow "slow" InPlace;
        but polls serial told_serial limit
    );
    // Threads of a connection to a server poll, too, or never do.
    let remote = served.locations().iter().any(|location| location.path().is_none());
    let effect = if remote { Effect::Restart } else { Effect::InPlace };
    all.add("poll-us", effect, served.polls != wanted.polls);
    let serial = |blk: &Blk| (blk.serial.clone(), blk.told_serial.clone());
    all.add("serial", Effect::Restart, serial(served) != serial(wanted));
    all.limit(served.limit, wanted.limit);
}
