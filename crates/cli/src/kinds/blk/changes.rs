//! What a new specification changes of a disk.
use super::spec::Blk;
use crate::kinds::changes::{Differences, Effect};
use paravane_store::Location;

/// Adds what `wanted` changes of `served`.
pub(super) fn changes(all: &mut Differences, served: &Blk, wanted: &Blk) {
    use Effect::{InPlace, Restart, Session};
    let Blk {
        image,
        format,
        backing,
        force_layers,
        read_only,
        lock,
        direct,
        block_size,
        registered_buffers,
        store_timeout,
        polls,
        serial,
        told_serial,
        queues,
        queue_size,
        engine,
        on_full,
        slow,
        limit,
    } = served;
    let is_remote = |location: &Location| location.path().is_none();
    all.add("image", Session, *image != wanted.image);
    all.add("format", Session, *format != wanted.format);
    all.add("backing", Session, *backing != wanted.backing);
    all.add("force-layers", Restart, *force_layers != wanted.force_layers);
    all.add("read-only", Restart, *read_only != wanted.read_only);
    all.add("no-lock", Restart, *lock != wanted.lock);
    all.add("direct", Restart, *direct != wanted.direct);
    all.add("block-size", Restart, *block_size != wanted.block_size);
    all.add("registered-buffers", Restart, *registered_buffers != wanted.registered_buffers);
    all.add("store-timeout", Restart, *store_timeout != wanted.store_timeout);
    // Threads of a connection to a server poll, too, or never do.
    let remote = is_remote(image) || backing.iter().any(|layer| is_remote(&layer.location));
    all.add("poll-us", if remote { Restart } else { InPlace }, *polls != wanted.polls);
    all.add("serial", Restart, (serial, told_serial) != (&wanted.serial, &wanted.told_serial));
    all.add("queues", Restart, *queues != wanted.queues);
    all.add("queue-size", Restart, *queue_size != wanted.queue_size);
    all.add("engine", Restart, *engine != wanted.engine);
    all.add("on-full", InPlace, *on_full != wanted.on_full);
    all.add("slow", InPlace, *slow != wanted.slow);
    all.limit(*limit, wanted.limit);
}
