//! What the broker may connect to.
use super::message::{Message, receive};
use paravane_store::Target;
use parking_lot::Mutex;
use std::collections::HashSet;
use std::os::fd::OwnedFd;

/// Targets that were named at the start, and by the reader of the file of devices.
#[derive(Debug)]
pub(super) struct Targets {
    named: Mutex<HashSet<Target>>,
    /// Names more. It does not block.
    pub(super) reader: Option<OwnedFd>,
}

impl Targets {
    pub(super) fn new(named: Vec<Target>, reader: Option<OwnedFd>) -> Self {
        Self { named: Mutex::new(named.into_iter().collect()), reader }
    }

    /// Whether a target is configured.
    pub(super) fn has(&self, target: &Target) -> bool {
        self.named.lock().contains(target)
    }

    /// Takes what the reader has sent. `false`: it has ended.
    pub(super) fn take(&self) -> bool {
        let Some(reader) = &self.reader else { return false };
        loop {
            match receive(reader) {
                Ok(Some((Message::Allow(target), _))) => drop(self.named.lock().insert(target)),
                Ok(Some(_)) => {}
                Ok(None) => return false,
                // Nothing more for now.
                Err(error) => return error.kind() == std::io::ErrorKind::TimedOut,
            }
        }
    }
}
