//! Memory slots for a vhost-user server that has only tables.
//!
//! The clients add a region of memory at a time (CONFIGURE_MEM_SLOTS), and refuse servers that
//! cannot do that. The vhost library of DPDK 22.11 takes all regions in one table. The relay passes
//! the messages on and turns each new region into a table of all. Rings, data and notifications do
//! not pass it.
use rustix::cmsg_space;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// Requests of the protocol ("Front-end message types").
mod request {
    pub(super) const GET_FEATURES: u32 = 1;
    pub(super) const SET_MEM_TABLE: u32 = 5;
    pub(super) const GET_VRING_BASE: u32 = 11;
    pub(super) const GET_PROTOCOL_FEATURES: u32 = 15;
    pub(super) const SET_PROTOCOL_FEATURES: u32 = 16;
    pub(super) const GET_QUEUE_NUM: u32 = 17;
    pub(super) const GET_CONFIG: u32 = 24;
    pub(super) const GET_MAX_MEM_SLOTS: u32 = 36;
    pub(super) const ADD_MEM_REG: u32 = 37;
    pub(super) const REM_MEM_REG: u32 = 38;
}
use request::*;

/// Requests that have an answer in any case.
const ANSWERED: [u32; 5] = [GET_FEATURES, GET_VRING_BASE, GET_PROTOCOL_FEATURES, GET_QUEUE_NUM, GET_CONFIG];
/// Protocol features.
const REPLY_ACK: u64 = 1 << 3;
const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
/// Flags of a message: version 1, and that it is an answer, or wants one.
const VERSION: u32 = 1;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;
/// Bytes of a header: request, flags, size.
const HEADER: usize = 12;
/// Most bytes of a message after its header.
const LONGEST: usize = 4096;
/// Most regions of a table.
const REGIONS: usize = 8;
/// Bytes of a region in a table.
const REGION: usize = 32;

/// A socket whose connections are passed on to a server, until dropped.
pub(crate) struct Relay {
    /// The thread ends with the process; nobody can connect after the folder is gone.
    _thread: std::thread::JoinHandle<()>,
}

impl Relay {
    /// Listens on `socket` and passes connections on to `server`, one after the other.
    ///
    /// # Errors
    /// The socket or the thread cannot be made.
    pub(super) fn start(socket: &Path, server: PathBuf) -> io::Result<Self> {
        let listener = UnixListener::bind(socket)?;
        let pass_on = move || {
            for client in listener.incoming() {
                // The client sees a closed connection; that it failed is told there.
                let _ = client.and_then(|client| pass(&client, &server));
            }
        };
        let thread = std::thread::Builder::new().name("vhost-relay".into()).spawn(pass_on)?;
        Ok(Self { _thread: thread })
    }
}

/// A message with its descriptors.
struct Message {
    request: u32,
    flags: u32,
    payload: Vec<u8>,
    fds: Vec<OwnedFd>,
}

impl Message {
    /// Receives a message; `None` at the end of the connection.
    fn receive(stream: &UnixStream) -> io::Result<Option<Self>> {
        let mut header = [0; HEADER];
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(REGIONS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::WAITALL | RecvFlags::CMSG_CLOEXEC;
        let received = recvmsg(stream, &mut [IoSliceMut::new(&mut header)], &mut control, flags)?.bytes;
        let mut fds = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = message {
                fds.extend(received);
            }
        }
        if received == 0 {
            return Ok(None);
        }
        if received < HEADER {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let word = |at: usize| u32::from_ne_bytes([0, 1, 2, 3].map(|byte| header[at + byte]));
        let size = word(8) as usize;
        if size > LONGEST {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut payload = vec![0; size];
        let mut stream = stream;
        stream.read_exact(&mut payload)?;
        Ok(Some(Self { request: word(0), flags: word(4), payload, fds }))
    }

    fn send(&self, stream: &UnixStream) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(HEADER + self.payload.len());
        for word in [self.request, self.flags, self.payload.len() as u32] {
            bytes.extend_from_slice(&word.to_ne_bytes());
        }
        bytes.extend_from_slice(&self.payload);
        let fds: Vec<BorrowedFd<'_>> = self.fds.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(REGIONS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            // It has room for the descriptors of a table; a client's message has one.
            control.push(SendAncillaryMessage::ScmRights(&fds));
        }
        let sent = sendmsg(stream, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL)?;
        let mut stream = stream;
        stream.write_all(&bytes[sent..])
    }

    /// An answer with one number.
    fn answer(request: u32, number: u64) -> Self {
        let payload = number.to_ne_bytes().to_vec();
        Self { request, flags: VERSION | REPLY, payload, fds: Vec::new() }
    }

    /// The number that the payload begins with.
    fn number(&self) -> io::Result<u64> {
        let bytes = self.payload.first_chunk().ok_or(io::ErrorKind::InvalidData)?;
        Ok(u64::from_ne_bytes(*bytes))
    }
}

/// The regions that the client has added.
#[derive(Default)]
struct Table(Vec<([u8; REGION], OwnedFd)>);

impl Table {
    /// The region of a message: 8 bytes of padding come first.
    fn region(message: &Message) -> io::Result<[u8; REGION]> {
        let region = message.payload.get(8..).and_then(|bytes| bytes.first_chunk());
        region.copied().ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    fn add(&mut self, mut message: Message) -> io::Result<()> {
        let region = Self::region(&message)?;
        let fd = message.fds.pop().ok_or(io::ErrorKind::InvalidData)?;
        if self.0.len() == REGIONS {
            return Err(io::ErrorKind::InvalidData.into());
        }
        self.0.push((region, fd));
        Ok(())
    }

    /// Forgets a region, which the server keeps until the next table.
    fn remove(&mut self, message: &Message) -> io::Result<()> {
        let gone = Self::region(message)?;
        self.0.retain(|(region, _)| *region != gone);
        Ok(())
    }

    fn message(&self, flags: u32) -> io::Result<Message> {
        let mut payload = (self.0.len() as u64).to_ne_bytes().to_vec();
        payload.extend(self.0.iter().flat_map(|(region, _)| region));
        let fds = self.0.iter().map(|(_, fd)| fd.try_clone()).collect::<io::Result<_>>()?;
        Ok(Message { request: SET_MEM_TABLE, flags, payload, fds })
    }
}

/// Passes the messages of one connection on until either side ends it.
fn pass(client: &UnixStream, server: &Path) -> io::Result<()> {
    let server = UnixStream::connect(server)?;
    let mut table = Table::default();
    let mut acknowledges = false;
    while let Some(mut message) = Message::receive(client)? {
        let (request, flags) = (message.request, message.flags);
        let wanted = acknowledges && flags & NEED_REPLY != 0;
        match request {
            GET_MAX_MEM_SLOTS => {
                Message::answer(request, REGIONS as u64).send(client)?;
                continue;
            }
            REM_MEM_REG => {
                table.remove(&message)?;
                if wanted {
                    Message::answer(request, 0).send(client)?;
                }
                continue;
            }
            ADD_MEM_REG => {
                table.add(message)?;
                message = table.message(flags)?;
            }
            SET_PROTOCOL_FEATURES => {
                let features = message.number()? & !CONFIGURE_MEM_SLOTS;
                acknowledges = features & REPLY_ACK != 0;
                message.payload = features.to_ne_bytes().to_vec();
            }
            _ => {}
        }
        message.send(&server)?;
        // Closed here: the server has copies.
        drop(message);
        // The old features decide on an answer to new ones.
        if ANSWERED.contains(&request) || wanted {
            let Some(mut answer) = Message::receive(&server)? else { break };
            if request == GET_PROTOCOL_FEATURES {
                let features = answer.number()? | CONFIGURE_MEM_SLOTS;
                answer.payload = features.to_ne_bytes().to_vec();
            }
            answer.request = request;
            answer.send(client)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    /// Two regions are added; the server sees a table of one, then of both, with both descriptors.
    #[test]
    fn regions_become_tables() {
        let folder = tempfile::tempdir().unwrap();
        let (socket, behind) = (folder.path().join("relay"), folder.path().join("server"));
        let listener = UnixListener::bind(&behind).unwrap();
        let server = std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let mut tables = Vec::new();
            while let Some(message) = Message::receive(&stream).unwrap() {
                match message.request {
                    GET_PROTOCOL_FEATURES => Message::answer(15, REPLY_ACK).send(&stream).unwrap(),
                    SET_PROTOCOL_FEATURES => assert_eq!(message.number().unwrap(), REPLY_ACK),
                    SET_MEM_TABLE => {
                        assert_eq!(message.payload.len(), 8 + message.fds.len() * REGION);
                        tables.push((message.number().unwrap(), message.fds.len()));
                        Message::answer(5, 0).send(&stream).unwrap();
                    }
                    other => panic!("request {other}"),
                }
            }
            tables
        });
        let _relay = Relay::start(&socket, behind).unwrap();
        let client = UnixStream::connect(&socket).unwrap();
        let ask = |request, flags, payload: Vec<u8>, fds| {
            Message { request, flags: VERSION | flags, payload, fds }.send(&client).unwrap();
        };
        let answer = || Message::receive(&client).unwrap().unwrap();
        ask(GET_PROTOCOL_FEATURES, 0, Vec::new(), Vec::new());
        assert_eq!(answer().number().unwrap(), REPLY_ACK | CONFIGURE_MEM_SLOTS);
        let both = (REPLY_ACK | CONFIGURE_MEM_SLOTS).to_ne_bytes().to_vec();
        ask(SET_PROTOCOL_FEATURES, 0, both, Vec::new());
        ask(GET_MAX_MEM_SLOTS, NEED_REPLY, Vec::new(), Vec::new());
        assert_eq!(answer().number().unwrap(), REGIONS as u64);
        for number in 0..2 {
            let fd = File::open("/dev/null").unwrap().into();
            ask(ADD_MEM_REG, NEED_REPLY, vec![number; 8 + REGION], vec![fd]);
            let answer = answer();
            assert_eq!((answer.request, answer.number().unwrap()), (ADD_MEM_REG, 0));
        }
        ask(REM_MEM_REG, NEED_REPLY, vec![1; 8 + REGION], Vec::new());
        assert_eq!(answer().request, REM_MEM_REG);
        drop(client);
        assert_eq!(server.join().unwrap(), [(1, 1), (2, 2)]);
    }
}
