//! A server that follows a script: it says what a test wants it to say.
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use tempfile::TempDir;

/// What the script says of the export.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Said {
    pub(crate) size: u64,
    pub(crate) flags: u16,
    pub(crate) style: Style,
    /// Smallest block, preferred block, largest payload.
    pub(crate) blocks: Option<[u32; 3]>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Style {
    Simple,
    Structured,
    Extended,
}

pub(crate) const HAS_FLAGS: u16 = 1;
pub(crate) const READ_ONLY: u16 = 1 << 1;
pub(crate) const FLUSH: u16 = 1 << 2;
pub(crate) const FUA: u16 = 1 << 3;
pub(crate) const TRIM: u16 = 1 << 5;
pub(crate) const ZEROES: u16 = 1 << 6;
pub(crate) const MULTI_CONN: u16 = 1 << 8;

impl Said {
    pub(crate) fn new(style: Style) -> Self {
        Self { size: 1 << 20, flags: HAS_FLAGS | FLUSH | FUA | TRIM | ZEROES, style, blocks: None }
    }
}

/// A request as the script gets it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Asked {
    pub(crate) flags: u16,
    pub(crate) command: u16,
    pub(crate) cookie: u64,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) data: Vec<u8>,
}

/// A connection after its negotiation.
pub(crate) struct Peer {
    pub(crate) stream: UnixStream,
    pub(crate) style: Style,
    /// Number of the connection, from 0.
    pub(crate) number: usize,
}

impl Peer {
    /// The next request. `None`: the client has closed or said goodbye.
    pub(crate) fn request(&mut self) -> Option<Asked> {
        let mut header = [0; 32];
        let len = if self.style == Style::Extended { 32 } else { 28 };
        self.stream.read_exact(&mut header[..len]).ok()?;
        let magic = u32::from_be_bytes(header[..4].try_into().unwrap());
        assert_eq!(magic, if self.style == Style::Extended { 0x21e4_1c71 } else { 0x2560_9513 });
        let number =
            |range: std::ops::Range<usize>| header[range].iter().fold(0_u64, |n, b| n << 8 | u64::from(*b));
        let mut asked = Asked {
            flags: number(4..6) as u16,
            command: number(6..8) as u16,
            cookie: number(8..16),
            offset: number(16..24),
            len: number(24..len),
            data: Vec::new(),
        };
        if asked.command == 1 {
            assert_eq!(asked.flags & 1 << 5 != 0, self.style == Style::Extended);
            asked.data = vec![0; asked.len as usize];
            self.stream.read_exact(&mut asked.data).ok()?;
        }
        asked.flags &= !(1 << 5);
        (asked.command != 2).then_some(asked)
    }

    pub(crate) fn say(&mut self, bytes: &[u8]) {
        // The client may have hung up in the middle.
        let _ = self.stream.write_all(bytes);
    }

    /// A whole reply without errors.
    pub(crate) fn answer(&mut self, asked: &Asked, data: &[u8]) {
        let message = match (self.style, asked.command) {
            (Style::Simple, _) => [&simple(asked.cookie, 0)[..], data].concat(),
            (_, 0) => chunk(self.style, asked, true, 1, &[&asked.offset.to_be_bytes(), data].concat()),
            _ => chunk(self.style, asked, true, 0, &[]),
        };
        self.say(&message);
    }
}

/// A simple reply without data.
pub(crate) fn simple(cookie: u64, error: u32) -> Vec<u8> {
    [&0x6744_6698_u32.to_be_bytes()[..], &error.to_be_bytes(), &cookie.to_be_bytes()].concat()
}

/// A chunk of a structured or extended reply.
pub(crate) fn chunk(style: Style, asked: &Asked, done: bool, kind: u16, body: &[u8]) -> Vec<u8> {
    let flags = u16::from(done).to_be_bytes();
    let (kind, cookie) = (kind.to_be_bytes(), asked.cookie.to_be_bytes());
    if style == Style::Extended {
        let magic = 0x6e8a_278c_u32.to_be_bytes();
        let len = (body.len() as u64).to_be_bytes();
        [&magic[..], &flags, &kind, &cookie, &asked.offset.to_be_bytes(), &len, body].concat()
    } else {
        let magic = 0x668e_33ef_u32.to_be_bytes();
        [&magic[..], &flags, &kind, &cookie, &(body.len() as u32).to_be_bytes(), body].concat()
    }
}

/// A server with a script for each connection.
pub(crate) struct Scripted {
    socket: PathBuf,
    connections: Arc<AtomicUsize>,
    _folder: TempDir,
}

impl Scripted {
    /// `said` tells for each connection what the server says; `script` goes on from there.
    pub(crate) fn start(
        said: impl Fn(usize) -> Said + Send + Sync + 'static,
        script: impl Fn(Peer) + Send + Sync + 'static,
    ) -> Self {
        let folder = TempDir::new().unwrap();
        let socket = folder.path().join("socket");
        let listener = UnixListener::bind(&socket).unwrap();
        let connections = Arc::new(AtomicUsize::new(0));
        let (count, shared) = (connections.clone(), Arc::new((said, script)));
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (number, shared) = (count.fetch_add(1, Ordering::SeqCst), shared.clone());
                thread::spawn(move || {
                    let said = shared.0(number);
                    if let Some(peer) = negotiate(stream.unwrap(), said, number) {
                        shared.1(peer);
                    }
                });
            }
        });
        Self { socket, connections, _folder: folder }
    }

    pub(crate) fn url(&self) -> String {
        format!("nbd+unix:///disk?socket={}", self.socket.display())
    }

    pub(crate) fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }
}

fn negotiate(mut stream: UnixStream, said: Said, number: usize) -> Option<Peer> {
    stream.write_all(b"NBDMAGICIHAVEOPT\x00\x03").ok()?;
    stream.read_exact(&mut [0; 4]).ok()?;
    loop {
        let mut header = [0; 16];
        stream.read_exact(&mut header).ok()?;
        assert_eq!(&header[..8], b"IHAVEOPT");
        let option = u32::from_be_bytes(header[8..12].try_into().unwrap());
        let mut data = vec![0; u32::from_be_bytes(header[12..].try_into().unwrap()) as usize];
        stream.read_exact(&mut data).ok()?;
        let mut reply = |kind: u32, data: &[u8]| {
            let magic = 0x0003_e889_0455_65a9_u64.to_be_bytes();
            let len = (data.len() as u32).to_be_bytes();
            let message = [&magic[..], &option.to_be_bytes(), &kind.to_be_bytes(), &len, data].concat();
            stream.write_all(&message).ok()
        };
        match option {
            8 if said.style == Style::Structured => reply(1, &[])?,
            11 if said.style == Style::Extended => reply(1, &[])?,
            10 => {
                reply(4, &[&[0, 0, 0, 9][..], b"base:allocation"].concat())?;
                reply(1, &[])?;
            }
            6 | 7 => {
                if let Some(blocks) = said.blocks {
                    let sizes: Vec<u8> = blocks.iter().flat_map(|size| size.to_be_bytes()).collect();
                    reply(3, &[&[0, 3][..], &sizes].concat())?;
                }
                reply(3, &[&[0, 0][..], &said.size.to_be_bytes(), &said.flags.to_be_bytes()].concat())?;
                reply(1, &[])?;
                if option == 7 {
                    return Some(Peer { stream, style: said.style, number });
                }
            }
            2 => {
                reply(1, &[])?;
                return None;
            }
            _ => reply(1 << 31 | 1, &[])?,
        }
    }
}
