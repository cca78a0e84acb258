//! How the program ends when it fails.
use crate::log;
pub(crate) use paravane_command_line::{Failure, one_line};

/// Ends the process at once: threads still run, and nothing is dropped.
pub(crate) fn exit(status: u8) -> ! {
    log::finish();
    std::process::exit(status.into())
}
