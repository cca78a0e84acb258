//! The negotiation at the start of a connection. It blocks, with the time-outs of its stream.
//!
//! ```text
//!   greet -> [start_tls] -> extended headers, else structured replies -> base:allocation -> GO
//!                                                                              (INFO, ABORT: to look)
//! ```
use super::error::NbdError;
use super::export::Export;
use super::proto::*;
use super::reply::ReplyStyle;
use std::io::{Read, Write};

/// Longest reply to an option in bytes.
const REPLY_LIMIT: u32 = 64 << 10;
/// Most replies to one option.
const REPLIES: usize = 256;

/// How a negotiation ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// With requests.
    Transmit,
    /// With what the server says.
    Look,
}

/// What the server offers first.
#[derive(Clone, Copy, Debug)]
pub(super) struct Greeting {
    no_zeroes: bool,
}

/// Reads the greeting and answers it.
pub(super) fn greet(stream: &mut (impl Read + Write)) -> Result<Greeting, NbdError> {
    let during = "the server's greeting";
    let mut magic = [0; 8];
    read(stream, &mut magic, during)?;
    match u64::from_be_bytes(magic) {
        SERVER_MAGIC => {}
        word => return Err(NbdError::NoServer(word)),
    }
    read(stream, &mut magic, during)?;
    match u64::from_be_bytes(magic) {
        OPTION_MAGIC => {}
        OLDSTYLE_MAGIC => return Err(NbdError::Oldstyle),
        word => return Err(NbdError::NoServer(word)),
    }
    let mut flags = [0; 2];
    read(stream, &mut flags, during)?;
    let flags = u16::from_be_bytes(flags);
    if flags & FIXED_NEWSTYLE == 0 {
        return Err(NbdError::Protocol("it does not offer the fixed newstyle negotiation".into()));
    }
    let ours = u32::from(flags & (FIXED_NEWSTYLE | NO_ZEROES));
    write(stream, &ours.to_be_bytes(), during)?;
    Ok(Greeting { no_zeroes: flags & NO_ZEROES != 0 })
}

/// Asks for TLS; what follows is encrypted.
#[cfg_attr(not(any(feature = "tls", test)), expect(dead_code, reason = "a build without TLS"))]
pub(super) fn start_tls(stream: &mut (impl Read + Write)) -> Result<(), NbdError> {
    let what = "TLS";
    match option(stream, OPT_STARTTLS, &[], what, |_, _| Ok(()))? {
        Answer::Yes => Ok(()),
        Answer::No { code, text } => Err(NbdError::Refused { what, code, text }),
    }
}

/// Chooses an export.
pub(super) fn choose(
    stream: &mut (impl Read + Write),
    greeting: Greeting,
    name: &str,
    purpose: Purpose,
) -> Result<Export, NbdError> {
    let style = style(stream)?;
    let mut context = None;
    if style != ReplyStyle::Simple && purpose == Purpose::Transmit {
        context = allocation(stream, name)?;
    }
    let mut found = None;
    let mut sizes = None;
    let mut data = named(name);
    data.extend_from_slice(&1_u16.to_be_bytes());
    data.extend_from_slice(&INFO_BLOCK_SIZE.to_be_bytes());
    let (number, what) = match purpose {
        Purpose::Transmit => (OPT_GO, "the export"),
        Purpose::Look => (OPT_INFO, "information on the export"),
    };
    let answer = option(stream, number, &data, what, |kind, reply| {
        if kind != REP_INFO || reply.len() < 2 {
            return Ok(());
        }
        match (u16_at(reply, 0), reply.len()) {
            (INFO_EXPORT, 12) => found = Some((u64_at(reply, 2), u16_at(reply, 10))),
            (INFO_BLOCK_SIZE, 14) => sizes = Some((u32_at(reply, 2), u32_at(reply, 6), u32_at(reply, 10))),
            (kind @ (INFO_EXPORT | INFO_BLOCK_SIZE), len) => {
                return Err(NbdError::Protocol(format!("its information {kind} has {len} bytes")));
            }
            _ => {}
        }
        Ok(())
    })?;
    let mut export = match (answer, found) {
        (Answer::Yes, Some((size, flags))) => Export::new(size, flags, style),
        (Answer::Yes, None) => return Err(NbdError::Protocol("it tells no size of the export".into())),
        (Answer::No { code, text }, _) => match code & !REP_ERROR {
            1 if purpose == Purpose::Transmit && style != ReplyStyle::Extended => {
                by_name(stream, greeting, name, style)?
            }
            5 => return Err(NbdError::NeedsTls),
            6 => return Err(NbdError::NoExport(text)),
            _ => return Err(NbdError::Refused { what, code, text }),
        },
    };
    if let Some((block, preferred, payload)) = sizes {
        export.limit(block, preferred, payload)?;
    }
    export.allocation = context;
    if purpose == Purpose::Look {
        // It may hang up without an answer.
        let _ = option(stream, OPT_ABORT, &[], what, |_, _| Ok(()));
    }
    Ok(export)
}

/// Agrees on the layout of requests and replies.
fn style(stream: &mut (impl Read + Write)) -> Result<ReplyStyle, NbdError> {
    for (number, what, style) in [
        (OPT_EXTENDED_HEADERS, "extended headers", ReplyStyle::Extended),
        (OPT_STRUCTURED_REPLY, "structured replies", ReplyStyle::Structured),
    ] {
        match option(stream, number, &[], what, |_, _| Ok(()))? {
            Answer::Yes => return Ok(style),
            Answer::No { code, .. } if code & !REP_ERROR == 5 => return Err(NbdError::NeedsTls),
            Answer::No { .. } => {}
        }
    }
    Ok(ReplyStyle::Simple)
}

/// Selects the context of holes and zeroes. Returns its number.
fn allocation(stream: &mut (impl Read + Write), name: &str) -> Result<Option<u32>, NbdError> {
    let mut data = named(name);
    data.extend_from_slice(&1_u32.to_be_bytes());
    data.extend_from_slice(&(ALLOCATION.len() as u32).to_be_bytes());
    data.extend_from_slice(ALLOCATION.as_bytes());
    let mut context = None;
    let answer = option(stream, OPT_SET_META_CONTEXT, &data, "block status", |kind, reply| {
        if kind == REP_META_CONTEXT && reply.len() >= 4 && &reply[4..] == ALLOCATION.as_bytes() {
            context = Some(u32_at(reply, 0));
        }
        Ok(())
    })?;
    Ok(context.filter(|_| matches!(answer, Answer::Yes)))
}

/// Chooses an export as servers before 2016 want it.
fn by_name(
    stream: &mut (impl Read + Write),
    greeting: Greeting,
    name: &str,
    style: ReplyStyle,
) -> Result<Export, NbdError> {
    let during = "the choice of the export by name, which the server may not have";
    send(stream, OPT_EXPORT_NAME, name.as_bytes(), during)?;
    let mut reply = [0; 10 + 124];
    let len = if greeting.no_zeroes { 10 } else { reply.len() };
    read(stream, &mut reply[..len], during)?;
    Ok(Export::new(u64_at(&reply, 0), u16_at(&reply, 8), style))
}

/// A name with its length.
fn named(name: &str) -> Vec<u8> {
    let mut data = (name.len() as u32).to_be_bytes().to_vec();
    data.extend_from_slice(name.as_bytes());
    data
}

/// The last reply to an option.
enum Answer {
    Yes,
    No { code: u32, text: String },
}

fn send(stream: &mut impl Write, number: u32, data: &[u8], during: &'static str) -> Result<(), NbdError> {
    let mut message = OPTION_MAGIC.to_be_bytes().to_vec();
    message.extend_from_slice(&number.to_be_bytes());
    message.extend_from_slice(&(data.len() as u32).to_be_bytes());
    message.extend_from_slice(data);
    write(stream, &message, during)
}

/// Sends an option, and reads its replies. Those before the last one go to `each`.
fn option(
    stream: &mut (impl Read + Write),
    number: u32,
    data: &[u8],
    during: &'static str,
    mut each: impl FnMut(u32, &[u8]) -> Result<(), NbdError>,
) -> Result<Answer, NbdError> {
    send(stream, number, data, during)?;
    for _ in 0..REPLIES {
        let mut header = [0; 20];
        read(stream, &mut header, during)?;
        let (magic, option) = (u64_at(&header, 0), u32_at(&header, 8));
        let (kind, len) = (u32_at(&header, 12), u32_at(&header, 16));
        if magic != OPTION_REPLY_MAGIC || option != number || len > REPLY_LIMIT {
            return Err(NbdError::Protocol(format!(
                "its reply to option {number} begins with {magic:#x}, is for option {option} and has {len} bytes"
            )));
        }
        let mut reply = vec![0; len as usize];
        read(stream, &mut reply, during)?;
        match kind {
            REP_ACK => return Ok(Answer::Yes),
            _ if kind & REP_ERROR != 0 => return Ok(Answer::No { code: kind, text: shown(&reply) }),
            _ => each(kind, &reply)?,
        }
    }
    Err(NbdError::Protocol(format!("it has more than {REPLIES} replies to option {number}")))
}

fn read(stream: &mut impl Read, out: &mut [u8], during: &'static str) -> Result<(), NbdError> {
    stream.read_exact(out).map_err(|error| failed(error, during))
}

fn write(stream: &mut impl Write, data: &[u8], during: &'static str) -> Result<(), NbdError> {
    stream.write_all(data).and_then(|()| stream.flush()).map_err(|error| failed(error, during))
}

fn failed(error: std::io::Error, during: &'static str) -> NbdError {
    if error.kind() == std::io::ErrorKind::UnexpectedEof {
        let closed = "the server has closed the connection";
        return NbdError::Io { during, error: std::io::Error::new(error.kind(), closed) };
    }
    NbdError::Io { during, error }
}

#[cfg(test)]
mod tests;
