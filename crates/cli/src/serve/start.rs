//! How a daemon starts: stages, each of which takes the one before it.
//!
//! ```text
//!   Claimed     inherited descriptors, signals, sockets, kept sessions, or the daemon to take over from
//!     |
//!   Sandboxed   helper processes run, files outside the sandbox are read, the sandbox is closed
//!     |
//!   Opened      devices are open and match what their guests have read; privileges are dropped
//!     |
//!   Serving     sessions begin, resume, or arrive from the other daemon
//! ```
mod claimed;
mod opened;
mod sandboxed;
mod serving;
mod setup;

use super::check::{check, check_daemon};
use super::spec::DeviceSpec;
use crate::failure::Failure;
pub(super) use setup::Setup;

use claimed::Claimed;
use opened::Opened;
use sandboxed::Sandboxed;
pub(super) use serving::Serving;

/// Serves devices until a signal ends it, or another daemon takes over.
///
/// # Errors
/// The request is invalid, or the host fails.
pub(super) fn serve(setup: &Setup<'_>, devices: Vec<DeviceSpec>) -> Result<(), Failure> {
    match setup.each() {
        true => check_daemon(setup.daemon, &devices),
        false => check(setup.daemon, &devices),
    }
    .map_err(Failure::request)?;
    let claimed = Claimed::claim(setup)?;
    let sandboxed = Sandboxed::enter(claimed, setup, &devices)?;
    match Opened::open(sandboxed, setup, devices)? {
        Some(opened) => Serving::begin(opened, setup)?.run(setup),
        None => {
            tracing::info!("stopped by a signal before all devices were open");
            Ok(())
        }
    }
}
