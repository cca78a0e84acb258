//! The subjects of a case with two threads that run in this process.
use super::case::Case;
use super::ends::{ParavaneDevice, ParavaneDriver, layout};
use super::run::Pair;
use crate::BenchError;
use crate::memory::Pages;
use crate::subject::PARAVANE;
use paravane_ring::DmaArea;

/// The subjects of a case that run in this process, `paravane` first.
pub(crate) fn names(case: Case) -> Vec<&'static str> {
    let mut names = vec![PARAVANE];
    // Neither peer implements IN_ORDER. virtio-queue has no packed ring; virtio-driver's fails with
    // one descriptor.
    if cfg!(feature = "peers") && !case.in_order && !case.packed {
        names.extend(["virtio-queue", "virtio-driver"]);
    }
    names
}

/// Makes the subject called `name`: Paravane at both ends, or a peer at one.
///
/// # Errors
/// The subject cannot be set up.
pub(crate) fn pair(case: Case, name: &str) -> Result<Box<Pair>, BenchError> {
    match name {
        #[cfg(feature = "peers")]
        "virtio-queue" => super::peer_ends::with_virtio_queue(case),
        #[cfg(feature = "peers")]
        "virtio-driver" => super::peer_ends::with_virtio_driver(case),
        _ => {
            let layout = layout(case)?;
            let pages = Pages::new(layout.memory());
            let area = pages.shared().area();
            let (driver, addresses) = ParavaneDriver::new(layout, DmaArea { area, addr: 0 })?;
            let device = ParavaneDevice::new(case, addresses, 0, area)?;
            Ok(Pair::new(driver, device, pages))
        }
    }
}
