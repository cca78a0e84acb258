//! Live migration: the log of the pages that a device writes.
//!
//! ```text
//!   SET_LOG_BASE: area ----> stored --SET_FEATURES with LOG_ALL--> on: every write is marked by the end of its batch
//!                              ^                                   |
//!                              '------- SET_FEATURES without ------'
//! ```
//! The used ring is marked like all other memory, by its guest-physical address, whether
//! SET_VRING_ADDR asks for it or not.
use super::{BATCH_TIMEOUT, SessionError, VhostSession};
use crate::message::Handled;
use paravane_dma::DirtyLog;
use paravane_spec::vhost_user::{F_LOG_ALL, LogArea, protocol_feature};
use std::os::fd::OwnedFd;
use std::sync::Arc;

impl VhostSession {
    pub(super) fn set_log_base(&mut self, (area, file): (LogArea, OwnedFd)) -> Result<Handled, SessionError> {
        self.features.need_protocol(protocol_feature::LOG_SHMFD, "SET_LOG_BASE")?;
        let (alarm, quota) = (self.memory.alarm(), self.memory.quota());
        let log = DirtyLog::guarded(file, area.offset, area.size, alarm, quota)?;
        self.log = Some((area, Arc::clone(&log)));
        if self.features.has(F_LOG_ALL) {
            self.memory.memory().start_log(log, BATCH_TIMEOUT)?;
        }
        Ok(Handled::reply(&area))
    }

    /// Starts or stops logging. Call it after a change of the features.
    pub(super) fn update_logging(&mut self) -> Result<(), SessionError> {
        let memory = self.memory.memory();
        match (self.features.has(F_LOG_ALL), &self.log) {
            (true, Some((_, log))) => memory.start_log(Arc::clone(log), BATCH_TIMEOUT)?,
            // SET_LOG_BASE turns it on.
            (true, None) => {}
            (false, _) => {
                memory.stop_log(BATCH_TIMEOUT)?;
            }
        }
        Ok(())
    }
}
