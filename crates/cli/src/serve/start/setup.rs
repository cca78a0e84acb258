//! What all stages of the start need.
use crate::serve::args::{DaemonArgs, ServeArgs};

/// What a daemon is started with.
pub(in crate::serve) struct Setup<'a> {
    pub(in crate::serve) args: &'a ServeArgs,
    /// Options of the command line and the file.
    pub(in crate::serve) daemon: &'a DaemonArgs,
    pub(in crate::serve) verbose: u8,
}

impl Setup<'_> {
    /// Whether the devices start each for itself: those of a file.
    pub(super) fn each(&self) -> bool {
        self.args.config.is_some() && !self.args.take_over
    }
}
