//! One connection: sends requests and takes replies, as much as goes without waiting.
use super::export::Export;
use super::linger::Linger;
use super::options::NbdOptions;
use super::proto::*;
use super::reply::{Event, ReplyDecoder, ReplyError};
use super::socket::IOV_MAX;
use super::task::{NextOfTask, Tasks};
use super::wire::Wire;
use paravane_dma::HostSlice;
use std::collections::VecDeque;
use std::io;

/// Most requests of a system call.
const BATCH: usize = 64;
/// Bytes of received data that are kept.
const BUFFER: usize = 64 << 10;
/// Bytes that are received beyond the payload of a large read: the next header.
const AHEAD: usize = 4 << 10;
/// Payload in bytes from which on it is received without a copy.
const LARGE: u64 = 32 << 10;
/// Requests in flight up to which the rest of a reply is waited for.
///
/// With more, the server has other work, and time gained here gains nothing.
const FEW: usize = 4;
/// Bytes that are received before others get their turn.
const TURN: usize = 8 << 20;

const _: () = assert!(ReplyDecoder::WINDOW < BUFFER - AHEAD);

/// Why a connection is of no more use.
#[derive(Debug)]
pub(super) struct Lost {
    pub(super) reason: String,
    /// The server breaks the protocol.
    pub(super) is_violation: bool,
    /// The task whose memory cannot be read.
    pub(super) faulty: Option<u32>,
}

impl Lost {
    pub(super) fn because(reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), is_violation: false, faulty: None }
    }

    fn host(during: &str, error: &io::Error) -> Self {
        Self::because(format!("{during}: {}", plain(error)))
    }
}

impl From<ReplyError> for Lost {
    fn from(error: ReplyError) -> Self {
        Self { is_violation: true, ..Self::because(format!("the server breaks the protocol: {error}")) }
    }
}

/// A job that has ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct EndedTask {
    pub(super) task: u32,
    pub(super) result: i32,
}

/// A connection after its negotiation.
pub(super) struct NbdSession {
    pub(super) wire: Wire,
    pub(super) export: Export,
    write_through: bool,
    decoder: ReplyDecoder,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    /// The last data was large.
    is_large: bool,
    linger: Linger,
    /// Bytes of the first request to send that are sent.
    front_sent: u64,
    /// The socket takes no more at present.
    pub(super) is_blocked: bool,
    /// More may have been received than was worked off. Nothing else tells.
    pub(super) has_more: bool,
    headers: Box<[[u8; REQUEST_LIMIT]; BATCH]>,
    pieces: Vec<HostSlice>,
    /// Bytes ever received.
    pub(super) received: u64,
    /// The last text of the server that explains an error.
    pub(super) message: Option<String>,
}

impl std::fmt::Debug for NbdSession {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").field("export", &self.export).finish_non_exhaustive()
    }
}

impl NbdSession {
    pub(super) fn new(wire: Wire, export: Export, options: &NbdOptions) -> Self {
        Self {
            wire,
            export,
            write_through: options.write_through,
            decoder: ReplyDecoder::new(export.style),
            buffer: vec![0; BUFFER].into(),
            start: 0,
            end: 0,
            is_large: false,
            linger: Linger::new(options.linger),
            front_sent: 0,
            is_blocked: false,
            has_more: false,
            headers: Box::new([[0; REQUEST_LIMIT]; BATCH]),
            pieces: Vec::with_capacity(IOV_MAX),
            received: 0,
            message: None,
        }
    }

    /// Sends requests until the socket takes no more.
    pub(super) fn send(
        &mut self,
        tasks: &mut Tasks,
        to_send: &mut VecDeque<u32>,
        ended: &mut Vec<EndedTask>,
    ) -> Result<(), Lost> {
        let mut most = BATCH;
        loop {
            self.is_blocked = !self.wire.flush().map_err(|error| Lost::host("sending", &error))?;
            if self.is_blocked {
                return Ok(());
            }
            let (requests, bytes) = self.gather(tasks, to_send, ended, most);
            if requests == 0 {
                return Ok(());
            }
            // SAFETY: headers of ours, and the memory of jobs in flight, which stays valid.
            let sent = match unsafe { self.wire.send(&self.pieces) } {
                Ok(sent) => sent as u64,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.is_blocked = true;
                    return Ok(());
                }
                Err(error) if error.raw_os_error() == Some(libc::EFAULT) => {
                    if requests > 1 {
                        most = 1;
                        continue;
                    }
                    self.faulted(to_send, ended)?;
                    continue;
                }
                Err(error) => return Err(Lost::host("sending", &error)),
            };
            self.advance(tasks, to_send, sent);
            if sent < bytes {
                self.is_blocked = true;
                return Ok(());
            }
        }
    }

    /// Lists headers and payloads of requests. Returns the number of requests and of bytes.
    fn gather(
        &mut self,
        tasks: &mut Tasks,
        to_send: &mut VecDeque<u32>,
        ended: &mut Vec<EndedTask>,
        most: usize,
    ) -> (usize, u64) {
        self.pieces.clear();
        let extended = self.export.is_extended();
        let (mut count, mut bytes) = (0, 0);
        while count < most && self.pieces.len() < IOV_MAX {
            let Some(&index) = to_send.get(count) else { break };
            let skip = if count == 0 { self.front_sent } else { 0 };
            if skip == 0 {
                match tasks.plan(index, &self.export, self.write_through) {
                    NextOfTask::Send => {}
                    NextOfTask::Ended(result) => {
                        to_send.remove(count);
                        ended.push(EndedTask { task: index, result });
                        continue;
                    }
                }
            }
            let header = &mut self.headers[count];
            let size = tasks.get(index).request.encode(extended, header) as u64;
            if skip < size {
                let rest = &mut header[skip as usize..size as usize];
                bytes += rest.len() as u64;
                self.pieces.push(HostSlice { ptr: rest.as_mut_ptr(), len: rest.len() });
            }
            count += 1;
            let payload = tasks.payload(index);
            let at = skip.saturating_sub(size);
            if payload > at {
                let listed = tasks.pieces(index, at, payload - at, &mut self.pieces, IOV_MAX);
                bytes += listed;
                if listed < payload - at {
                    break;
                }
            }
        }
        (count, bytes)
    }

    /// `sent` bytes of the first requests are sent.
    fn advance(&mut self, tasks: &mut Tasks, to_send: &mut VecDeque<u32>, sent: u64) {
        let header = NbdRequest::size(self.export.is_extended()) as u64;
        let mut left = sent + self.front_sent;
        while let Some(&index) = to_send.front() {
            let whole = header + tasks.payload(index);
            if left < whole {
                if left > 0 {
                    tasks.began(index);
                }
                break;
            }
            left -= whole;
            to_send.pop_front();
            tasks.sent(index);
            if left == 0 {
                break;
            }
        }
        self.front_sent = left;
    }

    /// The memory of the first request to send cannot be read.
    fn faulted(&mut self, to_send: &mut VecDeque<u32>, ended: &mut Vec<EndedTask>) -> Result<(), Lost> {
        let faulty = to_send.front().copied();
        if self.front_sent > 0 {
            // The server waits for the rest, which does not exist.
            return Err(Lost { faulty, ..Lost::because("the memory of a write cannot be read") });
        }
        to_send.pop_front();
        ended.extend(faulty.map(|task| EndedTask { task, result: -libc::EFAULT }));
        Ok(())
    }

    /// Whether the first request to send is on its way in part.
    pub(super) fn has_begun(&self) -> bool {
        self.front_sent > 0
    }

    /// Takes the replies that have come. Jobs with more requests go to `to_send`.
    pub(super) fn receive(
        &mut self,
        tasks: &mut Tasks,
        to_send: &mut VecDeque<u32>,
        ended: &mut Vec<EndedTask>,
    ) -> Result<(), Lost> {
        let mut turn = 0;
        loop {
            let payload = self.decode(tasks, to_send, ended)?;
            self.has_more = turn >= TURN;
            if self.has_more {
                return Ok(());
            }
            let (got, asked) = match self.fetch(tasks, payload) {
                Ok((0, _)) => return Err(Lost::because("the server has closed the connection")),
                Ok(moved) => moved,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if self.waits_for_rest(payload, tasks) && self.linger.looks_again() {
                        continue;
                    }
                    return Ok(());
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if error.raw_os_error() == Some(libc::EFAULT) && payload.is_some() => {
                    tasks.fail_memory(payload.map(|(cookie, ..)| cookie).unwrap_or_default());
                    continue;
                }
                Err(error) => return Err(Lost::host("receiving", &error)),
            };
            turn += got;
            self.linger.moved();
            if got < asked {
                // Nothing more was there; the socket tells when there is.
                let payload = self.decode(tasks, to_send, ended)?;
                if !self.waits_for_rest(payload, tasks) {
                    return Ok(());
                }
            }
        }
    }

    /// Whether a reply has begun whose rest may be worth waiting for.
    ///
    /// `payload` is what [`NbdSession::decode`] returned.
    fn waits_for_rest(&self, payload: Option<(u64, u64, u64)>, tasks: &Tasks) -> bool {
        (payload.is_some() || self.start < self.end) && tasks.in_flight <= FEW
    }

    /// Receives: the payload straight to its memory, then what follows. Returns bytes got and asked.
    fn fetch(&mut self, tasks: &mut Tasks, payload: Option<(u64, u64, u64)>) -> io::Result<(usize, usize)> {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        self.pieces.clear();
        let mut direct = 0;
        if let Some((cookie, at, len)) = payload {
            debug_assert_eq!(self.end, 0);
            direct = tasks.pieces(cookie as u32, at, len, &mut self.pieces, IOV_MAX - 1);
        }
        let whole = payload.is_none_or(|(_, _, len)| len == direct || direct == 0);
        if whole {
            let room = &mut self.buffer[self.end..];
            let len = if self.is_large { room.len().min(AHEAD) } else { room.len() };
            self.pieces.push(HostSlice { ptr: room.as_mut_ptr(), len });
        }
        let asked = self.pieces.iter().map(|piece| piece.len).sum();
        // SAFETY: the buffer, and the memory of a read in flight, which stays valid.
        let got = unsafe { self.wire.receive(&self.pieces) }?;
        self.received += got as u64;
        let taken = (got as u64).min(direct);
        self.decoder.took(taken);
        self.end += got - taken as usize;
        Ok((got, asked))
    }

    /// Works off the buffer. Returns the payload that goes on beyond it: request, place, length.
    fn decode(
        &mut self,
        tasks: &mut Tasks,
        to_send: &mut VecDeque<u32>,
        ended: &mut Vec<EndedTask>,
    ) -> Result<Option<(u64, u64, u64)>, Lost> {
        loop {
            let bytes = &self.buffer[self.start..self.end];
            let (used, event) = self.decoder.next(bytes, tasks)?;
            let rest = &bytes[used..];
            self.start += used;
            match event {
                Event::More => return Ok(None),
                Event::Payload { cookie, at, len } => {
                    self.is_large = len >= LARGE || self.is_large && used == 0;
                    let have = len.min(rest.len() as u64);
                    if have == 0 {
                        return Ok(Some((cookie, at, len)));
                    }
                    tasks.scatter(cookie, at, &rest[..have as usize], &mut self.pieces);
                    self.start += have as usize;
                    self.decoder.took(have);
                }
                Event::Zeroes { cookie, at, len } => tasks.zero(cookie, at, len, &mut self.pieces),
                Event::Extent { cookie, len, flags } => tasks.get(cookie as u32).extents.push((len, flags)),
                Event::Message { start, len, .. } => {
                    if len > 0 {
                        self.message = Some(shown(&bytes[start..start + len]));
                    }
                }
                Event::End { error: ESHUTDOWN, .. } => {
                    return Err(Lost::because("the server is shutting down"));
                }
                Event::End { cookie, error } => {
                    let task = cookie as u32;
                    match tasks.answered(task, error, &self.export, self.write_through) {
                        NextOfTask::Send => to_send.push_back(task),
                        NextOfTask::Ended(result) => ended.push(EndedTask { task, result }),
                    }
                }
            }
        }
    }

    /// Tells the server that no more comes, if that goes without waiting.
    pub(super) fn say_goodbye(&mut self) {
        if self.front_sent > 0 || self.is_blocked {
            return;
        }
        let (mut message, len) = goodbye(self.export.is_extended());
        let piece = HostSlice { ptr: message.as_mut_ptr(), len };
        // SAFETY: the piece is ours. A server that does not take it sees the end of the connection.
        let _ = unsafe { self.wire.send(&[piece]) };
        let _ = self.wire.flush();
    }
}
