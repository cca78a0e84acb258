//! Messages of vhost-user: bytes and descriptors in, a typed request out; a typed reply in, bytes out. No socket here.
//!
//! ```text
//! 12 bytes --payload_len--> so many more --Request::decode(header, payload, descriptors)--> Request
//! Reply --encode(request)--> bytes (and a descriptor)
//! ```
//! Every length and number of descriptors is checked against what the request is; what is left of descriptors is closed.
//! Whether a request fits the state of the session is the session's business.
use paravane_spec::vhost_user::{
    ConfigAccess, Header, INFLIGHT_SIZE, Inflight, Iotlb, LogArea, MAX_TABLE_REGIONS, MemoryRegion,
    MemoryTable, SingleRegion, StateTransfer, VRING_INDEX_MASK, VRING_NO_FD, VringAddr, VringState, flags,
    request,
};
use std::os::fd::OwnedFd;
use thiserror::Error;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes of a header.
pub const HEADER: usize = size_of::<Header>();
/// Most bytes after a header.
pub const MAX_PAYLOAD: usize = 4096;
/// Most descriptors with a message.
pub const MAX_FDS: usize = MAX_TABLE_REGIONS;

/// Why bytes are no message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum MessageError {
    /// a message of version {0}
    #[error("a message of version {0}")]
    Version(u32),
    /// unknown flags in {0:#x}
    #[error("unknown flags in {0:#x}")]
    Flags(u32),
    /// a reply to nothing that was asked
    #[error("a reply to nothing that was asked")]
    Reply,
    /// request {0} is unknown
    #[error("request {0} is unknown")]
    Request(u32),
    /// request {request} with {size} bytes, which it cannot have
    #[error("request {request} with {size} bytes, which it cannot have")]
    Size {
        /// Which.
        request: u32,
        /// Bytes after the header.
        size: usize,
    },
    /// request {request} with {given} descriptors in place of {needed}
    #[error("request {request} with {given} descriptors in place of {needed}")]
    Fds {
        /// Which.
        request: u32,
        /// How many came.
        given: usize,
        /// How many belong to it.
        needed: usize,
    },
    /// request {request} says {value:#x}, which means nothing
    #[error("request {request} says {value:#x}, which means nothing")]
    Value {
        /// Which.
        request: u32,
        /// What is in it.
        value: u64,
    },
}

/// A file and where guest memory is in it.
#[derive(Debug)]
pub struct SharedRegion {
    /// Where.
    pub region: MemoryRegion,
    /// The file.
    pub file: OwnedFd,
}

/// What a client asks for.
#[derive(Debug)]
#[expect(
    missing_docs,
    reason = "the names are those of paravane_spec::vhost_user::request, which says what they mean"
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

/// The size of what follows a header.
///
/// # Errors
/// The header is of no request.
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

/// A message while it is taken apart.
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

    /// Nothing but the header.
    fn empty<T>(&self, request: T) -> Result<T, MessageError> {
        self.payload.is_empty().then_some(request).ok_or(self.wrong_size())
    }

    /// One structure and nothing else.
    fn only<T: FromBytes>(&self) -> Result<T, MessageError> {
        T::read_from_bytes(self.payload).map_err(|_| self.wrong_size())
    }

    /// A structure, and what comes after it.
    fn first<T: FromBytes + Immutable + KnownLayout>(&self) -> Result<(T, &[u8]), MessageError> {
        T::read_from_prefix(self.payload).map_err(|_| self.wrong_size())
    }

    fn wrong_fds(&self, needed: usize) -> MessageError {
        MessageError::Fds { request: self.request, given: self.fds.len(), needed }
    }

    /// The one descriptor.
    fn fd(&mut self) -> Result<OwnedFd, MessageError> {
        match (self.fds.len(), self.fds.pop()) {
            (1, Some(fd)) => Ok(fd),
            (given, _) => Err(MessageError::Fds { request: self.request, given, needed: 1 }),
        }
    }

    /// A queue, and the descriptor for it unless there is to be none.
    fn vring_fd(&mut self) -> Result<(u8, Option<OwnedFd>), MessageError> {
        let value: u64 = self.only()?;
        if value & !(VRING_INDEX_MASK | VRING_NO_FD) != 0 {
            return Err(self.wrong_value(value));
        }
        let index = (value & VRING_INDEX_MASK) as u8;
        if value & VRING_NO_FD == 0 {
            return Ok((index, Some(self.fd()?)));
        }
        self.no_fds()?;
        Ok((index, None))
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
        // There may be room for more regions than there are: User Mode Linux sends a structure of a fixed size.
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
    /// What a message says. `payload` has the bytes that [`payload_len`] told.
    ///
    /// # Errors
    /// The request is unknown, or its payload or its descriptors do not fit it. All descriptors are closed.
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
            request::SET_LOG_FD => {
                // Some send a number with it, which says nothing.
                if !matches!(payload.len(), 0 | 8) {
                    return Err(parts.wrong_size());
                }
                Self::SetLogFd(parts.fd()?)
            }
            request::SET_VRING_NUM => Self::SetVringNum(parts.only()?),
            request::SET_VRING_ADDR => Self::SetVringAddr(parts.only()?),
            request::SET_VRING_BASE => Self::SetVringBase(parts.only()?),
            request::GET_VRING_BASE => Self::GetVringBase(parts.only()?),
            request::SET_VRING_KICK => {
                let (index, fd) = parts.vring_fd()?;
                Self::SetVringKick(index, fd)
            }
            request::SET_VRING_CALL => {
                let (index, fd) = parts.vring_fd()?;
                Self::SetVringCall(index, fd)
            }
            request::SET_VRING_ERR => {
                let (index, fd) = parts.vring_fd()?;
                Self::SetVringErr(index, fd)
            }
            request::GET_PROTOCOL_FEATURES => parts.empty(Self::GetProtocolFeatures)?,
            request::SET_PROTOCOL_FEATURES => Self::SetProtocolFeatures(parts.only()?),
            request::GET_QUEUE_NUM => parts.empty(Self::GetQueueNum)?,
            request::SET_VRING_ENABLE => Self::SetVringEnable(parts.only()?),
            request::SEND_RARP => {
                // An address, and two bytes that mean nothing.
                let [a, b, c, d, e, f, _, _] = parts.only()?;
                Self::SendRarp([a, b, c, d, e, f])
            }
            request::SET_BACKEND_REQ_FD => {
                if !matches!(payload.len(), 0 | 8) {
                    return Err(parts.wrong_size());
                }
                Self::SetBackendReqFd(parts.fd()?)
            }
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
                // Some send the file as well, which is closed (the specification says so).
                if parts.fds.len() == 1 {
                    parts.fds.clear();
                }
                Self::RemMemReg(region)
            }
            request::SET_STATUS => Self::SetStatus(parts.only()?),
            request::GET_STATUS => parts.empty(Self::GetStatus)?,
            request::SET_DEVICE_STATE_FD => Self::SetDeviceStateFd(parts.only()?, parts.fd()?),
            request::CHECK_DEVICE_STATE => parts.empty(Self::CheckDeviceState)?,
            unknown => return Err(MessageError::Request(unknown)),
        };
        parts.no_fds()?;
        Ok(request)
    }
}

/// What is answered.
#[derive(Debug)]
pub enum Reply {
    /// A number; of an acknowledgement: 0 if it was done.
    Number(u64),
    /// It was not done, and the session goes on: an acknowledgement, if one was asked for.
    Refused,
    /// A queue's position.
    Vring(VringState),
    /// Bytes of the configuration space.
    Config(ConfigAccess, Vec<u8>),
    /// The log as it was told: the specification does not say what is answered, QEMU takes anything, and Cloud Hypervisor
    /// wants this.
    Log(LogArea),
    /// Memory to track in.
    Inflight(Inflight, OwnedFd),
    /// Nothing but the header, which in some requests means that it cannot be done.
    Empty,
}

impl Reply {
    /// The bytes of a reply to `request`, and the descriptor that goes with them.
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
                // With the padding, as all known clients have it.
                (message(request, flags, inflight.as_bytes()), Some(fd))
            }
            Self::Empty => (message(request, flags, &[]), None),
        }
    }
}

/// A message: header and payload.
#[must_use]
pub fn message(request: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    // Payloads of ours are below 4 KiB.
    let header = Header { request, flags, size: payload.len() as u32 };
    [header.as_bytes(), payload].concat()
}
