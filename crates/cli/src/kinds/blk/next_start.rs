//! How to start a disk again after a snapshot: its images, and all options that are in use.
use super::args::{Blk, ON_FULL, STORE_TIMEOUT};
use crate::choices::name;
use crate::engine::ENGINES;
use crate::images::Backing;
use crate::kinds::checked::QUEUE_SIZE;
use crate::serve::snapshot::messages::{Layer, NextStart, StartOption};
use paravane_device::blk::{EngineChoice, Format, OnFull};
use paravane_device::{Rate, RateLimit};
use paravane_store::{Location, Written};

/// The images and options of a disk.
///
/// # Errors
/// A path is not UTF-8, as qcow2 and JSON demand.
pub(super) fn of(blk: &Blk) -> Result<NextStart, String> {
    let backing = blk.backing.iter().map(|Backing { format, location }| layer(*format, location));
    Ok(NextStart {
        image: layer(blk.format, &blk.image)?,
        backing: backing.collect::<Result<_, _>>()?,
        options: options(blk),
        ..NextStart::default()
    })
}

/// A layer with absolute paths.
fn layer(format: Format, location: &Location) -> Result<Layer, String> {
    let mut location = location.clone();
    location.resolve(&std::env::current_dir().map_err(|error| format!("current directory: {error}"))?);
    if let Some(path) = location.path()
        && path.to_str().is_none()
    {
        return Err(format!("{location}: the path is not UTF-8, which qcow2 demands"));
    }
    let Written { text, lacks_secret } = location.written();
    Ok(Layer { format, path: text, lacks_secret })
}

/// Options that are not the defaults, but those of images and serial number.
///
/// The overlay is a file: what is for its image alone does not go on.
fn options(blk: &Blk) -> Vec<StartOption> {
    // An option that is added has to be listed.
    let Blk {
        force_layers,
        block_size,
        store_timeout,
        queues,
        queue_size,
        engine,
        on_full,
        slow,
        limit,
        // Images and the serial number.
        image: _,
        format: _,
        backing: _,
        serial: _,
        told_serial: _,
        // A disk with snapshots is locked and writable.
        read_only: _,
        no_lock: _,
        // Of raw images.
        direct: _,
        registered_buffers: _,
        // Follows from `poll-us`.
        polls: _,
    } = blk;
    let mut options = Vec::new();
    let mut add = |is_set: bool, option: StartOption| options.extend(is_set.then_some(option));
    add(*force_layers, StartOption::flag("force-layers"));
    if let Some(block) = block_size {
        add(true, StartOption::new("block-size", block));
    }
    add(*store_timeout != STORE_TIMEOUT, StartOption::new("store-timeout", store_timeout));
    add(*queues != 1, StartOption::new("queues", queues));
    add(*queue_size != QUEUE_SIZE, StartOption::new("queue-size", queue_size));
    add(*engine != EngineChoice::Auto, StartOption::new("engine", name(ENGINES, engine)));
    add(*on_full != OnFull::Wait, StartOption::new("on-full", name(ON_FULL, on_full)));
    if let Some(slow) = slow {
        add(true, StartOption::new("slow", slow));
    }
    limits(&limit.rates(), &mut add);
    options
}

fn limits(limit: &RateLimit, add: &mut impl FnMut(bool, StartOption)) {
    let RateLimit { bytes, ops } = limit;
    let rates = [("bytes-per-second", "burst-bytes", bytes), ("ops-per-second", "burst-ops", ops)];
    for (option, burst_option, rate) in rates {
        let Some(Rate { per_second, burst }) = rate else { continue };
        add(true, StartOption::new(option, per_second));
        add(*burst != per_second.get() / 10, StartOption::new(burst_option, burst));
    }
}
