//! Session of one client: negotiated features, memory, and queues.
//!
//! Uses no socket.
//!
//! ```text
//!   header, payload, descriptors --Parts--> handle --> reply, or an acknowledgement on request
//!                                             |
//!                                             +--> features, memory, log, in-flight region: kept here
//!                                             '--> Vring: started on an I/O thread, stopped, moved
//!   hand over: drain all queues, give the messages that make the session again
//!   end:  drain all queues, close the client's descriptors, unmap its memory, reset the device
//! ```
//! The first error ends the session: the messages that follow it have no defined meaning. A client
//! that asked for an acknowledgement receives a negative one first.
mod error;
mod features;
mod handover;
mod migration;
mod protocol;
mod queues;
mod saved;
mod translation;

pub use error::SessionError;
pub use paravane_export::protocol::{Answer, Offer};
pub use saved::KnownToDriver;
pub(crate) use saved::check;

use crate::back_channel::BackChannel;
use crate::device_state::{self, DeviceState, Transfer};
use crate::inflight::{self, InflightMemory};
use crate::iotlb::Translations;
use crate::memory::{ClientMemory, MAX_SLOTS};
use crate::message::{Handled, MessageError, Parts};
use crate::vring::{Kick, Vring};
use features::Features;
use paravane_device::Device;
use paravane_dma::{DirtyLog, headroom};
use paravane_export::SharedStatus;
use paravane_export::notifiers::Signal;
use paravane_io::{DeviceThreads, QueueSet};
use paravane_notify::Notifier;
use paravane_spec::net;
use paravane_spec::vhost_user::{
    ConfigAccess, F_LOG_ALL, LogArea, MAX_CONFIG, StateTransfer, VRING_NO_FD, VringState, protocol_feature,
    request,
};
use paravane_spec::{device_id, feature};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;
use zerocopy::IntoBytes;

/// Interval between looks at a queue whose client sends no kicks.
const POLL_INTERVAL: Duration = Duration::from_micros(500);
/// Interval between attempts to report a miss to a client that does not read.
const REPORT_RETRY: Duration = Duration::from_millis(20);

/// Address space that must be free when a session or a queue starts, in bytes.
///
/// Single allocations cannot all report failure. The largest queue takes a quarter of this.
const HEADROOM: usize = 32 << 20;

/// Longest wait for a running batch when memory, the log or the features change.
const BATCH_TIMEOUT: Duration = Duration::from_secs(5);

/// Session of one client, for [`VhostUser`](crate::VhostUser).
pub struct VhostSession {
    device: Box<dyn Device>,
    queues: QueueSet,
    shared_status: Arc<SharedStatus>,
    features: Features,
    memory: ClientMemory,
    vrings: Vec<Vring>,
    log: Option<(LogArea, Arc<DirtyLog>)>,
    inflight: Option<InflightMemory>,
    /// Of ours, where a later process may continue the session and the client has none.
    own_inflight: Option<InflightMemory>,
    /// Queues do not start yet; see [`VhostSession::release_held`].
    is_held: bool,
    back_channel: Arc<BackChannel>,
    /// Its socket, while it is waited for.
    watched: Option<Arc<OwnedFd>>,
    /// Set while addresses are IOVAs.
    translations: Option<Translations>,
    transfer: Transfer,
    status: u8,
    /// Queue pairs that the driver had set before a pause or a migration; 0: none.
    paused_pairs: u16,
    /// Kick of the queues whose client sends none; signalled every [`POLL_INTERVAL`].
    ticker: Notifier,
}

impl VhostSession {
    /// Begins the session of a client that has connected.
    ///
    /// The session owns the device until it ends.
    ///
    /// # Errors
    /// The process has too few descriptors or too little memory left. Returns the device.
    pub fn new(
        device: Box<dyn Device>,
        threads: Arc<DeviceThreads>,
        shared_status: Arc<SharedStatus>,
        offer: Offer,
    ) -> Result<Self, (Box<dyn Device>, SessionError)> {
        let resources = || {
            headroom(HEADROOM)
                .map_err(|source| SessionError::OutOfMemory { what: "a session".into(), source })?;
            let memory = ClientMemory::new(shared_status.quota.clone())?;
            Ok((memory, Notifier::new(false).map_err(SessionError::Host)?))
        };
        let (memory, ticker) = match resources() {
            Ok(resources) => resources,
            Err(error) => return Err((device, error)),
        };
        let queues = device.queue_sizes().len();
        let mut session = Self {
            features: Features::new(device.device_id(), device.features(), offer),
            device,
            queues: QueueSet::new(threads, queues),
            shared_status,
            memory,
            vrings: std::iter::repeat_with(Vring::default).take(queues).collect(),
            log: None,
            inflight: None,
            own_inflight: None,
            is_held: false,
            back_channel: Arc::default(),
            watched: None,
            translations: None,
            transfer: Transfer::None,
            status: 0,
            paused_pairs: 0,
            ticker,
        };
        session.follow_carrier();
        Ok(session)
    }

    /// Handles a request. Its parts are checked before it has any effect.
    fn handle(&mut self, request: u32, payload: &[u8], fds: Vec<OwnedFd>) -> Result<Handled, SessionError> {
        let parts = &mut Parts::new(request, payload, fds)?;
        match request {
            request::GET_FEATURES => return number(self.features.offered()),
            request::SET_FEATURES => self.set_features(parts.only()?)?,
            request::GET_PROTOCOL_FEATURES => return number(self.features.offered_protocol),
            request::SET_PROTOCOL_FEATURES => self.set_protocol_features(parts.only()?)?,
            request::SET_OWNER => self.begin_negotiation(),
            request::RESET_OWNER => {
                self.disable_all();
                self.forget_driver();
            }
            request::RESET_DEVICE => self.reset_device()?,
            request::GET_QUEUE_NUM => return number(self.queue_num()),
            request::SET_MEM_TABLE => self.change_memory(self.memory.with_all(parts.table()?)?)?,
            request::ADD_MEM_REG => self.change_memory(self.memory.with(parts.region()?)?)?,
            request::REM_MEM_REG => self.change_memory(self.memory.without(parts.removed_region()?)?)?,
            request::GET_MAX_MEM_SLOTS => return number(MAX_SLOTS as u64),
            request::SET_VRING_NUM => self.set_vring_num(parts.only()?)?,
            request::SET_VRING_ADDR => self.set_vring_addr(parts.only()?)?,
            request::SET_VRING_BASE => {
                let VringState { index, num } = parts.only()?;
                self.stopped_vring(index, "SET_VRING_BASE")?.base = num;
            }
            request::GET_VRING_BASE => return self.get_vring_base(parts.only()?),
            request::SET_VRING_KICK => self.set_vring_kick(parts.vring_fd()?)?,
            request::SET_VRING_CALL => self.set_vring_call(parts.vring_fd()?)?,
            request::SET_VRING_ERR => self.set_vring_err(parts.vring_fd()?)?,
            request::SET_VRING_ENABLE => self.set_vring_enable(parts.only()?)?,
            request::SEND_RARP => self.send_rarp(parts.only()?)?,
            request::SET_BACKEND_REQ_FD => self.set_backend_req_fd(parts.only_fd()?)?,
            request::GET_CONFIG => return Ok(self.get_config(parts.config()?.0)),
            request::SET_CONFIG => {
                let (access, bytes) = parts.config()?;
                if access.flags == 0 {
                    self.device.write_config(access.offset, bytes);
                }
            }
            request::SET_STATUS => self.set_status(parts.only()?)?,
            request::GET_STATUS => return number(self.status.into()),
            request::SET_LOG_BASE => return self.set_log_base(parts.with_fd()?),
            // This descriptor would announce changes of the log. Clients poll the log, so nothing
            // uses it.
            request::SET_LOG_FD => drop(parts.only_fd()?),
            request::GET_INFLIGHT_FD => return self.get_inflight_fd(parts),
            request::SET_INFLIGHT_FD => self.set_inflight_fd(parts)?,
            request::SET_DEVICE_STATE_FD => return self.set_device_state_fd(parts.with_fd()?),
            request::CHECK_DEVICE_STATE => return self.check_device_state(),
            request::IOTLB_MSG => return self.iotlb(&parts.only()?),
            request::POSTCOPY_ADVISE..=request::POSTCOPY_END => {
                return Err(MessageError::Postcopy(request).into());
            }
            unknown => return Err(MessageError::Request(unknown).into()),
        }
        Ok(Handled::Done)
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<(), SessionError> {
        self.features.accept_protocol(features)?;
        if !self.memory.use_guest_physical(features & protocol_feature::GPA_ADDRESSES != 0) {
            return Err(SessionError::Addresses);
        }
        self.shared_status.write().protocol_features = features;
        self.follow_carrier();
        Ok(())
    }

    fn set_vring_call(&mut self, (index, fd): (u8, Option<OwnedFd>)) -> Result<(), SessionError> {
        let queue = self.queue(index.into())?;
        let call = signal(fd, "SET_VRING_CALL")?;
        self.shared_status.notifiers.set_call(queue, call);
        // An interrupt through the old descriptor may have been missed.
        if self.queues.is_live(queue) {
            self.interrupt(queue);
        }
        Ok(())
    }

    fn set_vring_err(&mut self, (index, fd): (u8, Option<OwnedFd>)) -> Result<(), SessionError> {
        let queue = self.queue(index.into())?;
        self.shared_status.notifiers.set_err(queue, signal(fd, "SET_VRING_ERR")?);
        Ok(())
    }

    /// Announces a MAC address, which is followed by two bytes of padding.
    fn send_rarp(&mut self, [a, b, c, d, e, f, _, _]: [u8; 8]) -> Result<(), SessionError> {
        self.features.need_protocol(protocol_feature::RARP, "SEND_RARP")?;
        self.device.announce([a, b, c, d, e, f]);
        Ok(())
    }

    fn set_backend_req_fd(&mut self, fd: OwnedFd) -> Result<(), SessionError> {
        let request = "SET_BACKEND_REQ_FD";
        self.features.need_protocol(protocol_feature::BACKEND_REQ, request)?;
        paravane_export::pair::check(&fd).map_err(|source| SessionError::Fd { request, source })?;
        self.back_channel.connect(fd);
        self.follow_carrier();
        Ok(())
    }

    fn get_inflight_fd(&self, parts: &Parts<'_>) -> Result<Handled, SessionError> {
        let wanted = parts.inflight()?;
        parts.no_fds()?;
        self.features.need_protocol(protocol_feature::INFLIGHT_SHMFD, "GET_INFLIGHT_FD")?;
        let most = self.device.queue_sizes().iter().copied().max().unwrap_or(0);
        let (inflight, fd) = inflight::make(wanted, most, self.features.has(feature::RING_PACKED))?;
        Ok(Handled::Reply(inflight.as_bytes().to_vec(), Some(fd)))
    }

    fn set_inflight_fd(&mut self, parts: &mut Parts<'_>) -> Result<(), SessionError> {
        let (inflight, fd) = (parts.inflight()?, parts.fd()?);
        self.features.need_protocol(protocol_feature::INFLIGHT_SHMFD, "SET_INFLIGHT_FD")?;
        self.expect_idle("SET_INFLIGHT_FD")?;
        self.inflight = Some(InflightMemory::new(inflight, fd, &self.memory)?);
        self.shared_status.write().tracked = true;
        Ok(())
    }

    fn set_device_state_fd(
        &mut self,
        (said, pipe): (StateTransfer, OwnedFd),
    ) -> Result<Handled, SessionError> {
        self.features.need_protocol(protocol_feature::DEVICE_STATE, "SET_DEVICE_STATE_FD")?;
        self.expect_idle("SET_DEVICE_STATE_FD")?;
        let state = self.device_state();
        self.transfer = Transfer::begin(said, pipe, state)?;
        // The state travels through the client's pipe; the reply carries no descriptor.
        number(VRING_NO_FD)
    }

    fn check_device_state(&mut self) -> Result<Handled, SessionError> {
        let own = self.device_state();
        let loaded = self.transfer.check(own);
        if let Ok(Some(pairs)) = loaded {
            self.paused_pairs = pairs;
        }
        number(loaded.is_err().into())
    }

    /// Refuses a request that comes while a queue is live.
    fn expect_idle(&self, request: &'static str) -> Result<(), SessionError> {
        match self.live_queue() {
            Some(queue) => Err(SessionError::Live { queue, request }),
            None => Ok(()),
        }
    }

    fn set_features(&mut self, features: u64) -> Result<(), SessionError> {
        let changed = self.features.accepted ^ features;
        if changed & !F_LOG_ALL != 0 {
            self.expect_idle("SET_FEATURES")?;
            self.begin_negotiation();
        }
        self.features.accept(features)?;
        self.shared_status.write().features = features;
        // A driver starts over, with new translations. (Clients also send the features to turn the
        // log on.)
        if changed & !F_LOG_ALL != 0 || self.is_idle() {
            self.forget_translations();
        }
        self.update_logging()
    }

    /// Index of the first live queue, if any.
    fn live_queue(&self) -> Option<u32> {
        self.queues.first_live().map(u32::from)
    }

    /// Number of queues; of queue pairs for a network device, if counted so.
    ///
    /// The client decides how it counts.
    ///
    /// The protocol does not say what a network device counts. QEMU and DPDK's virtio-user expect
    /// queue pairs, and accept RARP or STATUS. Others expect queues, and accept neither: User Mode
    /// Linux from Linux 7 on refuses a device whose driver uses more queues than this number.
    fn queue_num(&self) -> u64 {
        let queues = self.vrings.len() as u64;
        let counts_pairs = self.device.device_id() == device_id::NET
            && self.features.has_protocol(protocol_feature::RARP | protocol_feature::STATUS);
        if counts_pairs { queues / u64::from(net::PAIR) } else { queues }
    }

    fn get_config(&self, access: ConfigAccess) -> Handled {
        let ConfigAccess { offset, size, .. } = access;
        if offset.checked_add(size).is_none_or(|end| end > MAX_CONFIG) {
            return Handled::reply(&[0_u8; 0]);
        }
        let mut bytes = vec![0; size as usize];
        self.device.read_config(offset, &mut bytes);
        Handled::reply(&*[access.as_bytes(), &bytes].concat())
    }

    fn set_status(&mut self, status: u64) -> Result<(), SessionError> {
        self.features.need_protocol(protocol_feature::STATUS, "SET_STATUS")?;
        let status = u8::try_from(status).map_err(|_| SessionError::Status(status))?;
        if status == 0 {
            // QEMU sends status 0 whenever it stops a device, before it reads the queue positions
            // with GET_VRING_BASE for a migration. So positions stay. A client sends them all again
            // for a driver that starts over.
            self.disable_all();
            let pairs = self.commanded_pairs();
            self.forget_driver();
            self.paused_pairs = pairs;
        }
        self.status = status;
        Ok(())
    }

    /// State that a migration carries, beside the positions of queues.
    fn device_state(&mut self) -> DeviceState {
        DeviceState {
            device_id: self.device.device_id(),
            queues: self.vrings.len() as u32,
            pairs: self.commanded_pairs(),
        }
    }

    /// Queue pairs that the driver has set through the control queue; 0: none.
    fn commanded_pairs(&self) -> u16 {
        match device_state::pairs_of(&self.device.state()) {
            0 => self.paused_pairs,
            pairs => pairs,
        }
    }

    /// Begins anew with whatever a driver negotiated before, if no queue is live.
    ///
    /// Not every front end sends SET_STATUS or RESET_DEVICE (QEMU before 7.1, Cloud Hypervisor, crosvm).
    fn begin_negotiation(&mut self) {
        if self.features.of_driver() != 0 && self.live_queue().is_none() {
            self.forget_driver();
            self.tell_enabled();
        }
    }

    /// Forgets what a driver agreed to: offloads, queue pairs, the state of the device.
    fn forget_driver(&mut self) {
        self.paused_pairs = 0;
        self.device.reset();
    }

    /// Resets the device to its state at connection. Memory and protocol features stay.
    fn reset_device(&mut self) -> Result<(), SessionError> {
        self.features.need_protocol(protocol_feature::RESET_DEVICE, "RESET_DEVICE")?;
        self.queues.stop(self.queues.all(), false);
        for queue in self.queues.all() {
            self.shared_status.notifiers.set_failure(queue, None);
        }
        for vring in &mut self.vrings {
            *vring = Vring { is_tracked: vring.is_tracked, ..Vring::default() };
        }
        self.forget_translations();
        self.status = 0;
        self.forget_driver();
        for (queue, vring) in (0..).zip(&self.vrings) {
            self.publish_status(queue, vring);
        }
        Ok(())
    }

    /// Shows the driver of a card the carrier of the network, if it is told of changes.
    fn follow_carrier(&mut self) {
        let is_told =
            self.features.has_protocol(protocol_feature::CONFIG) && self.back_channel.socket().is_some();
        self.device.follow_carrier(is_told);
    }

    /// Time until the next call of [`Session::tick`](paravane_export::protocol::Session::tick) is due.
    fn next_tick(&self) -> Option<Duration> {
        let polls = |(queue, vring): (u16, &Vring)| {
            matches!(vring.kick, Some(Kick::Poll)) && self.queues.is_live(queue)
        };
        if (0..).zip(&self.vrings).any(polls) {
            return Some(POLL_INTERVAL);
        }
        (self.translations.is_some() && self.back_channel.has_unreported()).then_some(REPORT_RETRY)
    }
}

fn number(number: u64) -> Result<Handled, SessionError> {
    Ok(Handled::reply(&number))
}

fn signal(fd: Option<OwnedFd>, request: &'static str) -> Result<Option<Signal>, SessionError> {
    fd.map(Signal::new).transpose().map_err(|source| SessionError::Fd { request, source })
}
