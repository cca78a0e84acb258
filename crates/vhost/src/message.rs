//! Decode and encode vhost-user messages.
//!
//! ```text
//! 12 bytes --payload_len--> payload --Request::decode(header, payload, descriptors)--> Request
//! Reply --encode(request)--> bytes, and at most one descriptor
//! ```
//! Payload sizes and numbers of descriptors are checked for each request. Descriptors that are not
//! handed out are closed. Whether a request is allowed in the state of the session is checked by
//! [`crate::session`].
//!
//! Source: QEMU's `docs/interop/vhost-user.rst`.
use paravane_export::Framing;
use paravane_spec::vhost_user::{
    ConfigAccess, Header, INFLIGHT_SIZE, Inflight, Iotlb, LogArea, MAX_TABLE_REGIONS, MemoryRegion,
    MemoryTable, SingleRegion, StateTransfer, VRING_INDEX_MASK, VRING_NO_FD, VringAddr, VringState, flags,
    request,
};
use std::os::fd::OwnedFd;
use thiserror::Error;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Size of a header in bytes.
pub const HEADER: usize = size_of::<Header>();
/// Largest payload in bytes.
pub const MAX_PAYLOAD: usize = 4096;
/// Largest number of descriptors with a message.
pub const MAX_FDS: usize = MAX_TABLE_REGIONS;

/// Frame of the messages of a client.
pub static FRAMING: Framing = Framing {
    header: HEADER,
    max_message: HEADER + MAX_PAYLOAD,
    max_fds: MAX_FDS,
    payload: |header| {
        let (header, _) = split(header)?;
        Ok(payload_len(header)?)
    },
};

/// Malformed message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum MessageError {
    /// Protocol version other than 1.
    #[error("unsupported message version {0}: need 1")]
    Version(u32),
    /// Reserved flag bits in the header.
    #[error("reserved bits set in message flags {0:#x}")]
    Flags(u32),
    /// Reply from a client that was asked nothing.
    #[error("unexpected reply: no request is pending")]
    Reply,
    /// Request code out of range.
    #[error("unknown request {0}")]
    Request(u32),
    /// Request of postcopy migration.
    #[error("request {0}: postcopy is not offered; migrate by precopy")]
    Postcopy(u32),
    /// Payload of a size that the request cannot have.
    #[error("request {request}: invalid payload of {size} bytes")]
    Size {
        /// Request code.
        request: u32,
        /// Payload size in bytes.
        size: usize,
    },
    /// Wrong number of descriptors.
    #[error("request {request}: {given} file descriptors, need {needed}")]
    Fds {
        /// Request code.
        request: u32,
        /// Number of descriptors received.
        given: usize,
        /// Number of descriptors that the request takes.
        needed: usize,
    },
    /// Payload that the protocol does not define.
    #[error("request {request}: invalid value {value:#x}")]
    Value {
        /// Request code.
        request: u32,
        /// Invalid value.
        value: u64,
    },
}

/// Memory region and the file that holds it.
#[derive(Debug)]
pub struct SharedRegion {
    /// Addresses, size and offset in the file.
    pub region: MemoryRegion,
    /// File of the region.
    pub file: OwnedFd,
}

/// Request of a client.
#[derive(Debug)]
#[expect(
    missing_docs,
    reason = "the names are those of paravane_spec::vhost_user::request, which documents them"
)]
pub enum Request {
    GetFeatures,
    SetFeatures(u64),
    SetOwner,
    ResetOwner,
    SetMemTable(Vec<SharedRegion>),
    SetLogBase(LogArea, OwnedFd),
    SetLogFd(OwnedFd),
    SetVringNum(VringState),
    SetVringAddr(VringAddr),
    SetVringBase(VringState),
    GetVringBase(VringState),
    SetVringKick(u8, Option<OwnedFd>),
    SetVringCall(u8, Option<OwnedFd>),
    SetVringErr(u8, Option<OwnedFd>),
    GetProtocolFeatures,
    SetProtocolFeatures(u64),
    GetQueueNum,
    SetVringEnable(VringState),
    SendRarp([u8; 6]),
    SetBackendReqFd(OwnedFd),
    IotlbMsg(Iotlb),
    GetConfig(ConfigAccess),
    SetConfig(ConfigAccess, Vec<u8>),
    GetInflightFd(Inflight),
    SetInflightFd(Inflight, OwnedFd),
    ResetDevice,
    GetMaxMemSlots,
    AddMemReg(SharedRegion),
    RemMemReg(MemoryRegion),
    SetStatus(u64),
    GetStatus,
    SetDeviceStateFd(StateTransfer, OwnedFd),
    CheckDeviceState,
}

/// Size in bytes of the payload that follows a header.
///
/// # Errors
/// The header is not that of a request, or its payload is too large.
pub fn payload_len(header: Header) -> Result<usize, MessageError> {
    let Header { request, flags, size } = header;
    if flags & flags::VERSION_MASK != flags::VERSION {
        return Err(MessageError::Version(flags & flags::VERSION_MASK));
    }
    if flags & flags::REPLY != 0 {
        return Err(MessageError::Reply);
    }
    if flags & !(flags::VERSION_MASK | flags::REPLY | flags::NEED_REPLY) != 0 {
        return Err(MessageError::Flags(flags));
    }
    match usize::try_from(size) {
        Ok(size) if size <= MAX_PAYLOAD => Ok(size),
        _ => Err(MessageError::Size { request, size: size as usize }),
    }
}

/// Message that is being decoded.
struct Parts<'a> {
    request: u32,
    payload: &'a [u8],
    fds: Vec<OwnedFd>,
}

impl Parts<'_> {
    fn wrong_size(&self) -> MessageError {
        MessageError::Size { request: self.request, size: self.payload.len() }
    }

    fn wrong_value(&self, value: impl Into<u64>) -> MessageError {
        MessageError::Value { request: self.request, value: value.into() }
    }

    /// Checks that there is no payload.
    fn empty<T>(&self, request: T) -> Result<T, MessageError> {
        self.payload.is_empty().then_some(request).ok_or(self.wrong_size())
    }

    /// Reads a payload of exactly one structure.
    fn only<T: FromBytes>(&self) -> Result<T, MessageError> {
        T::read_from_bytes(self.payload).map_err(|_| self.wrong_size())
    }

    /// Reads a structure, and returns the bytes after it.
    fn first<T: FromBytes + Immutable + KnownLayout>(&self) -> Result<(T, &[u8]), MessageError> {
        T::read_from_prefix(self.payload).map_err(|_| self.wrong_size())
    }

    fn wrong_fds(&self, needed: usize) -> MessageError {
        MessageError::Fds { request: self.request, given: self.fds.len(), needed }
    }

    /// Takes the one descriptor.
    fn fd(&mut self) -> Result<OwnedFd, MessageError> {
        match (self.fds.len(), self.fds.pop()) {
            (1, Some(fd)) => Ok(fd),
            (given, _) => Err(MessageError::Fds { request: self.request, given, needed: 1 }),
        }
    }

    /// Takes the one descriptor of a message with which some clients send an unused number.
    fn only_fd(&mut self) -> Result<OwnedFd, MessageError> {
        if matches!(self.payload.len(), 0 | 8) { self.fd() } else { Err(self.wrong_size()) }
    }

    /// Reads a queue index, and takes its descriptor if the payload announces one.
    fn vring_fd(&mut self, make: fn(u8, Option<OwnedFd>) -> Request) -> Result<Request, MessageError> {
        let value: u64 = self.only()?;
        if value & !(VRING_INDEX_MASK | VRING_NO_FD) != 0 {
            return Err(self.wrong_value(value));
        }
        let index = (value & VRING_INDEX_MASK) as u8;
        if value & VRING_NO_FD == 0 {
            return Ok(make(index, Some(self.fd()?)));
        }
        self.no_fds()?;
        Ok(make(index, None))
    }

    fn no_fds(&self) -> Result<(), MessageError> {
        if self.fds.is_empty() { Ok(()) } else { Err(self.wrong_fds(0)) }
    }

    fn table(&mut self) -> Result<Vec<SharedRegion>, MessageError> {
        let (MemoryTable { regions: count, .. }, rest) = self.first()?;
        let entry = size_of::<MemoryRegion>();
        let room = rest.len() / entry;
        let needed = usize::try_from(count).unwrap_or(usize::MAX);
        if needed > MAX_TABLE_REGIONS {
            return Err(self.wrong_value(count));
        }
        // The payload may have room for unused regions: User Mode Linux sends a structure of fixed
        // size.
        if !rest.len().is_multiple_of(entry) || room > MAX_TABLE_REGIONS || needed > room {
            return Err(self.wrong_size());
        }
        if self.fds.len() != needed {
            return Err(self.wrong_fds(needed));
        }
        let regions = rest.chunks_exact(entry).map_while(|bytes| MemoryRegion::read_from_bytes(bytes).ok());
        let regions: Vec<_> = regions.take(needed).collect();
        let files = std::mem::take(&mut self.fds);
        Ok(regions.into_iter().zip(files).map(|(region, file)| SharedRegion { region, file }).collect())
    }

    fn config(&self) -> Result<(ConfigAccess, &[u8]), MessageError> {
        let (access, bytes) = self.first::<ConfigAccess>()?;
        if u32::try_from(bytes.len()) == Ok(access.size) {
            Ok((access, bytes))
        } else {
            Err(self.wrong_size())
        }
    }

    fn inflight(&self) -> Result<Inflight, MessageError> {
        let mut inflight = Inflight::default();
        if self.payload.len() != INFLIGHT_SIZE && self.payload.len() != size_of::<Inflight>() {
            return Err(self.wrong_size());
        }
        inflight.as_mut_bytes()[..self.payload.len()].copy_from_slice(self.payload);
        Ok(inflight)
    }
}

impl Request {
    /// Decodes a request. `payload` has the size that [`payload_len`] returned.
    ///
    /// # Errors
    /// The request is unknown, or its payload or descriptors do not fit. All descriptors are
    /// closed.
    pub fn decode(header: Header, payload: &[u8], fds: Vec<OwnedFd>) -> Result<Self, MessageError> {
        let mut parts = Parts { request: header.request, payload, fds };
        let parts = &mut parts;
        let request = match header.request {
            request::GET_FEATURES => parts.empty(Self::GetFeatures)?,
            request::SET_FEATURES => Self::SetFeatures(parts.only()?),
            request::SET_OWNER => parts.empty(Self::SetOwner)?,
            request::RESET_OWNER => parts.empty(Self::ResetOwner)?,
            request::SET_MEM_TABLE => Self::SetMemTable(parts.table()?),
            request::SET_LOG_BASE => Self::SetLogBase(parts.only()?, parts.fd()?),
            request::SET_LOG_FD => Self::SetLogFd(parts.only_fd()?),
            request::SET_VRING_NUM => Self::SetVringNum(parts.only()?),
            request::SET_VRING_ADDR => Self::SetVringAddr(parts.only()?),
            request::SET_VRING_BASE => Self::SetVringBase(parts.only()?),
            request::GET_VRING_BASE => Self::GetVringBase(parts.only()?),
            request::SET_VRING_KICK => parts.vring_fd(Self::SetVringKick)?,
            request::SET_VRING_CALL => parts.vring_fd(Self::SetVringCall)?,
            request::SET_VRING_ERR => parts.vring_fd(Self::SetVringErr)?,
            request::GET_PROTOCOL_FEATURES => parts.empty(Self::GetProtocolFeatures)?,
            request::SET_PROTOCOL_FEATURES => Self::SetProtocolFeatures(parts.only()?),
            request::GET_QUEUE_NUM => parts.empty(Self::GetQueueNum)?,
            request::SET_VRING_ENABLE => Self::SetVringEnable(parts.only()?),
            request::SEND_RARP => {
                // A MAC address and two bytes of padding.
                let [a, b, c, d, e, f, _, _] = parts.only()?;
                Self::SendRarp([a, b, c, d, e, f])
            }
            request::SET_BACKEND_REQ_FD => Self::SetBackendReqFd(parts.only_fd()?),
            request::IOTLB_MSG => Self::IotlbMsg(parts.only()?),
            request::GET_CONFIG => Self::GetConfig(parts.config()?.0),
            request::SET_CONFIG => {
                let (access, bytes) = parts.config()?;
                Self::SetConfig(access, bytes.to_vec())
            }
            request::GET_INFLIGHT_FD => Self::GetInflightFd(parts.inflight()?),
            request::SET_INFLIGHT_FD => Self::SetInflightFd(parts.inflight()?, parts.fd()?),
            request::RESET_DEVICE => parts.empty(Self::ResetDevice)?,
            request::GET_MAX_MEM_SLOTS => parts.empty(Self::GetMaxMemSlots)?,
            request::ADD_MEM_REG => {
                let SingleRegion { region, .. } = parts.only()?;
                Self::AddMemReg(SharedRegion { region, file: parts.fd()? })
            }
            request::REM_MEM_REG => {
                let SingleRegion { region, .. } = parts.only()?;
                // Some clients send the file as well. The specification says to close it.
                if parts.fds.len() == 1 {
                    parts.fds.clear();
                }
                Self::RemMemReg(region)
            }
            request::SET_STATUS => Self::SetStatus(parts.only()?),
            request::GET_STATUS => parts.empty(Self::GetStatus)?,
            request::SET_DEVICE_STATE_FD => Self::SetDeviceStateFd(parts.only()?, parts.fd()?),
            request::CHECK_DEVICE_STATE => parts.empty(Self::CheckDeviceState)?,
            request::POSTCOPY_ADVISE..=request::POSTCOPY_END => {
                return Err(MessageError::Postcopy(header.request));
            }
            unknown => return Err(MessageError::Request(unknown)),
        };
        parts.no_fds()?;
        Ok(request)
    }
}

/// Reply to a client.
#[derive(Debug)]
pub enum Reply {
    /// A number; as an acknowledgement, 0 means success.
    Number(u64),
    /// Failed, and the session continues.
    ///
    /// Sent as a negative acknowledgement, if one was requested.
    Refused,
    /// Position of a queue.
    Vring(VringState),
    /// Bytes of the configuration space.
    Config(ConfigAccess, Vec<u8>),
    /// The log area as the client sent it.
    ///
    /// The specification defines no payload: QEMU accepts any, Cloud Hypervisor needs this.
    Log(LogArea),
    /// In-flight region.
    Inflight(Inflight, OwnedFd),
    /// Header without payload, which some requests define as failure.
    Empty,
}

impl Reply {
    /// Encodes a reply to `request`; returns its bytes and its descriptor.
    #[must_use]
    pub fn encode(self, request: u32) -> (Vec<u8>, Option<OwnedFd>) {
        let flags = flags::VERSION | flags::REPLY;
        match self {
            Self::Number(number) => (message(request, flags, number.as_bytes()), None),
            Self::Refused => (message(request, flags, 1_u64.as_bytes()), None),
            Self::Vring(state) => (message(request, flags, state.as_bytes()), None),
            Self::Log(area) => (message(request, flags, area.as_bytes()), None),
            Self::Config(access, bytes) => {
                (message(request, flags, &[access.as_bytes(), &bytes].concat()), None)
            }
            Self::Inflight(inflight, fd) => {
                // With the padding, as all known clients send it.
                (message(request, flags, inflight.as_bytes()), Some(fd))
            }
            Self::Empty => (message(request, flags, &[]), None),
        }
    }
}

/// Splits a message into header and payload.
///
/// # Errors
/// It is shorter than a header.
pub fn split(message: &[u8]) -> Result<(Header, &[u8]), MessageError> {
    let refused = |_| MessageError::Size { request: 0, size: message.len() };
    // Plain data: every bit pattern is valid.
    Header::read_from_prefix(message).map_err(refused)
}

/// Encodes a message: header and payload.
#[must_use]
pub fn message(request: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    // Payloads sent here are below 4 KiB.
    let header = Header { request, flags, size: payload.len() as u32 };
    [header.as_bytes(), payload].concat()
}
