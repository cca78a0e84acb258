//! What a server sends in reply: a decoder that is fed with bytes and does no I/O.
//!
//! ```text
//!   header --read, data------> payload --all taken--> [last chunk] ended -> End
//!     |  \--block status-----> extents --all read---> [else] header
//!     |  \--hole, error, none, simple reply without data--> [last chunk] ended, [else] header
//!     '--anything else: ReplyError, and the connection is of no more use
//! ```
//! It checks that each request in flight is answered once, with each of its bytes exactly once and
//! no other.
use super::coverage::Coverage;
use super::proto::*;
use thiserror::Error;

/// Longest payload in bytes that is no data and no list of extents.
const CONTROL_LIMIT: u64 = 14 + STRING_LIMIT as u64 + 64;
/// Most error chunks in the reply to one request.
const ERROR_LIMIT: u32 = 64;
/// Most extents in the reply to one request.
const EXTENT_LIMIT: u64 = 1 << 20;

/// Layout of replies, as negotiated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyStyle {
    /// Simple replies only.
    Simple,
    /// Structured replies, and simple ones to requests that read nothing.
    Structured,
    /// Replies with extended headers.
    Extended,
}

/// What a request asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Asked {
    /// Bytes.
    Bytes,
    /// Extents of a metadata context.
    Extents {
        /// Number of the context.
        context: u32,
    },
    /// Success or an error.
    #[default]
    Done,
}

/// A request in flight, as the decoder sees it.
#[derive(Clone, Debug, Default)]
pub struct Expected {
    asked: Asked,
    offset: u64,
    len: u64,
    error: u32,
    chunks: u64,
    errors: u32,
    extents: u64,
    coverage: Coverage,
}

impl Expected {
    /// A request for `len` bytes at `offset` of the export.
    #[must_use]
    pub fn new(asked: Asked, offset: u64, len: u64) -> Self {
        Self { asked, offset, len, ..Self::default() }
    }

    /// Becomes another request; keeps memory.
    pub(super) fn renew(&mut self, asked: Asked, offset: u64, len: u64) {
        (self.asked, self.offset, self.len) = (asked, offset, len);
        (self.error, self.chunks, self.errors, self.extents) = (0, 0, 0, 0);
        self.coverage.clear();
    }

    /// Counts an error chunk. `false` if no server sends so many.
    ///
    /// Other chunks need no limit: each has bytes that were not there before.
    fn count_error(&mut self) -> bool {
        self.errors += 1;
        self.errors <= ERROR_LIMIT
    }

    /// Adds bytes of the export. Returns where they begin in the request.
    fn cover(&mut self, cookie: u64, offset: u64, len: u64) -> Result<u64, ReplyError> {
        let outside = ReplyError::Outside { cookie, offset, len };
        let at = offset.checked_sub(self.offset).ok_or(outside)?;
        match at.checked_add(len) {
            Some(end) if len > 0 && end <= self.len => {}
            _ => return Err(outside),
        }
        if !self.coverage.add(at, at + len) {
            return Err(ReplyError::Doubled { cookie, offset, len });
        }
        Ok(at)
    }
}

/// Requests in flight.
pub trait Owed {
    /// The request with this cookie, if there is one.
    fn owed(&mut self, cookie: u64) -> Option<&mut Expected>;
}

/// A step of the decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The rest needs more bytes.
    More,
    /// Bytes of a read follow; [`ReplyDecoder::took`] says how many of them were taken.
    Payload {
        /// The request.
        cookie: u64,
        /// Where they begin in the request.
        at: u64,
        /// Number of bytes.
        len: u64,
    },
    /// Bytes of a read are zeroes.
    Zeroes {
        /// The request.
        cookie: u64,
        /// Where they begin in the request.
        at: u64,
        /// Number of bytes.
        len: u64,
    },
    /// An extent, which follows the one before.
    Extent {
        /// The request.
        cookie: u64,
        /// Length in bytes.
        len: u64,
        /// 1: hole, 2: zeroes.
        flags: u32,
    },
    /// An error chunk has a text for the operator.
    Message {
        /// The request.
        cookie: u64,
        /// Where in the bytes the text begins.
        start: usize,
        /// Length of the text.
        len: usize,
    },
    /// The request is answered.
    End {
        /// The request.
        cookie: u64,
        /// Error number of the protocol, or 0.
        error: u32,
    },
}

/// A reply breaks the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ReplyError {
    /// Wrong first word.
    #[error("a reply begins with {0:#x}")]
    Magic(u32),
    /// No such request in flight.
    #[error("a reply to the unknown request {0:#x}")]
    Cookie(u64),
    /// Wrong layout.
    #[error("a simple reply to a request that needs a structured one ({0:#x})")]
    Simple(u64),
    /// Wrong offset in an extended header.
    #[error("the offset {offset} in a reply to {cookie:#x} is not that of the request")]
    Offset {
        /// The request.
        cookie: u64,
        /// As the server sent it.
        offset: u64,
    },
    /// Wrong type of chunk.
    #[error("a chunk of type {kind} does not answer the request {cookie:#x}")]
    Kind {
        /// The request.
        cookie: u64,
        /// Type of the chunk.
        kind: u16,
    },
    /// Wrong length of a chunk.
    #[error("a chunk of type {kind} has {len} bytes ({cookie:#x})")]
    Length {
        /// The request.
        cookie: u64,
        /// Type of the chunk.
        kind: u16,
        /// Length of its payload.
        len: u64,
    },
    /// Bytes that were not asked for.
    #[error("a chunk has {len} bytes at {offset}, outside of its request {cookie:#x}")]
    Outside {
        /// The request.
        cookie: u64,
        /// Where in the export.
        offset: u64,
        /// Number of bytes.
        len: u64,
    },
    /// Bytes that have come before.
    #[error("a chunk has {len} bytes at {offset} again, or in too many pieces ({cookie:#x})")]
    Doubled {
        /// The request.
        cookie: u64,
        /// Where in the export.
        offset: u64,
        /// Number of bytes.
        len: u64,
    },
    /// Missing bytes.
    #[error("the reply to {0:#x} ends before all is there")]
    Short(u64),
    /// More error chunks than a server needs.
    #[error("the reply to {0:#x} has too many error chunks")]
    Chunks(u64),
    /// An error number of 0.
    #[error("an error chunk without an error ({0:#x})")]
    NoError(u64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DecoderState {
    Header,
    Payload { cookie: u64, at: u64, left: u64, last: bool },
    Extents { cookie: u64, left: u64, last: bool },
    Ended { cookie: u64 },
}

/// Takes the bytes of a connection apart.
#[derive(Clone, Debug)]
pub struct ReplyDecoder {
    style: ReplyStyle,
    state: DecoderState,
}

/// Header of a chunk.
struct Chunk {
    header: usize,
    last: bool,
    kind: u16,
    cookie: u64,
    /// Extended headers only.
    offset: Option<u64>,
    len: u64,
}

impl Chunk {
    fn wrong_kind(&self) -> ReplyError {
        ReplyError::Kind { cookie: self.cookie, kind: self.kind }
    }

    fn wrong_length(&self) -> ReplyError {
        ReplyError::Length { cookie: self.cookie, kind: self.kind, len: self.len }
    }

    /// Whether `least` bytes of the body are there, which has a valid length if `is_valid`.
    fn has(&self, body: &[u8], least: u64, is_valid: bool) -> Result<bool, ReplyError> {
        if is_valid { Ok(body.len() as u64 >= least) } else { Err(self.wrong_length()) }
    }
}

/// What a chunk leads to, with the bytes of its body that were used; `None`: the rest needs more.
type Step = Result<Option<(usize, Event)>, ReplyError>;

impl ReplyDecoder {
    /// Bytes of the longest part that [`ReplyDecoder::next`] needs as a whole.
    pub const WINDOW: usize = 32 + CONTROL_LIMIT as usize;

    /// A decoder for a new connection.
    #[must_use]
    pub fn new(style: ReplyStyle) -> Self {
        Self { style, state: DecoderState::Header }
    }

    /// Decodes one step. Returns how many bytes it used.
    ///
    /// # Errors
    /// The server breaks the protocol: there is no next step.
    pub fn next(&mut self, bytes: &[u8], owed: &mut impl Owed) -> Result<(usize, Event), ReplyError> {
        match self.state {
            DecoderState::Header => self.header(bytes, owed),
            DecoderState::Payload { cookie, at, left, .. } => {
                Ok((0, Event::Payload { cookie, at, len: left }))
            }
            DecoderState::Extents { cookie, left, last } => self.extent(bytes, owed, cookie, left, last),
            DecoderState::Ended { cookie } => self.end(owed, cookie),
        }
    }

    /// `len` bytes of the payload were taken, which are no more than there are.
    pub fn took(&mut self, len: u64) {
        if let DecoderState::Payload { cookie, at, left, last } = &mut self.state {
            debug_assert!(len <= *left);
            (*at, *left) = (*at + len, *left - len);
            if *left == 0 {
                self.state = after(*cookie, *last);
            }
        }
    }

    fn header(&mut self, bytes: &[u8], owed: &mut impl Owed) -> Result<(usize, Event), ReplyError> {
        if bytes.len() < 16 {
            // Garbage is found at once, also if no more comes.
            if bytes.len() >= 4 {
                self.check_magic(u32_at(bytes, 0))?;
            }
            return Ok((0, Event::More));
        }
        let magic = u32_at(bytes, 0);
        self.check_magic(magic)?;
        if magic == SIMPLE_REPLY_MAGIC {
            return self.simple(u32_at(bytes, 4), u64_at(bytes, 8), owed);
        }
        let is_extended = self.style == ReplyStyle::Extended;
        let header = if is_extended { 32 } else { 20 };
        if bytes.len() < header {
            return Ok((0, Event::More));
        }
        let chunk = Chunk {
            header,
            last: u16_at(bytes, 4) & REPLY_DONE != 0,
            kind: u16_at(bytes, 6),
            cookie: u64_at(bytes, 8),
            offset: is_extended.then(|| u64_at(bytes, 16)),
            len: if is_extended { u64_at(bytes, 24) } else { u32_at(bytes, 16).into() },
        };
        self.chunk(&chunk, bytes, owed)
    }

    fn check_magic(&self, magic: u32) -> Result<(), ReplyError> {
        let is_known = match self.style {
            ReplyStyle::Simple => magic == SIMPLE_REPLY_MAGIC,
            ReplyStyle::Structured => magic == SIMPLE_REPLY_MAGIC || magic == STRUCTURED_REPLY_MAGIC,
            ReplyStyle::Extended => magic == EXTENDED_REPLY_MAGIC,
        };
        if is_known { Ok(()) } else { Err(ReplyError::Magic(magic)) }
    }

    fn simple(
        &mut self,
        error: u32,
        cookie: u64,
        owed: &mut impl Owed,
    ) -> Result<(usize, Event), ReplyError> {
        let request = owed.owed(cookie).ok_or(ReplyError::Cookie(cookie))?;
        let has_data = request.asked == Asked::Bytes && self.style == ReplyStyle::Simple;
        if request.asked != Asked::Done && !has_data {
            return Err(ReplyError::Simple(cookie));
        }
        if request.chunks > 0 {
            return Err(ReplyError::Cookie(cookie));
        }
        request.chunks += 1;
        request.error = error;
        if error == 0 && has_data {
            let (offset, len) = (request.offset, request.len);
            request.cover(cookie, offset, len)?;
            self.state = DecoderState::Payload { cookie, at: 0, left: len, last: true };
            return Ok((16, Event::Payload { cookie, at: 0, len }));
        }
        let (_, event) = self.end(owed, cookie)?;
        Ok((16, event))
    }

    fn chunk(
        &mut self,
        chunk: &Chunk,
        bytes: &[u8],
        owed: &mut impl Owed,
    ) -> Result<(usize, Event), ReplyError> {
        let &Chunk { header, last, kind, cookie, offset, len } = chunk;
        let request = owed.owed(cookie).ok_or(ReplyError::Cookie(cookie))?;
        if let Some(offset) = offset.filter(|offset| *offset != request.offset) {
            return Err(ReplyError::Offset { cookie, offset });
        }
        let kind_of_extents = match self.style {
            ReplyStyle::Extended => REPLY_BLOCK_STATUS_EXT,
            _ => REPLY_BLOCK_STATUS,
        };
        let body = &bytes[header..];
        let step = match kind {
            REPLY_NONE if len != 0 => Err(chunk.wrong_length()),
            REPLY_NONE if !last => Err(chunk.wrong_kind()),
            REPLY_NONE => {
                self.state = DecoderState::Ended { cookie };
                self.end(owed, cookie).map(Some)
            }
            REPLY_OFFSET_DATA => self.data(chunk, body, request),
            REPLY_OFFSET_HOLE => self.hole(chunk, body, request),
            _ if kind == kind_of_extents => match self.extents(chunk, body, request)? {
                None => Ok(None),
                Some((prefix, left)) => {
                    let (used, event) = self.extent(&body[prefix..], owed, cookie, left, last)?;
                    Ok(Some((prefix + used, event)))
                }
            },
            _ if kind & REPLY_ERROR_BIT != 0 => self.error(chunk, body, request),
            _ => Err(chunk.wrong_kind()),
        };
        Ok(step?.map_or((0, Event::More), |(used, event)| (header + used, event)))
    }

    /// Bytes of a read.
    fn data(&mut self, chunk: &Chunk, body: &[u8], request: &mut Expected) -> Step {
        let &Chunk { last, cookie, len, .. } = chunk;
        if request.asked != Asked::Bytes {
            return Err(chunk.wrong_kind());
        }
        // Not above what was asked for, so that nothing waits for more than a request.
        if !chunk.has(body, 8, len >= 9 && len - 8 <= request.len)? {
            return Ok(None);
        }
        request.chunks += 1;
        let at = request.cover(cookie, u64_at(body, 0), len - 8)?;
        self.state = DecoderState::Payload { cookie, at, left: len - 8, last };
        Ok(Some((8, Event::Payload { cookie, at, len: len - 8 })))
    }

    /// Zeroes of a read.
    fn hole(&mut self, chunk: &Chunk, body: &[u8], request: &mut Expected) -> Step {
        let cookie = chunk.cookie;
        if request.asked != Asked::Bytes {
            return Err(chunk.wrong_kind());
        }
        if !chunk.has(body, 12, chunk.len == 12)? {
            return Ok(None);
        }
        request.chunks += 1;
        let len = u32_at(body, 8).into();
        let at = request.cover(cookie, u64_at(body, 0), len)?;
        self.state = after(cookie, chunk.last);
        Ok(Some((12, Event::Zeroes { cookie, at, len })))
    }

    /// The head of a list of extents. Returns its length, and that of the list.
    fn extents(
        &mut self,
        chunk: &Chunk,
        body: &[u8],
        request: &mut Expected,
    ) -> Result<Option<(usize, u64)>, ReplyError> {
        let is_extended = self.style == ReplyStyle::Extended;
        let Asked::Extents { context } = request.asked else { return Err(chunk.wrong_kind()) };
        let (prefix, each) = if is_extended { (8, 16) } else { (4, 8) };
        let list = chunk.len.checked_sub(prefix).filter(|list| *list > 0 && list % each == 0);
        let list = list.ok_or(chunk.wrong_length())?;
        if !chunk.has(body, prefix, list / each <= EXTENT_LIMIT)? {
            return Ok(None);
        }
        let is_counted = !is_extended || u64::from(u32_at(body, 4)) == list / each;
        if u32_at(body, 0) != context || request.extents > 0 || !is_counted {
            return Err(chunk.wrong_kind());
        }
        request.chunks += 1;
        self.state = DecoderState::Extents { cookie: chunk.cookie, left: list, last: chunk.last };
        Ok(Some((prefix as usize, list)))
    }

    /// An error, which may have a text and a place.
    fn error(&mut self, chunk: &Chunk, body: &[u8], request: &mut Expected) -> Step {
        let &Chunk { last, kind, cookie, len, .. } = chunk;
        if !chunk.has(body, len, (6..=CONTROL_LIMIT).contains(&len))? {
            return Ok(None);
        }
        let text = usize::from(u16_at(body, 4));
        let fixed = if kind == REPLY_ERROR_OFFSET { 14 } else { 6 };
        if (text + fixed) as u64 > len || text > STRING_LIMIT {
            return Err(chunk.wrong_length());
        }
        if kind == REPLY_ERROR_OFFSET {
            let offset = u64_at(body, 6 + text);
            let at = offset.checked_sub(request.offset);
            // The end counts: some requests have no length.
            if at.is_none_or(|at| at > request.len) {
                return Err(ReplyError::Outside { cookie, offset, len: 0 });
            }
        }
        let error = u32_at(body, 0);
        if error == 0 {
            return Err(ReplyError::NoError(cookie));
        }
        request.chunks += 1;
        if !request.count_error() {
            return Err(ReplyError::Chunks(cookie));
        }
        if request.error == 0 {
            request.error = error;
        }
        self.state = after(cookie, last);
        Ok(Some((len as usize, Event::Message { cookie, start: chunk.header + 6, len: text })))
    }

    /// The next extent of a list.
    fn extent(
        &mut self,
        bytes: &[u8],
        owed: &mut impl Owed,
        cookie: u64,
        left: u64,
        last: bool,
    ) -> Result<(usize, Event), ReplyError> {
        let each = if self.style == ReplyStyle::Extended { 16 } else { 8 };
        if bytes.len() < each {
            return Ok((0, Event::More));
        }
        let request = owed.owed(cookie).ok_or(ReplyError::Cookie(cookie))?;
        request.extents += 1;
        let (len, flags) = if each == 16 {
            (u64_at(bytes, 0), u64_at(bytes, 8) as u32)
        } else {
            (u32_at(bytes, 0).into(), u32_at(bytes, 4))
        };
        if len == 0 {
            return Err(ReplyError::Length { cookie, kind: REPLY_BLOCK_STATUS, len: 0 });
        }
        let left = left - each as u64;
        self.state =
            if left == 0 { after(cookie, last) } else { DecoderState::Extents { cookie, left, last } };
        Ok((each, Event::Extent { cookie, len, flags }))
    }

    fn end(&mut self, owed: &mut impl Owed, cookie: u64) -> Result<(usize, Event), ReplyError> {
        let request = owed.owed(cookie).ok_or(ReplyError::Cookie(cookie))?;
        let is_whole = match request.asked {
            Asked::Bytes => request.coverage.is_whole(request.len),
            Asked::Extents { .. } => request.extents > 0,
            Asked::Done => true,
        };
        if request.error == 0 && !is_whole {
            return Err(ReplyError::Short(cookie));
        }
        self.state = DecoderState::Header;
        Ok((0, Event::End { cookie, error: request.error }))
    }
}

/// State behind a chunk.
fn after(cookie: u64, last: bool) -> DecoderState {
    if last { DecoderState::Ended { cookie } } else { DecoderState::Header }
}

#[cfg(test)]
mod tests;
