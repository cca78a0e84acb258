//! Exchange: the handover of an export within a process, which its keeper never loses.
//!
//! ```text
//!   record file:  record of the old export ---------------------------------> record of the new export
//!   old export:   queues drained --Exchanged--> gone                            ^ one write
//!   new export:                      adopts the file, messages replayed --------'
//! ```
//! The keeper's copies and the record file go along ([`Left`]), and one export after the other writes
//! the file. A process that dies at any point leaves one of the two records, and its successor can
//! continue from either:
//!
//! - Both name the same open files: connection, memory, kicks and calls of the client.
//! - Both name the same in-flight region, that of the client or of the session. It has the positions
//!   of the queues and what is in flight, whichever export serves them. Drained queues have nothing in
//!   it, and a queue that starts again takes it up as after a crash. So the new export may serve
//!   requests before its record is written.
//! - No message is handled in between: each stays on the connection until an export that writes the
//!   file has done it.
//!
//! If no export adopts the copies, the session has ended: they are closed with the last
//! [`Exchanged`].
use crate::handover::Handover;
use crate::keeper::{Active, Keeping};
use parking_lot::Mutex;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// State of an export for its successor in this process, see [`Export::begin_exchange`].
///
/// What a keeper has of it stays until the successor replaces it.
///
/// [`Export::begin_exchange`]: crate::Export::begin_exchange
#[derive(Debug)]
#[must_use]
pub struct Exchanged {
    pub(crate) handover: Handover,
    pub(crate) left: Arc<Left>,
}

impl Exchanged {
    /// A copy, whose descriptors keep the client connected.
    ///
    /// Resume one of them only.
    ///
    /// # Errors
    /// The process has no file descriptors left.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self { handover: self.handover.try_clone()?, left: Arc::clone(&self.left) })
    }

    /// The state of the export.
    pub fn handover(&self) -> &Handover {
        &self.handover
    }

    /// Copies of the descriptors of the device that are kept, as [`Kept::device_fds`].
    ///
    /// Open the device with them: a TAP device that is kept cannot be opened again.
    ///
    /// # Errors
    /// The process has no file descriptors left.
    ///
    /// [`Kept::device_fds`]: crate::Kept::device_fds
    pub fn device_fds(&self) -> io::Result<Vec<OwnedFd>> {
        self.left.0.lock().as_ref().map_or_else(|| Ok(Vec::new()), Keeping::device_fds)
    }
}

/// What a keeper has of an export that was exchanged, until another export adopts it.
#[derive(Debug)]
pub(crate) struct Left(Mutex<Option<Keeping>>);

impl Left {
    pub(crate) fn new(keeping: Option<Keeping>) -> Self {
        Self(Mutex::new(keeping))
    }

    /// Takes what is kept. From here on, the caller writes the record file.
    pub(crate) fn take(&self) -> Option<Active> {
        self.0.lock().take().and_then(Keeping::into_active)
    }
}

impl Drop for Left {
    fn drop(&mut self) {
        self.0.get_mut().take().into_iter().for_each(Keeping::end);
    }
}
