//! Handover: the state of an export, for another process.
//!
//! ```text
//!  old: begin_hand_over --> last message handled --> queues drained ---------------------> Handover
//!                                                                                             |
//!  new: serves  <-- queues started, each signalled once <-- messages replayed <-- resume <----'
//! ```
//! A record has the state of the export and the sections that its session wrote
//! ([`Session::save`](crate::protocol::Session::save)), which mean something to its protocol only.
//!
//! The descriptors of a disk image do not go along: the new process opens and locks it anew, so the
//! old one has finished all its requests by then. It drops its device meanwhile.
mod error;
mod frame;
pub(crate) mod record;

pub use error::HandoverError;
pub use frame::{REQUIRED, SECTION_TAGS, once};

use std::os::fd::OwnedFd;

/// State of an export that another process resumes.
///
/// Send both parts to it: the bytes as they are, the descriptors in this order.
#[derive(Debug)]
#[must_use]
pub struct Handover {
    /// Record of the state, in the format of `docs/reference/handover-record.md`.
    pub record: Vec<u8>,
    /// Descriptors in the order in which the record names them.
    ///
    /// First the listening socket and the connection, where there are such.
    pub fds: Vec<OwnedFd>,
}

impl Handover {
    /// A copy, whose descriptors keep the client connected.
    ///
    /// Resume one of them only.
    ///
    /// # Errors
    /// The process has no file descriptors left.
    pub fn try_clone(&self) -> std::io::Result<Self> {
        let fds = self.fds.iter().map(OwnedFd::try_clone).collect::<Result<_, _>>()?;
        Ok(Self { record: self.record.clone(), fds })
    }

    /// The sections of the session in the record, with their tags: those in [`SECTION_TAGS`].
    ///
    /// # Errors
    /// The record is damaged, invalid or of another version.
    pub fn session_sections(&self) -> Result<Vec<(u32, &[u8])>, HandoverError> {
        frame::session_sections(&self.record)
    }
}
