//! The subjects: who accesses guest memory, and how.
use super::fixture::Fixture;
use super::memcpy::{Memcpy, Scattered};
use super::ops::Ops;
use super::paravane::{Locked, Paravane};
use super::timing::{EmptyTarget, Loop};
use crate::BenchError;
use crate::error::broken;
use crate::subject::{PARAVANE, Subject};
use std::sync::Arc;

/// Bare copies where the domain's mappings lead.
pub(super) const SCATTERED: &str = "memcpy/pages";
/// The loop alone, which is subtracted.
pub(super) const LOOP: &str = "loop";

/// Whether the subject says device addresses.
pub(super) fn translated(name: &str) -> bool {
    name == "vm-memory/iommu"
        || name == SCATTERED
        || (name.starts_with("paravane/") && name != "paravane/log")
}

/// Makes a subject that makes the accesses of `ops` to `fixture`.
pub(super) fn subject(
    name: &str,
    fixture: &Fixture,
    ops: Ops,
    longest: usize,
) -> Result<Box<dyn Subject + Send>, BenchError> {
    Ok(match name {
        LOOP => Box::new(Loop::new(EmptyTarget, ops, longest)),
        "memcpy" => match Memcpy::new(fixture) {
            Some(target) => Box::new(Loop::new(target, ops, longest)),
            None => return Err(broken("memcpy", "memory is in several pieces")),
        },
        SCATTERED => match Scattered::new(fixture) {
            Some(target) => Box::new(Loop::new(target, ops, longest)),
            None => return Err(broken(SCATTERED, "memory is in several pieces")),
        },
        PARAVANE => Box::new(Loop::new(<Paravane>::direct(&fixture.plain), ops, longest)),
        "paravane/log" => Box::new(Loop::new(<Paravane>::direct(&fixture.under_log), ops, longest)),
        "paravane/iova" => Box::new(Loop::new(<Paravane>::behind(&fixture.domain), ops, longest)),
        "paravane/iova+log" => Box::new(Loop::new(<Paravane>::behind(&fixture.logged), ops, longest)),
        "paravane/mutex" => {
            let target = Locked::new(<Paravane>::behind(&fixture.logged), Arc::clone(&fixture.mutex));
            Box::new(Loop::new(target, ops, longest))
        }
        "paravane/rwlock" => {
            let target = Locked::new(<Paravane>::behind(&fixture.logged), Arc::clone(&fixture.rwlock));
            Box::new(Loop::new(target, ops, longest))
        }
        #[cfg(feature = "peers")]
        "vm-memory" => Box::new(Loop::new(fixture.peers.plain()?, ops, longest)),
        #[cfg(feature = "peers")]
        "vm-memory/bitmap" => Box::new(Loop::new(fixture.peers.logged()?, ops, longest)),
        #[cfg(feature = "peers")]
        "vm-memory/iommu" => Box::new(Loop::new(fixture.peers.translated()?, ops, longest)),
        _ => return Err(broken(PARAVANE, format_args!("there is no subject {name}"))),
    })
}
