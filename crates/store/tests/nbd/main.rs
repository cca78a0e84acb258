//! The NBD client against real servers, and against one that follows a script.
#[cfg(feature = "tls")]
mod certificates;
mod disk;
mod faults;
mod files;
mod hostile;
mod kills;
mod model;
mod script;
mod servers;
#[cfg(feature = "tls")]
mod tls;

use paravane_store::nbd::{Nbd, NbdError, NbdOptions};
use paravane_store::{Direct, Location, NamedFiles};
use std::sync::Arc;

/// Opens what a URL names.
fn open(url: &str, options: NbdOptions) -> Result<Nbd, NbdError> {
    match url.parse() {
        Ok(Location::Nbd(location)) => {
            Nbd::open(&location, options, Arc::new(Direct), &NamedFiles::default())
        }
        other => panic!("{url}: {other:?}"),
    }
}
