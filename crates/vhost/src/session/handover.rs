//! Handover of a session: the messages that make it again.
//!
//! ```text
//!  Session --hand_over: drain-----------------> messages, and what no message carries --replay--> Session
//!     '-----state_to_keep: queues stay live---> the same, and an in-flight region of ours --^
//! ```
//! The order of the messages matters: features first, then memory, the log, the in-flight region
//! and translations, then the queues, and their kicks last. So all queues are complete when the
//! first one starts.
use super::{Session, SessionError};
use crate::handover::HandoverError;
use crate::handover::record::{Message, SessionState};
use crate::inflight::InflightMemory;
use crate::keeper::Keeping;
use crate::memory::ClientMemory;
use crate::message::{self, HEADER, MessageError, Request};
use crate::vring::Kick;
use paravane_device::Device;
use paravane_spec::vhost_user::{
    Header, MAX_CONFIG, SingleRegion, VRING_NO_FD, VringAddr, VringState, flags, request,
};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Messages that are being written, with descriptors of type `D`.
struct Messages<D>(Vec<Message<D>>);

impl<D> Messages<D> {
    fn push(
        &mut self,
        request: u32,
        payload: &(impl IntoBytes + Immutable + ?Sized),
        fd: impl IntoIterator<Item = D>,
    ) {
        let bytes = message::message(request, flags::VERSION, payload.as_bytes());
        self.0.push((bytes, fd.into_iter().collect()));
    }

    /// Writes a message whose payload is the index of a queue.
    fn push_vring_fd(&mut self, request: u32, queue: u16, fd: Option<D>) {
        let no_fd = if fd.is_some() { 0 } else { VRING_NO_FD };
        self.push(request, &(u64::from(queue) | no_fd), fd);
    }
}

/// What a session stands for in a record: its descriptors, or numbers for them.
pub(crate) type Give<'g, D> = dyn FnMut(BorrowedFd<'_>) -> Result<D, HandoverError> + 'g;

/// Who continues the session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Successor {
    /// Another process, which is there.
    Present,
    /// This process. What is kept of the session stays, and so does its in-flight region.
    Within,
    /// The next process, when this one has died.
    Later,
}

impl Session {
    /// Ends the session here, so that another process continues it.
    ///
    /// Completes what is in flight. The client notices nothing. Its memory is still mapped: to unmap
    /// it can take long.
    ///
    /// Returns the device too.
    ///
    /// `keeping`: the successor is in this process, and goes on with what is kept.
    ///
    /// # Errors
    /// The session cannot be handed over. It has ended as by [`Session::end`].
    pub(crate) fn hand_over(
        mut self,
        mut keeping: Option<&mut Keeping>,
    ) -> (Box<dyn Device>, Result<(SessionState, ClientMemory), HandoverError>) {
        let unknown = self.stop_every();
        let notifiers = Arc::clone(&self.shared_status.notifiers);
        let lost = unknown.into_iter().find(|queue| notifiers.failure(*queue).is_none());
        let state = match lost {
            Some(queue) => Err(HandoverError::Position(queue.into())),
            None => {
                let successor = if keeping.is_some() { Successor::Within } else { Successor::Present };
                let mut duplicate = |fd: BorrowedFd<'_>| {
                    if let Some(keeping) = &mut keeping {
                        keeping.detach(fd);
                    }
                    fd.try_clone_to_owned().map_err(HandoverError::Fd)
                };
                self.state(successor, &mut duplicate)
            }
        };
        match state {
            Ok(state) => {
                notifiers.clear();
                (self.device, Ok((state, self.memory)))
            }
            Err(error) => (self.end(), Err(error)),
        }
    }

    /// The state for a process that continues the session when this one has died.
    ///
    /// Positions of live queues are in the in-flight region. Translations are not part of it: the
    /// client is asked for them again.
    ///
    /// # Errors
    /// No process could continue the session now, or `give` fails.
    pub(crate) fn state_to_keep<D>(
        &mut self,
        give: &mut Give<'_, D>,
    ) -> Result<SessionState<D>, HandoverError> {
        self.state(Successor::Later, give)
    }

    fn state<D>(
        &mut self,
        successor: Successor,
        give: &mut Give<'_, D>,
    ) -> Result<SessionState<D>, HandoverError> {
        if self.transfer.is_open() {
            return Err(HandoverError::Transfer);
        }
        let queues = 0..self.vrings.len() as u16;
        let notifiers = &self.shared_status.notifiers;
        let failed = queues.filter_map(|queue| Some((queue, notifiers.failure(queue)?))).collect();
        let mut config = vec![0; MAX_CONFIG as usize];
        self.device.read_config(0, &mut config);
        let region_times = self.memory.regions().iter().map(|(_, _, times)| times).collect();
        let pairs = self.commanded_pairs();
        let mut messages = Messages(Vec::new());
        self.push_all(successor, &mut messages, give)?;
        self.push_queues(&mut messages, give)?;
        let own_inflight = self.own_inflight.as_ref().filter(|_| successor != Successor::Present);
        let own_inflight = own_inflight.map(|own| Ok((own.layout(), give(own.file())?))).transpose()?;
        let (messages, identity) = (messages.0, Some(self.device.identity()));
        Ok(SessionState { messages, region_times, failed, config, pairs, identity, own_inflight })
    }

    /// Writes all that comes before the queues.
    fn push_all<D>(
        &self,
        successor: Successor,
        messages: &mut Messages<D>,
        give: &mut Give<'_, D>,
    ) -> Result<(), HandoverError> {
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
            messages.push(request::ADD_MEM_REG, &region, [give(file)?]);
        }
        if let Some((area, log)) = &self.log {
            messages.push(request::SET_LOG_BASE, area, [give(log.fd())?]);
        }
        if let Some(inflight) = &self.inflight {
            messages.push(request::SET_INFLIGHT_FD, &inflight.layout(), [give(inflight.file())?]);
        }
        if successor != Successor::Later {
            for update in self.translations.iter().flat_map(|translations| translations.updates()) {
                messages.push(request::IOTLB_MSG, &update, None);
            }
        }
        if let Some(socket) = self.back_channel.socket() {
            messages.push(request::SET_BACKEND_REQ_FD, &[0_u8; 0], [give(socket.as_fd())?]);
        }
        Ok(())
    }

    fn push_queues<D>(
        &self,
        messages: &mut Messages<D>,
        give: &mut Give<'_, D>,
    ) -> Result<(), HandoverError> {
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
            let signals = self.shared_status.notifiers.signals(queue);
            for (request, signal) in
                [request::SET_VRING_CALL, request::SET_VRING_ERR].into_iter().zip(signals)
            {
                if let Some(signal) = signal {
                    messages.push_vring_fd(request, queue, Some(give(signal.as_fd())?));
                }
            }
            if vring.enabled {
                messages.push(request::SET_VRING_ENABLE, &state(1), None);
            }
        }
        for (queue, vring) in (0..).zip(&self.vrings) {
            match &vring.kick {
                None => {}
                Some(Kick::Poll) => messages.push_vring_fd(request::SET_VRING_KICK, queue, None),
                Some(Kick::Fd(fd)) => {
                    messages.push_vring_fd(request::SET_VRING_KICK, queue, Some(give(fd.as_fd())?));
                }
            }
        }
        Ok(())
    }

    /// Starts the queues that were held back.
    ///
    /// # Errors
    /// A queue cannot be served. End the session.
    pub(crate) fn release(&mut self) -> Result<(), SessionError> {
        match std::mem::take(&mut self.is_held) {
            true => self.start_all(),
            false => Ok(()),
        }
    }

    /// Continues a session that another process has handed over.
    ///
    /// Handles its messages as those of a client, and sends no replies.
    ///
    /// `hold`: no queue starts before [`Session::release`].
    ///
    /// # Errors
    /// As [`Session::answer`]. End the session.
    pub(crate) fn replay(&mut self, state: SessionState, hold: bool) -> Result<(), SessionError> {
        let SessionState { messages, region_times, failed, config, pairs, identity, own_inflight } = state;
        // Of a connection without messages, nobody knows the device.
        if !messages.is_empty() {
            self.device.keep_identity(identity.as_deref());
        }
        self.is_held = hold;
        if let Some((layout, file)) = own_inflight {
            self.own_inflight = Some(InflightMemory::new(layout, file, &self.memory)?);
            // Each may have been live.
            self.vrings.iter_mut().for_each(|vring| vring.is_tracked = true);
        }
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
        if self.live_queue().is_none() {
            self.paused_pairs = pairs;
        } else if let Some(net) = self.device.net() {
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
