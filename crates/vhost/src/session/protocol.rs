//! What an export calls. The methods of [`VhostSession`] of the same names come first.
use super::saved::SavedSession;
use super::{Answer, VhostSession};
use crate::message;
use paravane_device::Device;
use paravane_export::protocol::{Section, Sections, Session, Successor};
use paravane_export::{HandoverError, SessionEnd};
use std::any::Any;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// Numbers of descriptors to wait for.
const ALARM: u8 = 0;
const BACK_CHANNEL: u8 = 1;

impl Session for VhostSession {
    fn device(&mut self) -> &mut dyn Device {
        &mut *self.device
    }

    fn track(&mut self) -> Result<(), SessionEnd> {
        Ok(self.track_itself()?)
    }

    fn replay(&mut self, sections: Vec<Section>, hold: bool) -> Result<(), SessionEnd> {
        Ok(self.replay_saved(SavedSession::read(sections)?, hold)?)
    }

    fn release(&mut self) -> Result<(), SessionEnd> {
        Ok(self.release_held()?)
    }

    fn prepare(&mut self, message: &[u8]) -> Result<bool, SessionEnd> {
        let (header, _) = message::split(message)?;
        Ok(Self::prepare(self, header)?)
    }

    fn answer(&mut self, message: &[u8], fds: Vec<OwnedFd>) -> (Option<Answer>, Result<(), SessionEnd>) {
        match message::split(message) {
            Ok((header, payload)) => {
                let (answer, result) = Self::answer(self, header, payload, fds);
                (answer, result.map_err(SessionEnd::from))
            }
            Err(error) => (None, Err(error.into())),
        }
    }

    fn config_changed(&mut self) {
        Self::config_changed(self);
    }

    fn translates(&self) -> bool {
        self.translations.is_some()
    }

    fn rest(&mut self) -> Option<Duration> {
        self.watched = self.back_channel.socket();
        self.next_tick()
    }

    fn descriptors(&self) -> Vec<(u8, BorrowedFd<'_>)> {
        let channel = self.watched.as_ref().map(|socket| (BACK_CHANNEL, socket.as_fd()));
        std::iter::once((ALARM, self.alarm())).chain(channel).collect()
    }

    fn woken(&mut self, number: u8) -> Result<bool, SessionEnd> {
        if number == ALARM {
            self.check_memory()?;
            return Ok(false);
        }
        let is_dropped = number == BACK_CHANNEL && self.hear();
        if is_dropped {
            let device = self.shared_status.read().name;
            tracing::info!(
                device,
                "client closed its back channel; it gets no more reports of sizes and missing translations"
            );
        }
        Ok(is_dropped)
    }

    fn tick(&mut self) -> Result<(), SessionEnd> {
        if self.next_tick().is_some() {
            Self::tick(self)?;
        }
        Ok(())
    }

    fn stop(&mut self) -> Result<(), HandoverError> {
        self.stop_for_successor()
    }

    fn save(&mut self, successor: Successor, into: &mut dyn Sections) -> Result<(), HandoverError> {
        self.save_all(successor, into)
    }

    fn leave(self: Box<Self>) -> (Box<dyn Device>, Box<dyn Any + Send>) {
        self.leave_client()
    }

    fn end(self: Box<Self>) -> Box<dyn Device> {
        Self::end(*self)
    }
}
