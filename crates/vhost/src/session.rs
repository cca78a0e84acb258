//! Session of one client: negotiated features, memory, and queues.
//!
//! Uses no socket.
//!
//! ```text
//!   header, payload, descriptors --Request::decode--> Request --handle--> Reply, or an acknowledgement on request
//!                                                        |
//!                                                        +--> features, memory, log, in-flight region: kept here
//!                                                        '--> Vring: started on an I/O thread, stopped, moved
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
pub(crate) use saved::{check, seen_by_driver};

use crate::back_channel::BackChannel;
use crate::device_state::{self, DeviceState, Transfer};
use crate::inflight::{self, InflightMemory};
use crate::iotlb::Translations;
use crate::memory::{ClientMemory, MAX_SLOTS};
use crate::message::{Reply, Request};
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
    ConfigAccess, F_LOG_ALL, Header, Inflight, LogArea, MAX_CONFIG, StateTransfer, VRING_NO_FD, VringState,
    flags, protocol_feature,
};
use paravane_spec::{device_id, feature};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

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

    /// Has a later process be able to continue the session: tracks what is in flight.
    ///
    /// # Errors
    /// The process has too few descriptors or too little memory left.
    pub(crate) fn track_itself(&mut self) -> Result<(), SessionError> {
        if self.own_inflight.is_none() {
            let (layout, file) = inflight::make_own(self.device.queue_sizes())?;
            self.own_inflight = Some(InflightMemory::new(layout, file, &self.memory)?);
        }
        Ok(())
    }

    /// Clears the tracking of queues that a message may start anew.
    ///
    /// Call it before [`VhostSession::answer`], if a later process may continue the session. Returns
    /// whether the message may start queues.
    ///
    /// # Errors
    /// The host refuses.
    pub(crate) fn prepare(&mut self, header: Header) -> Result<bool, SessionError> {
        use paravane_spec::vhost_user::request::{
            ADD_MEM_REG, SET_MEM_TABLE, SET_VRING_ADDR, SET_VRING_ENABLE, SET_VRING_KICK,
        };
        let starts = [ADD_MEM_REG, SET_MEM_TABLE, SET_VRING_ADDR, SET_VRING_ENABLE, SET_VRING_KICK];
        if !starts.contains(&header.request) {
            return Ok(false);
        }
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

    /// Handles a message.
    ///
    /// Send the answer even if the result is an error, which ends the session.
    ///
    /// A message may signal the client through its descriptors. A process that does not ignore
    /// SIGPIPE must call [`paravane_io::outlive_pipes`] on the calling thread first; Rust programs
    /// ignore it by default.
    ///
    /// # Errors
    /// The message is malformed or not allowed in this state, or the host cannot serve it. End the
    /// session.
    pub fn answer(
        &mut self,
        header: Header,
        payload: &[u8],
        fds: Vec<OwnedFd>,
    ) -> (Option<Answer>, Result<(), SessionError>) {
        let done = Request::decode(header, payload, fds)
            .map_err(SessionError::from)
            .and_then(|request| self.handle(request));
        // The message that accepts REPLY_ACK is acknowledged too: User Mode Linux waits for it.
        let acknowledge =
            header.flags & flags::NEED_REPLY != 0 && self.features.has_protocol(protocol_feature::REPLY_ACK);
        let (reply, result) = match done {
            Ok(Some(Reply::Refused)) => (acknowledge.then_some(Reply::Refused), Ok(())),
            Ok(Some(reply)) => (Some(reply), Ok(())),
            Ok(None) => (acknowledge.then_some(Reply::Number(0)), Ok(())),
            Err(error) => (acknowledge.then_some(Reply::Number(1)), Err(error)),
        };
        (reply.map(|reply| reply.encode(header.request)), result)
    }

    fn handle(&mut self, request: Request) -> Result<Option<Reply>, SessionError> {
        match request {
            Request::GetFeatures => return number(self.features.offered()),
            Request::SetFeatures(features) => self.set_features(features)?,
            Request::GetProtocolFeatures => return number(self.features.offered_protocol()),
            Request::SetProtocolFeatures(features) => self.set_protocol_features(features)?,
            Request::SetOwner => self.begin_negotiation(),
            Request::ResetOwner => {
                self.disable_all();
                self.forget_driver();
            }
            Request::ResetDevice => self.reset_device()?,
            Request::GetQueueNum => return number(self.queue_num()),
            Request::SetMemTable(regions) => self.change_memory(self.memory.with_all(regions)?)?,
            Request::AddMemReg(region) => self.change_memory(self.memory.with(region)?)?,
            Request::RemMemReg(region) => self.change_memory(self.memory.without(region)?)?,
            Request::GetMaxMemSlots => return number(MAX_SLOTS as u64),
            Request::SetVringNum(state) => self.set_vring_num(state)?,
            Request::SetVringAddr(addr) => self.set_vring_addr(addr)?,
            Request::SetVringBase(VringState { index, num }) => {
                self.stopped_vring(index, "SET_VRING_BASE")?.base = num;
            }
            Request::GetVringBase(VringState { index, .. }) => return self.get_vring_base(index),
            Request::SetVringKick(index, fd) => self.set_vring_kick(index, fd)?,
            Request::SetVringCall(index, fd) => self.set_vring_call(index, fd)?,
            Request::SetVringErr(index, fd) => {
                let queue = self.queue(index.into())?;
                self.shared_status.notifiers.set_err(queue, signal(fd, "SET_VRING_ERR")?);
            }
            Request::SetVringEnable(state) => self.set_vring_enable(state)?,
            Request::SendRarp(mac) => self.send_rarp(mac)?,
            Request::SetBackendReqFd(fd) => self.set_backend_req_fd(fd)?,
            Request::GetConfig(access) => return Ok(Some(self.get_config(access))),
            Request::SetConfig(access, bytes) => {
                if access.flags == 0 {
                    self.device.write_config(access.offset, &bytes);
                }
            }
            Request::SetStatus(status) => self.set_status(status)?,
            Request::GetStatus => return number(self.status.into()),
            Request::SetLogBase(area, fd) => {
                self.set_log_base(area, fd)?;
                return Ok(Some(Reply::Log(area)));
            }
            // This descriptor would announce changes of the log. Clients poll the log, so nothing
            // uses it.
            Request::SetLogFd(_) => {}
            Request::GetInflightFd(wanted) => return self.get_inflight_fd(wanted).map(Some),
            Request::SetInflightFd(inflight, fd) => self.set_inflight_fd(inflight, fd)?,
            Request::SetDeviceStateFd(said, pipe) => return self.set_device_state_fd(said, pipe),
            Request::CheckDeviceState => return self.check_device_state(),
            Request::IotlbMsg(said) => return self.iotlb(&said),
        }
        Ok(None)
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

    fn set_vring_call(&mut self, index: u8, fd: Option<OwnedFd>) -> Result<(), SessionError> {
        let queue = self.queue(index.into())?;
        let call = signal(fd, "SET_VRING_CALL")?;
        self.shared_status.notifiers.set_call(queue, call);
        // An interrupt through the old descriptor may have been missed.
        if self.queues.is_live(queue) {
            self.interrupt(queue);
        }
        Ok(())
    }

    fn send_rarp(&mut self, mac: [u8; 6]) -> Result<(), SessionError> {
        self.features.need_protocol(protocol_feature::RARP, "SEND_RARP")?;
        self.device.announce(mac);
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

    fn get_inflight_fd(&self, wanted: Inflight) -> Result<Reply, SessionError> {
        self.features.need_protocol(protocol_feature::INFLIGHT_SHMFD, "GET_INFLIGHT_FD")?;
        let most = self.device.queue_sizes().iter().copied().max().unwrap_or(0);
        let (inflight, fd) = inflight::make(wanted, most, self.features.has(feature::RING_PACKED))?;
        Ok(Reply::Inflight(inflight, fd))
    }

    fn set_inflight_fd(&mut self, inflight: Inflight, fd: OwnedFd) -> Result<(), SessionError> {
        self.features.need_protocol(protocol_feature::INFLIGHT_SHMFD, "SET_INFLIGHT_FD")?;
        self.expect_idle("SET_INFLIGHT_FD")?;
        self.inflight = Some(InflightMemory::new(inflight, fd, &self.memory)?);
        self.shared_status.write().tracked = true;
        Ok(())
    }

    fn set_device_state_fd(
        &mut self,
        said: StateTransfer,
        pipe: OwnedFd,
    ) -> Result<Option<Reply>, SessionError> {
        self.features.need_protocol(protocol_feature::DEVICE_STATE, "SET_DEVICE_STATE_FD")?;
        self.expect_idle("SET_DEVICE_STATE_FD")?;
        let state = self.device_state();
        self.transfer = Transfer::begin(said, pipe, state)?;
        // The state travels through the client's pipe; the reply carries no descriptor.
        number(VRING_NO_FD)
    }

    fn check_device_state(&mut self) -> Result<Option<Reply>, SessionError> {
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
        let changed = self.features.accepted() ^ features;
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

    fn get_config(&self, access: ConfigAccess) -> Reply {
        let ConfigAccess { offset, size, .. } = access;
        if offset.checked_add(size).is_none_or(|end| end > MAX_CONFIG) {
            return Reply::Empty;
        }
        let mut bytes = vec![0; size as usize];
        self.device.read_config(offset, &mut bytes);
        Reply::Config(access, bytes)
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
            self.shared_status.notifiers.forget_failure(queue);
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

    /// Tells the client that the configuration space changed, if it accepted CONFIG.
    pub fn config_changed(&mut self) {
        if self.features.has_protocol(protocol_feature::CONFIG) {
            self.back_channel.config_changed();
        }
    }

    /// Shows the driver of a card the carrier of the network, if it is told of changes.
    fn follow_carrier(&mut self) {
        let is_told =
            self.features.has_protocol(protocol_feature::CONFIG) && self.back_channel.socket().is_some();
        self.device.follow_carrier(is_told);
    }

    /// Socket for requests to the client, if there is one.
    ///
    /// Call [`VhostSession::hear`] when it is readable or broken.
    #[must_use]
    pub fn back_channel(&self) -> Option<Arc<OwnedFd>> {
        self.back_channel.socket()
    }

    /// Discards what the client sent on [`VhostSession::back_channel`].
    ///
    /// Drops a channel that the client closed or floods; returns whether it did.
    pub fn hear(&mut self) -> bool {
        let is_dropped = self.back_channel.discard();
        if is_dropped {
            self.follow_carrier();
        }
        is_dropped
    }

    /// Descriptor that becomes readable when shared memory may be lost.
    ///
    /// Then call [`VhostSession::check_memory`].
    #[must_use]
    pub fn alarm(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }

    /// Checks that shared memory is still there. Call it after [`VhostSession::alarm`].
    ///
    /// # Errors
    /// Shared memory is lost: the client truncated a file.
    pub fn check_memory(&self) -> Result<(), SessionError> {
        let _ = self.memory.alarm().take();
        let log = self.log.as_ref().is_some_and(|(_, log)| log.lost());
        let inflight = self.inflight.as_ref().is_some_and(|inflight| inflight.memory.is_lost());
        if log || inflight || self.memory.lost() { Err(SessionError::MemoryLost) } else { Ok(()) }
    }

    /// Time until the next call of [`VhostSession::tick`] is due, if nothing else happens.
    #[must_use]
    pub fn next_tick(&self) -> Option<Duration> {
        let polls = |(queue, vring): (u16, &Vring)| {
            matches!(vring.kick, Some(Kick::Poll)) && self.queues.is_live(queue)
        };
        if (0..).zip(&self.vrings).any(polls) {
            return Some(POLL_INTERVAL);
        }
        (self.translations.is_some() && self.back_channel.has_unreported()).then_some(REPORT_RETRY)
    }

    /// Kicks queues that receive no kicks, and reports misses again.
    ///
    /// # Errors
    /// A queue that became ready cannot be served.
    pub fn tick(&mut self) -> Result<(), SessionError> {
        self.ticker.signal();
        self.report_again()
    }

    /// Ends the session.
    ///
    /// Completes what is in flight, and drops all that belongs to the client. Returns the device.
    pub fn end(mut self) -> Box<dyn Device> {
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

fn number(number: u64) -> Result<Option<Reply>, SessionError> {
    Ok(Some(Reply::Number(number)))
}

fn signal(fd: Option<OwnedFd>, request: &'static str) -> Result<Option<Signal>, SessionError> {
    fd.map(Signal::new).transpose().map_err(|source| SessionError::Fd { request, source })
}
