//! How to start a disk again after a snapshot: all options that are in use.
use super::messages::{Format, Layer, NextStart, StartOption};
use crate::serve::args::{self, Backing};
use crate::serve::spec::{Blk, DeviceSpec, Endpoint, Kind, default_poll};
use clap::ValueEnum;
use paravane_device::{Rate, RateLimit};
use paravane_store::{Location, Written};
use std::path::Path;
use std::time::Duration;

impl NextStart {
    /// The images and options of a disk. `None`: the device is not one.
    ///
    /// # Errors
    /// A path is not UTF-8, as qcow2 and JSON demand.
    pub(crate) fn of(spec: &DeviceSpec) -> Result<Option<Self>, String> {
        let Kind::Blk(blk) = &spec.kind else { return Ok(None) };
        let layer = |Backing { format, location }: &Backing| layer(*format, location);
        Ok(Some(Self {
            image: layer(&Backing { format: blk.format, location: blk.image.clone() })?,
            backing: blk.backing.iter().map(layer).collect::<Result<_, _>>()?,
            name: spec.name.clone(),
            endpoint: endpoint(&spec.endpoint),
            options: options(spec, blk),
        }))
    }
}

/// A layer with absolute paths.
fn layer(format: args::Format, location: &Location) -> Result<Layer, String> {
    let mut location = location.clone();
    location.resolve(&std::env::current_dir().map_err(|error| format!("current directory: {error}"))?);
    if let Some(path) = location.path()
        && path.to_str().is_none()
    {
        return Err(format!("{location}: the path is not UTF-8, which qcow2 demands"));
    }
    let format = match format {
        args::Format::Raw => Format::Raw,
        args::Format::Qcow2 => Format::Qcow2,
    };
    let Written { text, lacks_secret } = location.written();
    Ok(Layer { format, path: text, lacks_secret })
}

fn endpoint(endpoint: &Endpoint) -> StartOption {
    let absolute = |path: &Path| {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        path.to_string_lossy().into_owned()
    };
    match endpoint {
        Endpoint::Listen(path) => StartOption::new("socket", absolute(path)),
        Endpoint::Connect(path) => StartOption::new("connect", absolute(path)),
        Endpoint::Activated => StartOption::flag("socket-activation"),
        Endpoint::Inherited(number) => StartOption::new("fd", number),
    }
}

/// Options that are not the defaults, but those of images, endpoint and serial number.
///
/// The overlay is a file: what is for its image alone does not go on.
fn options(spec: &DeviceSpec, blk: &Blk) -> Vec<StartOption> {
    let DeviceSpec { workers, longest_poll, latencies, packed, name: _, endpoint: _, kind: _ } = spec;
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
        lock: _,
        // Of raw images.
        direct: _,
        registered_buffers: _,
        // That of `longest_poll`.
        polls: _,
    } = blk;
    let mut options = Vec::new();
    let mut add = |is_set: bool, option: StartOption| options.extend(is_set.then_some(option));
    add(*force_layers, StartOption::flag("force-layers"));
    if let Some(block) = block_size {
        add(true, StartOption::new("block-size", block));
    }
    let seconds = store_timeout.as_secs();
    add(*store_timeout != crate::serve::spec::STORE_TIMEOUT, StartOption::new("store-timeout", seconds));
    add(*queues != 1, StartOption::new("queues", queues));
    add(*queue_size != crate::serve::spec::QUEUE_SIZE, StartOption::new("queue-size", queue_size));
    add(*engine != crate::engine::Engine::Auto, StartOption::new("engine", of_value(engine)));
    add(*on_full != args::OnFull::default(), StartOption::new("on-full", of_value(on_full)));
    if let Some(slow) = slow {
        add(true, StartOption::new("slow", humantime::format_duration(*slow)));
    }
    if let Some(workers) = workers {
        add(true, StartOption::new("workers", workers));
    }
    let overlay = Location::File("overlay".into());
    let is_poll_other = *longest_poll != Duration::from_micros(default_poll(&overlay).into());
    add(is_poll_other, StartOption::new("poll-us", longest_poll.as_micros()));
    add(!latencies, StartOption::new("latencies", "off"));
    add(!packed, StartOption::flag("no-packed"));
    limits(limit, &mut add);
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

/// The name of a value on the command line.
fn of_value(value: &impl ValueEnum) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}
