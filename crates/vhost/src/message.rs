//! Decode and encode vhost-user messages.
//!
//! ```text
//! 12 bytes --payload_len--> payload --Parts::new(request, payload, descriptors)--> structures, descriptors
//! Handled::Reply --message(request, flags)--> bytes, and at most one descriptor
//! ```
//! Payload sizes and numbers of descriptors are checked for each request. Descriptors that are not
//! handed out are closed. Whether a request is allowed in the state of the session is checked by
//! [`crate::session`].
//!
//! Source: QEMU's `docs/interop/vhost-user.rst`.
use paravane_export::Framing;
use paravane_spec::vhost_user::{
    ConfigAccess, Header, INFLIGHT_SIZE, Inflight, MAX_TABLE_REGIONS, MemoryRegion, MemoryTable,
    SingleRegion, VRING_INDEX_MASK, VRING_NO_FD, flags, request,
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

/// Payload and descriptors of a request.
///
/// Each request has one way to take them, which checks both: [`Parts::only`] and [`Parts::with_fd`] for
/// most.
///
/// # Errors
/// Each method fails if the payload or the number of descriptors is not that of the request.
#[derive(Debug)]
pub struct Parts<'a> {
    request: u32,
    payload: &'a [u8],
    fds: Vec<OwnedFd>,
}

/// Requests without payload and descriptors.
const BARE: [u32; 9] = [
    request::GET_FEATURES,
    request::SET_OWNER,
    request::RESET_OWNER,
    request::GET_PROTOCOL_FEATURES,
    request::GET_QUEUE_NUM,
    request::RESET_DEVICE,
    request::GET_MAX_MEM_SLOTS,
    request::GET_STATUS,
    request::CHECK_DEVICE_STATE,
];

impl<'a> Parts<'a> {
    /// Takes the parts of a request. `payload` has the size that [`payload_len`] returned.
    ///
    /// Descriptors that are not taken are closed.
    ///
    /// # Errors
    /// The request has no parts, and there are some.
    pub fn new(request: u32, payload: &'a [u8], fds: Vec<OwnedFd>) -> Result<Self, MessageError> {
        let parts = Self { request, payload, fds };
        if BARE.contains(&request) {
            let []: [u8; 0] = parts.only()?;
        }
        Ok(parts)
    }

    fn wrong_size(&self) -> MessageError {
        MessageError::Size { request: self.request, size: self.payload.len() }
    }

    fn wrong_value(&self, value: impl Into<u64>) -> MessageError {
        MessageError::Value { request: self.request, value: value.into() }
    }

    /// Reads a payload of exactly one structure.
    fn structure<T: FromBytes>(&self) -> Result<T, MessageError> {
        T::read_from_bytes(self.payload).map_err(|_| self.wrong_size())
    }

    /// Reads a payload of exactly one structure, without descriptors.
    pub fn only<T: FromBytes>(&self) -> Result<T, MessageError> {
        let structure = self.structure()?;
        self.no_fds()?;
        Ok(structure)
    }

    /// Reads a payload of exactly one structure, and takes the one descriptor.
    pub fn with_fd<T: FromBytes>(&mut self) -> Result<(T, OwnedFd), MessageError> {
        Ok((self.structure()?, self.fd()?))
    }

    /// Reads a structure, and returns the bytes after it.
    fn first<T: FromBytes + Immutable + KnownLayout>(&self) -> Result<(T, &[u8]), MessageError> {
        T::read_from_prefix(self.payload).map_err(|_| self.wrong_size())
    }

    fn wrong_fds(&self, needed: usize) -> MessageError {
        MessageError::Fds { request: self.request, given: self.fds.len(), needed }
    }

    /// Takes the one descriptor.
    pub fn fd(&mut self) -> Result<OwnedFd, MessageError> {
        match (self.fds.len(), self.fds.pop()) {
            (1, Some(fd)) => Ok(fd),
            (given, _) => Err(MessageError::Fds { request: self.request, given, needed: 1 }),
        }
    }

    /// Takes the one descriptor of a message with which some clients send an unused number.
    pub fn only_fd(&mut self) -> Result<OwnedFd, MessageError> {
        if matches!(self.payload.len(), 0 | 8) { self.fd() } else { Err(self.wrong_size()) }
    }

    /// Reads a queue index, and takes its descriptor if the payload announces one.
    pub fn vring_fd(&mut self) -> Result<(u8, Option<OwnedFd>), MessageError> {
        let value: u64 = self.structure()?;
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

    /// Checks that there is no descriptor.
    pub fn no_fds(&self) -> Result<(), MessageError> {
        if self.fds.is_empty() { Ok(()) } else { Err(self.wrong_fds(0)) }
    }

    /// Reads a table of regions, and takes their descriptors.
    pub fn table(&mut self) -> Result<Vec<SharedRegion>, MessageError> {
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

    /// Reads the one region to add, and takes its descriptor.
    pub fn region(&mut self) -> Result<SharedRegion, MessageError> {
        let (SingleRegion { region, .. }, file) = self.with_fd()?;
        Ok(SharedRegion { region, file })
    }

    /// Reads the one region to remove.
    ///
    /// Some clients send the file as well. The specification says to close it.
    pub fn removed_region(&self) -> Result<MemoryRegion, MessageError> {
        let SingleRegion { region, .. } = self.structure()?;
        match self.fds.len() {
            0 | 1 => Ok(region),
            _ => Err(self.wrong_fds(0)),
        }
    }

    /// Reads an access to the configuration space, and its bytes.
    pub fn config(&self) -> Result<(ConfigAccess, &[u8]), MessageError> {
        let (access, bytes) = self.first::<ConfigAccess>()?;
        if u32::try_from(bytes.len()) != Ok(access.size) {
            return Err(self.wrong_size());
        }
        self.no_fds()?;
        Ok((access, bytes))
    }

    /// Reads the description of an in-flight region.
    pub fn inflight(&self) -> Result<Inflight, MessageError> {
        let mut inflight = Inflight::default();
        if self.payload.len() != INFLIGHT_SIZE && self.payload.len() != size_of::<Inflight>() {
            return Err(self.wrong_size());
        }
        inflight.as_mut_bytes()[..self.payload.len()].copy_from_slice(self.payload);
        Ok(inflight)
    }
}

/// What becomes of a request.
pub(crate) enum Handled {
    /// It is done, and has no reply.
    Done,
    /// It is refused. The session goes on.
    Refused,
    /// Payload of its reply, and a descriptor.
    Reply(Vec<u8>, Option<OwnedFd>),
}

impl Handled {
    /// A reply without a descriptor.
    pub(crate) fn reply(payload: &(impl IntoBytes + Immutable + ?Sized)) -> Self {
        Self::Reply(payload.as_bytes().to_vec(), None)
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
