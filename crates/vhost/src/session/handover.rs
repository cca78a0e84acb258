//! Handover of a session: the messages that make it again.
//!
//! ```text
//!  Session --hand_over: drain--> messages, and what no message carries --replay--> Session
//! ```
//! The order of the messages matters: features first, then memory, the log, the in-flight region
//! and translations, then the queues, and their kicks last. So all queues are complete when the
//! first one starts.
use super::{Session, SessionError};
use crate::handover::HandoverError;
use crate::handover::record::{Message, SessionState};
use crate::message::{self, HEADER, MessageError, Request};
use crate::vring::Kick;
use paravane_spec::vhost_user::{
    Header, MAX_CONFIG, SingleRegion, VRING_NO_FD, VringAddr, VringState, flags, request,
};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Messages that are being written.
#[derive(Default)]
struct Messages(Vec<Message>);

impl Messages {
    fn push(
        &mut self,
        request: u32,
        payload: &(impl IntoBytes + Immutable + ?Sized),
        fd: impl IntoIterator<Item = OwnedFd>,
    ) {
        let bytes = message::message(request, flags::VERSION, payload.as_bytes());
        self.0.push((bytes, fd.into_iter().collect()));
    }

    /// Writes a message whose payload is the index of a queue.
    fn push_vring_fd(&mut self, request: u32, queue: u16, fd: Option<OwnedFd>) {
        let no_fd = if fd.is_some() { 0 } else { VRING_NO_FD };
        self.push(request, &(u64::from(queue) | no_fd), fd);
    }
}

fn duplicate(fd: BorrowedFd<'_>) -> Result<OwnedFd, HandoverError> {
    fd.try_clone_to_owned().map_err(HandoverError::Fd)
}

impl Session<'_> {
    /// Ends the session here, so that another process continues it.
    ///
    /// Completes what is in flight. The client notices nothing.
    ///
    /// # Errors
    /// The session cannot be handed over. It has ended as by [`Session::end`].
    pub(crate) fn hand_over(mut self) -> Result<SessionState, HandoverError> {
        match self.state() {
            Ok(state) => {
                self.shared_status.notifiers.clear();
                Ok(state)
            }
            Err(error) => {
                self.end();
                Err(error)
            }
        }
    }

    fn state(&mut self) -> Result<SessionState, HandoverError> {
        if self.transfer.is_open() {
            return Err(HandoverError::Transfer);
        }
        let unknown = self.stop_every();
        let notifiers = Arc::clone(&self.shared_status.notifiers);
        if let Some(queue) = unknown.into_iter().find(|queue| notifiers.failure(*queue).is_none()) {
            return Err(HandoverError::Position(queue.into()));
        }
        let queues = 0..self.vrings.len() as u16;
        let failed = queues.filter_map(|queue| Some((queue, notifiers.failure(queue)?))).collect();
        let mut config = vec![0; MAX_CONFIG as usize];
        self.device.read_config(0, &mut config);
        let region_times = self.memory.regions().iter().map(|(_, _, times)| times).collect();
        let pairs = self.device.net().map_or(0, |net| net.commanded_pairs());
        let mut messages = Messages::default();
        self.push_all(&mut messages)?;
        self.push_queues(&mut messages)?;
        Ok(SessionState { messages: messages.0, region_times, failed, config, pairs })
    }

    /// Writes all that comes before the queues.
    fn push_all(&mut self, messages: &mut Messages) -> Result<(), HandoverError> {
        let (protocol, accepted) = (self.features.accepted_protocol(), self.features.accepted());
        let numbers = [
            (request::SET_PROTOCOL_FEATURES, protocol),
            (request::SET_FEATURES, accepted),
            (request::SET_STATUS, self.status.into()),
        ];
        // 0 is where each of them begins.
        for (request, number) in numbers.into_iter().filter(|(_, number)| *number != 0) {
            messages.push(request, &number, None);
        }
        for (region, file, _) in self.memory.regions().iter() {
            let region = SingleRegion { padding: 0, region };
            messages.push(request::ADD_MEM_REG, &region, [duplicate(file)?]);
        }
        if let Some((area, log)) = &self.log {
            messages.push(request::SET_LOG_BASE, area, [duplicate(log.fd())?]);
        }
        if let Some(inflight) = &self.inflight {
            let (inflight, file) = inflight.parts().map_err(HandoverError::Fd)?;
            messages.push(request::SET_INFLIGHT_FD, &inflight, [file]);
        }
        for update in self.translations.iter().flat_map(|translations| translations.updates()) {
            messages.push(request::IOTLB_MSG, &update, None);
        }
        if let Some(socket) = self.back_channel.take() {
            let socket = match Arc::try_unwrap(socket) {
                Ok(socket) => socket,
                Err(shared) => shared.try_clone().map_err(HandoverError::Fd)?,
            };
            messages.push(request::SET_BACKEND_REQ_FD, &[0_u8; 0], [socket]);
        }
        Ok(())
    }

    fn push_queues(&mut self, messages: &mut Messages) -> Result<(), HandoverError> {
        for (queue, vring) in (0..).zip(&self.vrings) {
            let state = |num| VringState { index: queue.into(), num };
            if vring.size > 0 {
                messages.push(request::SET_VRING_NUM, &state(vring.size.into()), None);
            }
            if vring.base > 0 {
                messages.push(request::SET_VRING_BASE, &state(vring.base), None);
            }
            if let Some(addr) = vring.addr {
                messages.push(request::SET_VRING_ADDR, &VringAddr { index: queue.into(), ..addr }, None);
            }
            let signals = self.shared_status.notifiers.take(queue).map_err(HandoverError::Fd)?;
            for (request, fd) in [request::SET_VRING_CALL, request::SET_VRING_ERR].into_iter().zip(signals) {
                if fd.is_some() {
                    messages.push_vring_fd(request, queue, fd);
                }
            }
            if vring.enabled {
                messages.push(request::SET_VRING_ENABLE, &state(1), None);
            }
        }
        for (queue, vring) in (0..).zip(&mut self.vrings) {
            match vring.kick.take() {
                None => {}
                Some(Kick::Poll) => messages.push_vring_fd(request::SET_VRING_KICK, queue, None),
                Some(Kick::Fd(fd)) => messages.push_vring_fd(request::SET_VRING_KICK, queue, Some(fd)),
            }
        }
        Ok(())
    }

    /// Continues a session that another process has handed over.
    ///
    /// Handles its messages as those of a client, and sends no replies.
    ///
    /// # Errors
    /// As [`Session::answer`]. End the session.
    pub(crate) fn replay(&mut self, state: SessionState) -> Result<(), SessionError> {
        let SessionState { messages, region_times, failed, config, pairs } = state;
        // First, so that these queues do not start.
        for (queue, error) in failed {
            let queue = self.queue(queue.into())?;
            self.shared_status.notifiers.restore_failure(queue, error);
        }
        for (bytes, fds) in messages {
            let refused = |request| MessageError::Size { request, size: bytes.len() };
            let (header, payload) = Header::read_from_prefix(&bytes).map_err(|_| refused(0))?;
            if message::payload_len(header)? != payload.len() {
                return Err(refused(header.request).into());
            }
            self.handle(Request::decode(header, &bytes[HEADER..], fds)?)?;
        }
        if !self.memory.set_times(&region_times) {
            return Err(SessionError::RegionTimes);
        }
        if let Some(net) = self.device.net() {
            net.restore_pairs(pairs);
        }
        for (queue, vring) in (0..).zip(&self.vrings) {
            self.publish_status(queue, vring);
        }
        // The device may have been opened with another size.
        let mut now = vec![0; config.len()];
        self.device.read_config(0, &mut now);
        if now != config {
            self.config_changed();
        }
        Ok(())
    }
}
