//! Format of a record: sections between a header and a checksum.
//!
//! ```text
//!  header: magic, version, length | section ... section | checksum of all before
//!  section: tag, number of descriptors, length | value
//! ```
//! All numbers are little-endian. A section takes its descriptors from the front of those that
//! remain. A section with an unknown tag is skipped with its descriptors, unless the tag has the bit
//! [`REQUIRED`]: a later version may add sections that an earlier one can do without, and marks
//! others.
//!
//! The type of a descriptor is a parameter: the descriptor itself for another process, or the number
//! under which it is kept for a later one ([`crate::keeper`]).
//!
//! This file knows the sections of an export. Those of its session are the protocol's
//! ([`Protocol::check`], [`Session::replay`](crate::protocol::Session::replay)).
//!
//! A record is not trusted. Each length is checked, and nothing is allocated before.
use super::frame::{
    CHECKSUM, HEADER, MAGIC, MAX_RECORD, REQUIRED, SECTION_TAGS, SectionBytes, VERSION, body, next_section,
    once,
};
use super::{Handover, HandoverError};
use crate::framing::Framing;
use crate::protocol::{Protocol, Section};
use crc32fast::hash as checksum;
use std::os::fd::OwnedFd;

/// Longest path of a socket in bytes.
const MAX_PATH: usize = 4096;

/// Longest note of an owner in bytes.
const MAX_NOTE: usize = 8192;

/// Tags of the sections of an export.
mod tag {
    use super::REQUIRED;

    /// Endpoint, number of sessions so far, and the listening socket.
    pub(super) const EXPORT: u32 = 1;
    /// Connection, with the part of a message that has arrived.
    pub(super) const CONNECTION: u32 = 2;
    /// Note of the owner of the export.
    pub(super) const NOTE: u32 = 9;
    /// The first message on the connection has not been done, or not been answered.
    pub(super) const PENDING: u32 = REQUIRED | 2;
    /// Number of the protocol, if it is not 0: readers that know vhost-user only refuse the record.
    pub(super) const PROTOCOL: u32 = REQUIRED | 3;
}

/// Kind of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Listens on a path, and has made the file.
    Listen,
    /// Listens on a socket that it was given.
    Listener,
    /// Connects to a path.
    Connect,
    /// Was given its only connection.
    Connection,
}

impl Kind {
    pub(crate) fn listens(self) -> bool {
        matches!(self, Self::Listen | Self::Listener)
    }
}

/// Endpoint of an export.
#[derive(Debug)]
pub(crate) struct EndpointState<D = OwnedFd> {
    pub(crate) kind: Kind,
    /// Path, if the kind has one, as the operator gave it.
    pub(crate) path: Vec<u8>,
    /// Device and inode number of the socket's file, if the export made it.
    pub(crate) file: (u64, u64),
    /// Socket, if the kind listens.
    pub(crate) listener: Option<D>,
}

/// What a process that died may have left undone of the first message on the connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Pending {
    /// The message was begun. Queues must not start before it is done.
    Begun,
    /// The message is done, and the state is the one after it.
    Done {
        /// Length of the message in bytes.
        len: usize,
        answer: PendingAnswer,
        /// The message is taken off the connection and answered in one step.
        at_once: bool,
    },
}

/// Answer to a message that is done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PendingAnswer {
    None,
    Bytes(Vec<u8>),
    /// It has a descriptor: handle the message again.
    Again,
}

/// Connection with the session on it.
#[derive(Debug)]
pub(crate) struct ConnectionState<D = OwnedFd> {
    pub(crate) socket: D,
    /// The part of a message that has arrived, and its descriptors.
    pub(crate) partial: (Vec<u8>, Vec<D>),
    /// What makes the session again.
    pub(crate) session: Vec<Section<D>>,
    pub(crate) pending: Option<Pending>,
}

impl ConnectionState {
    /// A connection without messages so far.
    pub(crate) fn new(socket: OwnedFd) -> Self {
        Self { socket, partial: (Vec::new(), Vec::new()), session: Vec::new(), pending: None }
    }
}

/// State of an export.
#[derive(Debug)]
pub(crate) struct ExportState<D = OwnedFd> {
    /// Number of its protocol.
    pub(crate) protocol: u32,
    pub(crate) endpoint: EndpointState<D>,
    /// Number of sessions so far.
    pub(crate) sessions: u64,
    pub(crate) connection: Option<ConnectionState<D>>,
    /// Note of its owner, for a later process.
    pub(crate) note: Vec<u8>,
}

/// Record that is being written.
struct Writer<D> {
    record: Vec<u8>,
    fds: Vec<D>,
}

impl<D> Writer<D> {
    fn section(&mut self, tag: u32, value: &[u8], fds: impl IntoIterator<Item = D>) {
        let before = self.fds.len();
        self.fds.extend(fds);
        // Each is far below 2^32: the record's size is checked at its end.
        for number in [tag, (self.fds.len() - before) as u32, value.len() as u32] {
            self.record.extend(number.to_le_bytes());
        }
        self.record.extend(value);
    }
}

impl<D> ExportState<D> {
    /// Writes the record. Returns it with its descriptors in their order.
    ///
    /// # Errors
    /// It would be too large.
    pub(crate) fn write(self) -> Result<(Vec<u8>, Vec<D>), HandoverError> {
        let Self { protocol, endpoint, sessions, connection, note } = self;
        let mut writer = Writer { record: Vec::new(), fds: Vec::new() };
        writer.record.extend(MAGIC);
        writer.record.extend(VERSION.to_le_bytes());
        writer.record.extend([0; 4]);
        let mut value = (endpoint.kind as u32).to_le_bytes().to_vec();
        for number in [sessions, endpoint.file.0, endpoint.file.1] {
            value.extend(number.to_le_bytes());
        }
        value.extend(&endpoint.path);
        writer.section(tag::EXPORT, &value, endpoint.listener);
        if protocol != 0 {
            writer.section(tag::PROTOCOL, &protocol.to_le_bytes(), None);
        }
        if !note.is_empty() {
            writer.section(tag::NOTE, &note[..note.len().min(MAX_NOTE)], None);
        }
        if let Some(ConnectionState { socket, partial, session, pending }) = connection {
            writer.section(tag::CONNECTION, &partial.0, std::iter::once(socket).chain(partial.1));
            for Section { tag, value, fds } in session {
                writer.section(tag, &value, fds);
            }
            if let Some(pending) = pending {
                writer.section(tag::PENDING, &pending.encode(), None);
            }
        }
        let Writer { mut record, fds } = writer;
        let length = record.len() + CHECKSUM;
        if length > MAX_RECORD {
            return Err(HandoverError::TooLarge);
        }
        record[12..HEADER].copy_from_slice(&(length as u32).to_le_bytes());
        record.extend(checksum(&record).to_le_bytes());
        Ok((record, fds))
    }
}

impl ExportState {
    /// Writes the record for another process.
    ///
    /// # Errors
    /// It would be too large.
    pub(crate) fn encode(self) -> Result<Handover, HandoverError> {
        let (record, fds) = self.write()?;
        Ok(Handover { record, fds })
    }

    /// Reads a record of an export of this protocol.
    ///
    /// # Errors
    /// It is damaged, invalid, or of another version or protocol. All descriptors are closed.
    pub(crate) fn decode(handover: Handover, protocol: &dyn Protocol) -> Result<Self, HandoverError> {
        let Handover { record, fds } = handover;
        let framing = protocol.framing();
        let mut sections = Reader { rest: body(&record)?, fds: fds.into_iter() };
        let (mut export, mut connection, mut session) = (None, None, Vec::new());
        let (mut number, mut pending, mut note) = (None, None, None);
        while let Some(Section { tag, value, mut fds }) = sections.next()? {
            let is_of_connection = SECTION_TAGS.contains(&tag) || tag & REQUIRED != 0;
            if is_of_connection && tag != tag::PROTOCOL && connection.is_none() {
                return Err(HandoverError::Record("session without a connection"));
            }
            match tag {
                tag::EXPORT => once(&mut export, read_export(&value, fds)?)?,
                tag::PROTOCOL => {
                    let read = <[u8; 4]>::try_from(value).ok().filter(|_| fds.is_empty());
                    once(
                        &mut number,
                        read.map(u32::from_le_bytes).ok_or(HandoverError::Record("protocol"))?,
                    )?;
                }
                tag::CONNECTION => {
                    if value.len() > framing.max_message || !(1..=framing.max_fds + 1).contains(&fds.len()) {
                        return Err(HandoverError::Record("connection"));
                    }
                    let socket = fds.remove(0);
                    once(&mut connection, (socket, (value, fds)))?;
                }
                tag::NOTE => once(&mut note, read_note(&value, fds.len())?)?,
                tag::PENDING => {
                    let read = Pending::decode(&value, framing).filter(|_| fds.is_empty());
                    once(&mut pending, read.ok_or(HandoverError::Record("message that is not done"))?)?;
                }
                _ if is_of_connection => session.push(Section { tag, value, fds }),
                // Of a later version.
                _ => {}
            }
        }
        if !sections.fds.as_slice().is_empty() {
            return Err(HandoverError::Record("more descriptors than it names"));
        }
        let number = number.unwrap_or(0);
        if number != protocol.number() {
            return Err(HandoverError::Protocol { recorded: number, own: protocol.number() });
        }
        let (endpoint, sessions) = export.ok_or(HandoverError::Record("no endpoint"))?;
        protocol.check(&session)?;
        let connection =
            connection.map(|(socket, partial)| ConnectionState { socket, partial, session, pending });
        Ok(Self { protocol: number, endpoint, sessions, connection, note: note.unwrap_or_default() })
    }
}

impl Pending {
    fn encode(&self) -> Vec<u8> {
        match self {
            Self::Begun => vec![0; 8],
            Self::Done { len, answer, at_once } => {
                let (kind, bytes): (u8, &[u8]) = match answer {
                    PendingAnswer::None => (1, &[]),
                    PendingAnswer::Bytes(bytes) => (2, bytes),
                    PendingAnswer::Again => (3, &[]),
                };
                // No message of a protocol is that long.
                let head = [&[kind, u8::from(*at_once), 0, 0], &(*len as u32).to_le_bytes()[..]].concat();
                [&head, bytes].concat()
            }
        }
    }

    fn decode(value: &[u8], framing: &Framing) -> Option<Self> {
        let (&[kind, at_once, 0, 0, l0, l1, l2, l3], bytes) = value.split_first_chunk::<8>()? else {
            return None;
        };
        let len = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
        let answer = match (kind, bytes) {
            (0, []) if at_once == 0 && len == 0 => return Some(Self::Begun),
            (1, []) => PendingAnswer::None,
            (2, bytes) if bytes.len() <= framing.max_message => PendingAnswer::Bytes(bytes.to_vec()),
            (3, []) => PendingAnswer::Again,
            _ => return None,
        };
        let fits = (framing.header..=framing.max_message).contains(&len) && at_once <= 1;
        fits.then_some(Self::Done { len, answer, at_once: at_once == 1 })
    }
}

/// The note in a record; empty: it has none.
///
/// # Errors
/// The record is damaged, invalid or of another version.
pub(crate) fn note_of(record: &[u8]) -> Result<Vec<u8>, HandoverError> {
    let (mut rest, mut note) = (body(record)?, None);
    while let Some(SectionBytes { tag, value, fds }) = next_section(&mut rest)? {
        if tag == tag::NOTE {
            once(&mut note, read_note(value, fds)?)?;
        }
    }
    Ok(note.unwrap_or_default())
}

fn read_note(value: &[u8], fds: usize) -> Result<Vec<u8>, HandoverError> {
    match (1..=MAX_NOTE).contains(&value.len()) && fds == 0 {
        true => Ok(value.to_vec()),
        false => Err(HandoverError::Record("note")),
    }
}

struct Reader<'a> {
    rest: &'a [u8],
    fds: std::vec::IntoIter<OwnedFd>,
}

impl Reader<'_> {
    fn next(&mut self) -> Result<Option<Section>, HandoverError> {
        let Some(SectionBytes { tag, fds, value }) = next_section(&mut self.rest)? else { return Ok(None) };
        if fds > self.fds.len() {
            return Err(HandoverError::Record("fewer descriptors than it names"));
        }
        Ok(Some(Section { tag, value: value.to_vec(), fds: self.fds.by_ref().take(fds).collect() }))
    }
}

fn read_export(value: &[u8], mut fds: Vec<OwnedFd>) -> Result<(EndpointState, u64), HandoverError> {
    let short = || HandoverError::Record("endpoint");
    let (head, path) = value.split_first_chunk::<28>().ok_or_else(short)?;
    let kind = match u32::from_le_bytes([head[0], head[1], head[2], head[3]]) {
        0 => Kind::Listen,
        1 => Kind::Listener,
        2 => Kind::Connect,
        3 => Kind::Connection,
        _ => return Err(HandoverError::Record("unknown kind of endpoint")),
    };
    let (numbers, _) = head[4..].as_chunks::<8>();
    let [sessions, dev, ino] = [0, 1, 2].map(|at| u64::from_le_bytes(numbers[at]));
    if path.len() > MAX_PATH || fds.len() != usize::from(kind.listens()) {
        return Err(short());
    }
    Ok((EndpointState { kind, path: path.to_vec(), file: (dev, ino), listener: fds.pop() }, sessions))
}

#[cfg(test)]
mod tests;
