//! What an export calls.
use super::saved::SavedSession;
use super::{Answer, SessionError, VhostSession};
use crate::inflight::{self, InflightMemory};
use crate::message::{self, Handled};
use paravane_device::Device;
use paravane_export::protocol::{Section, Sections, Session, Successor};
use paravane_export::{HandoverError, SessionEnd};
use paravane_spec::vhost_user::{flags, protocol_feature, request};
use std::any::Any;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;
use zerocopy::IntoBytes;

/// Numbers of descriptors to wait for.
const ALARM: u8 = 0;
const BACK_CHANNEL: u8 = 1;

impl Session for VhostSession {
    fn device(&mut self) -> &mut dyn Device {
        &mut *self.device
    }

    fn track(&mut self) -> Result<(), SessionEnd> {
        if self.own_inflight.is_none() {
            let (layout, file) = inflight::make_own(self.device.queue_sizes())?;
            self.own_inflight = Some(InflightMemory::new(layout, file, &self.memory)?);
        }
        Ok(())
    }

    fn replay(&mut self, sections: Vec<Section>, hold: bool) -> Result<(), SessionEnd> {
        Ok(self.replay_saved(SavedSession::read(sections)?, hold)?)
    }

    fn release(&mut self) -> Result<(), SessionEnd> {
        Ok(self.release_held()?)
    }

    fn prepare(&mut self, message: &[u8]) -> Result<bool, SessionEnd> {
        let (header, _) = message::split(message)?;
        let starts = [
            request::ADD_MEM_REG,
            request::SET_MEM_TABLE,
            request::SET_VRING_ADDR,
            request::SET_VRING_ENABLE,
            request::SET_VRING_KICK,
        ];
        if !starts.contains(&{ header.request }) {
            return Ok(false);
        }
        // The tracking of a queue that the message may start anew is cleared.
        let own = self.own_inflight.as_ref().filter(|_| !self.is_held);
        for (queue, vring) in (0..).zip(&mut self.vrings) {
            if let Some(own) = own
                && vring.is_tracked
                && !self.queues.is_live(queue)
            {
                let request = "in-flight region";
                own.memory.clear(queue).map_err(|source| SessionError::Fd { request, source })?;
                vring.is_tracked = false;
            }
        }
        Ok(true)
    }

    fn answer(&mut self, message: &[u8], fds: Vec<OwnedFd>) -> (Option<Answer>, Result<(), SessionEnd>) {
        let (header, payload) = match message::split(message) {
            Ok(parts) => parts,
            Err(error) => return (None, Err(error.into())),
        };
        let done = self.handle(header.request, payload, fds);
        // The message that accepts REPLY_ACK is acknowledged too: User Mode Linux waits for it.
        let acknowledges =
            header.flags & flags::NEED_REPLY != 0 && self.features.has_protocol(protocol_feature::REPLY_ACK);
        let acknowledge = |code: u64| acknowledges.then(|| (code.as_bytes().to_vec(), None));
        let (reply, result) = match done {
            Ok(Handled::Reply(payload, fd)) => (Some((payload, fd)), Ok(())),
            Ok(Handled::Done) => (acknowledge(0), Ok(())),
            Ok(Handled::Refused) => (acknowledge(1), Ok(())),
            Err(error) => (acknowledge(1), Err(error.into())),
        };
        let encode =
            |payload: &[u8]| message::message(header.request, flags::VERSION | flags::REPLY, payload);
        (reply.map(|(payload, fd)| (encode(&payload), fd)), result)
    }

    fn config_changed(&mut self) {
        if self.features.has_protocol(protocol_feature::CONFIG) {
            self.back_channel.config_changed();
        }
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
        std::iter::once((ALARM, self.memory.as_fd())).chain(channel).collect()
    }

    fn woken(&mut self, number: u8) -> Result<bool, SessionEnd> {
        if number == ALARM {
            let _ = self.memory.alarm().take();
            let log = self.log.as_ref().is_some_and(|(_, log)| log.lost());
            let inflight = self.inflight.as_ref().is_some_and(|inflight| inflight.memory.is_lost());
            let is_lost = log || inflight || self.memory.lost();
            return if is_lost { Err(SessionError::MemoryLost.into()) } else { Ok(false) };
        }
        let is_dropped = number == BACK_CHANNEL && self.back_channel.discard();
        if is_dropped {
            self.follow_carrier();
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
            self.ticker.signal();
            self.report_again()?;
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

    fn end(mut self: Box<Self>) -> Box<dyn Device> {
        self.stop_every();
        self.shared_status.notifiers.clear();
        self.device.reset();
        let mut status = self.shared_status.write();
        status.connected = false;
        status.tracked = false;
        drop(status);
        self.device
    }
}
