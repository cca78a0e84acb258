//! Whoever is measured.
use super::case::{Case, Side};
use super::scripted::{Alone, SCRIPT};
use crate::BenchError;
use std::fmt::Display;

/// Name of our own subject.
pub(crate) const OURS: &str = "paravane";

/// A queue with a scripted other side, ready to move chains.
pub(crate) trait Subject {
    /// Moves `batches` batches through the queue and returns a sum over what it saw, which keeps the work
    /// from being optimised away and is the same for every subject of a case in the same number of batches
    /// (see [`super`] on what is summed).
    ///
    /// # Errors
    /// The subject refused, or moved another number of chains than it was offered.
    fn run(&mut self, batches: u32) -> Result<u64, BenchError>;

    /// Does beforehand what is not to be measured.
    ///
    /// # Errors
    /// As [`Subject::run`].
    fn ready(&mut self) -> Result<(), BenchError> {
        Ok(())
    }

    /// The ring index, in shared memory, up to which the subject has worked; 0 if it has no ring.
    fn position(&self) -> u16 {
        0
    }
}

/// The error of a subject that does not work.
#[cold]
pub(crate) fn broken(subject: &'static str, reason: impl Display) -> BenchError {
    BenchError::Subject { subject, reason: reason.to_string() }
}

/// The error of a subject that moved `seen` chains of `wanted`.
#[cold]
pub(crate) fn miscounted(subject: &'static str, seen: usize, wanted: u16) -> BenchError {
    broken(subject, format_args!("it moved {seen} chains of {wanted}"))
}

/// The subjects of a case, ours first. The scripted side is not among them.
pub(crate) fn names(case: Case) -> Vec<&'static str> {
    let mut names = vec![OURS];
    if cfg!(feature = "peers") {
        // No peer has a packed device side or knows IN_ORDER.
        match (case.side, case.packed, case.in_order) {
            (Side::Device, false, false) => names.push("virtio-queue"),
            (Side::Driver, false, false) => names.push("virtio-drivers"),
            _ => {}
        }
        #[cfg(feature = "peers")]
        if case.side == Side::Driver && super::virtio_driver::has(case) {
            names.push("virtio-driver");
        }
    }
    names
}

/// Makes the subject called `name`, or `None` if the case has no such subject.
///
/// # Errors
/// It could not be set up.
pub(crate) fn make(case: Case, name: &str) -> Result<Option<Box<dyn Subject>>, BenchError> {
    if name != SCRIPT && !names(case).contains(&name) {
        return Ok(None);
    }
    Ok(Some(match (case.side, name) {
        (_, SCRIPT) => Box::new(Alone::new(case)),
        (Side::Device, OURS) => Box::new(super::device_side::Ours::new(case)?),
        (Side::Driver, OURS) => Box::new(super::driver_side::Ours::new(case)?),
        #[cfg(feature = "peers")]
        (Side::Device, "virtio-queue") => Box::new(super::virtio_queue::Peer::new(case)?),
        #[cfg(feature = "peers")]
        (Side::Driver, "virtio-driver") => Box::new(super::virtio_driver::Peer::new(case)?),
        #[cfg(feature = "peers")]
        (Side::Driver, "virtio-drivers") => super::virtio_drivers::peer(case)?,
        _ => return Ok(None),
    }))
}
