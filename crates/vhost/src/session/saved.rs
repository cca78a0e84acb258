//! A session in a handover record: the messages that make it again, and what no message carries.
//!
//! To continue a session is to handle its messages as if a client sent them: there is no second
//! parser to trust, and every check applies. The tags and values are a published format
//! (docs/reference/handover-record.md).
use crate::memory::MAX_SLOTS;
use crate::message::{HEADER, MAX_FDS, MAX_PAYLOAD};
use paravane_export::Handover;
use paravane_export::handover::{HandoverError, REQUIRED, once};
use paravane_export::protocol::{Section, Sections};
use paravane_spec::vhost_user::{Header, Inflight, request};
use std::os::fd::{BorrowedFd, OwnedFd};
use zerocopy::{FromBytes, IntoBytes};

/// Longest text of an error in bytes.
const MAX_TEXT: usize = 4096;
/// Largest configuration space in bytes.
const MAX_CONFIG: usize = paravane_spec::vhost_user::MAX_CONFIG as usize;
/// Most bytes of what a driver knows of a device beside its configuration space.
const MAX_IDENTITY: usize = 64;

/// Tags of sections.
mod tag {
    use paravane_export::handover::REQUIRED;

    /// One vhost-user message.
    pub(super) const MESSAGE: u32 = 3;
    /// How often each memory region was added.
    pub(super) const REGION_TIMES: u32 = 4;
    /// Queue that has failed.
    pub(super) const FAILED: u32 = 5;
    /// Configuration space as the driver has seen it.
    pub(super) const CONFIG: u32 = 6;
    /// Queue pairs that the driver has set through the control queue.
    pub(super) const PAIRS: u32 = 7;
    /// What the driver knows of the device beside its configuration space.
    pub(super) const IDENTITY: u32 = 8;
    /// In-flight region of ours, for a client without one.
    pub(super) const OWN_INFLIGHT: u32 = REQUIRED | 1;
}

/// What no message carries.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Facts {
    /// How often each region was added, in the order of the regions.
    pub(super) region_times: Vec<u32>,
    /// Queues that have failed, each with its error.
    pub(super) failed: Vec<(u16, String)>,
    /// Configuration space as the driver has seen it.
    pub(super) config: Vec<u8>,
    /// Number of queue pairs that the driver has set; 0: none.
    pub(super) pairs: u16,
    /// What the driver knows of the device beside that. `None`: it was not noted.
    pub(super) identity: Option<Vec<u8>>,
}

/// State of a session, without its connection.
#[derive(Debug)]
pub(super) struct SavedSession<D = OwnedFd> {
    /// Messages that make it again, in their order, each with its header and descriptors.
    pub(super) messages: Vec<(Vec<u8>, Vec<D>)>,
    pub(super) facts: Facts,
    /// In-flight region of ours. Queues may have been live: it has their positions.
    pub(super) own_inflight: Option<(Inflight, D)>,
}

/// Writes a message.
pub(super) fn write_message(
    into: &mut dyn Sections,
    message: Vec<u8>,
    fd: Option<BorrowedFd<'_>>,
) -> Result<(), HandoverError> {
    into.push(tag::MESSAGE, message, fd.as_slice())
}

/// Writes the in-flight region of ours.
pub(super) fn write_own_inflight(
    into: &mut dyn Sections,
    layout: Inflight,
    file: BorrowedFd<'_>,
) -> Result<(), HandoverError> {
    into.push(tag::OWN_INFLIGHT, layout.as_bytes().to_vec(), &[file])
}

impl Facts {
    /// Writes them, behind the messages.
    pub(super) fn write(self, into: &mut dyn Sections) -> Result<(), HandoverError> {
        let Self { region_times, failed, config, pairs, identity } = self;
        let times = region_times.iter().flat_map(|times| times.to_le_bytes()).collect();
        into.push(tag::REGION_TIMES, times, &[])?;
        for (queue, error) in failed {
            let text = &error.as_bytes()[..error.floor_char_boundary(MAX_TEXT)];
            into.push(tag::FAILED, [&u32::from(queue).to_le_bytes(), text].concat(), &[])?;
        }
        into.push(tag::CONFIG, config, &[])?;
        if pairs > 0 {
            into.push(tag::PAIRS, u32::from(pairs).to_le_bytes().to_vec(), &[])?;
        }
        match identity.filter(|identity| !identity.is_empty()) {
            Some(identity) => into.push(tag::IDENTITY, identity, &[]),
            None => Ok(()),
        }
    }
}

impl<D> SavedSession<D> {
    /// Reads the sections of a session.
    ///
    /// # Errors
    /// One is invalid, or needed and unknown.
    pub(super) fn read(sections: impl IntoIterator<Item = Section<D>>) -> Result<Self, HandoverError> {
        let (mut messages, mut failed) = (Vec::new(), Vec::new());
        let (mut times, mut config, mut pairs) = (None, None, None);
        let (mut identity, mut own_inflight) = (None, None);
        for Section { tag, value, mut fds } in sections {
            match tag {
                tag::MESSAGE => {
                    if !(HEADER..=HEADER + MAX_PAYLOAD).contains(&value.len()) || fds.len() > MAX_FDS {
                        return Err(HandoverError::Record("message"));
                    }
                    messages.push((value, fds));
                }
                tag::REGION_TIMES => {
                    let (numbers, rest) = value.as_chunks::<4>();
                    if !rest.is_empty() || numbers.len() > MAX_SLOTS || !fds.is_empty() {
                        return Err(HandoverError::Record("memory regions"));
                    }
                    once(&mut times, numbers.iter().map(|number| u32::from_le_bytes(*number)).collect())?;
                }
                tag::FAILED => failed.push(read_failed(&value, fds.len())?),
                tag::CONFIG => {
                    if value.len() > MAX_CONFIG || !fds.is_empty() {
                        return Err(HandoverError::Record("configuration space"));
                    }
                    once(&mut config, value)?;
                }
                tag::PAIRS => {
                    let number = value.try_into().map(u32::from_le_bytes).map(u16::try_from);
                    let (Ok(Ok(number)), true) = (number, fds.is_empty()) else {
                        return Err(HandoverError::Record("queue pairs"));
                    };
                    once(&mut pairs, number)?;
                }
                tag::IDENTITY => {
                    if !(1..=MAX_IDENTITY).contains(&value.len()) || !fds.is_empty() {
                        return Err(HandoverError::Record("identity"));
                    }
                    once(&mut identity, value)?;
                }
                tag::OWN_INFLIGHT => {
                    let (Ok(layout), [_]) = (Inflight::read_from_bytes(&value), &fds[..]) else {
                        return Err(HandoverError::Record("in-flight region"));
                    };
                    once(&mut own_inflight, (layout, fds.remove(0)))?;
                }
                tag if tag & REQUIRED != 0 => return Err(HandoverError::Section(tag)),
                // Of a later version.
                _ => {}
            }
        }
        let facts = Facts {
            region_times: times.unwrap_or_default(),
            failed,
            config: config.unwrap_or_default(),
            pairs: pairs.unwrap_or_default(),
            identity,
        };
        Ok(Self { messages, facts, own_inflight })
    }
}

/// What a driver knows of its device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KnownToDriver {
    /// Configuration space as the driver has seen it.
    pub config: Vec<u8>,
    /// Features that the driver has accepted; 0: none yet.
    pub features: u64,
}

impl KnownToDriver {
    /// Reads what the driver of a recorded session has seen. `None`: there is no session.
    ///
    /// # Errors
    /// The record is damaged, invalid or of another version.
    pub fn recorded(handover: &Handover) -> Result<Option<Self>, HandoverError> {
        let (mut seen, mut features) = (None, 0);
        for (tag, value) in handover.session_sections()? {
            match tag {
                tag::CONFIG => seen = Some(value.to_vec()),
                tag::MESSAGE => {
                    let Some((header, payload)) = value.split_at_checked(HEADER) else { continue };
                    let is_features = Header::read_from_bytes(header)
                        .is_ok_and(|header| { header.request } == request::SET_FEATURES);
                    if let (true, Ok(bytes)) = (is_features, payload.try_into()) {
                        features = u64::from_le_bytes(bytes);
                    }
                }
                _ => {}
            }
        }
        Ok(seen.map(|config| Self { config, features }))
    }
}

/// Checks the sections of a session.
///
/// # Errors
/// As [`SavedSession::read`].
pub(crate) fn check(sections: &[Section]) -> Result<(), HandoverError> {
    let copies = sections.iter().map(|Section { tag, value, fds }| Section {
        tag: *tag,
        value: value.clone(),
        fds: vec![(); fds.len()],
    });
    SavedSession::read(copies).map(drop)
}

fn read_failed(value: &[u8], fds: usize) -> Result<(u16, String), HandoverError> {
    let failed = value.split_first_chunk::<4>().and_then(|(queue, text)| {
        let queue = u16::try_from(u32::from_le_bytes(*queue)).ok()?;
        Some((queue, str::from_utf8(text).ok()?.to_owned()))
    });
    failed.filter(|(_, text)| text.len() <= MAX_TEXT && fds == 0).ok_or(HandoverError::Record("failed queue"))
}

#[cfg(test)]
mod tests;
