//! One client: what it has been told and has told us, and the queues that are served for it. No socket here.
//!
//! ```text
//!   header, payload, descriptors --Request::decode--> Request --handle--> Reply, or an acknowledgement if one was asked for
//!                                                        |
//!                                                        +--> features, memory, log, in-flight memory: kept here
//!                                                        '--> Vring: started on an I/O thread, stopped, moved
//!   end:  all queues drained, the client's descriptors and memory let go, the device reset
//! ```
//! The first thing that is wrong ends the session: what a client means by what follows cannot be known. If it waits for an
//! acknowledgement it is told so first.
mod error;
mod features;
mod migration;
mod queues;
mod translation;

pub use error::SessionError;
pub use features::Offer;

use crate::back_channel::BackChannel;
use crate::device_state::Transfer;
use crate::inflight::{self, InflightMemory};
use crate::iotlb::Translations;
use crate::memory::{ClientMemory, MAX_SLOTS};
use crate::message::{Reply, Request};
use crate::notifiers::Signal;
use crate::pair;
use crate::status::SharedStatus;
use crate::vring::{Kick, Vring};
use features::Features;
use paravane_device::Device;
use paravane_dma::{DirtyLog, headroom};
use paravane_io::IoThread;
use paravane_notify::Notifier;
use paravane_spec::net;
use paravane_spec::vhost_user::{
    ConfigAccess, F_LOG_ALL, Header, MAX_CONFIG, VRING_NO_FD, VringState, flags, protocol_feature,
};
use paravane_spec::{device_id, feature};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;
use translation::Handled;

/// How often a queue is looked at whose client gives no kicks.
const TICK: Duration = Duration::from_micros(500);
/// How soon it is tried again to tell a client what is missed that does not read.
const RETRY: Duration = Duration::from_millis(20);

/// Address space that must be left when a session or a queue begins, in bytes: what they allocate cannot all fail singly. The
/// largest queue takes a quarter of it.
const HEADROOM: usize = 32 << 20;

/// How long a change waits for a batch that is under way.
const SETTLE: Duration = Duration::from_secs(5);

/// What is sent back: bytes, and perhaps a descriptor.
pub type Answer = (Vec<u8>, Option<OwnedFd>);

/// What serves the queues of a session.
#[derive(Clone, Copy, Debug)]
pub struct Workers<'a> {
    /// Queue n is on thread n modulo their number; at least one.
    pub threads: &'a [IoThread],
    /// The device's number among all on these threads.
    pub device: usize,
}

/// One client's session.
pub struct Session<'a> {
    device: &'a mut dyn Device,
    workers: Workers<'a>,
    shared_status: &'a SharedStatus,
    features: Features,
    memory: ClientMemory,
    vrings: Vec<Vring>,
    log: Option<Arc<DirtyLog>>,
    inflight: Option<InflightMemory>,
    back_channel: Arc<BackChannel>,
    /// Where addresses are IOVAs.
    translations: Option<Translations>,
    transfer: Transfer,
    status: u8,
    /// Kicks of the queues that are to be looked at from time to time.
    ticker: Notifier,
}

impl<'a> Session<'a> {
    /// A client has come.
    ///
    /// # Errors
    /// The process has no descriptors or no memory left.
    pub fn new(
        device: &'a mut dyn Device,
        workers: Workers<'a>,
        shared_status: &'a SharedStatus,
        offer: Offer,
    ) -> Result<Self, SessionError> {
        headroom(HEADROOM)
            .map_err(|source| SessionError::OutOfMemory { what: "a session".into(), source })?;
        let queues = device.queue_sizes().len();
        Ok(Self {
            features: Features::new(device.device_id(), device.features(), offer),
            device,
            workers,
            shared_status,
            memory: ClientMemory::new(shared_status.quota.clone())?,
            vrings: std::iter::repeat_with(Vring::default).take(queues).collect(),
            log: None,
            inflight: None,
            back_channel: Arc::default(),
            translations: None,
            transfer: Transfer::None,
            status: 0,
            ticker: Notifier::new(false).map_err(SessionError::Host)?,
        })
    }

    /// Does what a message says. The answer is to be sent even if there is an error, which ends the session.
    ///
    /// What the message changes is told to the queues, and through descriptors of the client: in a process that does not ignore
    /// SIGPIPE, as Rust programs do, the calling thread has called [`paravane_io::outlive_pipes`].
    pub fn answer(
        &mut self,
        header: Header,
        payload: &[u8],
        fds: Vec<OwnedFd>,
    ) -> (Option<Answer>, Result<(), SessionError>) {
        let done = Request::decode(header, payload, fds)
            .map_err(SessionError::from)
            .and_then(|request| self.handle(request));
        // Also of the message that accepts this: User Mode Linux waits for it.
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
            Request::SetProtocolFeatures(features) => {
                self.features.accept_protocol(features)?;
                self.shared_status.write().protocol_features = features;
            }
            Request::SetOwner => {}
            Request::ResetOwner => self.disable_all(),
            Request::ResetDevice => {
                self.features.need_protocol(protocol_feature::RESET_DEVICE, "RESET_DEVICE")?;
                self.reset();
            }
            Request::GetQueueNum => return number(self.queue_num()),
            Request::SetMemTable(regions) => self.change_memory(self.memory.with_all(regions)?)?,
            Request::AddMemReg(region) => self.change_memory(self.memory.with(region)?)?,
            Request::RemMemReg(region) => self.change_memory(self.memory.without(region)?)?,
            Request::GetMaxMemSlots => return number(MAX_SLOTS as u64),
            Request::SetVringNum(state) => self.set_vring_num(state)?,
            Request::SetVringAddr(addr) => self.set_vring_addr(addr)?,
            Request::SetVringBase(VringState { index, num }) => {
                self.resting(index, "SET_VRING_BASE")?.base = num;
            }
            Request::GetVringBase(VringState { index, .. }) => return self.get_vring_base(index),
            Request::SetVringKick(index, fd) => self.set_vring_kick(index, fd)?,
            Request::SetVringCall(index, fd) => {
                let queue = self.queue(index.into())?;
                let call = signal(fd, "SET_VRING_CALL")?;
                self.shared_status.notifiers.set_call(queue, call);
                // What was interrupted by the old one may have been missed.
                if self.vrings[usize::from(queue)].is_live() {
                    self.interrupt(queue);
                }
            }
            Request::SetVringErr(index, fd) => {
                let queue = self.queue(index.into())?;
                self.shared_status.notifiers.set_err(queue, signal(fd, "SET_VRING_ERR")?);
            }
            Request::SetVringEnable(state) => self.set_vring_enable(state)?,
            Request::SendRarp(mac) => {
                self.features.need_protocol(protocol_feature::RARP, "SEND_RARP")?;
                if let Some(net) = self.device.net() {
                    net.announce(mac);
                }
            }
            Request::SetBackendReqFd(fd) => {
                self.features.need_protocol(protocol_feature::BACKEND_REQ, "SET_BACKEND_REQ_FD")?;
                let request = "SET_BACKEND_REQ_FD";
                pair::check(&fd).map_err(|source| SessionError::Fd { request, source })?;
                self.back_channel.connect(fd);
            }
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
            // We need tell nobody that the log has changed: it is looked at all the same.
            Request::SetLogFd(_) => {}
            Request::GetInflightFd(wanted) => {
                self.features.need_protocol(protocol_feature::INFLIGHT_SHMFD, "GET_INFLIGHT_FD")?;
                let (inflight, fd) = {
                    let most = self.device.queue_sizes().iter().copied().max().unwrap_or(0);
                    inflight::make(wanted, most, self.features.has(feature::RING_PACKED))?
                };
                return Ok(Some(Reply::Inflight(inflight, fd)));
            }
            Request::SetInflightFd(inflight, fd) => {
                self.features.need_protocol(protocol_feature::INFLIGHT_SHMFD, "SET_INFLIGHT_FD")?;
                if let Some(queue) = self.live_queue() {
                    return Err(SessionError::Live { queue, request: "SET_INFLIGHT_FD" });
                }
                self.inflight = Some(InflightMemory::new(inflight, fd, &self.memory)?);
                self.shared_status.write().tracked = true;
            }
            Request::SetDeviceStateFd(said, pipe) => {
                self.features.need_protocol(protocol_feature::DEVICE_STATE, "SET_DEVICE_STATE_FD")?;
                if let Some(queue) = self.live_queue() {
                    return Err(SessionError::Live { queue, request: "SET_DEVICE_STATE_FD" });
                }
                let queues = self.vrings.len() as u32;
                self.transfer = Transfer::begin(said, pipe, self.device.device_id(), queues)?;
                // The client's pipe does; none of ours comes with the answer.
                return number(VRING_NO_FD);
            }
            Request::CheckDeviceState => {
                let queues = self.vrings.len() as u32;
                return number((!self.transfer.check(self.device.device_id(), queues)).into());
            }
            Request::IotlbMsg(said) => {
                if self.iotlb(&said)? == Handled::Refused {
                    return Ok(Some(Reply::Refused));
                }
            }
        }
        Ok(None)
    }

    fn set_features(&mut self, features: u64) -> Result<(), SessionError> {
        let changed = self.features.accepted() ^ features;
        if changed & !F_LOG_ALL != 0
            && let Some(queue) = self.live_queue()
        {
            return Err(SessionError::Live { queue, request: "SET_FEATURES" });
        }
        self.features.accept(features)?;
        self.shared_status.write().features = features;
        // A driver begins anew, with other translations. (A client that turns its log on says its features, too.)
        if changed & !F_LOG_ALL != 0 || self.is_idle() {
            self.forget_translations();
        }
        self.log_or_not()
    }

    /// A queue that is live, if any is.
    fn live_queue(&self) -> Option<u32> {
        self.vrings.iter().position(Vring::is_live).map(|index| index as u32)
    }

    /// Of a network card: the pairs, as clients expect.
    fn queue_num(&self) -> u64 {
        let queues = self.vrings.len() as u64;
        if self.device.device_id() == device_id::NET { queues / u64::from(net::PAIR) } else { queues }
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
            // QEMU says so whenever it stops a device, before it asks where the queues have come to (GET_VRING_BASE): a
            // machine that moves takes them along. For a driver that begins anew a client says all of them again.
            self.disable_all();
            self.device.reset();
        }
        self.status = status;
        Ok(())
    }

    /// The device is as it was when the client came; memory and protocol features stay.
    fn reset(&mut self) {
        for queue in 0..self.vrings.len() as u16 {
            self.abandon(queue);
            self.shared_status.notifiers.forget_failure(queue);
        }
        self.vrings.fill_with(Vring::default);
        self.forget_translations();
        self.status = 0;
        self.device.reset();
        for (queue, vring) in (0..).zip(&self.vrings) {
            self.show(queue, vring);
        }
    }

    /// Has the device look at the host's side again, and tells the client if the configuration space has changed. Says
    /// whether it has.
    ///
    /// # Errors
    /// The host does not say.
    pub fn refresh(&mut self) -> io::Result<bool> {
        let changed = self.device.refresh()?;
        if changed {
            self.config_changed();
        }
        Ok(changed)
    }

    /// The configuration space has changed: tells the client, if it can hear it.
    pub fn config_changed(&mut self) {
        if self.features.has_protocol(protocol_feature::CONFIG) {
            self.back_channel.config_changed();
        }
    }

    /// The socket for requests of ours, if the client has given one. When it is readable or broken, [`Session::hear`].
    #[must_use]
    pub fn back_channel(&self) -> Option<Arc<OwnedFd>> {
        self.back_channel.socket()
    }

    /// Throws away what has come on [`Session::back_channel`].
    pub fn hear(&self) {
        self.back_channel.discard();
    }

    /// Readable when memory may have been lost.
    #[must_use]
    pub fn alarm(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }

    /// After [`Session::alarm`].
    ///
    /// # Errors
    /// Memory that the client has shared is gone.
    pub fn check_memory(&self) -> Result<(), SessionError> {
        let _ = self.memory.alarm().take();
        let log = self.log.as_ref().is_some_and(|log| log.lost());
        let inflight = self.inflight.as_ref().is_some_and(InflightMemory::lost);
        if log || inflight || self.memory.lost() { Err(SessionError::MemoryLost) } else { Ok(()) }
    }

    /// When [`Session::tick`] is to be called, if nothing else happens.
    #[must_use]
    pub fn next_tick(&self) -> Option<Duration> {
        let polls = |vring: &Vring| vring.is_live() && matches!(vring.kick, Some(Kick::Poll));
        if self.vrings.iter().any(polls) {
            return Some(TICK);
        }
        (self.translations.is_some() && self.back_channel.has_untold()).then_some(RETRY)
    }

    /// Kicks the queues that nobody kicks, and tells again what could not be told.
    ///
    /// # Errors
    /// A queue whose ring is there now cannot be served.
    pub fn tick(&mut self) -> Result<(), SessionError> {
        self.ticker.signal();
        self.tell_again()
    }

    /// The client is gone: what it had in flight is completed, and nothing of it is left.
    pub fn end(mut self) {
        self.stop_every();
        self.shared_status.notifiers.clear();
        self.device.reset();
        let mut status = self.shared_status.write();
        status.connected = false;
        status.tracked = false;
    }
}

fn number(number: u64) -> Result<Option<Reply>, SessionError> {
    Ok(Some(Reply::Number(number)))
}

fn signal(fd: Option<OwnedFd>, request: &'static str) -> Result<Option<Signal>, SessionError> {
    fd.map(Signal::new).transpose().map_err(|source| SessionError::Fd { request, source })
}
