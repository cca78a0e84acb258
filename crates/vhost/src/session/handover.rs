//! Handover of a session: the messages that make it again.
//!
//! ```text
//!  session --stop: drain--> save ----------> messages, and what no message carries --replay--> session
//!     '------ save: queues stay live ------> the same, and an in-flight region of ours --^
//! ```
//! The order of the messages matters: features first, then memory, the log, the in-flight region
//! and translations, then the queues, and their kicks last. So all queues are complete when the
//! first one starts.
use super::saved::{self, Facts, SavedSession};
use super::{SessionError, VhostSession};
use crate::device_state::state_of;
use crate::inflight::InflightMemory;
use crate::message::{self, MessageError};
use crate::vring::Kick;
use paravane_device::Device;
use paravane_export::handover::HandoverError;
use paravane_export::protocol::{Sections, Session, Successor};
use paravane_spec::vhost_user::{
    MAX_CONFIG, SingleRegion, VRING_NO_FD, VringAddr, VringState, flags, request,
};
use std::any::Any;
use std::os::fd::{AsFd, BorrowedFd};
use zerocopy::{Immutable, IntoBytes};

/// Messages that are being written.
struct Messages<'a>(&'a mut dyn Sections);

impl Messages<'_> {
    fn push(
        &mut self,
        request: u32,
        payload: &(impl IntoBytes + Immutable + ?Sized),
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<(), HandoverError> {
        saved::write_message(self.0, message::message(request, flags::VERSION, payload.as_bytes()), fd)
    }

    /// Writes a message whose payload is the index of a queue.
    fn push_vring_fd(
        &mut self,
        request: u32,
        queue: u16,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<(), HandoverError> {
        let no_fd = if fd.is_some() { 0 } else { VRING_NO_FD };
        self.push(request, &(u64::from(queue) | no_fd), fd)
    }
}

impl VhostSession {
    /// See [`paravane_export::protocol::Session::stop`].
    pub(super) fn stop_for_successor(&mut self) -> Result<(), HandoverError> {
        let unknown = self.stop_every();
        let notifiers = &self.shared_status.notifiers;
        match unknown.into_iter().find(|queue| notifiers.failure(*queue).is_none()) {
            Some(queue) => Err(HandoverError::Position(queue.into())),
            None => Ok(()),
        }
    }

    /// See [`paravane_export::protocol::Session::leave`]: memory takes long to unmap.
    pub(super) fn leave_client(self) -> (Box<dyn Device>, Box<dyn Any + Send>) {
        self.shared_status.notifiers.clear();
        (self.device, Box::new(self.memory))
    }

    /// See [`paravane_export::protocol::Session::save`].
    ///
    /// For [`Successor::Later`], positions of live queues are in the in-flight region. Translations
    /// are not part of it: the client is asked for them again.
    pub(super) fn save_all(
        &mut self,
        successor: Successor,
        into: &mut dyn Sections,
    ) -> Result<(), HandoverError> {
        if self.transfer.is_open() {
            return Err(HandoverError::Transfer("device state (SET_DEVICE_STATE_FD)"));
        }
        let queues = self.queues.all();
        let notifiers = &self.shared_status.notifiers;
        let failed = queues.filter_map(|queue| Some((queue, notifiers.failure(queue)?))).collect();
        let mut config = vec![0; MAX_CONFIG as usize];
        self.device.read_config(0, &mut config);
        let region_times = self.memory.regions().iter().map(|(_, _, times)| times).collect();
        let pairs = self.commanded_pairs();
        let facts = Facts { region_times, failed, config, pairs, identity: Some(self.device.identity()) };
        self.push_all(successor, &mut Messages(into))?;
        self.push_queues(&mut Messages(into))?;
        facts.write(into)?;
        let own = self.own_inflight.as_ref().filter(|_| successor != Successor::Present);
        match own.and_then(|own| Some((own.layout, own.memory.file()?))) {
            Some((layout, file)) => saved::write_own_inflight(into, layout, file),
            None => Ok(()),
        }
    }

    /// Writes all that comes before the queues.
    fn push_all(&self, successor: Successor, messages: &mut Messages<'_>) -> Result<(), HandoverError> {
        let (protocol, accepted) = (self.features.accepted_protocol, self.features.accepted);
        let numbers = [
            (request::SET_PROTOCOL_FEATURES, protocol),
            (request::SET_FEATURES, accepted),
            (request::SET_STATUS, self.status.into()),
        ];
        // 0 is where each of them begins.
        for (request, number) in numbers.into_iter().filter(|(_, number)| *number != 0) {
            messages.push(request, &number, None)?;
        }
        for (region, file, _) in self.memory.regions().iter() {
            let region = SingleRegion { padding: 0, region };
            messages.push(request::ADD_MEM_REG, &region, file)?;
        }
        if let Some((area, log)) = &self.log {
            messages.push(request::SET_LOG_BASE, area, log.fd())?;
        }
        if let Some(inflight) = &self.inflight {
            messages.push(request::SET_INFLIGHT_FD, &inflight.layout, inflight.memory.file())?;
        }
        if successor != Successor::Later {
            for update in self.translations.iter().flat_map(|translations| translations.updates()) {
                messages.push(request::IOTLB_MSG, &update, None)?;
            }
        }
        if let Some(socket) = self.back_channel.socket() {
            messages.push(request::SET_BACKEND_REQ_FD, &[0_u8; 0], Some(socket.as_fd()))?;
        }
        Ok(())
    }

    fn push_queues(&self, messages: &mut Messages<'_>) -> Result<(), HandoverError> {
        for (queue, vring) in (0..).zip(&self.vrings) {
            let state = |num| VringState { index: queue.into(), num };
            if vring.size > 0 {
                messages.push(request::SET_VRING_NUM, &state(vring.size.into()), None)?;
            }
            if vring.base > 0 {
                messages.push(request::SET_VRING_BASE, &state(vring.base), None)?;
            }
            if let Some(addr) = vring.addr {
                messages.push(request::SET_VRING_ADDR, &VringAddr { index: queue.into(), ..addr }, None)?;
            }
            let signals = self.shared_status.notifiers.signals(queue);
            for (request, signal) in
                [request::SET_VRING_CALL, request::SET_VRING_ERR].into_iter().zip(signals)
            {
                if let Some(signal) = signal {
                    messages.push_vring_fd(request, queue, Some(signal.as_fd()))?;
                }
            }
            if vring.enabled {
                messages.push(request::SET_VRING_ENABLE, &state(1), None)?;
            }
        }
        for (queue, vring) in (0..).zip(&self.vrings) {
            match &vring.kick {
                None => {}
                Some(Kick::Poll) => messages.push_vring_fd(request::SET_VRING_KICK, queue, None)?,
                Some(Kick::Fd(fd)) => {
                    messages.push_vring_fd(request::SET_VRING_KICK, queue, Some(fd.as_fd()))?;
                }
            }
        }
        Ok(())
    }

    /// Starts the queues that were held back.
    ///
    /// # Errors
    /// A queue cannot be served. End the session.
    pub(crate) fn release_held(&mut self) -> Result<(), SessionError> {
        match std::mem::take(&mut self.is_held) {
            true => self.start_all(),
            false => Ok(()),
        }
    }

    /// Continues a session that another process has handed over.
    ///
    /// Handles its messages as those of a client, and sends no replies.
    ///
    /// `hold`: no queue starts before [`VhostSession::release_held`].
    ///
    /// # Errors
    /// As [`Session::answer`]. End the session.
    pub(super) fn replay_saved(&mut self, saved: SavedSession, hold: bool) -> Result<(), SessionError> {
        let SavedSession { messages, facts, own_inflight } = saved;
        let Facts { region_times, failed, config, pairs, identity } = facts;
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
            self.shared_status.notifiers.set_failure(queue, Some(error));
        }
        for (bytes, fds) in messages {
            let (header, payload) = message::split(&bytes)?;
            if message::payload_len(header)? != payload.len() {
                return Err(MessageError::Size { request: header.request, size: bytes.len() }.into());
            }
            self.handle(header.request, payload, fds)?;
        }
        if !self.memory.set_times(&region_times) {
            return Err(SessionError::RegionTimes);
        }
        if self.live_queue().is_none() {
            self.paused_pairs = pairs;
        } else {
            self.device.restore_state(&state_of(pairs));
        }
        for (queue, vring) in (0..).zip(&self.vrings) {
            self.publish_status(queue, vring);
        }
        // The device may have been opened with another size.
        let mut now = vec![0; config.len()];
        self.device.read_config(0, &mut now);
        if now != config {
            Session::config_changed(self);
        }
        Ok(())
    }
}
