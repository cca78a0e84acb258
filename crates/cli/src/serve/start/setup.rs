//! What all stages of the start need.
use crate::serve::args::{DaemonArgs, ServeArgs};

/// What a daemon is started with.
pub(crate) struct Setup<'a> {
    pub(crate) args: &'a ServeArgs,
    /// Options of the command line and the file.
    pub(crate) daemon: &'a DaemonArgs,
    pub(crate) verbose: u8,
}

impl Setup<'_> {
    /// Whether the devices start each for itself: those of a file.
    pub(super) fn each(&self) -> bool {
        self.args.config.is_some() && !self.args.take_over
    }
}
