//! The subjects of the cases: ways to access guest memory.
use super::fixture::Fixture;
use super::memcpy::{Memcpy, Scattered};
use super::ops::Ops;
use super::paravane::{Locked, Paravane};
use super::timing::{EmptyTarget, Loop};
use crate::BenchError;
use crate::error::broken;
use crate::subject::{PARAVANE, Subject};
use std::sync::Arc;

/// Copies of the pages that the domain maps, without checks.
pub(super) const SCATTERED: &str = "memcpy/pages";
/// The empty loop, which is subtracted.
pub(super) const LOOP: &str = "loop";

/// Whether the subject uses device addresses.
pub(super) fn translated(name: &str) -> bool {
    name == "vm-memory/iommu"
        || name == SCATTERED
        || (name.starts_with("paravane/") && name != "paravane/log")
}

/// Makes a subject that performs `ops` on `fixture`.
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
            None => return Err(broken("memcpy", "guest memory has several regions")),
        },
        SCATTERED => match Scattered::new(fixture) {
            Some(target) => Box::new(Loop::new(target, ops, longest)),
            None => return Err(broken(SCATTERED, "guest memory has several regions")),
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
        _ => return Err(broken(PARAVANE, format_args!("no subject {name}"))),
    })
}
