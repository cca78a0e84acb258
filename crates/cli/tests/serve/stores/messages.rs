//! Where messages of NBD begin and end, for a [`Proxy`](super::proxy::Proxy).
//!
//! Of connections with structured replies: all others have no length for the data of a read.
use std::io::{Error, ErrorKind, Read, Result};

/// Magic number of a request.
const REQUEST: u32 = 0x2560_9513;
/// Magic number of a simple reply.
const SIMPLE: u32 = 0x6744_6698;
/// Magic number of a chunk of a structured reply.
const CHUNK: u32 = 0x668e_33ef;
/// Where the cookie of a reply lies.
const COOKIE: std::ops::Range<usize> = 8..16;

/// A message of either side, whole.
pub(super) struct Message {
    pub(super) bytes: Vec<u8>,
    /// A request that is answered, or the end of an answer; nothing of these in the negotiation.
    pub(super) counts: bool,
    /// Part of an answer.
    pub(super) is_reply: bool,
}

/// The next message of a server.
pub(super) fn of_server(from: &mut impl Read) -> Result<Message> {
    let mut bytes = vec![0; 4];
    from.read_exact(&mut bytes)?;
    let magic = number(&bytes) as u32;
    match magic {
        // "NBDM": the greeting.
        0x4e42_444d => extend(&mut bytes, from, 18)?,
        // The answer to an option.
        0x0003_e889 => {
            extend(&mut bytes, from, 20)?;
            extend_by(&mut bytes, from, 16..20)?;
        }
        SIMPLE => extend(&mut bytes, from, 16)?,
        CHUNK => {
            extend(&mut bytes, from, 20)?;
            extend_by(&mut bytes, from, 16..20)?;
        }
        _ => return Err(Error::new(ErrorKind::InvalidData, format!("{magic:#x} of a server"))),
    }
    // The last chunk has a flag.
    let ends = magic == SIMPLE || magic == CHUNK && bytes[5] & 1 != 0;
    Ok(Message { bytes, counts: ends, is_reply: matches!(magic, SIMPLE | CHUNK) })
}

/// The next message of a client.
pub(super) fn of_client(from: &mut impl Read) -> Result<Message> {
    let mut bytes = vec![0; 4];
    from.read_exact(&mut bytes)?;
    let (magic, mut counts) = (number(&bytes) as u32, false);
    match magic {
        // Flags, which begin the negotiation.
        0..=3 => {}
        // "IHAV": an option.
        0x4948_4156 => {
            extend(&mut bytes, from, 16)?;
            extend_by(&mut bytes, from, 12..16)?;
        }
        REQUEST => {
            extend(&mut bytes, from, 28)?;
            let command = bytes[7];
            if command == 1 {
                extend_by(&mut bytes, from, 24..28)?;
            }
            // The goodbye has no answer.
            counts = command != 2;
        }
        _ => return Err(Error::new(ErrorKind::InvalidData, format!("{magic:#x} of a client"))),
    }
    Ok(Message { bytes, counts, is_reply: false })
}

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// Reads up to a length of the whole message.
fn extend(bytes: &mut Vec<u8>, from: &mut impl Read, len: usize) -> Result<()> {
    let have = bytes.len();
    bytes.resize(len, 0);
    from.read_exact(&mut bytes[have..])
}

/// Reads as much as a field of the message tells.
fn extend_by(bytes: &mut Vec<u8>, from: &mut impl Read, field: std::ops::Range<usize>) -> Result<()> {
    let len = bytes.len() + number(&bytes[field]) as usize;
    extend(bytes, from, len)
}

/// What is wrong with a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wrong {
    /// It begins with another number.
    Magic,
    /// It answers a request that nobody has sent.
    Cookie,
    /// It comes twice.
    Twice,
    /// Its chunk is of no known kind.
    Kind,
    /// Its data lie elsewhere.
    Offset,
}

impl Wrong {
    pub(super) const ALL: [Self; 5] = [Self::Magic, Self::Cookie, Self::Twice, Self::Kind, Self::Offset];

    /// Makes a reply wrong. `false`: it has nothing of this sort.
    pub(super) fn spoil(self, reply: &mut Vec<u8>) -> bool {
        let is_chunk = number(&reply[..4]) as u32 == CHUNK;
        match self {
            Self::Magic => reply[..4].fill(0x99),
            Self::Cookie => reply[COOKIE].iter_mut().for_each(|byte| *byte ^= 0xff),
            Self::Twice => reply.extend_from_within(..),
            Self::Kind if is_chunk => reply[6..8].fill(0x44),
            // Of chunks with data.
            Self::Offset if is_chunk && reply[6..8] == [0, 1] => reply[20..28].fill(0x11),
            Self::Kind | Self::Offset => return false,
        }
        true
    }
}
