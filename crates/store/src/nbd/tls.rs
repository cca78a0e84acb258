//! TLS with X.509 certificates, by rustls.
//!
//! Data is copied on its way: between guest memory and the buffers of rustls.
use super::error::NbdError;
use super::handshake::start_tls;
use super::socket::{Bare, Timed};
use crate::{NamedFiles, Target, TlsFiles};
use paravane_dma::HostSlice;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

/// Bytes that are encrypted before the socket has taken them.
const AT_ONCE: usize = 256 << 10;
/// Bytes of a record.
const RECORD: usize = 16 << 10;

/// What this side needs for TLS.
#[derive(Debug)]
pub(super) struct TlsClient {
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
}

impl TlsClient {
    pub(super) fn new(files: &TlsFiles, target: &Target, named: &NamedFiles) -> Result<Self, NbdError> {
        let name = match (&files.hostname, target) {
            (Some(name), _) => name.clone(),
            (None, Target::Tcp { host, .. }) => host.clone(),
            (None, Target::Unix(_)) => {
                return Err(NbdError::Tls("a Unix socket needs tls-hostname=NAME".into()));
            }
        };
        let invalid = |_| NbdError::Tls(format!("{name} is no name that a certificate can have"));
        let server = ServerName::try_from(name.clone()).map_err(invalid)?;
        let identity = named.identity(files.folder.as_deref()).map_err(NbdError::Tls)?;
        let config = identity.config().map_err(NbdError::Tls)?;
        Ok(Self { config: Arc::new(config), name: server })
    }

    /// Changes over to TLS, and waits until both sides have agreed.
    pub(super) fn start(&self, socket: OwnedFd, end: Instant) -> Result<Encrypted, NbdError> {
        let mut stream = Timed { socket: socket.as_fd(), end };
        start_tls(&mut stream)?;
        let connection = ClientConnection::new(self.config.clone(), self.name.clone());
        let mut connection = connection.map_err(|error| NbdError::Tls(error.to_string()))?;
        while connection.is_handshaking() {
            connection.complete_io(&mut stream).map_err(|error| NbdError::Tls(error.to_string()))?;
        }
        connection.set_buffer_limit(None);
        Ok(Encrypted { socket, connection, scrap: vec![0; RECORD].into() })
    }
}

/// An encrypted connection.
pub(super) struct Encrypted {
    socket: OwnedFd,
    connection: ClientConnection,
    scrap: Box<[u8]>,
}

impl std::fmt::Debug for Encrypted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Encrypted").field("socket", &self.socket).finish_non_exhaustive()
    }
}

impl AsFd for Encrypted {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Encrypted {
    /// The stream for the negotiation, which waits until `end` at most.
    pub(super) fn negotiate<T>(
        &mut self,
        end: Instant,
        choose: impl FnOnce(&mut rustls::Stream<'_, ClientConnection, Timed<'_>>) -> T,
    ) -> T {
        let mut socket = Timed { socket: self.socket.as_fd(), end };
        choose(&mut rustls::Stream::new(&mut self.connection, &mut socket))
    }

    /// Encrypts from pieces, and sends what goes at once. Less than all: the socket takes no more.
    ///
    /// # Safety
    /// As [`super::socket::send`].
    pub(super) unsafe fn send(&mut self, pieces: &[HostSlice]) -> io::Result<usize> {
        let (mut taken, mut sent) = (0, 0);
        'pieces: for piece in pieces {
            let mut at = 0;
            while at < piece.len {
                if taken >= sent + AT_ONCE {
                    if !self.flush()? {
                        break 'pieces;
                    }
                    sent = taken;
                }
                let part = (piece.len - at).min(self.scrap.len());
                // SAFETY: inside of the piece, which is valid by the caller's promise.
                unsafe { HostSlice { ptr: piece.ptr.add(at), len: part }.read(&mut self.scrap[..part]) };
                self.connection.writer().write_all(&self.scrap[..part])?;
                (at, taken) = (at + part, taken + part);
            }
        }
        self.flush()?;
        Ok(taken)
    }

    /// Sends what is encrypted. `true` if all is sent.
    pub(super) fn flush(&mut self) -> io::Result<bool> {
        while self.connection.wants_write() {
            match self.connection.write_tls(&mut Bare(self.socket.as_fd())) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Decrypts into pieces what has come.
    ///
    /// # Safety
    /// As [`super::socket::receive`].
    pub(super) unsafe fn receive(&mut self, pieces: &[HostSlice]) -> io::Result<usize> {
        let mut got = 0;
        for piece in pieces {
            let mut at = 0;
            while at < piece.len {
                let part = (piece.len - at).min(self.scrap.len());
                match self.connection.reader().read(&mut self.scrap[..part]) {
                    // The peer has said that nothing follows.
                    Ok(0) => return Ok(got),
                    Ok(read) => {
                        // SAFETY: inside of the piece, which is valid by the caller's promise.
                        unsafe { HostSlice { ptr: piece.ptr.add(at), len: read }.write(&self.scrap[..read]) };
                        (at, got) = (at + read, got + read);
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        if !self.fetch(got)? {
                            return Ok(got);
                        }
                    }
                    // Without a word: what came before is used first.
                    Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(got),
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(got)
    }

    /// Gets more from the socket. `false` if there is nothing, but `got` bytes came before.
    fn fetch(&mut self, got: usize) -> io::Result<bool> {
        match self.connection.read_tls(&mut Bare(self.socket.as_fd())) {
            // Known to the reader from now on.
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && got > 0 => return Ok(false),
            Err(error) => return Err(error),
        }
        let wrong = |error: rustls::Error| io::Error::new(io::ErrorKind::InvalidData, error.to_string());
        self.connection.process_new_packets().map_err(wrong)?;
        Ok(true)
    }

    pub(super) fn into_socket(self) -> OwnedFd {
        self.socket
    }
}
