//! The subjects of the cases with one thread.
use super::case::{Case, Side};
use super::scripted::{SCRIPT, ScriptAlone};
use crate::BenchError;
use crate::subject::{PARAVANE, Subject};

/// The subjects of a case, `paravane` first, without the script.
pub(crate) fn names(case: Case) -> Vec<&'static str> {
    let mut names = vec![PARAVANE];
    if cfg!(feature = "peers") {
        // No peer implements packed device rings or IN_ORDER.
        match (case.side, case.packed, case.in_order) {
            (Side::Device, false, false) => names.push("virtio-queue"),
            #[cfg(feature = "peers")]
            (Side::Driver, false, false) if super::virtio_drivers::has(case) => names.push("virtio-drivers"),
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
/// The subject cannot be set up.
pub(crate) fn make(case: Case, name: &str) -> Result<Option<Box<dyn Subject>>, BenchError> {
    if name != SCRIPT && !names(case).contains(&name) {
        return Ok(None);
    }
    Ok(Some(match (case.side, name) {
        (_, SCRIPT) => Box::new(ScriptAlone::new(case)),
        (Side::Device, PARAVANE) => Box::new(super::device_side::Paravane::new(case)?),
        (Side::Driver, PARAVANE) => Box::new(super::driver_side::Paravane::new(case)?),
        #[cfg(feature = "peers")]
        (Side::Device, "virtio-queue") => Box::new(super::virtio_queue::Peer::new(case)?),
        #[cfg(feature = "peers")]
        (Side::Driver, "virtio-driver") => Box::new(super::virtio_driver::Peer::new(case)?),
        #[cfg(feature = "peers")]
        (Side::Driver, "virtio-drivers") => super::virtio_drivers::peer(case)?,
        _ => return Ok(None),
    }))
}
