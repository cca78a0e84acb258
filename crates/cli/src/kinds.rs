//! Kinds of devices: a file or folder each, and one line in [`KINDS`].
//!
//! Command line, files of devices, sandbox, doctor, status, manuals and reference iterate over the list and
//! use what [`kind`] has of each.
pub(crate) mod blk;
pub(crate) mod changes;
pub(crate) mod checked;
pub(crate) mod command;
mod console;
pub(crate) mod endpoint;
pub(crate) mod kind;
mod limits;
pub(crate) mod net;
pub(crate) mod observe;
mod opened;
pub(crate) mod opening;
pub(crate) mod rng;
pub(crate) mod texts;

pub(crate) use command::DeviceCommand;
pub(crate) use kind::Kind;

/// All kinds, in the order of help and manuals.
pub(crate) static KINDS: &[&Kind] = &[&blk::BLK, &net::NET, &rng::RNG, &console::CONSOLE];

/// The kind of this name.
pub(crate) fn find(name: &str) -> Option<&'static Kind> {
    KINDS.iter().find(|kind| kind.name == name).copied()
}

/// All names as in a sentence: "blk, net or rng".
pub(crate) fn names(last: &str) -> String {
    let names: Vec<_> = KINDS.iter().map(|kind| kind.name).collect();
    let (end, begin) = names.split_last().unwrap_or((&"", &[]));
    format!("{} {last} {end}", begin.join(", "))
}
